// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sim"
)

// Times of cgpu-load (limiter/load/load.c), which load is on the simulated driver.
const (
	loadHog    = 500 * time.Microsecond
	loadLoop   = time.Millisecond
	loadThink  = 15 * time.Microsecond // what a program takes to see a kernel's end and to launch the next
	loadLook   = 5 * time.Millisecond
	loadReport = 10 // looks
	loadGap    = 100 * time.Millisecond
)

// load computes as cgpu doctor --measure wants it, in the words of cgpu-load.
type load struct {
	mu   sync.Mutex
	w    *contexts
	work time.Duration // as last seen
	last time.Duration // when it last grew; 0: not in this mode yet
}

func cmdLoad([]string) error {
	c, err := openGPU(patient)
	if err != nil {
		return err
	}
	defer c.close()
	w, err := newContexts(c, 1, loadHog, 0)
	if errors.Is(err, errNoSim) {
		fmt.Fprintln(os.Stderr, "cgpu-probe: load:", err)
		os.Exit(exitNoSim)
	}
	if err != nil {
		return err
	}
	l := &load{w: w}
	print("up")
	failed := make(chan error, 1)
	go func() { failed <- l.report() }()
	read := make(chan error, 1)
	go func() { read <- l.obey() }()
	select {
	case err = <-failed:
	case err = <-read:
	}
	return err
}

// obey does what standard input says, until it ends.
func (l *load) obey() error {
	sc := bufio.NewScanner(os.Stdin)
	for sc.Scan() {
		var err error
		switch sc.Text() {
		case "calibrate": // the model's clock never changes
			print("ready %d %d", loadHog.Microseconds(), loadLoop.Microseconds())
		case "hog":
			err = l.submit(loadHog, 0)
		case "loop":
			err = l.submit(loadLoop, loadThink)
		case "stop":
			err = l.submit(0, 0)
		default:
			err = fmt.Errorf("%q: want calibrate, hog, loop or stop", sc.Text())
		}
		if err != nil {
			return err
		}
	}
	return sc.Err()
}

// submit has kernels of another kind instead of those before; none of length 0.
func (l *load) submit(kernel, gap time.Duration) error {
	p := make([]byte, sim.SubmitSize)
	rm.PutU64(p, sim.SubmitLength, uint64(kernel))
	rm.PutU64(p, sim.SubmitGap, uint64(gap))
	rm.PutU32(p, sim.SubmitFlags, sim.SubmitStop)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = 0
	return l.w.c.control(l.w.groups[0], sim.CtrlSubmit, p)
}

// report tells what was done.
func (l *load) report() error {
	for n := 1; ; n++ {
		time.Sleep(loadLook)
		if err := l.look(n%loadReport == 0); err != nil {
			return err
		}
	}
}

func (l *load) look(tell bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	sum, err := l.w.progress()
	if err != nil {
		return err
	}
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		return err
	}
	now := time.Duration(t.Nano())
	if sum.GPUTime > l.work {
		if l.last > 0 && now-l.last > loadGap {
			print("gap %d %d", l.last.Microseconds(), now.Microseconds())
		}
		l.work, l.last = sum.GPUTime, now
	}
	if tell {
		print("work %d %d %d", now.Microseconds(), l.work.Microseconds(), l.last.Microseconds())
	}
	return nil
}
