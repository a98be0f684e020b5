// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/journal"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/test/walk"
)

// mortal is a driver as a guard has it that is killed in the middle of a call: whoever comes by then stays for ever. What the driver does
// is done, or not, and nobody hears of it.
type mortal struct {
	*inProcess
	guard  *Guard
	any    bool         // also in calls of which nobody can tell what came of them
	memory bool         // only in calls by which memory comes or goes
	calls  atomic.Int64 // until it dies; below 0: it lives
	before atomic.Bool  // the driver is not asked any more
	own    atomic.Bool  // it dies in a call of the guard's own, which has no caller
	commit atomic.Bool  // it dies in the next commit after the call, of which nothing is written
	dead   atomic.Bool
	died   chan struct{}
}

func (d *mortal) Exec(t Target, call *rm.Call) (e syscall.Errno) {
	d.stayIfDead()
	dies := !makesClient(call) && (!d.memory || ofMemory(call)) &&
		(d.any || d.own.Load() == (t.PID == 0) && d.decidable(t, call)) && d.calls.Add(-1) == 0
	if !dies || !d.before.Load() || d.commit.Load() {
		e = d.inProcess.Exec(t, call)
	}
	switch {
	case dies && d.commit.Load():
		d.dieInCommit()
	case dies:
		d.dead.Store(true)
		close(d.died)
	}
	d.stayIfDead()
	return e
}

// dieInCommit has no more room for the journal.
func (d *mortal) dieInCommit() {
	d.guard.books.commits.Lock()
	defer d.guard.books.commits.Unlock()
	m := d.guard.keep.memory
	fd := m.Files()[m.Active().Load()&1]
	kept, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	full, e := unix.Open("/dev/full", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err = errors.Join(err, e); err != nil {
		panic(err)
	}
	d.guard.books.lost = func(error) {
		err := unix.Dup3(kept, fd, unix.O_CLOEXEC)
		if err = errors.Join(err, unix.Close(kept), unix.Close(full)); err != nil {
			panic(err)
		}
		d.dead.Store(true)
		close(d.died)
		d.stayIfDead()
	}
	if err := unix.Dup3(full, fd, unix.O_CLOEXEC); err != nil {
		panic(err)
	}
}

// makesClient: with a real driver the task makes its clients itself, and their files close by themselves.
func makesClient(call *rm.Call) bool {
	return !rm.UVMShaped(call.Cmd) && call.NR() == rm.EscAlloc && rm.U32(call.Outer, rm.AllocRoot) == 0
}

// ofMemory: memory comes or goes by it, or is mapped.
func ofMemory(call *rm.Call) bool {
	switch call.Cmd {
	case rm.UVMMapExternal, rm.UVMUnmapExternal, rm.UVMFree:
		return true
	}
	if rm.UVMShaped(call.Cmd) {
		return false
	}
	switch call.NR() {
	case rm.EscAlloc:
		class := rm.U32(call.Outer, rm.AllocClass)
		return class == classVidmem || class == classSystem
	case rm.EscVidHeapControl, rm.EscDupObject, rm.EscFree, rm.EscMapMemory:
		return true
	}
	return false
}

func (d *mortal) stayIfDead() {
	if d.dead.Load() {
		select {}
	}
}

func (d *mortal) CloseFile(id uint32) {
	d.stayIfDead()
	d.inProcess.CloseFile(id)
}

func (d *mortal) CloseExport(id uint32) {
	d.stayIfDead()
	d.inProcess.CloseExport(id)
}

// decidable: what is known of such a call, whoever has made it is not ended (settle.go). Of the guard's own calls those make something in
// the middle of a call that is not.
func (d *mortal) decidable(t Target, call *rm.Call) bool {
	o := call.Outer
	if rm.UVMShaped(call.Cmd) {
		form, _ := d.guard.abi.UVM(call.Cmd)
		switch call.Cmd {
		case rm.UVMUnmapExternal, rm.UVMFree, rm.UVMCreateExternal, rm.UVMMapDynamicRegion, rm.UVMAllocSemaphorePool:
			return true
		case rm.UVMMapExternal:
			f := d.guard.files.find(t.FD, nodeUVM)
			gpus := int(rm.U64(o, form.FD-uvmMapCount))
			for i := range gpus {
				if f == nil || f.isMapped(rangeOf(o, form), gpuUUID(o[uvmMapAttributes+i*uvmMapAttributesSize:])) {
					return false
				}
			}
			return f != nil
		}
		return false
	}
	switch own := t.PID == 0; call.NR() {
	case rm.EscAlloc, rm.EscDupObject:
		client, handle, _ := madeBy(call)
		return !own && client != 0 && handle != 0
	case rm.EscFree:
		return rm.U32(o, rm.FreeRoot) != rm.U32(o, rm.FreeObject)
	case rm.EscControl:
		ctl, known := d.guard.abi.Control(rm.U32(o, rm.ControlCmd))
		return !own && known && slices.Contains(repeatable, ctl.Kind)
	}
	return false
}

// newMortal makes the rig's guard one that can die.
func (r *rig) newMortal() *mortal {
	d := &mortal{inProcess: r.guard.driver.(*inProcess), guard: r.guard, died: make(chan struct{})}
	d.calls.Store(-1)
	r.guard.driver = d
	return d
}

// fall has another guard go on in the place of one that has died.
func (r *rig) fall(d *mortal) error {
	old := r.guard
	if !d.commit.Load() { // else it was locked when that guard died
		old.books.commits.Lock() // whoever would answer, or write something down, stays
	}
	go old.work.Lock() // and who would do something by himself
	old.watch.mu.Lock()
	for fd := range old.watch.on {
		_ = unix.EpollCtl(old.watch.epfd, unix.EPOLL_CTL_DEL, int(fd), nil)
	}
	old.watch.mu.Unlock()
	for _, l := range old.parkAll() {
		for until := time.Now().Add(10 * time.Second); l.waiting.Load() != 0; time.Sleep(100 * time.Microsecond) {
			if l.wake(); time.Now().After(until) {
				return errors.New("the dead guard still takes up calls")
			}
		}
	}
	fds := old.keep.memory.Files()
	f := &Fallen{Memory: old.keep.memory}
	text, err := readDescriptor(fds[old.keep.memory.Active().Load()&1])
	if err != nil {
		return err
	}
	entries, _, last, err := journal.Parse(text)
	if err != nil {
		return err
	}
	f.last = last
	withSockets(entries)
	if f.Revived, err = ReadBooks(entries); err != nil {
		return err
	}
	r.closeLeft(f)
	next, err := Revive(f.Revived, d.another(), old.log)
	if err != nil {
		return err
	}
	if err := next.mayGoOn(f); err != nil {
		return fmt.Errorf("%w: %w", errRefused, err)
	}
	next.gpuTime.StartRescuer = noRescuer
	r.t.Cleanup(next.events.Close)
	next.fallen = f
	f.Process.Seccomp, f.Process.Control, f.Process.Sim = 0, 0, 0 // the rig has none
	r.guard = next
	next.rise()
	if _, err := next.guardClient(); err != nil {
		return err
	}
	return nil
}

// errRefused: nobody goes on.
var errRefused = errors.New("the container is as without a keeper")

// closeLeft closes the copies of the container's files that the dead guard had for calls under way, as keeper.Left does.
func (r *rig) closeLeft(f *Fallen) {
	kept := f.Descriptors()
	for _, x := range f.flights() {
		if x.outcome(f.last) == unknown {
			kept = append(kept, int(x.fd))
		}
	}
	list, _ := os.ReadDir("/proc/self/fd")
	for _, x := range list {
		target, _ := os.Readlink("/proc/self/fd/" + x.Name())
		if fd, err := strconv.Atoi(x.Name()); err == nil && strings.HasPrefix(target, r.nodes) && !slices.Contains(kept, fd) {
			_ = unix.Close(fd)
		}
	}
}

func readDescriptor(fd int) ([]byte, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	text := make([]byte, st.Size)
	_, err := unix.Pread(fd, text, 0)
	return text, err
}

// withSockets puts numbers into the books where the rig has no sockets.
func withSockets(entries map[journal.Key][]byte) {
	for key, text := range entries {
		if key.Kind == bookProcess {
			entries[key] = append([]byte(`{"seccomp":1048576,"control":1048577,`), text[len(`{"seccomp":0,"control":0,`):]...)
		}
	}
}

// TestWalkFallen: a guard is killed at some call of the driver, before that or after, and the next one goes on: what the container does
// afterwards is charged as it was, and in the end nothing is left.
func TestWalkFallen(t *testing.T) { walkFalls(t, false) }

// TestWalkEnded: a guard is killed at any call, also where nobody can tell what came of it, as a program may wish that has found out how to
// have its guard killed. Who made the call is ended then, and nothing of his is left, neither with the driver nor in the account.
func TestWalkEnded(t *testing.T) { walkFalls(t, true) }

func walkFalls(t *testing.T, any bool) {
	seed, limit := uint64(time.Now().UnixNano()), 20*time.Second
	if d, err := time.ParseDuration(os.Getenv(walkForEnv)); err == nil {
		limit = d
	}
	if testing.Short() {
		limit = 4 * time.Second
	}
	if n, err := strconv.ParseUint(os.Getenv(walkEnv), 0, 64); err == nil {
		seed = n
	}
	falls, ended, refused := 0, 0, 0
	for deadline := time.Now().Add(limit); time.Now().Before(deadline) || falls == 0; seed++ {
		fell, killed, err := walkFallen(t, seed, any)
		switch {
		case errors.Is(err, errRefused):
			refused++
		case err != nil:
			t.Fatalf("seed %#x: %v", seed, err)
		case killed:
			ended++
		}
		if fell {
			falls++
		}
	}
	t.Logf("%d guards fell; %d times a process was ended, %d times nobody went on", falls, ended, refused)
}

// commitAllTheTime has what is noted committed between any two notes, and not only at the ends of calls.
func commitAllTheTime(b *books) (stop func()) {
	var over atomic.Bool
	go func() {
		for !over.Load() {
			b.commit(nil)
			time.Sleep(10 * time.Microsecond)
		}
	}()
	return func() { over.Store(true) }
}

func walkFallen(t *testing.T, seed uint64, any bool) (fell, killed bool, err error) {
	random := rand.New(rand.NewPCG(seed, 1))
	var d *mortal
	w := newWalker(t, walkPatience, func(r *rig) { // before the first worker, which else has no flight
		d = r.newMortal()
		d.any = any
		_, err := r.guard.guardClient() // as Arm does
		if err = errors.Join(err, letInterrupt(), r.guard.newKeep(nil)); err != nil {
			t.Fatal(err)
		}
	})
	done := make(chan error, 1)
	go func() {
		<-d.died
		w.falling.Lock()
		w.unnamed = 3 // a call of each process
		err := w.fall(d)
		w.falling.Unlock()
		if done <- err; err != nil {
			w.c.kill() // its calls wait for a guard
		}
	}()
	if random.IntN(2) == 0 {
		defer commitAllTheTime(w.guard.books)()
	}
	d.before.Store(random.IntN(2) == 0)
	d.commit.Store(random.IntN(3) == 0)
	d.calls.Store(1 + random.Int64N(400))
	if d.own.Store(random.IntN(4) == 0); d.own.Load() && !any { // there are fewer
		d.calls.Store(1 + random.Int64N(60))
	} else if d.memory = random.IntN(4) > 0; d.memory {
		d.calls.Store(1 + random.Int64N(40))
	}
	ops := walk.Generate(seed, walk.Kind{Steps: walkSteps / 4, Procs: 3, Limit: uint64(testLimit)})
	step, err := w.run(ops)
	if fell = d.dead.Load(); fell {
		fall := <-done
		if killed = w.guard.stats.processesKilled.Load() > 0; killed || fall != nil {
			err = fall // the list came to no end
		}
	}
	if killed && err == nil {
		w.c.kill()
		err = w.books(true)
	}
	if err == nil {
		err = w.over()
	}
	if err != nil {
		err = fmt.Errorf("step %d, fell %v, before the driver %v, in a call of its own %v, in a commit %v: %w", step, fell, d.before.Load(),
			d.own.Load(), d.commit.Load(), err)
	}
	return fell, killed, err
}

// TestFallenFree: a guard is killed when it is about to free memory that a channel writes errors to, and has not kept it yet. The next one
// does not free it under the channel.
func TestFallenFree(t *testing.T) {
	const channel = 1
	r := newRig(t)
	d := r.newMortal()
	d.any = true
	if _, err := r.guard.guardClient(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(letInterrupt(), r.guard.newKeep(nil)); err != nil {
		t.Fatal(err)
	}
	c := r.start()
	a := c.do("open")[0]
	memory := c.do("alloc", a, 8*mib)[0]
	made := c.do("notifier", a, memory, 1)
	d.before.Store(true)
	d.calls.Store(1)
	c.send("free", a, memory)
	<-d.died
	if err := r.fall(d); err != nil {
		t.Fatal(err)
	}
	if _, err := c.answer(); err == nil {
		_, _ = c.try("alloc", a, mib)
		_, _ = c.try("token", a, made[channel])
	}
	if n := r.sim.Snapshot().Stray; n != 0 {
		t.Errorf("%d writes to free memory", n)
	}
	c.kill()
	r.empty()
}
