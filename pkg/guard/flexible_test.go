// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"
	"time"

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

// TestFlexibleAwait: the container is over, and somebody outside still has a file to which flexible addresses were exported.
func TestFlexibleAwait(t *testing.T) {
	g := withTwoGPUs(newFakeGuard(t, answering(0, nil)))
	f := newFakeCall(t, g, fakeControl)
	if s := makeFabric(f, fakeFabric, flexibleWanted(flexibleSize).params(g)); s != rm.StatusOK {
		t.Fatal(rm.StatusName(s))
	}
	fd, closeIt := exportFile(t)
	p := exportCall(fd, 0, fakeFabric)
	o := fakeControlCall(fakeClient, 0x3d0b, p)
	if f.escape(rm.EscControl, o, p); rm.U32(o, rm.ControlStatus) != rm.StatusOK {
		t.Fatal(rm.StatusName(rm.U32(o, rm.ControlStatus)))
	}
	g.account.freeObject(fakeClient, fakeClient) // all processes are gone
	g.sweep()
	if g.account.gpus[0].flexible != flexibleSize || g.files.count() == 0 {
		t.Fatal("not held", g.account.gpus[0].flexible, g.files.count())
	}
	done := make(chan bool)
	go func() { g.awaitMemory(); close(done) }()
	select {
	case <-done:
		t.Errorf("the guard lets the reservation go while a file outside holds %v of NVLink addresses", g.account.gpus[0].flexible)
	case <-time.After(300 * time.Millisecond):
	}
	closeIt()
	<-done
}

// TestFlexibleSweeps: addresses whose file was closed are there again.
func TestFlexibleSweeps(t *testing.T) {
	g := withTwoGPUs(newFakeGuard(t, answering(0, nil)))
	f := newFakeCall(t, g, fakeControl)
	fd, closeIt := exportFile(t)
	most := int((g.account.gpus[0].limit + flexibleSpare) / flexibleSize)
	for i := range most {
		if s := makeFabric(f, uint32(fakeFabric+i), flexibleWanted(flexibleSize).params(g)); s != rm.StatusOK {
			t.Fatal(i, rm.StatusName(s))
		}
		p := exportCall(fd, i, uint32(fakeFabric+i))
		o := fakeControlCall(fakeClient, 0x3d0b, p)
		if f.escape(rm.EscControl, o, p); rm.U32(o, rm.ControlStatus) != rm.StatusOK {
			t.Fatal(rm.StatusName(rm.U32(o, rm.ControlStatus)))
		}
		g.account.freeObject(fakeClient, uint32(fakeFabric+i))
	}
	closeIt()
	time.Sleep(50 * time.Millisecond)
	if s := makeFabric(f, fakeFabric, flexibleWanted(flexibleSize).params(g)); s != rm.StatusOK {
		t.Errorf("nothing holds any addresses, and new ones are refused: %s", rm.StatusName(s))
	}
}

// TestFlexibleContextDMA: nor does anybody map them through a context DMA.
func TestFlexibleContextDMA(t *testing.T) {
	g, _, f := dmaGuard(t)
	if s := makeFabric(f, fakeFabric, flexibleWanted(flexibleSize).params(g)); s != rm.StatusOK {
		t.Fatal(rm.StatusName(s))
	}
	p := make([]byte, 32)
	rm.PutU32(p, rm.ContextDMAMemory, fakeFabric)
	rm.PutU64(p, rm.ContextDMALimit, 2<<20-1)
	if s := f.alloc(0x90, 0x2, p); s != rm.StatusOK {
		t.Fatal(rm.StatusName(s))
	}
	o := mapDMA(fakeClient, fakeRange, 0x90, 0, 2<<20)
	form, _ := g.abi.MapDMA(len(o))
	if f.escape(rm.EscMapDMA, o); rm.U32(o, form.Status) == rm.StatusOK {
		t.Error("mapped through a context DMA")
	}
}

// TestFlexibleRevived: kill -9 of the guard, and the next one goes on.
func TestFlexibleRevived(t *testing.T) {
	r := newRig(t)
	b := r.keepBooks(1)
	c := r.start()
	client := uint32(c.do("open")[1])
	a := r.guard.account
	for i := range 2 {
		ch := a.beginFlexible(0, flexibleSize)
		a.addObject(client, object{handle: uint32(fakeFabric + i), parent: client, class: classFabric, kind: rm.ClassFabric, gpu: noGPU,
			charge: ch, size: flexibleSize, flexible: true}, noGPU, 0, 0)
		a.endFlexible(ch)
	}
	r.guard.books.commit(nil)
	if err := b.compare(); err != nil {
		t.Log("compare:", err)
	}
	next, err := b.revive(true)
	if err != nil {
		t.Fatal(err)
	}
	defer letGo(next)
	if got := next.account.gpus[0].flexible; got != 2*flexibleSize {
		t.Errorf("the next guard counts %v of NVLink addresses, and there are %v", got, quota.Bytes(2*flexibleSize))
	}
	for i := range 2 {
		next.account.freeObject(client, uint32(fakeFabric+i))
	}
	if got := next.account.gpus[0].flexible; got != 0 {
		t.Errorf("after their end it counts %#x", uint64(got))
	}
	if ch := next.account.beginFlexible(0, flexibleSize); ch == nil {
		t.Errorf("no pool ever again")
	}
}

// TestFlexibleHostImported: host memory that comes from a file is not taken for device memory.
func TestFlexibleHostImported(t *testing.T) {
	const host, again = 0x81, 0x82
	asked := false
	g := withTwoGPUs(newFakeGuard(t, answering(0, func(call *rm.Call) {
		if call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == 0x3d0c {
			call.Blocks[0].Data[importObjectsTypes] = 2
		}
		if call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == 0xf80103 {
			asked = true
		}
	})))
	g.cfg.Settings.MaxHostMemory.Bytes = 64 * quota.MiB
	f := newFakeCall(t, g, fakeControl)
	f.hostMemory(host, 4*quota.MiB)
	if s := makeFabric(f, fakeFabric, flexibleWanted(flexibleSize).params(g)); s != rm.StatusOK {
		t.Fatal(rm.StatusName(s))
	}
	fd, _ := exportFile(t)
	p := exportCall(fd, 0, host)
	o := fakeControlCall(fakeClient, 0x3d0b, p)
	f.escape(rm.EscControl, o, p)
	p = importCall(fd, 0, again)
	o = fakeControlCall(fakeClient, 0x3d0c, p)
	f.escape(rm.EscControl, o, p)
	x, _ := g.account.lookup(fakeClient, again)
	if s := flexibleCall(f, fakeFabric, 0xf80103, 1, again); s == rm.StatusOK || asked {
		t.Errorf("host memory was attached: kind %v, host charge %v", x.kind, x.charge != nil && x.charge.host)
	}
}

// TestFlexibleOldDriver: up to 565 the driver dups what is attached into a client of its own, where it would outlive its handle.
func TestFlexibleOldDriver(t *testing.T) {
	for _, v := range []string{"535.183.01", "550.163.01", "565.77", "570.86.15"} {
		g := withClient(newFakeGuard(t, answering(0, nil)))
		var err error
		if g.abi, err = rm.ForDriver(v, false); err != nil {
			t.Fatal(err)
		}
		f, want := newFakeCall(t, g, fakeControl), uint32(rm.StatusNotSupported)
		if v >= "570" {
			want = rm.StatusOK
		}
		if s := makeFabric(f, fakeFabric, flexibleWanted(flexibleSize).params(g)); s != want {
			t.Errorf("%s: addresses: %s", v, rm.StatusName(s))
		}
		if s := flexibleCall(f, fakeFabric, 0xf80103, 1, fakeMemory); (s == rm.StatusOK) != (want == rm.StatusOK) {
			t.Errorf("%s: attached: %s", v, rm.StatusName(s))
		}
	}
}

// TestFlexibleAttached: pieces are paid for and bounded, by what the driver says that it has done.
func TestFlexibleAttached(t *testing.T) {
	done := uint16(flexibleMost)
	g := withClient(newFakeGuard(t, answering(0, func(call *rm.Call) {
		if call.NR() != rm.EscControl {
			return
		}
		switch p := call.Blocks[0].Data; rm.U32(call.Outer, rm.ControlCmd) {
		case 0xf80103:
			rm.PutU32(p, flexibleAttachCount+flexibleDone, uint32(done))
		case 0xf80104:
			rm.PutU32(p, flexibleDetachCount+flexibleDone, uint32(done))
		}
	})))
	g.slowBucket = bucket{perSecond: 1e3, burst: 1e6}
	f := newFakeCall(t, g, fakeControl)
	if s := makeFabric(f, fakeFabric, flexibleWanted(flexibleSize).params(g)); s != rm.StatusOK {
		t.Fatal(rm.StatusName(s))
	}
	memory := make([]uint32, flexibleMost)
	for i := range memory {
		memory[i] = fakeMemory
	}
	attach := func() uint32 { return flexibleCall(f, fakeFabric, 0xf80103, flexibleMost, memory...) }
	n := 0
	for ; attach() == rm.StatusOK; n += flexibleMost {
		if n > maxAttached {
			t.Fatal("without a bound")
		}
	}
	if n != maxAttached {
		t.Errorf("%d pieces, want %d", n, maxAttached)
	}
	done = 1
	flexibleCall(f, fakeFabric, 0xf80104, flexibleMost)
	if got := g.account.gpus[0].attached; got != maxAttached-1 {
		t.Errorf("one taken away: %d", got)
	}
	g.account.freeObject(fakeClient, fakeFabric)
	if got := g.account.gpus[0].attached; got != 0 {
		t.Errorf("the addresses are freed: %d", got)
	}
}
