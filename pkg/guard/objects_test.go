// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestFirmwareObjects: objects that the GPU's firmware has too are fewer than others.
func TestFirmwareObjects(t *testing.T) {
	g := withTwoGPUs(newFakeGuard(t, answering(0, nil)))
	f := newFakeCall(t, g, fakeControl)
	n := 0
	for ; n < 2*maxFirmware; n++ {
		o := fakeAlloc(fakeDevice, uint32(0x5d000000+n), 0x2081, make([]byte, 4))
		if f.escape(rm.EscAlloc, o); rm.U32(o, 40) != rm.StatusOK {
			break
		}
	}
	if n != maxFirmware-1 { // and the device
		t.Errorf("%d objects", n)
	}
	if o := fakeAlloc(secondDevice, 0x5d000000-2, 0x2081, make([]byte, 4)); f.escape(rm.EscAlloc, o) != replyDone ||
		rm.U32(o, 40) != rm.StatusOK {
		t.Errorf("one of another GPU's firmware: %s", rm.StatusName(rm.U32(o, 40)))
	}
	o := make([]byte, rm.DupSize) // a second handle counts where it is
	putWords(o, 0, fakeClient, fakeDevice, 0x5d000000-3, fakeClient, 0x5d000000-2)
	if f.escape(rm.EscDupObject, o); rm.U32(o, rm.DupStatus) != rm.StatusInsufficientResources {
		t.Errorf("a second handle of it: %s", rm.StatusName(rm.U32(o, rm.DupStatus)))
	}
	f.escape(rm.EscFree, fakeFree(secondDevice))
	p := make([]byte, 128)
	rm.PutU64(p, rm.MemorySize, 4096)
	o = fakeAlloc(fakeDevice, 0x5e000000, classSystem, p)
	if f.escape(rm.EscAlloc, o, p); rm.U32(o, 40) != rm.StatusOK {
		t.Errorf("another object: %s", rm.StatusName(rm.U32(o, 40)))
	}
	f.escape(rm.EscFree, fakeFree(fakeDevice))
	if g.account.usage(0).firmware != 0 || g.account.objects != 0 {
		t.Errorf("%d and %d objects left", g.account.usage(0).firmware, g.account.objects)
	}
}

// TestDeniedDup: of what work runs on there is one handle: the driver does not keep the address space of a second one.
func TestDeniedDup(t *testing.T) {
	for name, x := range map[string]object{
		"channel":       {class: 0xc86f, kind: rm.ClassChannel},
		"channel group": {class: classChannelGroup, kind: rm.ClassTSG},
		"context share": {class: classContextShare, kind: rm.ClassPlain},
	} {
		d := &fakeDriver{}
		g := withClient(newFakeGuard(t, d))
		x.handle, x.parent, x.gpu = 0x5d000001, fakeDevice, noGPU
		g.account.addObject(fakeClient, x, 0, 0, 0)
		o := make([]byte, rm.DupSize)
		putWords(o, 0, fakeClient, fakeDevice, 0x5d000002, fakeClient, x.handle)
		if newFakeCall(t, g, fakeControl).escape(rm.EscDupObject, o); rm.U32(o, rm.DupStatus) != rm.StatusNotSupported || len(d.calls) != 0 {
			t.Errorf("%s: %s, %d driver calls", name, rm.StatusName(rm.U32(o, rm.DupStatus)), len(d.calls))
		}
	}
}

// TestDeniedContextDMA: the binding of context DMAs, which nobody uses, never reaches the driver.
func TestDeniedContextDMA(t *testing.T) {
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	f := newFakeCall(t, g, fakeControl)
	for nr, size := range map[uint32]int{rm.EscBindContextDMA: 16} {
		o := make([]byte, size)
		rm.PutU32(o, 0, fakeClient)
		f.escape(nr, o)
		off, _ := g.abi.StatusOff(nr, size)
		if rm.U32(o, off) != rm.StatusNotSupported || len(d.calls) != 0 {
			t.Errorf("%s: %s, %d driver calls", rm.EscapeName(nr), rm.StatusName(rm.U32(o, off)), len(d.calls))
		}
	}
}

// TestPeerMemory: the driver keeps something for each pair of an object of this class and memory, so those are few.
func TestPeerMemory(t *testing.T) {
	g := withClient(newFakeGuard(t, answering(0, nil)))
	most := g.cfg.Settings.MaxTSGs * len(g.cfg.GPUs)
	f := newFakeCall(t, g, fakeControl)
	alloc := func(handle uint32) uint32 {
		o := fakeAlloc(fakeDevice, handle, classPeerMemory, make([]byte, 4))
		f.escape(rm.EscAlloc, o)
		return rm.U32(o, 40)
	}
	for n := range most {
		if s := alloc(uint32(0x5d000000 + n)); s != rm.StatusOK {
			t.Fatalf("number %d: %s", n, rm.StatusName(s))
		}
	}
	if s := alloc(0x5e000000); s != rm.StatusInsufficientResources {
		t.Errorf("one more than %d: %s", most, rm.StatusName(s))
	}
	f.escape(rm.EscFree, fakeFree(0x5d000000))
	if s := alloc(0x5e000000); s != rm.StatusOK {
		t.Errorf("in the place of a freed one: %s", rm.StatusName(s))
	}
}
