// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/journal"
	"github.com/opencgpu/cgpu/pkg/guard/keeper"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// flying is a worker whose calls the next guard would find, over a fake driver.
type flying struct {
	*flight
	rm, uvm *fakeCall
	serves  *fakeCall // one of them
	guard   *Guard
	memory  *keeper.Memory
	refuse  bool         // the driver has no memory, once
	in      func(string) // is told where the call is
}

func newFlying(t *testing.T) *flying {
	x := &flying{in: func(string) {}}
	x.guard = spillGuard(t, &fakeDriver{answer: x.exec}, 128*quota.MiB)
	x.guard.cfg.Settings.MaxHostMemory.Bytes = quota.GiB
	x.guard.cfg.Settings.Managed = device.ManagedAllow // nobody looks at maps when the test is over
	x.guard.filters = map[*listener]bool{}
	if err := x.guard.newKeep(nil); err != nil {
		t.Fatal(err)
	}
	x.memory = x.guard.keep.memory
	t.Cleanup(x.memory.Close)
	x.rm = newFakeCall(t, x.guard, fakeControl)
	x.uvm, _ = newFakeUVMCall(t, x.guard)
	mem, f, err := x.guard.newScratch()
	if err != nil {
		t.Fatal(err)
	}
	x.flight = f
	for _, c := range []*fakeCall{x.rm, x.uvm} {
		c.mem.unmap()
		c.mem, c.flight = &arena{mem: mem.mem, release: func() {}}, f
	}
	return x
}

func (x *flying) exec(_ Target, call *rm.Call) syscall.Errno {
	if x.in("asked"); x.refuse {
		x.refuse = false
		rm.PutU32(call.Outer, 40, rm.StatusNoMemory)
	}
	x.in("carried out")
	return 0
}

// flyingCall is a call with which another thread's changes are committed, too.
type flyingCall struct {
	name   string
	cmd    uint32 // where the driver is asked
	uvm    bool   // on a file of UVM's
	makes  bool   // an object
	resume bool   // the task makes it itself
	make   func(x *flying, handle uint32) reply
}

const allocCode = 3<<30 | 48<<16 | 'F'<<8 | rm.EscAlloc

// flyingCalls are such that the driver is asked and such that it is not, by turns.
var flyingCalls = []flyingCall{
	{"alloc", allocCode, false, true, false, allocFlying},
	{"memory that the task makes", 0, false, false, true, func(x *flying, handle uint32) reply {
		return noteMemory(x.rm, classSystem, fakeDevice, handle)
	}},
	{"alloc that spills when it is refused", allocCode, false, true, false, func(x *flying, handle uint32) reply {
		x.refuse = true
		return allocFlying(x, handle)
	}},
	{"alloc that is denied", 0, false, false, false, func(x *flying, handle uint32) reply {
		return x.rm.escape(rm.EscAlloc, fakeAlloc(fakeDevice, handle, 0xdead, nil))
	}},
	{"free", 3<<30 | rm.FreeSize<<16 | 'F'<<8 | rm.EscFree, false, false, false, func(x *flying, handle uint32) reply {
		x.guard.account.addObject(fakeClient, memoryObject(handle, fakeDevice), noGPU, 0, 0)
		return x.rm.escape(rm.EscFree, fakeFree(handle))
	}},
	{"unmapping that the task makes", 0, false, false, true, func(x *flying, handle uint32) reply {
		o := make([]byte, rm.UnmapMemorySize)
		rm.PutU32(o, rm.UnmapMemoryClient, fakeClient)
		return x.rm.escape(rm.EscUnmapMemory, o)
	}},
	{"UVM range", rm.UVMCreateExternal, true, false, false, func(x *flying, handle uint32) reply {
		form, _ := x.guard.abi.UVM(rm.UVMCreateExternal)
		o := make([]byte, form.Size)
		rm.PutU64(o, form.Base, uint64(handle)<<21)
		rm.PutU64(o, form.Length, 2<<20)
		return x.uvm.do(rm.UVMCreateExternal, o)
	}},
	{"UVM call that is denied", 0, true, false, false, func(x *flying, _ uint32) reply {
		form, _ := x.guard.abi.UVM(rm.UVMAllocDeviceP2P)
		return x.uvm.do(rm.UVMAllocDeviceP2P, make([]byte, form.Size))
	}},
	{"managed memory", 0, true, false, false, func(x *flying, handle uint32) reply {
		o := make([]byte, managedCallSize)
		rm.PutU64(o, managedCallBase, uint64(handle)<<12)
		rm.PutU64(o, managedCallLength, 4096)
		return x.uvm.do(page.ReserveManaged, o)
	}},
}

func allocFlying(x *flying, handle uint32) reply {
	p := make([]byte, 128)
	rm.PutU32(p, rm.MemoryOwner, 1)
	rm.PutU64(p, rm.MemorySize, 1<<20)
	return x.rm.escape(rm.EscAlloc, fakeAlloc(fakeDevice, handle, classVidmem, p), p)
}

// serve serves the n-th call as a worker does.
func (x *flying) serve(n int, call flyingCall) {
	x.notif = seccompNotif{}
	x.received(3)
	x.notif = seccompNotif{ID: uint64(n)}
	x.in("received")
	x.serves = x.rm
	if call.uvm {
		x.serves = x.uvm
	}
	c := x.serves
	rep := call.make(x, flyingHandle(n))
	x.in("handled")
	var parts []memoryPart
	if !rep.resume && rep.errno == 0 {
		parts = c.changedParts(nil)
	}
	a := x.guard.account
	a.mu.Lock()
	a.noteGPU(0) // another thread's
	a.mu.Unlock()
	x.in("noted")
	c.answered(rep, parts)
	x.in("written")
}

// flyingPlace is the flight that a guard takes first.
const flyingPlace = keeper.MaxFlights - 1

func flyingHandle(n int) uint32 { return 0x5c100000 + uint32(n) }

// check compares what the next guard finds of the n-th call with what it is.
func (x *flight) check(n int, call flyingCall, came outcome) error {
	switch came {
	case unknown:
		made := uint32(0)
		if call.makes {
			made = flyingHandle(n)
		}
		c, ok := x.call()
		if !ok || c.Cmd != call.cmd || x.made != made {
			return fmt.Errorf("the driver may have been asked for %+v, which makes %#x; want %v and %#x", c, x.made, call.cmd, made)
		}
		if _, handle, _ := madeBy(c); handle != made {
			return fmt.Errorf("%#x is made by the call, %#x by the flight", handle, made)
		}
	case answered:
		if (x.resume != 0) != call.resume || x.errno != 0 {
			return fmt.Errorf("it is answered by resume %d, errno %d", x.resume, x.errno)
		}
	}
	return nil
}

func lastCommit(files [2]*os.File, m *keeper.Memory) (uint64, error) {
	_, last, err := journal.Read(files[m.Active().Load()&1])
	return last, err
}

// journalFiles are those that a guard has left.
func journalFiles(t *testing.T, pid int, m *keeper.Memory) (files [2]*os.File) {
	t.Helper()
	for i, fd := range m.Files() {
		var err error
		if files[i], err = os.Open(fmt.Sprintf("/proc/%d/fd/%d", pid, fd)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { files[i].Close() })
	}
	return files
}

// TestFlight: wherever a guard is killed in a call, the next one finds what came of this call, and never the worker's call before.
func TestFlight(t *testing.T) {
	for _, before := range flyingCalls {
		for _, call := range flyingCalls {
			t.Run(before.name+", "+call.name, func(t *testing.T) {
				x := newFlying(t)
				x.serve(1, before)
				files := journalFiles(t, os.Getpid(), x.memory)
				var last uint64
				var points []string
				asked := false
				x.in = func(point string) {
					m := slices.Clone(x.memory.Flight(flyingPlace))
					left, _ := flightAt(m)
					if point == "written" { // killed when it was not
						if err := left.check(2, call, left.outcome(last)); err != nil || (left.outcome(last) == unknown) != (call.cmd != 0) {
							t.Errorf("settled, not written: %d, %v", left.outcome(last), err)
						}
					}
					var err error
					if last, err = lastCommit(files, x.memory); err != nil {
						t.Fatal(err)
					}
					asked = asked || point == "asked"
					want := map[bool]outcome{false: undone, true: unknown}[asked]
					if point == "written" {
						want = answered
					}
					if err := left.check(2, call, left.outcome(last)); left.outcome(last) != want || err != nil {
						t.Errorf("%s: %d, want %d; %v", point, left.outcome(last), want, err)
					}
					points = append(points, point)
				}
				x.serve(2, call)
				if asked != (call.cmd != 0) || x.settled.Load() < 2 {
					t.Errorf("%q, settled %d", points, x.settled.Load())
				}
			})
		}
	}
}

const steppedEnv = "CGPU_TEST_STEPPED"

// steppedCalls are some, as each takes ten thousand instructions.
var steppedCalls = flyingCalls[:6]

// TestFlightStepped is TestFlight at each instruction of calls.
func TestFlightStepped(t *testing.T) {
	if os.Getenv(steppedEnv) != "" {
		serveStepped(t)
		return
	}
	runtime.LockOSThread() // who traces is a thread
	defer runtime.UnlockOSThread()
	cmd := exec.Command(os.Args[0], "-test.run=^TestFlightStepped$", "-test.v")
	cmd.Env = append(os.Environ(), steppedEnv+"=1", "GODEBUG=asyncpreemptoff=1")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	var tid, fd int
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if n, _ := fmt.Sscanf(lines.Text(), "stepped %d %d", &tid, &fd); n == 2 {
			break
		}
	}
	m := memoryOf(t, cmd.Process.Pid, fd)
	s := stepper{memory: m, files: journalFiles(t, cmd.Process.Pid, m)}
	s.flight, _ = flightAt(m.Flight(flyingPlace))
	if err := unix.PtraceSeize(tid); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(in, "go")
	if err := s.run(tid); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d instructions of %d calls", s.steps, s.n)
}

// memoryOf is that of another process.
func memoryOf(t *testing.T, pid, fd int) *keeper.Memory {
	t.Helper()
	own, err := unix.Open(fmt.Sprintf("/proc/%d/fd/%d", pid, fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	m, err := keeper.OpenMemory(own)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

// serveStepped is the process that is stepped, between two signals, while it writes to its flight.
func serveStepped(t *testing.T) {
	debug.SetGCPercent(-1)
	runtime.LockOSThread()
	x := newFlying(t)
	fmt.Println("stepped", unix.Gettid(), x.memory.FD())
	bufio.NewScanner(os.Stdin).Scan()
	described := uint64(0)
	signal := func(s syscall.Signal) { _ = unix.Tgkill(os.Getpid(), unix.Gettid(), s) }
	x.in = func(point string) {
		switch point {
		case "received", "written":
			signal(unix.SIGUSR2)
		case "handled": // or the commit would be most of what is stepped
			x.guard.books.commit(nil)
		case "noted":
			signal(unix.SIGUSR1)
		case "asked": // what is just over, once more; but where the driver is asked again
			if described < x.notif.ID {
				x.asked.Store(0)
			}
			described = x.notif.ID
			signal(unix.SIGUSR1)
			x.serves.asked()
			signal(unix.SIGUSR2)
		}
	}
	for i, call := range steppedCalls {
		signal(unix.SIGUSR1)
		x.serve(i+1, call)
	}
}

// stepper looks at a flight after each instruction.
type stepper struct {
	*flight
	memory *keeper.Memory
	files  [2]*os.File
	last   uint64
	n      int     // the call
	came   outcome // what was found of it
	steps  int
}

// In the order in which a call comes to them.
var outcomes = []outcome{undone, unknown, answered}

func (s *stepper) run(tid int) error {
	stepping, deliver := false, 0
	for {
		var status unix.WaitStatus
		if _, err := unix.Wait4(tid, &status, unix.WALL, nil); err != nil || !status.Stopped() {
			if s.n == len(steppedCalls) && s.came == answered {
				return nil
			}
			return fmt.Errorf("after call %d: %v, %v", s.n, status, err)
		}
		deliver = 0
		switch status.StopSignal() {
		case unix.SIGUSR1:
			stepping = true
		case unix.SIGUSR2:
			stepping = false
		case unix.SIGTRAP:
		default:
			deliver = int(status.StopSignal())
		}
		if err := s.look(); err != nil {
			return fmt.Errorf("after %d instructions: %w", s.steps, err)
		}
		request := uintptr(unix.PTRACE_CONT)
		if stepping && s.settled.Load() != 0 == (s.came == answered) { // else the rest is how the journal is written
			request = unix.PTRACE_SINGLESTEP
		}
		if _, _, e := unix.Syscall6(unix.SYS_PTRACE, request, uintptr(tid), 0, uintptr(deliver), 0, 0); e != 0 {
			return os.NewSyscallError("ptrace", e)
		}
	}
}

// look is what another guard would find, should this one be killed now.
func (s *stepper) look() (err error) {
	s.steps++
	id := int(s.notif.ID)
	if id == 0 {
		return nil
	}
	if n := s.settled.Load(); n > s.last+1 {
		if s.last, err = lastCommit(s.files, s.memory); err != nil {
			return err
		}
	}
	came := s.outcome(s.last)
	if id != s.n {
		s.n, s.came = id, undone
	}
	if slices.Index(outcomes, came) < slices.Index(outcomes, s.came) {
		return fmt.Errorf("call %d has come to %d, and now to %d", id, s.came, came)
	}
	s.came = came
	if err := s.check(id, flyingCalls[id-1], came); err != nil {
		return fmt.Errorf("call %d, %s after %s: %w", id, flyingCalls[id-1].name, flyingCalls[max(id-2, 0)].name, err)
	}
	return nil
}
