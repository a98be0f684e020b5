// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sim"
)

// TestNotifierFreed: memory that a channel writes errors to stays, and counts, until the channel is gone.
func TestNotifierFreed(t *testing.T) {
	const group, channel = 0, 1
	for name, where := range map[string]int{"the group's": 0, "the channel's": 1, "for ECC": 2} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			c := r.start()
			a := c.do("open")[0]
			memory := c.do("alloc", a, 8*mib)[0]
			made := c.do("notifier", a, memory, where)
			c.do("free", a, memory)
			r.agree(8*quota.MiB + sim.DefaultContextCost)
			c.do("token", a, made[channel])
			c.do("alloc", a, mib)
			c.do("token", a, made[channel])
			if n := r.sim.Snapshot().Stray; n != 0 {
				t.Errorf("%d writes to free memory", n)
			}
			c.do("free", a, made[group])
			r.agree(quota.MiB)
			// In the usual order the guard takes no handle.
			memory = c.do("alloc", a, 8*mib)[0]
			made = c.do("notifier", a, memory, where)
			c.do("free", a, made[group])
			c.do("free", a, memory)
			r.agree(quota.MiB)
			// What ends with the client is not kept.
			memory = c.do("alloc", a, 8*mib)[0]
			c.do("notifier", a, memory, where)
			c.do("freeclient", a)
			r.agree(0)
			c.kill()
			r.empty()
		})
	}
}

// TestNotifierWays: whichever call frees it, memory is kept if a channel lives on that writes to it; what cannot be kept is not freed.
func TestNotifierWays(t *testing.T) {
	const group, channel, below, device, wrong = 0x101, 0x102, 0x103, 0x104, 0x105
	heap := make([]byte, rm.HeapSize)
	putWords(heap, rm.HeapRoot, fakeClient)
	rm.PutU32(heap, rm.HeapFunction, rm.HeapFnFree)
	rm.PutU32(heap, rm.HeapFreeMemory, fakeMemory)
	for _, c := range []struct {
		name       string
		notifier   uint32
		free       func(f *fakeCall) uint32
		want       uint32
		kept, left int // handles of the guard's: taken, and there when the call is over
	}{
		{"free", fakeMemory, func(f *fakeCall) uint32 {
			o := fakeFree(fakeMemory)
			f.escape(rm.EscFree, o)
			return rm.U32(o, rm.FreeStatus)
		}, rm.StatusOK, 1, 1},
		{"the heap's", fakeMemory, func(f *fakeCall) uint32 {
			f.escape(rm.EscVidHeapControl, heap)
			return rm.U32(heap, rm.HeapStatus)
		}, rm.StatusOK, 1, 1},
		{"its parent", below, func(f *fakeCall) uint32 {
			o := fakeFree(device)
			f.escape(rm.EscFree, o)
			return rm.U32(o, rm.FreeStatus)
		}, rm.StatusOK, 1, 1},
		{"an undone call", fakeMemory, func(f *fakeCall) uint32 {
			f.guard.undoObject(f.target(), fakeClient, fakeMemory)()
			return rm.StatusOK
		}, rm.StatusOK, 1, 1},
		{"the channel with it", fakeMemory, func(f *fakeCall) uint32 {
			o := fakeFree(fakeDevice)
			f.escape(rm.EscFree, o)
			return rm.U32(o, rm.FreeStatus)
		}, rm.StatusOK, 0, 0},
		{"refused", fakeMemory, func(f *fakeCall) uint32 {
			f.guard.driver.(*fakeDriver).answer = func(_ Target, call *rm.Call) syscall.Errno {
				if call.NR() == rm.EscFree && rm.U32(call.Outer, rm.FreeObject) == fakeMemory {
					rm.PutU32(call.Outer, rm.FreeStatus, rm.StatusInvalidArgument)
				}
				return 0
			}
			o := fakeFree(fakeMemory)
			f.escape(rm.EscFree, o)
			return rm.U32(o, rm.FreeStatus)
		}, rm.StatusInvalidArgument, 1, 0},
		{"a context DMA", wrong, func(f *fakeCall) uint32 {
			o := fakeFree(wrong)
			f.escape(rm.EscFree, o)
			return rm.U32(o, rm.FreeStatus)
		}, rm.StatusInUse, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := &fakeDriver{}
			g := withClient(newFakeGuard(t, d))
			a := g.account
			a.addObject(fakeClient, object{handle: device, parent: fakeClient, kind: rm.ClassDevice, gpu: 0}, noGPU, 0, 0)
			a.addObject(fakeClient, memoryObject(below, device), 0, 0, quota.MiB)
			a.addObject(fakeClient, object{handle: wrong, parent: fakeDevice, kind: rm.ClassContextDMA, gpu: noGPU}, noGPU, 0, 0)
			a.addObject(fakeClient, object{handle: group, parent: fakeDevice, kind: rm.ClassTSG, gpu: noGPU}, noGPU, 0, 0)
			f := newFakeCall(t, g, fakeControl)
			p := make([]byte, 368)
			rm.PutU32(p, rm.ChannelNotifiers[0], c.notifier)
			o := fakeAlloc(group, channel, 0xc86f, p)
			if f.escape(rm.EscAlloc, o, p); rm.U32(o, 40) != rm.StatusOK {
				t.Fatal(rm.StatusName(rm.U32(o, 40)))
			}
			if _, err := g.guardClient(); err != nil {
				t.Fatal(err)
			}
			d.calls = nil
			if s := c.free(f); s != c.want {
				t.Errorf("%s, want %s", rm.StatusName(s), rm.StatusName(c.want))
			}
			nr := func(of uint32) func(cmd uint32) bool { return func(cmd uint32) bool { return cmd&0xff == of } }
			dup, free := slices.IndexFunc(d.calls, nr(rm.EscDupObject)), slices.IndexFunc(d.calls, nr(rm.EscFree))
			if dup >= 0 != (c.kept > 0) || dup > free && free >= 0 {
				t.Errorf("%d handles are to be taken before, calls %#x", c.kept, d.calls)
			}
			left := func() int {
				g.endWindows()
				a.mu.Lock()
				defer a.mu.Unlock()
				return a.windows
			}
			if n := left(); n != c.left {
				t.Errorf("%d handles left, want %d", n, c.left)
			}
			a.freeObject(fakeClient, group)
			if n := left(); n != 0 {
				t.Errorf("%d handles are left when the channel is gone", n)
			}
		})
	}
}

// TestNotifierKinds: a channel writes only to what is memory of the container's.
func TestNotifierKinds(t *testing.T) {
	const group, channel, what = 0x101, 0x102, 0x103
	for name, c := range map[string]struct {
		object  object
		refused bool
	}{
		"device memory":                {object{class: classVidmem, kind: rm.ClassVidmem}, false},
		"host memory":                  {object{class: classSystem, kind: rm.ClassSysmem, host: true}, false},
		"a context DMA":                {object{kind: rm.ClassContextDMA}, false},
		"the page that all share":      {object{class: 0xde, kind: rm.ClassUserShared}, true},
		"doorbells":                    {object{class: classUsermode, kind: rm.ClassPlain}, true},
		"addresses":                    {object{class: classVirtual, kind: rm.ClassVirtual}, true},
		"imported, of whatever kind":   {object{kind: rm.ClassPlain}, true},
		"what the guard does not know": {object{handle: what + 1}, true},
	} {
		for _, off := range []int{rm.ChannelNotifiers[0], rm.ChannelNotifiers[1], rm.ChannelUserdMemory} {
			g := withClient(newFakeGuard(t, answering(0, nil)))
			g.account.addObject(fakeClient, object{handle: group, parent: fakeDevice, kind: rm.ClassTSG, gpu: noGPU}, noGPU, 0, 0)
			o := c.object
			o.parent, o.gpu, o.handle = fakeDevice, noGPU, max(o.handle, what)
			g.account.addObject(fakeClient, o, noGPU, 0, 0)
			p := make([]byte, 368)
			rm.PutU32(p, off, what)
			alloc := fakeAlloc(group, channel, 0xc86f, p)
			newFakeCall(t, g, fakeControl).escape(rm.EscAlloc, alloc, p)
			refused, want := c.refused, uint32(rm.StatusInvalidObjectHandle)
			if o.handle != what { // what is not there
				want = rm.StatusObjectNotFound
			}
			if off == rm.ChannelUserdMemory { // no context DMA
				refused = refused || o.kind == rm.ClassContextDMA
			}
			if got := rm.U32(alloc, 40) == want; got != refused {
				t.Errorf("%s at %d: %s", name, off, rm.StatusName(rm.U32(alloc, 40)))
			}
		}
	}
}

// TestNotifierOfTheGone: the client ends while the guard takes its handle: the memory is charged for as long, and given back once.
func TestNotifierOfTheGone(t *testing.T) {
	const group, channel, other = 0x101, 0x102, 0x103
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	a := g.account
	a.addClient(testClient, 2, nil)
	a.addObject(testClient, memoryObject(other, testClient), 0, 0, 8*quota.MiB)
	a.addObject(fakeClient, object{handle: group, parent: fakeDevice, kind: rm.ClassTSG, gpu: noGPU}, noGPU, 0, 0)
	f := newFakeCall(t, g, fakeControl)
	p := make([]byte, 368)
	rm.PutU32(p, rm.ChannelNotifiers[0], fakeMemory)
	o := fakeAlloc(group, channel, 0xc86f, p)
	if f.escape(rm.EscAlloc, o, p); rm.U32(o, 40) != rm.StatusOK {
		t.Fatal(rm.StatusName(rm.U32(o, 40)))
	}
	wantUsage(t, a, 0, 16*quota.MiB)
	ended := false
	d.answer = func(_ Target, call *rm.Call) syscall.Errno {
		if call.Cmd&0xff == rm.EscDupObject && !ended {
			ended = true
			a.removeClient(a.client(fakeClient))
			wantUsage(t, a, 0, 16*quota.MiB)
		}
		return 0
	}
	f.escape(rm.EscFree, fakeFree(fakeMemory))
	if !ended {
		t.Fatal("no handle was taken")
	}
	g.endWindows()
	wantUsage(t, a, 0, 8*quota.MiB)
	if a.zombies != 0 {
		t.Errorf("%d zombies", a.zombies)
	}
}
