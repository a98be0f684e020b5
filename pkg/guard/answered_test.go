// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestLostAnswers: signals take the answer to a call away in every order there is, and the call is made once all the same.
// "answered" is an answer that was sent and got lost, "away" a caller who was gone before it could be sent, and whom the next
// notification finds the saved result for; "stale" is a notification whose caller is gone before anything is done.
func TestLostAnswers(t *testing.T) {
	for _, x := range []struct {
		name  string
		steps []string
	}{
		{"answered", []string{"answered"}},
		{"answered twice", []string{"answered", "answered"}},
		{"away", []string{"away"}},
		{"away, answered", []string{"away", "answered"}},
		{"answered, away", []string{"answered", "away"}},
		{"answered, away, answered, away", []string{"answered", "away", "answered", "away"}},
		{"answered, stale", []string{"answered", "stale"}},
		{"stale, answered, stale, away, stale", []string{"stale", "answered", "stale", "away", "stale"}},
	} {
		t.Run(x.name, func(t *testing.T) {
			const ok, duplicate = 0, 0x19
			var last lastAnswer
			memory := []byte{1, 0, 0, 0} // the structure in the caller's memory: here a status word only
			made := 0
			call := func(stale bool) *trappedCall {
				outer := append([]byte(nil), memory...)
				c := &trappedCall{notif: &seccompNotif{}, call: rm.Call{Outer: outer}, before: [][]byte{append([]byte(nil), memory...)},
					fd: -1, executed: !stale}
				failed := false
				if !stale {
					made++
				}
				switch {
				case stale:
				case made == 1:
					c.undo, c.once = func() {}, true
					rm.PutU32(outer, 0, ok)
				default:
					rm.PutU32(outer, 0, duplicate)
					failed = true
				}
				last.replayOrForget(c, func() bool { return failed }, func() bool { return !stale })
				return c
			}
			for i, step := range append(x.steps, "answered") {
				c := call(step == "stale")
				if step == "stale" {
					continue
				}
				if got := rm.U32(c.call.Outer, 0); got != ok {
					t.Fatalf("step %d: the driver's answer to a second call, %#x, reaches the caller", i, got)
				}
				switch step {
				case "answered":
					memory = append(memory[:0], c.call.Outer...)
					last.record(c)
				case "away":
					s := c.save(replyDone)
					memory = append(memory[:0], s.out[0].data...)
					last.recordSaved(s)
				}
			}
		})
	}
}

// TestLostOnce: a call whose answer got lost comes again, and the driver refuses it, since it has carried it out. Its caller hears that it
// has.
func TestLostOnce(t *testing.T) {
	heapFree := make([]byte, rm.HeapSize)
	rm.PutU32(heapFree, rm.HeapRoot, fakeClient)
	rm.PutU32(heapFree, rm.HeapFunction, rm.HeapFnFree)
	rm.PutU32(heapFree, rm.HeapFreeMemory, fakeMemory)
	const address, elsewhere = 0x7f0000000000, 0x7f1100000000
	unmap, move := make([]byte, rm.UnmapMemorySize), make([]byte, rm.UpdateMappingSize)
	rm.PutU32(unmap, rm.UnmapMemoryClient, fakeClient)
	rm.PutU32(unmap, rm.UnmapMemoryMemory, fakeMemory)
	rm.PutU64(unmap, rm.UnmapMemoryAddress, address)
	rm.PutU32(move, rm.UpdateMappingClient, fakeClient)
	rm.PutU32(move, rm.UpdateMappingMemory, fakeMemory)
	rm.PutU64(move, rm.UpdateMappingOld, address)
	rm.PutU64(move, rm.UpdateMappingNew, elsewhere)
	other, err := unix.Open(fakeControl, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(other)
	registered := make([]byte, 4)
	rm.PutU32(registered, rm.RegisterFDFD, uint32(other))
	params := map[uint32][]byte{0x503c0102: make([]byte, 16), 0x503c0104: make([]byte, 32), 0x503c0105: make([]byte, 4),
		0x3d05: make([]byte, 24), 0x3d06: make([]byte, 20), 0x3d0a: make([]byte, 76)}
	rm.PutU32(params[0x503c0104], rm.PeerMemoryHandle, fakeMemory)
	rm.PutU32(params[0x503c0105], rm.PeerMemoryHandle, fakeMemory)
	rm.PutU32(params[0x3d05], rm.ExportFDObject+rm.ExportObjectHandle, fakeMemory)
	for cmd, off := range map[uint32]int{0x3d05: 16, 0x3d06: 0, 0x3d0a: 72} {
		rm.PutU32(params[cmd], off, uint32(other))
	}
	rm.PutU32(params[0x3d06], rm.ImportFDObject+rm.ExportObjectParent, fakeDevice)
	rm.PutU32(params[0x3d06], rm.ImportFDObject+rm.ExportObjectHandle, 0x5c000077)
	control := func(object, cmd uint32) []byte { return fakeControlCall(object, cmd, params[cmd]) }
	for _, x := range []struct {
		name   string
		nr     uint32
		o      []byte
		status int // where the driver refuses it the second time; 0: it does so by an errno, or by letting the task make it
	}{
		{"an object is freed", rm.EscFree, fakeFree(fakeMemory), rm.FreeStatus},
		{"a client is", rm.EscFree, fakeFree(fakeClient), rm.FreeStatus},
		{"memory, the old way", rm.EscVidHeapControl, heapFree, rm.HeapStatus},
		{"a file lends its identity", rm.EscRegisterFD, registered, 0},
		{"a file takes GPUs", rm.EscAttachGPUs, make([]byte, 4), 0},
		{"an address space for peers", rm.EscControl, control(fakeDevice, 0x503c0102), rm.ControlStatus},
		{"memory for peers", rm.EscControl, control(fakeDevice, 0x503c0104), rm.ControlStatus},
		{"no longer", rm.EscControl, control(fakeDevice, 0x503c0105), rm.ControlStatus},
		{"a file for exports", rm.EscControl, control(fakeClient, 0x3d0a), rm.ControlStatus},
		{"an export", rm.EscControl, control(fakeClient, 0x3d05), rm.ControlStatus},
		{"an import", rm.EscControl, control(fakeClient, 0x3d06), rm.ControlStatus},
		{"a window ends", rm.EscUnmapMemory, unmap, 0},
		{"a window is elsewhere", rm.EscUpdateMapping, move, 0},
	} {
		t.Run(x.name, func(t *testing.T) {
			d := &fakeDriver{}
			g := withClient(newFakeGuard(t, d))
			d.answer = func(_ Target, call *rm.Call) syscall.Errno { return 0 }
			f, err := g.followFile(other, node{kind: nodeControl})
			if err != nil {
				t.Fatal(err)
			}
			f.exporter = true
			shown, err := newWeakRef(other)
			if err != nil {
				t.Fatal(err)
			}
			defer shown.close(nil)
			own, err := g.guardClient()
			if err != nil {
				t.Fatal(err)
			}
			g.account.addWindow(fakeClient, fakeMemory, nil, &window{address: address, handle: own.NewHandle(), file: shown, own: own})
			c := newFakeCall(t, g, fakeControl)
			if rep := c.escape(x.nr, x.o); c.failed(rep) || !c.executed {
				t.Fatalf("%+v, status %#x", rep, c.statusWord())
			}
			c.task.lastAnswer.record(&c.trappedCall)
			d.answer = func(_ Target, call *rm.Call) syscall.Errno {
				if x.status == 0 {
					return unix.EINVAL
				}
				rm.PutU32(call.Outer, x.status, rm.StatusObjectNotFound)
				return 0
			}
			again := slices.Clone(x.o)
			rep := c.escape(x.nr, again)
			c.notif.Args[2] = c.task.lastAnswer.args[2] // the same memory
			if !c.task.lastAnswer.replayOrForget(&c.trappedCall, func() bool { return c.refuses(rep) }, func() bool { return true }) ||
				c.statusWord() != rm.StatusOK {
				t.Error("the caller hears that it cannot be done")
			}
		})
	}
}
