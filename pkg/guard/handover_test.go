// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/guard/handover"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/peerpage"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/sim"
	"github.com/opencgpu/cgpu/pkg/tally"
	"github.com/opencgpu/cgpu/test/walk"
)

// handOver lets another guard go on in the place of the rig's, by its state alone. What it knows must be the same.
func (r *rig) handOver() error {
	if err := letInterrupt(); err != nil {
		return err
	}
	old := r.guard
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		next, err := r.tryHandOver(old)
		if err == nil {
			r.guard = next
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("hand over: %w", err)
		}
	}
}

func (r *rig) tryHandOver(old *Guard) (next *Guard, err error) {
	s, next, resume, err := r.restored(old)
	if err != nil {
		resume()
		return nil, err
	}
	// The old one has nothing to do any more: nobody resumes it.
	old.watch.mu.Lock()
	for fd := range old.watch.on {
		_ = unix.EpollCtl(old.watch.epfd, unix.EPOLL_CTL_DEL, int(fd), nil)
	}
	old.watch.mu.Unlock()
	r.t.Cleanup(next.events.Close)
	next.goOn(s)
	return next, nil
}

// restored brings a guard to rest, and makes another one of its state, which must be in the same. resume lets the first go on.
func (r *rig) restored(old *Guard) (s *handover.State, next *Guard, resume func(), err error) {
	filters := old.parkAll()
	resume = func() {
		for _, l := range filters {
			l.unpark()
		}
	}
	for _, l := range filters {
		if !l.awaitIdle(time.Now().Add(200*time.Millisecond)) || l.dead.Load() {
			return nil, nil, resume, busy("a call")
		}
	}
	if !old.work.TryLock() {
		return nil, nil, resume, busy("work")
	}
	unpark := resume
	resume = func() {
		old.work.Unlock()
		unpark()
	}
	if old.pendingRoots.Load() > 0 {
		return nil, nil, resume, busy("a root alloc")
	}
	b, err := stateOf(old, filters)
	if err != nil {
		return nil, nil, resume, busy(err.Error())
	}
	if s, err = handover.Decode(b); err != nil {
		return nil, nil, resume, err
	}
	if next, err = Restore(s, old.driver.(*inProcess).another(), old.log); err != nil {
		return nil, nil, resume, fmt.Errorf("%w: %s", err, b)
	}
	next.gpuTime.StartRescuer = noRescuer
	again, err := stateOf(next, filters)
	if err == nil && !bytes.Equal(b, again) {
		i := 0
		for i < min(len(b), len(again)) && b[i] == again[i] {
			i++
		}
		err = fmt.Errorf("the state is another one after it was restored, from byte %d on:\n…%s\n…%s", i, b[max(0, i-200):], again[max(0,
			i-200):])
	}
	return s, next, resume, err
}

// survives sees, wherever a test compares the guard's books, that its state can be handed over as it is, where nothing is under way.
func (r *rig) survives() {
	r.t.Helper()
	if err := letInterrupt(); err != nil {
		r.t.Fatal(err)
	}
	_, _, resume, err := r.restored(r.guard)
	resume()
	if err != nil && !errors.Is(err, errBusy) {
		r.t.Error(err)
	}
}

func stateOf(g *Guard, filters []*listener) ([]byte, error) {
	s, err := g.snapshot()
	if err != nil {
		return nil, err
	}
	s.Process.Seccomp, s.Process.Control = 1<<20, 1<<20+1 // the rig has none
	s.Process.InitPID = max(1, s.Process.InitPID)
	s.Rescuer, s.Process.Tally = nil, 0 // which TakeOver finds again
	for _, l := range filters {
		s.Process.Listeners = append(s.Process.Listeners, l.fd)
	}
	if len(filters) == 0 {
		s.Process.Listeners = []int{1<<20 + 2}
	}
	return handover.Encode(s)
}

// TestWalkHandedOver: whatever a container has done, a guard that goes on from another one's state knows the same, and keeps the books as
// well: they agree with the driver's after each step, and nothing is left at the end.
func TestWalkHandedOver(t *testing.T) {
	seed, limit := uint64(time.Now().UnixNano()), 15*time.Second
	if d, err := time.ParseDuration(os.Getenv(walkForEnv)); err == nil {
		limit = d
	}
	if testing.Short() {
		limit = 2 * time.Second
	}
	if n, err := strconv.ParseUint(os.Getenv(walkEnv), 0, 64); err == nil {
		seed = n
	}
	w := newWalker(t, walkPatience)
	w.each = 7
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); seed++ {
		ops := walk.Generate(seed, walk.Kind{Steps: walkSteps, Procs: 3, Limit: uint64(testLimit), Malformed: seed%4 != 3})
		if step, err := w.run(ops); err != nil {
			t.Fatalf("seed %#x, step %d: %v", seed, step, err)
		}
	}
	if err := w.over(); err != nil {
		t.Error(err)
	}
}

// TestSignalsHandedOver: calls that signals interrupt all the time happen once each, whichever guard has begun them.
func TestSignalsHandedOver(t *testing.T) {
	for name, delay := range map[string]sim.Delay{"fast": {}, "slow": {Alloc: 3 * time.Millisecond, Free: 3 * time.Millisecond}} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			c := r.start()
			a := c.do("open")[0]
			objects := r.sim.Snapshot().Objects
			r.sim.SetDelay(delay)
			c.send("signals", a, 1000, 3000)
			answer := make(chan error, 1)
			go func() {
				_, err := c.answer()
				answer <- err
			}()
			hands := 0
			for over := false; !over; hands++ {
				if err := r.handOver(); err != nil {
					t.Fatal(err)
				}
				select {
				case err := <-answer:
					if over = true; err != nil {
						t.Error(err)
					}
				case <-time.After(20 * time.Millisecond):
				}
			}
			t.Logf("%d guards, %+v", hands, r.guard.Status().Calls)
			if n := r.sim.Snapshot().Objects; n != objects {
				t.Errorf("%d objects, want %d: a call was lost or made twice", n, objects)
			}
			r.agree(0)
		})
	}
}

// TestRestoreVersions: what each version of a guard wrote makes a guard.
func TestRestoreVersions(t *testing.T) {
	for _, name := range []string{"v1"} {
		b, err := os.ReadFile("handover/testdata/" + name + ".json")
		if err != nil {
			t.Fatal(err)
		}
		r := newRig(t)
		s, err := handover.Decode(b)
		if err != nil {
			t.Fatal(err)
		}
		s.Config = testConfig(r.nodes)
		g, err := Restore(s, r.guard.driver.(*inProcess).another(), testLog(t))
		if err != nil {
			t.Fatal(err)
		}
		if a := g.account; len(a.clients) != len(s.Account.Clients) || a.objects != len(s.Account.Objects) || g.files.count() != len(s.Files) ||
			len(g.tasks.procs) != len(s.Processes) || len(g.managed.procs) != 1 || g.savedBytes.Load() == 0 {
			t.Errorf("%d clients, %d objects, %d files, %d processes", len(a.clients), a.objects, g.files.count(), len(g.tasks.procs))
		}
		s.Account.GPUs[0].Used++
		if _, err := Restore(s, r.guard.driver.(*inProcess).another(), testLog(t)); err == nil || !strings.Contains(err.Error(), "in use") {
			t.Errorf("a state that has lost a charge: %v", err)
		}
	}
}

// FuzzRestore: whatever a state says, it makes a guard or is refused.
func FuzzRestore(f *testing.F) {
	b, err := os.ReadFile("handover/testdata/v1.json")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	nodes := makeNodes(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := handover.Decode(b)
		if err != nil {
			return
		}
		gpus := len(s.Config.GPUs)
		s.Config = testConfig(nodes)
		if len(s.Config.GPUs) != gpus {
			return
		}
		_, _ = Restore(s, rmclient.Kernel{}, slog.New(slog.DiscardHandler))
	})
}

// TestTakeOver: what others see of the container is right from the first moment on, and the descriptors that the program before would go on
// with stay open until this one serves, whatever becomes of it.
func TestTakeOver(t *testing.T) {
	r := newRig(t)
	g, dir := r.guard, t.TempDir()
	g.cfg.RunDir, g.cfg.Socket, g.cfg.Control = dir, dir+"/n.sock", dir+"/n.ctl"
	g.account.countChannel(runlist{0, engineGR}, 5)
	g.lastRecord = &ledger.Record{Name: "web"}
	sockets, err := Listen(g.cfg)
	if err != nil {
		t.Fatal(err)
	}
	counters, err := tally.Create(dir, g.cfg.Nonce, nil)
	if err != nil {
		t.Fatal(err)
	}
	var places []*peerpage.Entry // the container's, and another one's
	for range 2 {
		e, err := peerpage.Join(dir, g.cfg.GPUs[0].UUID)
		if err != nil {
			t.Fatal(err)
		}
		places = append(places, e)
	}
	s, err := g.snapshot()
	if err != nil {
		t.Fatal(err)
	}
	p := &s.Process
	p.InitPID, p.Listeners, p.Tally = 1, []int{1 << 20}, counters.FD()
	p.Seccomp, err = descriptor(sockets.Seccomp)
	if err == nil {
		p.Control, err = descriptor(sockets.Control)
	}
	if err != nil {
		t.Fatal(err)
	}
	s.GPUTime[0].Place = places[0].Place()
	next, taken, err := TakeOver(s, g.driver, g.log)
	if err != nil {
		t.Fatal(err)
	}
	if n := places[1].OtherChannels(); n != 5 {
		t.Errorf("another container is told of %d channels, and there are 5", n)
	}
	_ = errors.Join(taken.Seccomp.Close(), taken.Control.Close())
	next.tallyFile.Release()
	next.gpuTime.End()
	for _, fd := range []int{p.Seccomp, p.Control, p.Tally} {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil {
			t.Errorf("descriptor %d of the state: %v", fd, err)
		}
	}
	next.events.Write(event.Event{Kind: event.Warning, Text: "this"})
	list, err := event.Read(dir)
	if err != nil || len(list) != 1 || list[0].Name != "web" {
		t.Errorf("the container has lost its name: %+v, %v", list, err)
	}
}

// TestUndoIsWaitedFor: a result that is taken back if its caller does not come is not forgotten with its thread, which may have ended.
func TestUndoIsWaitedFor(t *testing.T) {
	r := newRig(t)
	g := r.guard
	c := newFakeCall(t, g, fakeControl)
	c.call.Outer = fakeFree(fakeMemory)
	c.before = [][]byte{c.call.Outer}
	undone := make(chan struct{})
	c.undo = func() { close(undone) }
	c.task.mu.Lock()
	g.saveResult(&c.trappedCall, replyDone)
	g.tasks.dropTask(c.task)
	c.task.mu.Unlock()
	snapshot := func() error {
		g.work.Lock()
		defer g.work.Unlock()
		_, err := g.snapshot()
		return err
	}
	if err := snapshot(); err == nil || !strings.Contains(err.Error(), "interrupted call") {
		t.Errorf("handed over with a result that would be taken back: %v", err)
	}
	<-undone
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		err := snapshot()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// TestKindsAreNamed: a container that has an object of whatever class can be handed over.
func TestKindsAreNamed(t *testing.T) {
	abi, err := rm.ForDriver(testVersion, false)
	if err != nil {
		t.Fatal(err)
	}
	for id := range uint32(1 << 16) {
		if class, ok := abi.Class(id); ok && kindNames[class.Kind] == "" {
			t.Errorf("class %#x is of kind %d, which has no name", id, class.Kind)
		}
	}
}
