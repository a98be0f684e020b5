// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"github.com/opencgpu/cgpu/pkg/proc"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// idleProcess does nothing.
type idleProcess struct{ *exec.Cmd }

func startIdle(t *testing.T) idleProcess {
	t.Helper()
	p := idleProcess{exec.Command("sleep", "100")}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = p.Process.Kill(), p.Wait() })
	return p
}

func (p idleProcess) pid() int { return p.Process.Pid }

// end kills the process, and leaves it unburied.
func (p idleProcess) end(t *testing.T) {
	t.Helper()
	_ = p.Process.Kill()
	eventually(t, "the end of a process", func() bool { return proc.Exiting(p.pid()) })
}

// clientOf makes a client of another process.
func (c *fakeContainer) clientOf(handle uint32, tgid int) *client {
	c.Helper()
	c.client(handle)
	made := c.account.clients[handle]
	made.tgid = tgid
	return made
}

// TestExiting: a process is over when all of its threads are.
func TestExiting(t *testing.T) {
	p := startIdle(t)
	if proc.Exiting(os.Getpid()) || proc.Exiting(p.pid()) {
		t.Error("a process that lives is taken for one that ends")
	}
	p.end(t)
	_ = p.Wait()
	if !proc.Exiting(p.pid()) {
		t.Error("a process that is gone is taken for one that lives")
	}
	c := startPlain(t)
	c.headless()
	if proc.Exiting(c.pid()) {
		t.Error("a process whose first thread has ended, and no other, is taken for one that ends")
	}
	c.kill()
}

// TestStopBeforeKill: all channels of a process are off, on every engine and GPU, and have no work left, before the guard kills it; other
// processes' go on.
func TestStopBeforeKill(t *testing.T) {
	c := newFakeContainer(t, 2)
	p := startIdle(t)
	c.clientOf(fakeClient+1, p.pid())
	c.clientOf(fakeClient+2, p.pid())
	c.channels(fakeClient, workGroup, 0x100, 3)
	want := slices.Concat(c.channels(fakeClient+1, workGroup, 0x100, 70), c.channels(fakeClient+1, copyGroup, 0x200, 2),
		c.channels(fakeClient+1, workGroup+1, 0x300, 1), c.channels(fakeClient+2, copyGroup+1, 0x400, 1))
	c.managed.pids = func() []int { return []int{os.Getpid(), p.pid()} }
	c.d.at = func(cmd uint32) {
		if cmd == controlDisableChannels && proc.Exiting(p.pid()) {
			t.Error("channels are stopped after the process was killed")
		}
	}
	c.killProcess(p.pid())
	_ = p.Wait()
	if status := p.ProcessState.Sys().(syscall.WaitStatus); status.Signal() != syscall.SIGKILL {
		t.Errorf("%v", p.ProcessState)
	}
	c.isOff(want)
	for _, l := range c.d.take() {
		if !l.off || !l.rewind {
			t.Errorf("%+v", l)
		}
	}
}

// TestStopOfTheDead: handles that are gone do not keep the others on.
func TestStopOfTheDead(t *testing.T) {
	c := newFakeContainer(t, 1)
	names := c.channels(fakeClient, workGroup, 0x100, 5)
	c.d.gone[names[2]] = true
	c.stopChannels(func(*client) bool { return true })
	c.isOff(slices.Delete(names, 2, 3))
}

// TestKillClients: a client's channels are off before it is freed.
func TestKillClients(t *testing.T) {
	c := newFakeContainer(t, 1)
	names := c.channels(fakeClient, workGroup, 0x100, 2)
	freed := 0
	answer := c.d.answer
	c.d.answer = func(t Target, call *rm.Call) syscall.Errno {
		if call.NR() == rm.EscFree {
			freed++
			c.isOff(names)
		}
		return answer(t, call)
	}
	if left := c.killClients(func(*client) bool { return true }); left != 0 || freed != 1 || c.account.clientCount() != 0 {
		t.Errorf("%d left, %d freed", left, freed)
	}
}

// TestEndedStayOff: a pause that ends lets no channel run of a process that has ended, or that the guard ends.
func TestEndedStayOff(t *testing.T) {
	prepare := func(t *testing.T) (c *fakeContainer, alive, dead, ending []fakeName) {
		c = newFakeContainer(t, 1)
		p := startIdle(t)
		c.clientOf(fakeClient+1, p.pid())
		c.clientOf(fakeClient+2, os.Getpid()).ending = true
		alive = c.channels(fakeClient, workGroup, 0x100, 2)
		dead = c.channels(fakeClient+1, workGroup, 0x200, 2)
		ending = c.channels(fakeClient+2, workGroup, 0x300, 2)
		c.pause(true)
		c.isOff(alive, dead, ending)
		p.end(t)
		return c, alive, dead, ending
	}
	t.Run("at the end of a pause", func(t *testing.T) {
		c, _, dead, ending := prepare(t)
		if !c.pause(false) || c.off() {
			t.Error("the container is still off")
		}
		c.isOff(dead, ending)
	})
	t.Run("at the end of the container", func(t *testing.T) {
		c, _, dead, ending := prepare(t)
		c.d.take()
		c.gpuTime.End()
		lists := c.d.take()
		c.isOff(dead, ending)
		if len(lists) != 2 || !lists[0].off || !lists[0].rewind || len(lists[0].channels) != 6 || lists[1].off {
			t.Errorf("%+v, want first all without work, then those on that live", lists)
		}
	})
	t.Run("where the driver would not resume at first", func(t *testing.T) {
		c, _, dead, ending := prepare(t)
		c.d.refuse = func(l fakeList) uint32 { return rm.StatusInvalidState }
		c.pause(false)
		c.d.refuse = nil
		for !c.pause(false) {
		}
		c.isOff(dead, ending)
	})
	t.Run("by the rescuer", func(t *testing.T) {
		c, alive, _, _ := prepare(t)
		resumes := func() {
			t.Helper()
			l := slices.Concat(c.noted()...)
			slices.SortFunc(l, func(a, b fakeName) int { return int(a.handle) - int(b.handle) })
			if !slices.Equal(l, alive) {
				t.Errorf("%#x is resumed, %#x may run", l, alive)
			}
		}
		resumes()
		c.clientOf(fakeClient+3, os.Getpid())
		c.channels(fakeClient+3, workGroup, 0x400, 2)
		c.gpuTime.Lock()
		c.gpuTime.LetRun(0, c.account.channelsOn(0, true))
		c.gpuTime.Unlock()
		c.stopChannels(func(x *client) bool { return x.handle == fakeClient+3 }) // while it is paused
		resumes()
	})
	t.Run("by GPFIFO_SCHEDULE", func(t *testing.T) {
		c, _, _, _ := prepare(t)
		c.pause(false)
		c.gpuTime.Lock()
		defer c.gpuTime.Unlock()
		if c.mustNotRun(fakeClient, workGroup) || !c.mustNotRun(fakeClient+2, workGroup) || !c.mustNotRun(fakeClient+2, 0x300) {
			t.Error("channels of a client that ends may be let run")
		}
	})
}

// TestEndUVMOrder: of processes that are over the channels are stopped before UVM takes their memory away; those of others go on.
func TestEndUVMOrder(t *testing.T) {
	c := newFakeContainer(t, 1)
	p := startIdle(t)
	c.clientOf(fakeClient+1, p.pid())
	c.channels(fakeClient, workGroup, 0x100, 2)
	dead := c.channels(fakeClient+1, workGroup, 0x200, 2)
	p.end(t)
	f := mappedUVM(t, c.Guard, os.Getpid(), p.pid())
	answer := c.d.answer
	ended := 0
	c.d.answer = func(target Target, call *rm.Call) syscall.Errno {
		if call.Cmd == rm.UVMUnregisterVASpace {
			ended++
			c.isOff(dead)
			wantUsage(t, c.account, 0, 8*quota.MiB)
		}
		return answer(target, call)
	}
	c.endUVM(f)
	wantUsage(t, c.account, 0, 0)
	if ended != 1 || slices.Contains(c.d.calls, rm.UVMUnmapExternal) {
		t.Errorf("%d address spaces ended, calls %v", ended, c.d.calls)
	}
}

// mappedUVM is an address space that the guard alone has, with 8 MiB that nothing else holds.
func mappedUVM(t *testing.T, g *Guard, users ...int) *file {
	t.Helper()
	f := followedUVM(t, g)
	for _, tgid := range users {
		f.owners[tgid] = true
	}
	const memory = 0x5c000777
	g.account.addObject(fakeClient, memoryObject(memory, fakeDevice), 0, 0, 8*quota.MiB)
	g.recordMapping(f, uvmMap{gpu: gpuUUID{1}, addresses: addresses{1 << 33, 1<<33 + 8<<20}, charge: g.account.holdOf(fakeClient, memory)})
	g.account.freeObject(fakeClient, memory)
	return f
}

// TestAwaited: an address space whose user is about to end is left to its end, which the guard hears of.
func TestAwaited(t *testing.T) {
	c := newFakeContainer(t, 1)
	p := startIdle(t)
	p.end(t)
	mappedUVM(t, c.Guard, os.Getpid(), p.pid())
	watched := &process{tgid: p.pid(), pidfd: -1}
	c.tasks.procs[p.pid()] = watched
	c.sweep()
	if c.files.count() != 2 {
		t.Fatal("torn down while its process ends")
	}
	c.tasks.dropProcess(watched)
	c.sweep()
	if c.files.count() != 1 {
		t.Error("not torn down after the end of its process")
	}
	wantUsage(t, c.account, 0, 0)
	mappedUVM(t, c.Guard, os.Getpid()) // who lives has closed it
	c.sweep()
	if c.files.count() != 1 {
		t.Error("not torn down although its user has closed it")
	}
}

// TestEndUnheard: whose process has ended, and was perhaps buried, waits for nobody to hear of that: neither memory that is asked for, nor
// what it had announced.
func TestEndUnheard(t *testing.T) {
	c := newFakeContainer(t, 1)
	p := startIdle(t)
	fd, err := unix.PidfdOpen(p.pid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	c.tasks.procs[p.pid()] = &process{tgid: p.pid(), pidfd: fd} // with no watcher
	limit := c.account.usage(0).limit
	c.managed.pids = func() []int { return nil }
	if !c.reserveManaged(p.pid(), 1<<40, 1<<40+4<<20) {
		t.Fatal("refused")
	}
	_ = p.Process.Kill()
	_ = p.Wait()
	mappedUVM(t, c.Guard, p.pid())
	if !c.reserve(cost{size: limit - 4*quota.MiB}) {
		t.Error("refused, although the process that has the memory was over")
	}
	c.account.unreserve(cost{size: limit - 4*quota.MiB})
	if !c.reserveManaged(os.Getpid(), 1<<41, 1<<41+uint64(limit)) {
		t.Error("refused, although the process that has announced so much was over")
	}
}

// TestTearingDown: while UVM tears an address space down nothing else of the container waits, but for who needs that memory; it is torn
// down once, and its memory counts until UVM has freed it.
func TestTearingDown(t *testing.T) {
	c := newFakeContainer(t, 1)
	began, goOn := make(chan bool), make(chan bool)
	answer := c.d.answer
	c.d.answer = func(target Target, call *rm.Call) syscall.Errno {
		if call.Cmd == rm.UVMUnregisterVASpace {
			began <- true
			<-goOn
		}
		return answer(target, call)
	}
	limit := c.account.usage(0).limit
	mappedUVM(t, c.Guard)
	c.startSweep()
	<-began
	for range 3 { // neither waits nor begins again
		c.startSweep()
	}
	wantUsage(t, c.account, 0, 8*quota.MiB)
	if !c.reserve(cost{size: limit - 8*quota.MiB}) {
		t.Error("what there is room for does not fit")
	}
	c.account.unreserve(cost{size: limit - 8*quota.MiB})
	got := make(chan bool)
	go func() { got <- c.reserve(cost{size: limit}) }()
	select {
	case fits := <-got:
		t.Fatalf("an allocation does not wait for the memory that is about to be freed: %v", fits)
	case <-began:
		t.Fatal("torn down twice")
	case <-time.After(50 * time.Millisecond):
	}
	goOn <- true
	if !<-got {
		t.Error("refused, although the memory was about to be freed")
	}
	if n := c.account.usage(0).denied; n != 0 {
		t.Errorf("%d denials counted", n)
	}
}

// TestTornDownMeanwhile: who gets an address space out of a socket while it is torn down has it followed anew.
func TestTornDownMeanwhile(t *testing.T) {
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	c := newFakeCall(t, g, fakeUVM)
	if err := c.followFile(); err != nil {
		t.Fatal(err)
	}
	old := c.file
	g.endUVM(old)
	f, err := c.lockUVM()
	if err != nil || f == old || f.ended || g.files.count() != 1 {
		t.Fatalf("%v, %d files", err, g.files.count())
	}
	f.uvm.Unlock()
	_ = unix.Close(f.strong)
}

// TestUnboundStayOff: a process that lives ends its channels in UVM while its container is paused. The end of the pause does not let them
// run, nor does the rescuer; the others go on.
func TestUnboundStayOff(t *testing.T) {
	gpu := gpuUUID{1}
	call := func(cmd uint32, fill func(o []byte, form rm.UVMForm)) func(*fakeCall) {
		return func(uvm *fakeCall) {
			form, _ := uvm.guard.abi.UVM(cmd)
			o := make([]byte, form.Size)
			fill(o, form)
			if rep := uvm.do(cmd, o); rep != replyDone {
				t.Errorf("%+v", rep)
			}
		}
	}
	ofGPU := func(o []byte, _ rm.UVMForm) { copy(o[rm.UVMGPU:], gpu[:]) }
	for _, way := range []struct {
		name string
		end  func(*fakeCall)
	}{
		{"the channel", call(rm.UVMUnregisterChannel, func(o []byte, form rm.UVMForm) {
			rm.PutU32(o, form.Client, fakeClient)
			rm.PutU32(o, form.Object, 0x100)
		})},
		{"the address space", call(rm.UVMUnregisterVASpace, ofGPU)},
		{"the GPU", call(rm.UVMUnregisterGPU, ofGPU)},
		{"the file", func(uvm *fakeCall) { uvm.guard.endUVM(uvm.file) }},
	} {
		t.Run(way.name, func(t *testing.T) {
			c := newFakeContainer(t, 1)
			names := c.channels(fakeClient, workGroup, 0x100, 2)
			uvm := newFakeCall(t, c.Guard, fakeUVM)
			uvm.file = followedUVM(t, c.Guard)
			name := channelName(names[0])
			uvm.file.spaces[gpu], uvm.file.channels[name] = true, uvmChannel{gpu, c.account.retainChannel(name)}
			c.pause(true)
			leaves := func() {
				if left := slices.Concat(c.noted()...); !slices.Equal(left, names[1:]) {
					t.Errorf("the rescuer would let %#x run", left)
				}
				c.pause(false)
			}
			asked := c.d.answer
			c.d.answer = func(target Target, call *rm.Call) syscall.Errno {
				if rm.UVMShaped(call.Cmd) { // the guard may be killed, or the pause end, before UVM has answered
					leaves()
				}
				return asked(target, call)
			}
			way.end(uvm)
			c.isOff(names[:1])
			c.pause(true)
			leaves()
			c.isOff(names[:1])
		})
	}
}

// TestUnboundRefused: a channel that UVM does not end, as it refuses the call, is paused and resumed as any other.
func TestUnboundRefused(t *testing.T) {
	for _, ends := range []bool{false, true} {
		t.Run(fmt.Sprintf("the pause ends meanwhile: %t", ends), func(t *testing.T) {
			c := newFakeContainer(t, 1)
			names := c.channels(fakeClient, workGroup, 0x100, 2)
			uvm := newFakeCall(t, c.Guard, fakeUVM)
			uvm.file = followedUVM(t, c.Guard)
			name := channelName(names[0])
			uvm.file.channels[name] = uvmChannel{gpuUUID{1}, c.account.retainChannel(name)}
			c.pause(true)
			form, _ := c.abi.UVM(rm.UVMUnregisterChannel)
			asked := c.d.answer
			c.d.answer = func(target Target, call *rm.Call) syscall.Errno {
				if call.Cmd == rm.UVMUnregisterChannel {
					if ends {
						c.pause(false)
					}
					rm.PutU32(call.Outer, form.Status, rm.StatusInvalidArgument)
					return 0
				}
				return asked(target, call)
			}
			o := make([]byte, form.Size)
			rm.PutU32(o, form.Client, fakeClient)
			rm.PutU32(o, form.Object, names[0].handle)
			if rep := uvm.do(rm.UVMUnregisterChannel, o); !uvm.failed(rep) {
				t.Errorf("%+v", rep)
			}
			if !ends {
				c.isOff(names)
				if left := slices.Concat(c.noted()...); len(left) != 2 {
					t.Errorf("the rescuer would let only %#x run", left)
				}
				c.pause(false)
			}
			c.isOff()
		})
	}
}

// TestBoundAgain: a channel that is registered again is paused and resumed as any other.
func TestBoundAgain(t *testing.T) {
	c := newFakeContainer(t, 1)
	names := c.channels(fakeClient, workGroup, 0x100, 1)
	uvm, ctl := newFakeUVMCall(t, c.Guard)
	for _, cmd := range []uint32{rm.UVMRegisterChannel, rm.UVMUnregisterChannel, rm.UVMRegisterChannel} {
		form, _ := c.abi.UVM(cmd)
		o := make([]byte, form.Size)
		if cmd == rm.UVMRegisterChannel {
			rm.PutU32(o, form.FD, uint32(ctl))
		}
		rm.PutU32(o, form.Client, fakeClient)
		rm.PutU32(o, form.Object, names[0].handle)
		if rep := uvm.do(cmd, o); uvm.failed(rep) {
			t.Fatalf("%+v, %s", rep, rm.StatusName(uvm.statusWord()))
		}
	}
	c.pause(true)
	c.isOff(names)
	c.pause(false)
	c.isOff()
}

// TestSweepSoon: who frees the last handle of something is swept for at once, also where the next sweep for another would come late.
func TestSweepSoon(t *testing.T) {
	g := newFakeGuard(t, &fakeDriver{})
	g.mu.Lock()
	g.sweepTimer, g.sweepWait = time.AfterFunc(time.Hour, g.sweepAgain), lastSweep
	g.mu.Unlock()
	g.sweepSoon()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		g.mu.Lock()
		wait := g.sweepWait
		g.mu.Unlock()
		if wait == 0 { // it has come, and there is nothing to come again for
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("no sweep; the next one is %v after the last", wait)
		}
	}
}
