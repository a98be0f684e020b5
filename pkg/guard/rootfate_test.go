// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// fakeRM is a driver that makes clients, each on a file, and names them one after the other.
type fakeRM struct {
	mu      sync.Mutex
	last    uint32
	clients map[uint32]int // the clients, and a descriptor of the file that each is on
	freed   []uint32
	refuse  uint32 // the status of every root alloc but the guard's first
}

func (d *fakeRM) driver() *fakeDriver {
	return &fakeDriver{answer: func(t Target, call *rm.Call) syscall.Errno {
		d.mu.Lock()
		defer d.mu.Unlock()
		switch o := call.Outer; call.NR() {
		case rm.EscAlloc:
			if rm.U32(o, rm.AllocClass) != rmclient.ClassClient {
				break
			}
			if d.refuse != 0 && len(d.clients) > 0 {
				rm.PutU32(o, 40, d.refuse)
				break
			}
			rm.PutU32(o, rm.AllocObject, d.make(t.FD))
			rm.PutU32(o, 40, rm.StatusOK)
		case rm.EscControl:
			if fd, ok := d.clients[rm.U32(o, rm.ControlClient)]; !ok || !kcmpSame(os.Getpid(), fd, t.FD) {
				rm.PutU32(o, rm.ControlStatus, rm.StatusInvalidClient)
			}
		case rm.EscFree:
			if fd, ok := d.clients[rm.U32(o, rm.FreeRoot)]; !ok || !kcmpSame(os.Getpid(), fd, t.FD) {
				rm.PutU32(o, rm.FreeStatus, rm.StatusInvalidClient)
				break
			}
			d.freed = append(d.freed, rm.U32(o, rm.FreeObject))
			delete(d.clients, rm.U32(o, rm.FreeObject))
		}
		return 0
	}}
}

func (d *fakeRM) make(fd int) uint32 {
	d.last = handleAfter(d.last, 1)
	d.clients[d.last] = fd
	return d.last
}

// made is what a task's root alloc does.
func (d *fakeRM) made(fd int) uint32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.make(fd)
}

func newFakeRM(t *testing.T) (*fakeRM, *Guard) {
	t.Helper()
	d := &fakeRM{last: 0xc1d00000 | clientHandles - 3, clients: map[uint32]int{}} // the numbers begin anew soon
	g := newFakeGuard(t, d.driver())
	if _, err := g.guardClient(); err != nil {
		t.Fatal(err)
	}
	return d, g
}

// ask lets a task of this process make a client; the answer gets lost.
func ask(t *testing.T, g *Guard) (*file, *pendingRoot) { return askAt(t, g, rootOuter()) }

func askAt(t *testing.T, g *Guard, o []byte) (*file, *pendingRoot) {
	t.Helper()
	c := newFakeCall(t, g, fakeControl)
	if rep := c.escape(rm.EscAlloc, o); rep != replyResume {
		t.Fatalf("%+v", rep)
	}
	f, p := c.root, c.root.pending
	g.rootAnswered(f, true)
	return f, p
}

// TestRootFound: the guard finds the client that a root alloc has made, without a word of the task's.
func TestRootFound(t *testing.T) {
	for _, others := range []int{0, 1, 700} {
		t.Run(fmt.Sprint(others, " of others after it"), func(t *testing.T) {
			d, g := newFakeRM(t)
			f, p := ask(t, g)
			want := d.made(p.fd)
			for range others {
				d.made(-1)
			}
			if g.watchRoot(f, p); !g.account.hasClientOn(f, want) || g.astrayAt.Load() != 0 || f.clients != 1 {
				t.Errorf("%#x was not found", want)
			}
			if len(d.freed) > 0 && d.freed[0] == want {
				t.Error("it was freed")
			}
		})
	}
}

// TestRootRefused: what the driver refuses the guard too is no offence, and the file may have another try.
func TestRootRefused(t *testing.T) {
	d, g := newFakeRM(t)
	d.refuse = rm.StatusInsufficientResources
	for range 3 {
		f, p := ask(t, g)
		if !g.resolveRoot(f, p, 0, true) || g.astrayAt.Load() != 0 || f.rooted || f.pending != nil {
			t.Fatal("an honest program's refused call counts against it")
		}
	}
}

// TestRootNotOver: while the thread may be inside, and the file has no client, nothing is decided.
func TestRootNotOver(t *testing.T) {
	d, g := newFakeRM(t)
	f, p := ask(t, g)
	tid, args, end := stuckThread(t)
	defer end()
	p.task, p.args = &task{tid: tid, proc: p.task.proc}, args
	if g.resolveRoot(f, p, 0, false) || g.astrayAt.Load() != 0 {
		t.Fatal("decided while the thread is inside")
	}
	p.since = p.since.Add(-stallTime - time.Second)
	d.mu.Lock()
	d.refuse = rm.StatusTimeout
	d.mu.Unlock()
	if g.resolveRoot(f, p, 0, false) {
		t.Fatal("decided while the driver answers nobody")
	}
	d.mu.Lock()
	d.refuse = 0
	d.mu.Unlock()
	for deadline := time.Now().Add(patience); !g.resolveRoot(f, p, 0, false); { // the runtime's signals wake it
		if time.Now().After(deadline) {
			t.Fatal("a call that is held back by its own memory waits for ever")
		}
	}
	if g.astrayAt.Load() == 0 {
		t.Fatal("it does not count")
	}
}

// TestRootAstray: the first call that makes no client may be honest; the second ends all, in the processes too.
func TestRootAstray(t *testing.T) {
	d, g := newFakeRM(t)
	g.managed.pids = nil
	victim := newFakeCall(t, g, fakeControl)
	vf, err := g.followFile(victim.fd, victim.node)
	if err != nil {
		t.Fatal(err)
	}
	kept := d.made(victim.fd)
	g.account.addClient(kept, os.Getpid(), vf)
	holder, other := holds(t, fakeControl), holds(t, "/dev/null")
	g.managed.pids = func() []int { return []int{holder.Process.Pid, other.Process.Pid} }

	f, p := ask(t, g)
	if !g.resolveRoot(f, p, 0, true) || g.astrayAt.Load() == 0 || f.rooted {
		t.Fatal("the first was not noticed, or bars its file")
	}
	if !g.account.ownsClient(kept) || g.allEndedAt.Load() != 0 {
		t.Fatal("one call that was not made ends a program")
	}
	g.astrayAt.Add(-int64(forgiveness + time.Second))
	if f, p = ask(t, g); !g.resolveRoot(f, p, 0, true) || g.allEndedAt.Load() != 0 {
		t.Fatal("an hour later it still counts")
	}
	if f, p = ask(t, g); !g.resolveRoot(f, p, 0, true) || g.allEndedAt.Load() == 0 {
		t.Fatal("the second does not count")
	}
	if _, ok := d.clients[kept]; ok || g.account.ownsClient(kept) {
		t.Error("a client lives on")
	}
	if err := holder.Wait(); err == nil || g.stats.processesKilled.Load() != 1 {
		t.Errorf("the process that has the driver open: %v, %d killed", err, g.stats.processesKilled.Load())
	}
	if other.Process.Signal(syscall.Signal(0)) != nil {
		t.Error("a process that has nothing to do with it was killed")
	}
}

// TestRootExcuse: a client that went to another file before is no excuse for a later call on that file.
func TestRootExcuse(t *testing.T) {
	d, g := newFakeRM(t)
	f, p := ask(t, g)
	c := newFakeCall(t, g, fakeControl)
	keep := dupFD(t, c.fd) // the task's own: the audit's sweep looks for files that are closed
	defer unix.Close(keep)
	ahead := handleAfter(d.last, 5)
	d.clients[ahead] = c.fd // under a name that it chose
	g.resolveRoot(f, p, 0, true)
	o := rootOuter()
	if rep := c.escape(rm.EscAlloc, o); rep.resume || rm.U32(o, 40) != rm.StatusInsufficientPermissions {
		t.Errorf("a file with an unknown client may have another: %+v, %s", rep, rm.StatusName(rm.U32(o, 40)))
	}
	delete(d.clients, ahead)
	far := handleAfter(d.last, 2*handlesAhead)
	d.clients[far] = c.fd
	if rep := c.escape(rm.EscAlloc, o); !rep.resume {
		t.Fatalf("an honest program gets none any more: %+v, %s", rep, rm.StatusName(rm.U32(o, 40)))
	}
	f, p = c.root, c.root.pending
	g.rootAnswered(f, true)
	if g.madeClient(f, p, far) {
		t.Error("a client with a name that the driver does not give now passes for the new one")
	}
	want := d.made(p.fd)
	if !g.resolveRoot(f, p, 0, true) || !g.account.hasClientOn(f, want) {
		t.Error("an honest program's client is not found")
	}
	rm.PutU32(o, rm.AllocRoot, 0xc1d0abcd)
	if rep := newFakeCall(t, g, fakeControl).escape(rm.EscAlloc, o); rep.resume {
		t.Error("a name that the caller chooses cannot be told from an old one")
	}
}

// TestRootOnFile: a client that the file has had before is not the new one.
func TestRootOnFile(t *testing.T) {
	d, g := newFakeRM(t)
	c := newFakeCall(t, g, fakeControl)
	f, err := g.followFile(c.fd, c.node)
	if err != nil {
		t.Fatal(err)
	}
	old := d.made(c.fd)
	g.account.addClient(old, os.Getpid(), f)
	f.clients, f.rooted = 1, true
	if rep := c.escape(rm.EscAlloc, rootOuter()); rep != replyResume {
		t.Fatalf("%+v", rep)
	}
	p := f.pending
	g.rootAnswered(f, true)
	if g.resolveRoot(f, p, old, false); f.pending != nil && g.astrayAt.Load() != 0 {
		t.Error("decided early")
	}
	g.resolveRoot(f, p, old, true)
	if f.clients != 1 || g.astrayAt.Load() == 0 || !f.rooted {
		t.Errorf("%d clients on the file; the old one passes for the new one", f.clients)
	}
}

// TestRootMemory: the driver can write its answer, or it is not asked.
func TestRootMemory(t *testing.T) {
	_, g := newFakeRM(t)
	m, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(m)
	for name, addr := range map[string]uint64{"nothing there": 8, "read only": uint64(uintptr(unsafe.Pointer(&m[0])))} {
		o := rootOuter()
		rm.PutU64(o, rm.AllocParams, addr)
		if rep := newFakeCall(t, g, fakeControl).escape(rm.EscAlloc, o); rep != fail(unix.EFAULT) {
			t.Errorf("%s: %+v", name, rep)
		}
	}
}

// TestRootMemoryHeld: a task that nobody can read from, since it serves its memory itself and does not, puts nothing off.
func TestRootMemoryHeld(t *testing.T) {
	_, g := newFakeRM(t)
	m, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(m)
	f, p := askAt(t, g, m[:copy(m, rootOuter())])
	defer holdMemory(t, m)()
	judged := make(chan bool)
	go func() { judged <- g.resolveRoot(f, p, 0, true) }()
	select {
	case over := <-judged:
		if !over || g.astrayAt.Load() == 0 {
			t.Error("a call that went elsewhere does not count")
		}
	case <-time.After(patience):
		t.Fatal("the task keeps the guard waiting")
	}
}

// holdMemory makes who touches a piece of memory from now on wait until the returned function is called.
func holdMemory(t *testing.T, m []byte) (release func()) {
	t.Helper()
	fd, _, e := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC, 0, 0)
	if e == unix.EPERM && os.Geteuid() != 0 {
		testenv.Lacks(t, "needs root: userfaultfd")
	}
	if e != 0 {
		t.Fatal("userfaultfd: ", e)
	}
	const (
		uffdioAPI      = 0xc018aa3f
		uffdioRegister = 0xc020aa00
		version        = 0xaa
		missing        = 1 // UFFDIO_REGISTER_MODE_MISSING
	)
	api := [3]uint64{version}
	register := [4]uint64{uint64(uintptr(unsafe.Pointer(&m[0]))), uint64(len(m)), missing}
	if e := ioctlPtr(int(fd), uffdioAPI, unsafe.Pointer(&api)); e != 0 {
		t.Fatal(e)
	}
	if e := ioctlPtr(int(fd), uffdioRegister, unsafe.Pointer(&register)); e != 0 {
		t.Fatal(e)
	}
	if err := unix.Madvise(m, unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	return func() { _ = unix.Close(int(fd)) }
}

// TestUnseen: what a root alloc may have made elsewhere, or an RM_ALLOC_MEMORY, is good for nothing. Of what is not there the driver is not
// asked to keep more: it may be made meanwhile.
func TestUnseen(t *testing.T) {
	const stolen, host, gone = 0x5c0000f0, 0x5c0000f1, 0x5c0000f2
	d := &fakeDriver{unseen: true, answer: func(_ Target, call *rm.Call) syscall.Errno {
		if call.NR() != rm.EscControl || rm.U32(call.Outer, rm.ControlCmd) != controlHandleInfo {
			return 0
		}
		p := call.Blocks[0].Data
		switch rm.U32(p, 0) {
		case stolen:
			rm.PutU32(p, handleInfoResult, rmclient.ClassDevice)
		case host:
			rm.PutU32(p, handleInfoResult, classOSDescriptor)
		default:
			rm.PutU32(call.Outer, rm.ControlStatus, rm.StatusObjectNotFound)
		}
		return 0
	}}
	g := withClient(newFakeGuard(t, d))
	c := newFakeCall(t, g, fakeControl)
	uvm, ctl := newFakeUVMCall(t, g)
	ways := map[string]func(handle uint32) uint32{
		"control": func(h uint32) uint32 {
			p := make([]byte, 4)
			o := fakeControlCall(h, controlNumSubdevices, p)
			c.escape(rm.EscControl, o, p)
			return rm.U32(o, rm.ControlStatus)
		},
		"alloc": func(h uint32) uint32 {
			p := make([]byte, 4)
			o := fakeAlloc(h, 0x5c0000e0, rmclient.ClassSubdevice, p)
			c.escape(rm.EscAlloc, o, p)
			return rm.U32(o, 40)
		},
		"heap": func(h uint32) uint32 {
			o := make([]byte, rm.HeapSize)
			rm.PutU32(o, rm.HeapRoot, fakeClient)
			rm.PutU32(o, rm.HeapParent, h)
			rm.PutU32(o, rm.HeapFunction, rm.HeapFnAllocSize)
			rm.PutU32(o, rm.HeapAllocAttr, rm.MemoryLocationPCI<<rm.MemoryAttrLocationShift)
			c.escape(rm.EscVidHeapControl, o)
			return rm.U32(o, rm.HeapStatus)
		},
		"dup": func(h uint32) uint32 {
			o := make([]byte, rm.DupSize)
			rm.PutU32(o, rm.DupClient, fakeClient)
			rm.PutU32(o, rm.DupParent, fakeDevice)
			rm.PutU32(o, rm.DupClientSrc, fakeClient)
			rm.PutU32(o, rm.DupObjectSrc, h)
			c.escape(rm.EscDupObject, o)
			return rm.U32(o, rm.DupStatus)
		},
		"UVM mapping": func(h uint32) uint32 {
			o, form := uvmCall(g, rm.UVMMapExternal, 1<<32, 8<<20, ctl)
			rm.PutU32(o, form.Object, h)
			uvm.do(rm.UVMMapExternal, o)
			return rm.U32(o, form.Status)
		},
	}
	for name, way := range ways {
		for _, x := range []struct {
			handle uint32
			astray int64
			root   int64
			want   uint32
		}{
			{stolen, 0, 0, rm.StatusInvalidObjectHandle}, {stolen, 1, 0, rm.StatusInvalidObjectHandle}, {stolen, 0, 1, rm.StatusInvalidObjectHandle},
			{gone, 1, 0, rm.StatusObjectNotFound}, {gone, 0, 0, rm.StatusOK},
			{host, 0, 0, rm.StatusInvalidObjectHandle}, {host, 1, 0, rm.StatusInvalidObjectHandle},
			{fakeDevice, 1, 1, rm.StatusOK}, {fakeClient, 1, 1, rm.StatusOK},
		} {
			if keeps := name == "dup" || name == "UVM mapping"; keeps && (x.handle == gone || x.handle == fakeClient) {
				x.want = rm.StatusObjectNotFound
			}
			g.astrayAt.Store(x.astray)
			g.pendingRoots.Store(x.root)
			if got := way(x.handle); got != x.want {
				t.Errorf("%s of %#x, %+v: %s", name, x.handle, x, rm.StatusName(got))
			}
		}
	}
}

const controlNumSubdevices = 0x800280

func TestRootPending(t *testing.T) {
	_, g := newFakeRM(t)
	g.pendingRoots.Store(maxPendingRoots)
	o := rootOuter()
	if rep := newFakeCall(t, g, fakeControl).escape(rm.EscAlloc, o); rep.resume || rm.U32(o, 40) != rm.StatusInsufficientResources {
		t.Errorf("%+v", rep)
	}
}

func TestPlace(t *testing.T) {
	p := &pendingRoot{task: &task{tid: 1 << 22}}
	if p.whereabouts() != threadOutside {
		t.Error("a thread that has ended is inside")
	}
	p = &pendingRoot{task: &task{tid: busyThread(t)}}
	if p.whereabouts() == threadInside {
		t.Error("a thread that runs is inside")
	}
	for deadline := time.Now().Add(patience); p.whereabouts() != threadOutside; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a thread that computes is never known to have left the driver")
		}
	}
}

// TestComputed: a thread that computes, in user mode or, where its call does not for long, in the kernel, cannot keep the guard looking for
// ever.
func TestComputed(t *testing.T) {
	began := cpuTime{1000, 2000}
	for _, x := range []struct {
		now          cpuTime
		root, memory bool
	}{
		{began, false, false},
		{cpuTime{1009, 2000}, false, false},
		{cpuTime{1010, 2000}, true, true},
		{cpuTime{1010, 2010}, false, true},
		{cpuTime{1028, 2237}, false, true}, // polls and yields
		{cpuTime{1010, 2160}, false, false},
		{cpuTime{1000, 3000}, true, false}, // one that makes memory clears it for as long
		{cpuTime{1020, 3000}, true, false},
	} {
		if since := x.now.since(began); since.leftRootAlloc() != x.root || since.leftMemoryCall() != x.memory {
			t.Errorf("%+v since %+v: want %t of a root alloc, %t of one that makes memory", x.now, began, x.root, x.memory)
		}
	}
}

// TestRootLooks: calls of many threads look at once where the thread of a root alloc is. The race detector sees what they share.
func TestRootLooks(t *testing.T) {
	_, g := newFakeRM(t)
	_, p := ask(t, g)
	p.task = &task{tid: busyThread(t), proc: p.task.proc}
	var looks sync.WaitGroup
	start := make(chan struct{})
	for range 4 {
		c := newFakeCall(t, g, fakeUVM) // on another file
		looks.Go(func() {
			<-start
			if rep, ok := g.awaitPendingRoots(&c.trappedCall); !ok {
				t.Errorf("%+v", rep)
			}
		})
	}
	close(start)
	looks.Wait()
}

// busyThread is a thread that computes, mostly outside the kernel.
func busyThread(t *testing.T) (tid int) {
	t.Helper()
	began, stop := make(chan int), make(chan struct{})
	var end sync.WaitGroup
	end.Go(func() {
		runtime.LockOSThread()
		began <- unix.Gettid()
		for running := true; running; {
			select {
			case <-stop:
				running = false
			default: // it is on its processor all the time
				unix.Getpid()
			}
		}
	})
	t.Cleanup(func() {
		close(stop)
		end.Wait()
	})
	return <-began
}

// holds starts a process that has a file open.
func holds(t *testing.T, path string) *exec.Cmd {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := exec.Command("sleep", "100")
	cmd.ExtraFiles = []*os.File{f}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd
}

// stuckThread is a thread that sleeps in an ioctl: it waits for a notification of a filter that has none.
func stuckThread(t *testing.T) (tid int, args [3]uint64, end func()) {
	t.Helper()
	type made struct{ tid, fd int }
	ready := make(chan made)
	notif := &seccompNotif{}
	go func() { // the thread ends with the filter's only task
		runtime.LockOSThread()
		prog := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW}}
		fprog := unix.SockFprog{Len: 1, Filter: &prog[0]}
		_ = unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
		fd, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER,
			uintptr(unsafe.Pointer(&fprog)))
		if e != 0 {
			ready <- made{0, -1}
			return
		}
		ready <- made{unix.Gettid(), int(fd)}
		for e := unix.EINTR; e == unix.EINTR; { // the runtime's signals
			_, _, e = unix.Syscall(unix.SYS_IOCTL, fd, ioctlNotifRecv, uintptr(unsafe.Pointer(notif)))
		}
	}()
	m := <-ready
	if m.fd < 0 {
		t.Fatal("no filter")
	}
	args = [3]uint64{uint64(m.fd), ioctlNotifRecv, uint64(uintptr(unsafe.Pointer(notif)))}
	p := &pendingRoot{task: &task{tid: m.tid}, args: args}
	for deadline := time.Now().Add(patience); p.whereabouts() != threadInside; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the thread does not sleep")
		}
	}
	return m.tid, args, func() {
		_ = unix.Close(m.fd) // the next signal ends it
		_ = unix.Tgkill(os.Getpid(), m.tid, syscall.SIGURG)
		runtime.KeepAlive(notif)
	}
}
