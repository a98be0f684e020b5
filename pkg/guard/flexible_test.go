// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

func flexibleWanted(size quota.Bytes) fabricWanted {
	return fabricWanted{0, rm.FabricFlexible, size, fabricPageLarge}
}

// flexibleCall is the status of an attach or a detach at an object.
func flexibleCall(f *fakeCall, object, cmd uint32, count int, memory ...uint32) uint32 {
	p := make([]byte, 2064)
	at := flexibleAttachCount
	if cmd == 0xf80104 {
		p, at = make([]byte, 528), flexibleDetachCount
	}
	for i, m := range memory {
		rm.PutU32(p, i*flexibleInfoSize, m)
	}
	p[at], p[at+1] = byte(count), byte(count>>8)
	o := fakeControlCall(object, cmd, p)
	f.escape(rm.EscControl, o, p)
	return rm.U32(o, rm.ControlStatus)
}

// TestFlexible: addresses without memory are libcuda's for its pools, and bounded, until the last handle on them has gone.
func TestFlexible(t *testing.T) {
	for _, c := range []struct {
		name   string
		want   fabricWanted
		status uint32
	}{
		{"a pool's", flexibleWanted(flexibleSize), rm.StatusOK},
		{"larger", flexibleWanted(2 * flexibleSize), rm.StatusInvalidArgument},
		{"all that there are", flexibleWanted(^quota.Bytes(0)), rm.StatusInvalidArgument},
		{"none", flexibleWanted(0), rm.StatusInvalidArgument},
		{"with memory", fabricWanted{fakeMemory, rm.FabricFlexible, flexibleSize, fabricPageLarge}, rm.StatusInvalidArgument},
	} {
		t.Run(c.name, func(t *testing.T) {
			var seen []byte
			g := withTwoGPUs(newFakeGuard(t, asked(&seen)))
			if s := makeFabric(newFakeCall(t, g, fakeControl), fakeFabric, c.want.params(g)); s != c.status || (seen != nil) != (s == rm.StatusOK) {
				t.Fatal(rm.StatusName(s))
			}
			if seen != nil && rm.U64(seen, rm.FabricAlignment) != fabricPageLarge {
				t.Errorf("aligned to %#x", rm.U64(seen, rm.FabricAlignment))
			}
		})
	}
}

func TestFlexibleBound(t *testing.T) {
	g := withTwoGPUs(newFakeGuard(t, answering(0, nil)))
	f := newFakeCall(t, g, fakeControl)
	most := int((g.account.gpus[0].limit + flexibleSpare) / flexibleSize)
	for i := range most {
		if s := makeFabric(f, uint32(fakeFabric+i), flexibleWanted(flexibleSize).params(g)); s != rm.StatusOK {
			t.Fatalf("object %d of %d: %s", i, most, rm.StatusName(s))
		}
	}
	one := func() uint32 { return makeFabric(f, fakeFabric+0x1000, flexibleWanted(flexibleSize).params(g)) }
	o := make([]byte, rm.DupSize)
	putWords(o, 0, fakeClient, fakeDevice, 0x82, fakeClient, fakeFabric)
	if f.escape(rm.EscDupObject, o); rm.U32(o, rm.DupStatus) != rm.StatusOK {
		t.Fatal(rm.StatusName(rm.U32(o, rm.DupStatus)))
	}
	g.account.freeObject(fakeClient, fakeFabric)
	if s := one(); s != rm.StatusInsufficientResources {
		t.Errorf("a dup keeps them: %s", rm.StatusName(s))
	}
	g.account.freeObject(fakeClient, 0x82)
	if s := one(); s != rm.StatusOK {
		t.Errorf("after the last handle: %s", rm.StatusName(s))
	}
	for i := range most {
		g.account.freeObject(fakeClient, uint32(fakeFabric+i))
	}
	g.account.freeObject(fakeClient, fakeFabric+0x1000)
	if left := g.account.gpus[0].flexible; left != 0 {
		t.Errorf("%v are left", left)
	}
}

// TestFlexibleRefused: what the driver refuses takes no addresses.
func TestFlexibleRefused(t *testing.T) {
	g := withClient(newFakeGuard(t, answering(rm.StatusNoMemory, nil)))
	if s := makeFabric(newFakeCall(t, g, fakeControl), fakeFabric, flexibleWanted(flexibleSize).params(g)); s != rm.StatusNoMemory {
		t.Error(rm.StatusName(s))
	}
	if left := g.account.gpus[0].flexible; left != 0 {
		t.Errorf("%v are left", left)
	}
}

// TestFlexibleAttach: only the container's own device memory of the same GPU is attached, and by the first handle alone.
func TestFlexibleAttach(t *testing.T) {
	const host, dup, sticky = 0x81, 0x82, 0x83
	asked := 0
	g := withTwoGPUs(newFakeGuard(t, answering(0, func(call *rm.Call) {
		if call.NR() == rm.EscControl {
			asked++
		}
	})))
	g.account.addObject(fakeClient, object{handle: host, parent: fakeDevice, kind: rm.ClassSysmem, host: true, gpu: noGPU}, 0, 0, quota.MiB)
	f := newFakeCall(t, g, fakeControl)
	if s := makeFabric(f, fakeFabric, flexibleWanted(flexibleSize).params(g)); s != rm.StatusOK {
		t.Fatal(rm.StatusName(s))
	}
	if s := makeFabric(f, sticky, fabricWanted{fakeMemory, 0, 8 * quota.MiB, 2 << 20}.params(g)); s != rm.StatusOK {
		t.Fatal(rm.StatusName(s))
	}
	o := make([]byte, rm.DupSize)
	putWords(o, 0, fakeClient, fakeDevice, dup, fakeClient, fakeFabric)
	f.escape(rm.EscDupObject, o)
	for _, c := range []struct {
		name        string
		object, cmd uint32
		count       int
		memory      []uint32
		status      uint32
	}{
		{"device memory", fakeFabric, 0xf80103, 1, []uint32{fakeMemory}, rm.StatusOK},
		{"none", fakeFabric, 0xf80103, 0, nil, rm.StatusInvalidArgument},
		{"too many", fakeFabric, 0xf80103, flexibleMost + 1, nil, rm.StatusInvalidArgument},
		{"what nobody knows", fakeFabric, 0xf80103, 1, []uint32{0x4711}, rm.StatusInvalidObjectHandle},
		{"host memory", fakeFabric, 0xf80103, 1, []uint32{host}, rm.StatusInvalidObjectHandle},
		{"another GPU's, the second", fakeFabric, 0xf80103, 2, []uint32{fakeMemory, secondMemory}, rm.StatusInvalidDevice},
		{"at a dup", dup, 0xf80103, 1, []uint32{fakeMemory}, rm.StatusInvalidObjectHandle},
		{"at addresses with memory", sticky, 0xf80103, 1, []uint32{fakeMemory}, rm.StatusInvalidObjectHandle},
		{"at memory", fakeMemory, 0xf80103, 1, []uint32{fakeMemory}, rm.StatusInvalidObjectHandle},
		{"detached", fakeFabric, 0xf80104, 1, nil, rm.StatusOK},
		{"detached by a dup", dup, 0xf80104, 1, nil, rm.StatusInvalidObjectHandle},
		{"too many are detached", fakeFabric, 0xf80104, flexibleMost + 1, nil, rm.StatusInvalidArgument},
	} {
		asked = 0
		if s := flexibleCall(f, c.object, c.cmd, c.count, c.memory...); s != c.status || (asked > 0) != (s == rm.StatusOK) {
			t.Errorf("%s: %s, the driver was asked %d times", c.name, rm.StatusName(s), asked)
		}
	}
}

// TestFlexibleMapped: nobody maps addresses to which nothing may be attached.
func TestFlexibleMapped(t *testing.T) {
	g, _, f := dmaGuard(t)
	if s := makeFabric(f, fakeFabric, flexibleWanted(flexibleSize).params(g)); s != rm.StatusOK {
		t.Fatal(rm.StatusName(s))
	}
	o := mapDMA(fakeClient, fakeRange, fakeFabric, 0, 2<<20)
	form, _ := g.abi.MapDMA(len(o))
	if f.escape(rm.EscMapDMA, o); rm.U32(o, form.Status) != rm.StatusNotSupported {
		t.Error(rm.StatusName(rm.U32(o, form.Status)))
	}
}
