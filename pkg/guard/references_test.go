// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestSourceEndsMeanwhile: what a call refers to is charged for as long as the driver keeps it because of that call, although its
// handle, its client or its file end in the account while the driver is asked. The driver has them until later.
func TestSourceEndsMeanwhile(t *testing.T) {
	const second, device = fakeClient + 1, 8
	dup := func(t *testing.T, g *Guard, during func(nr uint32, f func())) (drop func()) {
		source, err := os.OpenFile(fakeControl, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer source.Close()
		f, err := g.followFile(int(source.Fd()), node{kind: nodeControl})
		if err != nil {
			t.Fatal(err)
		}
		g.account.client(fakeClient).file = f
		g.account.addClient(second, os.Getpid(), nil)
		g.account.addObject(second, object{handle: device, parent: second, kind: rm.ClassDevice}, noGPU, 0, 0)
		during(rm.EscDupObject, func() {
			source.Close()
			g.sweep()
		})
		o := make([]byte, rm.DupSize)
		putWords(o, 0, second, device, 9, fakeClient, fakeMemory)
		newFakeCall(t, g, fakeControl).escape(rm.EscDupObject, o)
		return func() { g.account.freeObject(second, 9) }
	}
	mapped := func(t *testing.T, g *Guard, during func(nr uint32, f func())) (drop func()) {
		c, ctl := newFakeUVMCall(t, g)
		during(rm.UVMMapExternal, func() { g.clientGone(g.account.client(fakeClient)) })
		o, _ := uvmCall(g, rm.UVMMapExternal, 1<<32, 8<<20, ctl)
		c.do(rm.UVMMapExternal, o)
		return func() { g.endUVM(c.file) }
	}
	window := func(t *testing.T, g *Guard, during func(nr uint32, f func())) (drop func()) {
		file, err := os.OpenFile(fakeControl, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { file.Close() })
		g.account.clients[fakeClient].objects[fakeMemory].charge.page = pageSmall // or it is too much of BAR1
		during(rm.EscMapMemory, func() { g.clientGone(g.account.client(fakeClient)) })
		o := make([]byte, rm.MapMemorySize)
		putWords(o, 0, fakeClient, fakeDevice, fakeMemory)
		rm.PutU64(o, rm.MapMemoryLength, 4096)
		rm.PutU32(o, rm.MapMemoryFD, uint32(file.Fd()))
		newFakeCall(t, g, fakeControl).escape(rm.EscMapMemory, o)
		return func() {
			file.Close()
			g.endWindows()
		}
	}
	for name, call := range map[string]func(*testing.T, *Guard, func(nr uint32, f func())) func(){
		"dup": dup, "UVM mapping": mapped, "window": window,
	} {
		t.Run(name, func(t *testing.T) {
			d := &fakeDriver{}
			g := withClient(newFakeGuard(t, d))
			ended := false
			drop := call(t, g, func(nr uint32, f func()) {
				d.reset(func(call *rm.Call) {
					if call.NR() != nr && call.Cmd != nr || ended {
						return
					}
					ended = true
					done := make(chan struct{})
					go func() { // not the thread of the call
						f()
						close(done)
					}()
					<-done
					wantUsage(t, g.account, 0, 8*quota.MiB)
				})
			})
			if !ended || g.account.ownsClient(fakeClient) {
				t.Fatal("the source has not ended meanwhile")
			}
			wantUsage(t, g.account, 0, 8*quota.MiB)
			drop()
			wantUsage(t, g.account, 0, 0)
			if g.account.hasZombies() {
				t.Error("a zombie is left")
			}
		})
	}
}

// TestReferToTheGone: what is under a client's handles is looked up in that client only, not in one that is gone or has its place, and a
// dup of a channel of one that has just gone is no dup of an unknown object.
func TestReferToTheGone(t *testing.T) {
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	old := g.account.client(fakeClient)
	if o, ok := g.account.acquireObject(old, fakeMemory); !ok || o.charge == nil || o.charge.calls != 1 {
		t.Errorf("%+v, %v", o, ok)
	}
	if o, ok := g.account.acquireObject(old, 0x999); !ok || o.handle != 0 || o.gpu != noGPU {
		t.Errorf("an unknown object: %+v, %v", o, ok)
	}
	withClient(g) // in its place
	if o, ok := g.account.acquireObject(old, fakeMemory); ok || o.charge != nil {
		t.Errorf("of a client that is gone: %+v, %v", o, ok)
	}
	c := newFakeCall(t, g, fakeControl)
	c.call.Cmd, c.call.Outer = uint32(testCmd(rm.EscDupObject, rm.DupSize)), make([]byte, rm.DupSize)
	putWords(c.call.Outer, 0, fakeClient, fakeDevice, 9, fakeClient, fakeMemory)
	c.locked = callLock{old, old}
	if p := g.checkDup(&c.trappedCall); p.ask || c.statusWord() != rm.StatusInvalidClient {
		t.Errorf("a dup: asked %v, %s", p.ask, rm.StatusName(c.statusWord()))
	}
}

// TestReferenceEnds: a call leaves no reference behind, whatever came of it.
func TestReferenceEnds(t *testing.T) {
	for _, status := range []uint32{rm.StatusOK, rm.StatusNoMemory} {
		g := withClient(newFakeGuard(t, answering(status, nil)))
		fd, err := unix.Open(fakeControl, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		c := newFakeCall(t, g, fakeControl)
		p := exportCall(fd, 0, fakeMemory, fakeMemory)
		c.escape(rm.EscControl, fakeControlCall(fakeClient, 0x3d0b, p), p)
		o := make([]byte, rm.DupSize)
		putWords(o, 0, fakeClient, fakeDevice, 9, fakeClient, fakeMemory)
		c.escape(rm.EscDupObject, o)
		if ch := g.account.clients[fakeClient].objects[fakeMemory].charge; ch.calls != 0 {
			t.Errorf("%s: %d calls refer to the memory when there are none", rm.StatusName(status), ch.calls)
		}
	}
}
