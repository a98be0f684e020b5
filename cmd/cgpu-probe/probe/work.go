// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sim"
)

// exitNoSim is the exit status where the driver is not the simulated one.
const exitNoSim = 3

// errNoSim says that the driver refused the simulated driver's own controls.
var errNoSim = errors.New("this works with the simulated driver only")

// work is what a process' groups did on the graphics engine, all together.
type work struct {
	Kernels     uint64        `json:"kernels"`
	GPUTime     time.Duration `json:"gpuTimeNs"`
	Waiting     time.Duration `json:"waitingNs"` // had kernels, and did not compute
	Switches    uint64        `json:"switches"`
	Preemptions uint64        `json:"preemptions"`
}

// plus adds n times o.
func (w work) plus(n int64, o work) work {
	return work{w.Kernels + uint64(n)*o.Kernels, w.GPUTime + time.Duration(n)*o.GPUTime, w.Waiting + time.Duration(n)*o.Waiting,
		w.Switches + uint64(n)*o.Switches, w.Preemptions + uint64(n)*o.Preemptions}
}

// window is the work of some time.
type window struct {
	Elapsed time.Duration `json:"elapsedNs"`
	work
	Share float64 `json:"share"` // of the elapsed time, in percent
}

func newWindow(elapsed time.Duration, w work) window {
	return window{elapsed, w, float64(w.GPUTime) / float64(max(elapsed, 1)) * 100}
}

func (w window) String() string {
	millis := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	return fmt.Sprintf("elapsed_ms=%.1f kernels=%d gpu_ms=%.3f share=%.2f waiting_ms=%.3f switches=%d preemptions=%d",
		millis(w.Elapsed), w.Kernels, millis(w.GPUTime), w.Share, millis(w.Waiting), w.Switches, w.Preemptions)
}

// worker is one process with contexts.
type worker interface {
	start() error
	progress() (work, error)
	close()
}

// contexts is a worker in this process.
type contexts struct {
	c                *client
	groups, channels []uint32
	kernel, gap      time.Duration
}

// newContexts makes n groups with a channel each and schedules them, as CUDA does for a context.
func newContexts(c *client, n int, kernel, gap time.Duration) (*contexts, error) {
	w, err := newUnscheduled(c, n, kernel, gap)
	if err != nil {
		return nil, err
	}
	for _, g := range w.groups {
		if err := c.schedule(g, false); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// newUnscheduled makes contexts that may not compute yet.
func newUnscheduled(c *client, n int, kernel, gap time.Duration) (*contexts, error) {
	w := &contexts{c: c, kernel: kernel, gap: gap}
	for range n {
		g, err := c.group(rm.ChannelEngineTypeGR)
		if err != nil {
			return nil, err
		}
		w.groups = append(w.groups, g)
		if _, err := w.progress(); statusOf(err) != rm.StatusOK && statusOf(err) != ^uint32(0) {
			return nil, fmt.Errorf("%w: %w", errNoSim, err)
		} else if err != nil {
			return nil, err
		}
		ch, err := c.alloc(g, c.newHandle(), classChannel, make([]byte, channelSize))
		if err != nil {
			return nil, err
		}
		w.channels = append(w.channels, ch)
		// libcuda asks for 2 ms, whatever it is then given.
		slice := make([]byte, 8)
		rm.PutU64(slice, 0, 2048)
		if err := c.control(g, 0xa06c0103, slice); err != nil {
			return nil, err
		}
	}
	return w, nil
}

const (
	classChannel = 0xc86f // HOPPER_CHANNEL_GPFIFO_A
	channelSize  = 368    // the largest of all branches
)

func (w *contexts) start() error {
	p := make([]byte, sim.SubmitSize)
	rm.PutU64(p, sim.SubmitLength, uint64(w.kernel))
	rm.PutU64(p, sim.SubmitGap, uint64(w.gap))
	for _, g := range w.groups {
		if err := w.c.control(g, sim.CtrlSubmit, p); err != nil {
			return err
		}
	}
	return nil
}

func (w *contexts) progress() (sum work, err error) {
	for _, g := range w.groups {
		p := make([]byte, sim.WorkSize)
		if err := w.c.control(g, sim.CtrlWork, p); err != nil {
			return sum, err
		}
		sum = sum.plus(1, work{rm.U64(p, sim.WorkDone), time.Duration(rm.U64(p, sim.WorkGPUTime)), time.Duration(rm.U64(p, sim.WorkWaiting)),
			rm.U64(p, sim.WorkSwitches), rm.U64(p, sim.WorkPreemptions)})
	}
	return sum, nil
}

func (w *contexts) close() { w.c.close() }

// child is a worker in a process of its own. It gets a line for what it shall do and answers each with one, its work.
type child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// newChild starts a process that is ready when its first read answers.
func newChild(groups int, kernel, gap time.Duration) (*child, error) {
	kid := exec.Command("/proc/self/exe", "work", "--child", "--groups", strconv.Itoa(groups), "--kernel", kernel.String(), "--gap",
		gap.String())
	kid.Stderr = os.Stderr
	in, err := kid.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start a child: %w", err)
	}
	out, err := kid.StdoutPipe()
	if err == nil {
		err = kid.Start()
	}
	if err != nil {
		return nil, fmt.Errorf("start a child: %w", err)
	}
	return &child{cmd: kid, in: in, out: bufio.NewReader(out)}, nil
}

func (k *child) do(what string) (w work, err error) {
	if _, err = fmt.Fprintln(k.in, what); err == nil {
		var line []byte
		if line, err = k.out.ReadBytes('\n'); err == nil {
			err = json.Unmarshal(line, &w)
		}
	}
	if err != nil {
		if end := k.cmd.Wait(); k.cmd.ProcessState != nil && k.cmd.ProcessState.ExitCode() == exitNoSim {
			return w, errNoSim
		} else if end != nil {
			err = end
		}
		return w, fmt.Errorf("child %d: %w", k.cmd.Process.Pid, err)
	}
	return w, nil
}

func (k *child) start() error            { _, err := k.do("start"); return err }
func (k *child) progress() (work, error) { return k.do("read") }
func (k *child) close()                  { k.in.Close(); _ = k.cmd.Wait() }

// serveParent is the other side of child.
func serveParent(w worker, in io.Reader, out io.Writer) error {
	for sc := bufio.NewScanner(in); sc.Scan(); {
		if sc.Text() == "start" {
			if err := w.start(); err != nil {
				return err
			}
		}
		sum, err := w.progress()
		if err != nil {
			return err
		}
		if err := json.NewEncoder(out).Encode(sum); err != nil {
			return err
		}
	}
	return nil
}

// each does something with all workers at the same time.
func each(workers []worker, do func(worker) (work, error)) (sum work, err error) {
	var (
		wg sync.WaitGroup
		mu sync.Mutex
	)
	for _, w := range workers {
		wg.Go(func() {
			part, e := do(w)
			mu.Lock()
			defer mu.Unlock()
			if sum = sum.plus(1, part); err == nil {
				err = e
			}
		})
	}
	wg.Wait()
	return sum, err
}

// watch lets the workers compute until ctx ends, or for a time if that is not 0, and reports every window and the whole.
func watch(ctx context.Context, workers []worker, length, every time.Duration, report func(window)) (window, error) {
	first, err := each(workers, worker.progress)
	if err != nil {
		return window{}, err
	}
	begin := time.Now()
	if _, err := each(workers, func(w worker) (work, error) { return work{}, w.start() }); err != nil {
		return window{}, err
	}
	at, last := begin, first
	for next := begin; ; {
		if next = next.Add(every); length > 0 && next.After(begin.Add(length)) {
			next = begin.Add(length)
		}
		select {
		case <-time.After(time.Until(next)):
		case <-ctx.Done():
		}
		now := time.Now()
		sum, err := each(workers, worker.progress)
		if err != nil {
			return window{}, err
		}
		report(newWindow(now.Sub(at), sum.plus(-1, last)))
		at, last = now, sum
		if ctx.Err() != nil || length > 0 && now.Sub(begin) >= length {
			return newWindow(now.Sub(begin), sum.plus(-1, first)), nil
		}
	}
}

func cmdWork(args []string) error {
	fs := flag.NewFlagSet("work", flag.ExitOnError)
	kernel := fs.Duration("kernel", time.Millisecond, "what a kernel computes")
	gap := fs.Duration("gap", 0, "from the end of a kernel until the next is submitted")
	length := fs.Duration("for", 5*time.Second, "how long; 0: until a signal")
	groups := fs.Int("groups", 1, "contexts of a process")
	processes := fs.Int("processes", 1, "how many")
	every := fs.Duration("windows", time.Second, "how often to print")
	asJSON := fs.Bool("json", false, "print one JSON object at the end")
	asChild := fs.Bool("child", false, "internal: a process of --processes")
	_ = fs.Parse(args)
	for _, f := range []struct {
		name string
		n    int
	}{{"groups", *groups}, {"processes", *processes}} {
		if f.n < 1 || f.n > 1000 {
			return fmt.Errorf("--%s %d: want 1 to 1000", f.name, f.n)
		}
	}
	if *every <= 0 || *length < 0 {
		return fmt.Errorf("--windows %v --for %v: want times above 0", *every, *length)
	}
	err := runWork(*kernel, *gap, *length, *every, *groups, *processes, *asJSON, *asChild)
	if errors.Is(err, errNoSim) {
		if !*asChild { // its parent says it, once
			fmt.Fprintln(os.Stderr, "cgpu-probe: work:", err)
		}
		os.Exit(exitNoSim)
	}
	return err
}

func runWork(kernel, gap, length, every time.Duration, groups, processes int, asJSON, asChild bool) error {
	var workers []worker
	defer func() {
		for _, w := range workers {
			w.close()
		}
	}()
	if processes > 1 {
		for range processes {
			k, err := newChild(groups, kernel, gap)
			if err != nil {
				return err
			}
			workers = append(workers, k)
		}
	} else {
		c, err := openGPU(patient)
		if err != nil {
			return err
		}
		w, err := newContexts(c, groups, kernel, gap)
		if err != nil {
			c.close()
			return err
		}
		workers = append(workers, w)
	}
	if asChild {
		signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP) // the parent ends it
		return serveParent(workers[0], os.Stdin, os.Stdout)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	defer stop()
	var windows []window
	total, err := watch(ctx, workers, length, every, func(w window) {
		if windows = append(windows, w); !asJSON {
			print("window=%d %s", len(windows), w)
		}
	})
	if err != nil {
		return err
	}
	if !asJSON {
		print("total %s", total)
		return nil
	}
	return json.NewEncoder(os.Stdout).Encode(struct {
		Kernel    time.Duration `json:"kernelNs"`
		Gap       time.Duration `json:"gapNs"`
		Groups    int           `json:"groups"` // of a process
		Processes int           `json:"processes"`
		Windows   []window      `json:"windows"`
		Total     window        `json:"total"`
	}{kernel, gap, groups, processes, windows, total})
}
