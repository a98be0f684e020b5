// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/opencgpu/cgpu/pkg/ledger"
)

// load is a container with cgpu-load in it (limiter/load/load.c tells its words), or cgpu-probe load. It ends with its standard input, so
// it does not outlive doctor.
type load struct {
	name    string
	cmd     *exec.Cmd
	start   uint64 // of its first process, which launches the container and is then in it
	in, out *os.File
	errors  *os.File
	ended   chan struct{}

	mu      sync.Mutex // guards what follows
	up      bool
	ready   []float64 // microseconds of a kernel of hog and of loop
	samples []sample
	gaps    []gap
}

// sample is what was done by a moment.
type sample struct{ at, done, last time.Duration }

// gap is a time in which no kernel ended.
type gap struct{ from, to time.Duration }

func (h *Host) newLoad(name, gpu string, weight int) (*load, error) {
	l := &load{name: name, ended: make(chan struct{})}
	args := slices.Concat([]string{"run", "--memory", loadMemory, "--gpu", gpu, "--weight", strconv.Itoa(weight), "--name", name, "--"},
		h.loadProgram())
	l.cmd = exec.Command(filepath.Join(h.Bin, "cgpu"), args...)
	theirIn, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer theirIn.Close()
	out, theirOut, err := os.Pipe()
	if err != nil {
		in.Close()
		return nil, err
	}
	defer theirOut.Close()
	// Not a pipe: what cgpu run starts on the way may hold it open.
	said, err := os.CreateTemp("", "cgpu-doctor")
	if err == nil {
		_ = os.Remove(said.Name())
		l.cmd.Stdin, l.cmd.Stdout, l.cmd.Stderr = theirIn, theirOut, said
		err = l.cmd.Start()
	}
	if err != nil {
		in.Close()
		out.Close()
		return nil, errors.Join(err, said.Close())
	}
	l.in, l.out, l.errors = in, out, said
	l.start, _ = ledger.ProcStart(l.cmd.Process.Pid) // one that has ended has no container
	go l.read(out)
	go func() {
		_ = l.cmd.Wait()
		close(l.ended)
	}()
	return l, nil
}

// has says whether a record is its. Names are anybody's to choose.
func (l *load) has(r ledger.Record) bool {
	return l != nil && r.LauncherPID == l.cmd.Process.Pid && r.LauncherStart == l.start && l.start != 0
}

// end ends the container, at first by asking.
func (l *load) end() {
	l.in.Close()
	select {
	case <-l.ended:
	case <-time.After(2 * time.Second):
		_ = l.cmd.Process.Kill()
		select { // a process within a driver's call that hangs does not end
		case <-l.ended:
		case <-time.After(partTime):
		}
	}
	l.out.Close()
	l.errors.Close()
}

// over reports that it has ended.
func (l *load) over() bool {
	select {
	case <-l.ended:
		return true
	default:
		return false
	}
}

func (l *load) say(word string) { _, _ = fmt.Fprintln(l.in, word) } // one that is gone is noticed by await

// read takes in what the load says until it ends.
func (l *load) read(r io.Reader) {
	for sc := bufio.NewScanner(r); sc.Scan(); {
		l.take(sc.Text())
	}
}

func (l *load) take(text string) {
	words := strings.Fields(text)
	if len(words) == 0 {
		return
	}
	var n []float64
	for _, w := range words[1:] {
		f, err := strconv.ParseFloat(w, 64)
		if err != nil {
			return
		}
		n = append(n, f)
	}
	at := func(i int) time.Duration { return time.Duration(n[i] * float64(time.Microsecond)) }
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case words[0] == "up":
		l.up = true
	case words[0] == "ready" && len(n) == 2:
		l.ready = n
	case words[0] == "work" && len(n) == 3:
		l.samples = append(l.samples, sample{at(0), at(1), at(2)})
	case words[0] == "gap" && len(n) == 2:
		l.gaps = append(l.gaps, gap{at(0), at(1)})
	}
}

// await waits until a condition holds, for partTime at most.
func (l *load) await(what string, holds func() bool) error {
	for deadline := time.Now().Add(partTime); ; time.Sleep(2 * time.Millisecond) {
		l.mu.Lock()
		ok := holds()
		l.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-l.ended:
			return fmt.Errorf("%s: %s", l.cmd.ProcessState, l.lastWords())
		default:
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s did not %s within %v", l.name, what, partTime)
		}
	}
}

func (l *load) lastWords() string {
	text := make([]byte, 64<<10)
	n, _ := l.errors.ReadAt(text, 0)
	return lastLine(string(text[:n]))
}

// told is the moment of the last sample; last that of the last kernel's end. Both, gapAt and what a condition of await calls have the lock.
func (l *load) told() time.Duration {
	if len(l.samples) == 0 {
		return 0
	}
	return l.samples[len(l.samples)-1].at
}

func (l *load) last() time.Duration {
	if len(l.samples) == 0 {
		return 0
	}
	return l.samples[len(l.samples)-1].last
}

// gapAt is the gap that a moment is in.
func (l *load) gapAt(at time.Duration) (gap, bool) {
	for _, g := range l.gaps {
		if g.from <= at && g.to > at {
			return g, true
		}
	}
	return gap{}, false
}

// between is the work of a time that there are samples around.
func (l *load) between(begin, end time.Duration) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return doneBy(l.samples, end) - doneBy(l.samples, begin)
}

// doneBy is what was done by a moment between two samples, as if both were joined by a line.
func doneBy(samples []sample, at time.Duration) time.Duration {
	i := slices.IndexFunc(samples, func(s sample) bool { return s.at >= at })
	switch {
	case i < 0:
		return 0
	case i == 0:
		return samples[0].done
	}
	a, b := samples[i-1], samples[i]
	return a.done + time.Duration(float64(b.done-a.done)*float64(at-a.at)/float64(b.at-a.at))
}

// steps lists the samples' work, for a log.
func (l *load) steps(begin, end time.Duration) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var texts []string
	for i, s := range l.samples {
		if i > 0 && s.at > begin && s.at <= end {
			texts = append(texts, fmt.Sprintf("%.1f", ms(s.done-l.samples[i-1].done)))
		}
	}
	return strings.Join(texts, " ") + " ms"
}
