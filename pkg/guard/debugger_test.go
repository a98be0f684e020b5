// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestResetChannel: a program ends its own channel after a hardware exception, and no other engine than that channel's.
func TestResetChannel(t *testing.T) {
	const group, channel, compute, copyGroup, copyChannel, lone = 0x200, 0x201, 0x202, 0x210, 0x211, 0x220
	d := answering(0, nil)
	g := withClient(newFakeGuard(t, d))
	g.cfg.Settings.MaxTSGs, g.cfg.Settings.MaxChannels = 8, 8
	f := newFakeCall(t, g, fakeControl)
	for _, x := range []struct{ parent, handle, class, groupEngine, channelEngine uint32 }{
		{fakeDevice, group, classChannelGroup, 1, 0}, {group, channel, 0xc86f, 0, 0}, {channel, compute, 0xcbc0, 0, 0},
		{fakeDevice, copyGroup, classChannelGroup, 9, 0}, {copyGroup, copyChannel, 0xc86f, 0, 0},
		{fakeDevice, lone, 0xc86f, 0, 10},
	} {
		p := make([]byte, 368)
		if x.class == classChannelGroup {
			rm.PutU32(p, rm.TSGEngineType, x.groupEngine)
		} else {
			rm.PutU32(p, rm.ChannelEngineType, x.channelEngine)
		}
		o := fakeAlloc(x.parent, x.handle, x.class, p)
		if f.escape(rm.EscAlloc, o, p); rm.U32(o, 40) != rm.StatusOK {
			t.Fatalf("%#x: %s", x.handle, rm.StatusName(rm.U32(o, 40)))
		}
	}
	reset := func(handle uint32, size int, words ...uint32) (uint32, int) {
		p := make([]byte, size)
		for i, w := range words {
			rm.PutU32(p, 4*i, w)
		}
		o := fakeControlCall(handle, 0x906f0102, p)
		before := len(d.calls)
		f.escape(rm.EscControl, o, p)
		return rm.U32(o, rm.ControlStatus), len(d.calls) - before
	}
	for _, x := range []struct {
		name         string
		handle       uint32
		size         int
		words        []uint32
		status       uint32
		reachesCalls int
	}{
		{"as libcuda does", channel, 16, []uint32{1}, rm.StatusOK, 1},
		{"once more", channel, 16, []uint32{1, 0, 2}, rm.StatusOK, 1},
		{"the engine that neighbours compute on", copyChannel, 16, []uint32{1}, rm.StatusInvalidArgument, 0},
		{"no engine", copyChannel, 16, []uint32{0}, rm.StatusInvalidArgument, 0},
		{"another GPU of an SLI group", copyChannel, 16, []uint32{9, 1}, rm.StatusInvalidArgument, 0},
		{"a reason that only the driver gives", copyChannel, 16, []uint32{9, 0, 4}, rm.StatusInvalidArgument, 0},
		{"a copy channel", copyChannel, 16, []uint32{9}, rm.StatusOK, 1},
		{"a channel without a group", lone, 16, []uint32{10}, rm.StatusOK, 1},
		{"a group", group, 16, []uint32{1}, rm.StatusInvalidObject, 0},
		{"what is no channel", fakeDevice, 16, []uint32{1}, rm.StatusInvalidObject, 0},
		{"nothing", 0x999, 16, []uint32{1}, rm.StatusInvalidObject, 0},
		{"the structure of branches before 550", channel, 12, []uint32{1}, rm.StatusInvalidParamStruct, 0},
	} {
		if status, calls := reset(x.handle, x.size, x.words...); status != x.status || calls != x.reachesCalls {
			t.Errorf("%s: %s, %d driver calls; want %s, %d", x.name, rm.StatusName(status), calls, rm.StatusName(x.status), x.reachesCalls)
		}
	}
}

// TestRegOps: what a core dump writes into an own context passes, and nothing else.
func TestRegOps(t *testing.T) {
	const group, channel = 0x200, 0x201
	d := answering(0, nil)
	g := withClient(newFakeGuard(t, d))
	g.cfg.Settings.MaxTSGs, g.cfg.Settings.MaxChannels = 8, 8
	f := newFakeCall(t, g, fakeControl)
	for _, x := range [][3]uint32{{fakeDevice, group, classChannelGroup}, {group, channel, 0xc86f}} {
		p := make([]byte, 368)
		rm.PutU32(p, rm.TSGEngineType, 1)
		f.escape(rm.EscAlloc, fakeAlloc(x[0], x[1], x[2], p), p)
	}
	changed := func(at int, v byte) []byte {
		b := dumpOp()
		b[at] = v
		return b
	}
	for _, x := range []struct {
		name            string
		client, channel uint32
		route           uint32
		ops             []byte
		status          uint32
		calls           int
	}{
		{"no channel: the whole GPU", fakeClient, 0, 0, dumpOp(), rm.StatusInvalidObject, 0},
		{"no client", 0, channel, 0, dumpOp(), rm.StatusInvalidClient, 0},
		{"another container's client", 0xc1d00099, channel, 0, dumpOp(), rm.StatusInvalidClient, 0},
		{"a partition", fakeClient, channel, 1, dumpOp(), rm.StatusNotSupported, 0},
		{"a register of the GPU", fakeClient, channel, 0, changed(1, 0), rm.StatusNotSupported, 0},
		{"one of the memory's", fakeClient, channel, 0, changed(1, 0x20), rm.StatusNotSupported, 0},
		{"another register of the context", fakeClient, channel, 0, changed(12, 0xb4), rm.StatusNotSupported, 0},
		{"another bit", fakeClient, channel, 0, changed(20, 1), rm.StatusNotSupported, 0},
		{"two", fakeClient, channel, 0, append(dumpOp(), dumpOp()...), rm.StatusNotSupported, 0},
		{"none", fakeClient, channel, 0, nil, rm.StatusNotSupported, 0},
		{"too many", fakeClient, channel, 0, make([]byte, 5*rm.RegOpSize), rm.StatusInvalidArgument, 0},
		{"as libcuda does", fakeClient, channel, 0, dumpOp(), rm.StatusOK, 1},
	} {
		p := make([]byte, 48)
		putWords(p, rm.RegOpsClient, x.client, x.channel)
		rm.PutU32(p, 20, uint32(len(x.ops)/rm.RegOpSize))
		rm.PutU32(p, rm.RegOpsRoute, x.route)
		if len(x.ops) > 0 {
			putPointer(p, 24, x.ops)
		}
		o := fakeControlCall(fakeDevice, 0x20800122, p)
		before := len(d.calls)
		f.escape(rm.EscControl, o, p, x.ops)
		if status, calls := rm.U32(o, rm.ControlStatus), len(d.calls)-before; status != x.status || calls != x.calls {
			t.Errorf("%s: %s, %d driver calls; want %s, %d", x.name, rm.StatusName(status), calls, rm.StatusName(x.status), x.calls)
		}
	}
}

// TestDebugMemory: a debugger reads and writes more than fits into the guard at once, and memory only.
func TestDebugMemory(t *testing.T) {
	const vaspace, size = 0x300, chunk*2 + 100
	card := make([]byte, size+10)
	for i := range card {
		card[i] = byte(i * 7)
	}
	d := answering(0, func(call *rm.Call) {
		p, b := call.Blocks[0].Data, call.Blocks[1].Data
		off := rm.U64(p, rm.DebugMemoryOffset)
		if int(rm.U32(p, rm.DebugMemoryLength)) != len(b) || len(b) > chunk {
			t.Errorf("%d bytes in a block of %d", rm.U32(p, rm.DebugMemoryLength), len(b))
		}
		if rm.U32(call.Outer, rm.ControlCmd) == 0x83de0316 {
			copy(card[off:], b)
		} else {
			copy(b, card[off:])
		}
	})
	g := withClient(newFakeGuard(t, d))
	g.account.addObject(fakeClient, object{handle: vaspace, parent: fakeDevice, class: 0x50a0, kind: rm.ClassPlain, gpu: noGPU}, noGPU, 0, 0)
	f := newFakeCall(t, g, fakeControl)
	do := func(cmd, handle, length uint32, buffer []byte) (reply, uint32) {
		p := make([]byte, 24)
		putWords(p, rm.DebugMemoryHandle, handle, length)
		rm.PutU64(p, rm.DebugMemoryOffset, 10)
		putPointer(p, rm.DebugMemoryBuffer, buffer)
		o := fakeControlCall(fakeDevice, cmd, p)
		rep := f.escape(rm.EscControl, o, p, buffer)
		if rm.U32(p, rm.DebugMemoryLength) != length || rm.U64(p, rm.DebugMemoryOffset) != 10 {
			t.Error("the program's parameters are changed")
		}
		return rep, rm.U32(o, rm.ControlStatus)
	}
	buffer := make([]byte, size)
	if rep, status := do(0x83de0315, fakeMemory, size, buffer); rep != replyDone || status != rm.StatusOK || !slices.Equal(buffer, card[10:]) {
		t.Errorf("read: %+v, %s", rep, rm.StatusName(status))
	}
	for i := range buffer {
		buffer[i] = byte(i * 3)
	}
	if rep, status := do(0x83de0316, fakeMemory, size, buffer); rep != replyDone || status != rm.StatusOK ||
		!slices.Equal(buffer, card[10:]) || len(d.calls) != 6 {
		t.Errorf("write: %+v, %s, %d driver calls", rep, rm.StatusName(status), len(d.calls))
	}
	for _, x := range []struct {
		name           string
		handle, length uint32
		status         uint32
	}{
		{"an address space", vaspace, size, rm.StatusInvalidObject},
		{"nothing", fakeMemory, 0, rm.StatusInvalidArgument},
		{"too much", fakeMemory, 256<<20 + 1, rm.StatusInvalidArgument},
	} {
		if _, status := do(0x83de0315, x.handle, x.length, buffer); status != x.status || len(d.calls) != 6 {
			t.Errorf("%s: %s, %d driver calls", x.name, rm.StatusName(status), len(d.calls))
		}
	}
}

// debugCall makes a debugger's read or write of some memory from its start.
func debugCall(f *fakeCall, cmd, handle uint32, buffer []byte) (status uint32) {
	p := make([]byte, 24)
	putWords(p, rm.DebugMemoryHandle, handle, uint32(len(buffer)))
	putPointer(p, rm.DebugMemoryBuffer, buffer)
	o := fakeControlCall(fakeDevice, cmd, p)
	f.escape(rm.EscControl, o, p, buffer)
	return rm.U32(o, rm.ControlStatus)
}

// TestDebugOnlyMemory: the driver would read the host's memory through a range of addresses, and write what all read through a page of its
// own. So what the guard has not seen made as memory is refused: virtual memory of the old way to allocate, imports, unknown handles.
func TestDebugOnlyMemory(t *testing.T) {
	const virtual, imported, readOnly = 0x301, 0x302, 0x303
	d := answering(0, func(call *rm.Call) {
		if call.NR() == rm.EscVidHeapControl {
			rm.PutU32(call.Outer, rm.HeapAllocMemory, virtual)
		}
	})
	g := withClient(newFakeGuard(t, d))
	f := newFakeCall(t, g, fakeControl)
	heap := make([]byte, rm.HeapSize)
	rm.PutU32(heap, rm.HeapRoot, fakeClient)
	rm.PutU32(heap, rm.HeapParent, fakeDevice)
	rm.PutU32(heap, rm.HeapFunction, rm.HeapFnAllocSize)
	rm.PutU32(heap, rm.HeapAllocFlags, rm.MemoryFlagVirtual)
	if f.escape(rm.EscVidHeapControl, heap); rm.U32(heap, rm.HeapStatus) != rm.StatusOK {
		t.Fatal(rm.StatusName(rm.U32(heap, rm.HeapStatus)))
	}
	g.account.importObject(fakeClient, fakeDevice, imported, export{})
	g.account.addObject(fakeClient, object{handle: readOnly, parent: fakeDevice, class: 0xde, kind: rm.ClassPlain, gpu: noGPU}, noGPU, 0, 0)
	before := len(d.calls)
	buffer := make([]byte, 16)
	for _, handle := range []uint32{virtual, imported, readOnly, 0x999, 0} {
		for _, cmd := range []uint32{0x83de0315, 0x83de0316} {
			if status := debugCall(f, cmd, handle, buffer); status != rm.StatusInvalidObject || len(d.calls) != before {
				t.Errorf("%#x of %#x: %s, %d driver calls", cmd, handle, rm.StatusName(status), len(d.calls)-before)
			}
		}
	}
}

// TestSlowCalls: calls that hold the driver's locks for long are paid for before they are made, however many threads make them.
func TestSlowCalls(t *testing.T) {
	b, now := slowCalls(), time.Now()
	passed := 0
	for range 64 {
		if b.tryPay(now, 0.25) == 0 {
			passed++
		}
	}
	if passed != 13 { // of 3 seconds, and the one that makes the debt
		t.Errorf("%d of 64 at once", passed)
	}
	if wait := b.tryPay(now, 0.25); wait != 2500*time.Millisecond {
		t.Errorf("then a wait of %v", wait)
	}
	if wait := b.tryPay(now.Add(2500*time.Millisecond), 0.25); wait != 0 {
		t.Errorf("after that %v more", wait)
	}
	abi, err := rm.ForDriver(testVersion, false)
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []uint32{0x906f0102, 0x20800122, 0x83de0310, 0x83de0315, 0x83de0316, 0x83de0317, 0x83de0318, 0xde0001} {
		if c, ok := abi.Control(id); !ok || c.HoldsLocks == 0 {
			t.Errorf("%#x is not among them", id)
		}
	}
	d := answering(0, nil)
	g := withClient(newFakeGuard(t, d))
	g.slowBucket = bucket{perSecond: 1e-3, burst: -1} // in debt for long
	g.waiters.Store(maxWaiters)
	p := make([]byte, 8)
	if rep := newFakeCall(t, g, fakeControl).escape(rm.EscControl, fakeControlCall(fakeDevice, 0x83de0310, p), p); rep.errno != unix.EINTR ||
		len(d.calls) != 0 {
		t.Errorf("one more than may wait: %+v", rep)
	}
}

// TestDebugSwapped: another thread puts something else in the place of the memory between two pieces.
func TestDebugSwapped(t *testing.T) {
	var g *Guard
	writes := 0
	d := answering(0, func(call *rm.Call) {
		if rm.U32(call.Outer, rm.ControlCmd) == 0x83de0316 {
			if writes++; writes == 1 { // what RM_FREE and RM_ALLOC of another thread do to the account
				g.account.freeObject(fakeClient, fakeMemory)
				g.account.addObject(fakeClient, object{handle: fakeMemory, parent: fakeDevice, class: 0x50a0, kind: rm.ClassPlain, gpu: noGPU},
					noGPU, 0, 0)
			}
		}
	})
	g = withClient(newFakeGuard(t, d))
	f := newFakeCall(t, g, fakeControl)
	if debugCall(f, 0x83de0316, fakeMemory, make([]byte, 2*chunk)); writes != 1 {
		t.Errorf("%d writes, the second to an address space", writes)
	}
}

// notified is a thread that waits in a notification, which end answers.
func notified(t *testing.T) (l *listener, id uint64, end func()) {
	t.Helper()
	fds := make(chan int)
	var over atomic.Bool
	go func() {
		runtime.LockOSThread()
		prog := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS},
			{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 1, K: unix.SYS_GETPPID},
			{Code: unix.BPF_RET, K: unix.SECCOMP_RET_ALLOW}, {Code: unix.BPF_RET, K: unix.SECCOMP_RET_USER_NOTIF}}
		fprog := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
		fd, _, e := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER,
			uintptr(unsafe.Pointer(&fprog)))
		if e != 0 {
			fds <- -1
			return
		}
		fds <- int(fd)
		for !over.Load() { // the runtime's own signals interrupt it
			_, _, _ = unix.Syscall(unix.SYS_GETPPID, 0, 0, 0) // not RawSyscall: the garbage collector would wait for it
		}
		runtime.Goexit() // the thread ends
	}()
	fd := <-fds
	if fd < 0 {
		t.Fatal("no filter")
	}
	l = &listener{fd: fd}
	var notif seccompNotif
	for e := ioctlPtr(fd, ioctlNotifRecv, unsafe.Pointer(&notif)); e != 0; e = ioctlPtr(fd, ioctlNotifRecv, unsafe.Pointer(&notif)) {
		if notif = (seccompNotif{}); e != unix.ENOENT && e != unix.EINTR {
			t.Fatal(e)
		}
	}
	end = func() {
		over.Store(true)
		l.answer(notif.ID, replyDone)
	}
	t.Cleanup(func() { // whoever waits again is told that there is no such call
		end()
		_ = unix.Close(fd)
	})
	return l, notif.ID, end
}

// TestDebugInterrupted: a signal, or an exec by another thread, takes the caller away while the driver reads.
func TestDebugInterrupted(t *testing.T) {
	l, id, end := notified(t)
	reads := 0
	d := answering(0, func(call *rm.Call) {
		if rm.U32(call.Outer, rm.ControlCmd) == 0x83de0315 {
			if reads++; reads == 1 {
				for i := range call.Blocks[1].Data {
					call.Blocks[1].Data[i] = 0xee
				}
				end()
			}
		}
	})
	g := withClient(newFakeGuard(t, d))
	f := newFakeCall(t, g, fakeControl)
	buffer, p := make([]byte, 3*chunk), make([]byte, 24)
	putWords(p, rm.DebugMemoryHandle, fakeMemory, uint32(len(buffer)))
	putPointer(p, rm.DebugMemoryBuffer, buffer)
	o := fakeControlCall(fakeDevice, 0x83de0315, p)
	rm.PutU32(o, rm.ControlStatus, 0x1234)
	c := &f.trappedCall
	c.mem.reset()
	addr := uint64(uintptr(unsafe.Pointer(&o[0])))
	c.listener, c.notif = l, &seccompNotif{ID: id, Args: [6]uint64{uint64(c.fd), uint64(testCmd(rm.EscControl, len(o))), addr}}
	if !c.loadOuter(uint32(c.notif.Args[1]), addr, len(o)) {
		t.Fatal("load")
	}
	rep := g.onEscape(c)
	if bytes.IndexByte(buffer, 0xee) >= 0 {
		t.Error("memory was written by thread number after the thread had left the call")
	}
	w := &worker{guard: g, listener: l}
	w.sendAnswer(c, rep)
	if s := c.task.saved; s != nil && s.matches(c.notif, os.Getpid()) {
		t.Errorf("one piece of three is read, and the call is answered %+v with %d parts when it comes again", s.rep, len(s.parts()))
	}
	runtime.KeepAlive(o)
}
