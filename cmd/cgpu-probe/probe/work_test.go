// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sim"
)

// paramSizes is what RM takes from the class where the caller says no size.
var paramSizes = map[uint32]int{classDevice: 56, classSubdevice: 4, classGroup: 20, classChannel: channelSize}

// simCaller makes ioctls on the simulated driver, without a guard and nodes.
func simCaller(t *testing.T, s *sim.Session, pid int32) caller {
	t.Helper()
	file, err := s.OpenFile(sim.Control, 0)
	if err != nil {
		t.Fatal(err)
	}
	return func(_ int, cmd uintptr, arg unsafe.Pointer) syscall.Errno {
		call := &rm.Call{Cmd: uint32(cmd), Outer: unsafe.Slice((*byte)(arg), cmd>>16&0x3fff)}
		size := 0
		switch call.NR() {
		case rm.EscAlloc:
			size = paramSizes[rm.U32(call.Outer, rm.AllocClass)]
		case rm.EscControl:
			size = int(rm.U32(call.Outer, rm.ControlParamsSize))
		}
		if size > 0 { // pointers of both are at the same place
			data := unsafe.Slice(*(**byte)(unsafe.Add(arg, rm.ControlParams)), size)
			call.Blocks = []rm.Block{{In: -1, Off: rm.ControlParams, Data: data}}
		}
		return s.Ioctl(file, pid, pid, call)
	}
}

// simClient is a client with a device, as openGPU makes it on nodes.
func simClient(t *testing.T, call caller) *client {
	t.Helper()
	c := &client{call: call, fd: -1}
	c.next.Store(firstProbeHandle)
	out := make([]byte, allocSize)
	rm.PutU32(out, rm.AllocClass, classRootClient)
	err := c.allocRaw(out, nil)
	c.handle = rm.U32(out, rm.AllocObject)
	if err == nil {
		c.device, err = c.alloc(c.handle, c.newHandle(), classDevice, make([]byte, 56))
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func simDriver(t *testing.T) *sim.Driver {
	t.Helper()
	d, err := sim.New(sim.Config{DriverVersion: "580.159.04", GPUs: []sim.GPU{
		{UUID: "GPU-00000000-0000-0000-0000-000000000001", BusID: "0000:01:00.0", Name: "Tesla T4", Memory: 16 * quota.GiB}}})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestWork(t *testing.T) {
	for _, c := range []struct {
		name            string
		groups, workers int
		kernel, gap     time.Duration
		length, every   time.Duration
		signal          time.Duration
		windows         int
		share           float64 // of each window but the first, which has the first switch in it
		kernels         uint64  // of all
	}{
		{name: "alone", groups: 1, workers: 1, kernel: time.Millisecond, length: 5 * time.Second, every: time.Second, windows: 5, share: 100,
			kernels: 4999},
		{name: "with gaps", groups: 1, workers: 1, kernel: time.Millisecond, gap: 3 * time.Millisecond, length: 4 * time.Second,
			every: time.Second, windows: 4, share: 25, kernels: 1000},
		{name: "two contexts", groups: 2, workers: 1, kernel: time.Millisecond, length: 5 * time.Second, every: time.Second, windows: 5,
			share: 91.5, kernels: 4574},
		{name: "three processes", groups: 1, workers: 3, kernel: time.Millisecond, length: 5 * time.Second, every: time.Second, windows: 5,
			share: 91.5, kernels: 4573},
		{name: "a window that does not fit", groups: 1, workers: 1, kernel: time.Millisecond, length: 2500 * time.Millisecond,
			every: time.Second, windows: 3, share: 100, kernels: 2499},
		{name: "until a signal", groups: 1, workers: 1, kernel: 100 * time.Millisecond, every: time.Second, signal: 3200 * time.Millisecond,
			windows: 4, share: 100, kernels: 31},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { // which is what the simulated driver's time is, too
				d := simDriver(t)
				var workers []worker
				for i := range c.workers {
					w, err := newContexts(simClient(t, simCaller(t, d.Session([]int{0}), int32(i+1))), c.groups, c.kernel, c.gap)
					if err != nil {
						t.Fatal(err)
					}
					workers = append(workers, w)
				}
				ctx := t.Context()
				if c.signal > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, c.signal)
					defer cancel()
				}
				var windows []window
				var sum work
				total, err := watch(ctx, workers, c.length, c.every, func(w window) { windows, sum = append(windows, w), sum.plus(1, w.work) })
				if err != nil {
					t.Fatal(err)
				}
				if total.work != sum || total.Kernels != c.kernels || total.Elapsed != max(c.length, c.signal) || len(windows) != c.windows {
					t.Errorf("%d windows, total %v\nwant %d windows, %d kernels", len(windows), total, c.windows, c.kernels)
				}
				for i, w := range windows[1:] {
					if math.Abs(w.Share-c.share) > 0.2 {
						t.Errorf("window %d: %v, want a share of %.1f", i+2, w, c.share)
					}
				}
				g := d.Snapshot().GPUs[0]
				if len(g.TSGs) != c.groups*c.workers || g.Engine.Busy != total.GPUTime || g.TSGs[0].TimesliceUs != 2048 || g.TSGs[0].Channels != 1 {
					t.Errorf("driver: %+v", g)
				}
			})
		})
	}
}

// TestWorkRefused: the real driver does not know the control.
func TestWorkRefused(t *testing.T) {
	real := simCaller(t, simDriver(t).Session([]int{0}), 1)
	for _, c := range []struct {
		status uint32
		errno  syscall.Errno
		noSim  bool
	}{{status: rm.StatusNotSupported, noSim: true}, {status: rm.StatusInvalidArgument, noSim: true}, {errno: syscall.EIO}} {
		client := simClient(t, func(fd int, cmd uintptr, arg unsafe.Pointer) syscall.Errno {
			if out := unsafe.Slice((*byte)(arg), cmd>>16&0x3fff); byte(cmd) == rm.EscControl && rm.U32(out, rm.ControlCmd) == sim.CtrlWork {
				rm.PutU32(out, rm.ControlStatus, c.status)
				return c.errno
			}
			return real(fd, cmd, arg)
		})
		if _, err := newContexts(client, 1, time.Millisecond, 0); err == nil || errors.Is(err, errNoSim) != c.noSim {
			t.Errorf("status %#x, %v: %v", c.status, c.errno, err)
		}
	}
}

// TestMain lets the test's own program stand in for cgpu-probe in newChild: with the simulated driver in its own process,
// or refused (kernels of 3 ms) or killed (4 ms).
func TestMain(m *testing.M) {
	if len(os.Args) < 2 || os.Args[1] != "work" {
		os.Exit(m.Run())
	}
	t := &testing.T{}
	switch fmt.Sprint(os.Args[2:]) {
	case "[--child --groups 2 --kernel 1ms --gap 2ms]":
		w, err := newContexts(simClient(t, simCaller(t, simDriver(t).Session([]int{0}), 1)), 2, time.Millisecond, 2*time.Millisecond)
		if err == nil {
			err = serveParent(w, os.Stdin, os.Stdout)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	case "[--child --groups 1 --kernel 3ms --gap 0s]":
		os.Exit(exitNoSim)
	case "[--child --groups 1 --kernel 4ms --gap 0s]":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
}

func TestChild(t *testing.T) {
	k, err := newChild(2, time.Millisecond, 2*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if w, err := k.progress(); w != (work{}) || err != nil {
		t.Fatalf("before the start %+v, %v", w, err)
	}
	total, err := watch(t.Context(), []worker{k}, 100*time.Millisecond, 50*time.Millisecond, func(window) {})
	if err != nil || total.Kernels == 0 || total.Switches == 0 || total.Share <= 0 {
		t.Errorf("%v, %v", total, err)
	}
	b, err := json.Marshal(total)
	var again window
	if err != nil || json.Unmarshal(b, &again) != nil || again != total || !strings.Contains(string(b), `"kernels":`) {
		t.Errorf("as JSON %s, %v", b, err)
	}
	k.close()
	if !k.cmd.ProcessState.Success() {
		t.Errorf("the child ended with %v", k.cmd.ProcessState)
	}
	for _, c := range []struct {
		kernel time.Duration
		noSim  bool
		want   string
	}{{3 * time.Millisecond, true, "simulated driver only"}, {4 * time.Millisecond, false, "killed"}} {
		k, err := newChild(1, c.kernel, 0)
		if err != nil {
			t.Fatal(err)
		}
		_, err = k.progress()
		if err == nil || errors.Is(err, errNoSim) != c.noSim || !strings.Contains(err.Error(), c.want) {
			t.Errorf("child that dies: %v, want %q", err, c.want)
		}
		k.close()
	}
}

type fakeWorker struct{ started, reads uint64 }

func (w *fakeWorker) start() error { w.started++; return nil }
func (w *fakeWorker) close()       {}
func (w *fakeWorker) progress() (work, error) {
	w.reads++
	if w.reads > 3 {
		return work{}, io.ErrUnexpectedEOF
	}
	return work{Kernels: w.started, GPUTime: time.Duration(w.reads)}, nil
}

func TestServeParent(t *testing.T) {
	var out bytes.Buffer
	if err := serveParent(&fakeWorker{}, strings.NewReader("read\nstart\nread\n"), &out); err != nil {
		t.Fatal(err)
	}
	dec := json.NewDecoder(&out)
	for _, want := range []work{{0, 1, 0, 0, 0}, {1, 2, 0, 0, 0}, {1, 3, 0, 0, 0}} {
		var got work
		if err := dec.Decode(&got); err != nil || got != want {
			t.Errorf("%+v, %v; want %+v", got, err, want)
		}
	}
	if err := serveParent(&fakeWorker{reads: 3}, strings.NewReader("read\n"), &out); err == nil {
		t.Error("no error of a worker")
	}
}
