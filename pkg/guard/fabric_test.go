// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

const fakeFabric = 0x5c0000f8

// fabricWanted are a fabric object's parameters.
type fabricWanted struct {
	memory, flags uint32
	size          quota.Bytes
	page          uint64
}

func (w fabricWanted) params(g *Guard) []byte {
	class, _ := g.abi.Class(0xf8)
	p, form := make([]byte, class.ParamsSize), g.abi.Fabric()
	rm.PutU64(p, rm.FabricAlignment, 1<<40) // nobody else's addresses lie between
	rm.PutU64(p, rm.FabricSize, uint64(w.size))
	rm.PutU64(p, 16, w.page)
	rm.PutU32(p, form.Flags, w.flags)
	rm.PutU64(p, form.Offset, 4096)
	rm.PutU32(p, form.Memory, w.memory)
	return p
}

// makeFabric answers the status, and leaves the parameters as the task reads them.
func makeFabric(f *fakeCall, handle uint32, p []byte) uint32 {
	o := fakeAlloc(fakeDevice, handle, 0xf8, p)
	f.escape(rm.EscAlloc, o, p)
	return rm.U32(o, 40)
}

// asked keeps what the driver is asked for.
func asked(seen *[]byte) *fakeDriver {
	return answering(0, func(call *rm.Call) {
		if call.NR() == rm.EscAlloc && rm.U32(call.Outer, rm.AllocClass) == 0xf8 {
			*seen = bytes.Clone(call.Blocks[0].Data)
		}
	})
}

// TestFabric: NVLink addresses are for device memory of the container's, as CUDA asks for them, and once for each.
func TestFabric(t *testing.T) {
	const host, small, large = 0x81, 2 << 20, 512 << 20
	for _, c := range []struct {
		name   string
		want   fabricWanted
		status uint32
	}{
		{"device memory", fabricWanted{fakeMemory, 0, 8 * quota.MiB, small}, rm.StatusOK},
		{"contiguous", fabricWanted{fakeMemory, 4, 8 * quota.MiB, small}, rm.StatusOK},
		{"large pages", fabricWanted{fakeMemory, 0, 8 * quota.MiB, large}, rm.StatusOK}, // the driver says whether they fit
		{"more than the memory", fabricWanted{fakeMemory, 0, 8*quota.MiB + 1, small}, rm.StatusInvalidArgument},
		{"all that there are", fabricWanted{fakeMemory, 0, ^quota.Bytes(0), small}, rm.StatusInvalidArgument},
		{"page by page", fabricWanted{fakeMemory, 2, 8 * quota.MiB, small}, rm.StatusNotSupported},
		{"pages of another size", fabricWanted{fakeMemory, 0, 8 * quota.MiB, 256 << 30}, rm.StatusNotSupported},
		{"no memory", fabricWanted{0, 0, 8 * quota.MiB, small}, rm.StatusInvalidObjectHandle},
		{"what nobody knows", fabricWanted{0x4711, 0, 8 * quota.MiB, small}, rm.StatusInvalidObjectHandle},
		{"host memory", fabricWanted{host, 0, 8 * quota.MiB, small}, rm.StatusInvalidObjectHandle},
		{"another GPU's", fabricWanted{secondMemory, 0, 8 * quota.MiB, small}, rm.StatusInvalidDevice},
		{"flexible", fabricWanted{fakeMemory, rm.FabricFlexible, 8 * quota.MiB, small}, rm.StatusNotSupported},
		{"flexible, without memory", fabricWanted{0, rm.FabricFlexible | 4, 8 * quota.MiB, small}, rm.StatusNotSupported},
	} {
		t.Run(c.name, func(t *testing.T) {
			var seen []byte
			g := withTwoGPUs(newFakeGuard(t, asked(&seen)))
			g.account.addObject(fakeClient, object{handle: host, parent: fakeDevice, kind: rm.ClassSysmem, host: true, gpu: noGPU}, 0, 0, quota.MiB)
			f, p := newFakeCall(t, g, fakeControl), c.want.params(g)
			before := bytes.Clone(p)
			if s := makeFabric(f, fakeFabric, p); s != c.status || (seen != nil) != (s == rm.StatusOK) || !bytes.Equal(p, before) {
				t.Fatalf("%s, %x", rm.StatusName(s), p)
			}
			if c.status != rm.StatusOK {
				return
			}
			if got := rm.U64(seen, rm.FabricAlignment); got != c.want.page {
				t.Errorf("aligned to %#x", got)
			}
			again := func() uint32 { return makeFabric(f, fakeFabric+1, c.want.params(g)) }
			if s := again(); s != rm.StatusInsufficientResources {
				t.Errorf("again: %s", rm.StatusName(s))
			}
			g.account.freeObject(fakeClient, fakeFabric)
			ch := g.account.clients[fakeClient].objects[fakeMemory].charge
			g.account.addReference(ch) // a mapping, perhaps of the addresses
			if s := again(); s != rm.StatusInsufficientResources {
				t.Errorf("they may be mapped: %s", rm.StatusName(s))
			}
			g.account.dropReference(ch)
			if s := again(); s != rm.StatusOK {
				t.Errorf("after their end: %s", rm.StatusName(s))
			}
		})
	}
}

// TestFabricRefused: what the driver refuses has no addresses, though it is mapped: libcuda asks for large pages first.
func TestFabricRefused(t *testing.T) {
	g := withClient(newFakeGuard(t, answering(rm.StatusNoMemory, nil)))
	f := newFakeCall(t, g, fakeControl)
	ch := g.account.addReference(g.account.clients[fakeClient].objects[fakeMemory].charge)
	for range 2 {
		if s := makeFabric(f, fakeFabric, fabricWanted{fakeMemory, 0, 8 * quota.MiB, 2 << 20}.params(g)); s != rm.StatusNoMemory {
			t.Errorf("%s", rm.StatusName(s))
		}
	}
	if ch.fabric || ch.fabrics != 0 || ch.handles != 1 {
		t.Errorf("%+v", ch)
	}
}

// TestFabricPassed: a handle that comes from a file is still no device memory, but addresses of some, and may be below another GPU's
// device.
func TestFabricPassed(t *testing.T) {
	const handle = 0x82
	const ofFabric = 3 // NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_TYPE_FABRIC
	g := withTwoGPUs(newFakeGuard(t, answering(0, func(call *rm.Call) {
		if rm.U32(call.Outer, rm.ControlCmd) == 0x3d0c {
			call.Blocks[0].Data[importObjectsTypes] = ofFabric
		}
	})))
	ch := g.account.clients[fakeClient].objects[fakeMemory].charge
	g.account.addObject(fakeClient, object{handle: fakeFabric, parent: fakeDevice, class: classFabric, kind: rm.ClassFabric, gpu: noGPU,
		charge: ch, size: quota.MiB}, noGPU, 0, 0)
	f := newFakeCall(t, g, fakeControl)
	fd, _ := exportFile(t)
	p := exportCall(fd, 3, fakeFabric)
	f.escape(rm.EscControl, fakeControlCall(fakeClient, 0x3d0b, p), p)
	p = importCall(fd, 3, handle)
	rm.PutU32(p, importObjectsParent, secondDevice)
	o := fakeControlCall(fakeClient, 0x3d0c, p)
	if f.escape(rm.EscControl, o, p); rm.U32(o, rm.ControlStatus) != rm.StatusOK {
		t.Fatal(rm.StatusName(rm.U32(o, rm.ControlStatus)))
	}
	if x, _ := g.account.lookup(fakeClient, handle); x.kind != rm.ClassFabric || x.isMemory() || x.size != quota.MiB || ch.fabrics != 2 {
		t.Errorf("%+v, %+v", x, ch)
	}
	o = make([]byte, rm.DupSize)
	putWords(o, 0, fakeClient, secondDevice, handle+1, fakeClient, fakeFabric)
	if f.escape(rm.EscDupObject, o); rm.U32(o, rm.DupStatus) != rm.StatusOK || ch.fabrics != 3 {
		t.Errorf("dup: %s, %+v", rm.StatusName(rm.U32(o, rm.DupStatus)), ch)
	}
}

// TestFabricSpilled: the addresses of spilled memory have no memory behind them, and nobody else's GPU is there to use them.
func TestFabricSpilled(t *testing.T) {
	for _, c := range []struct {
		name   string
		size   quota.Bytes
		two    bool
		status uint32
	}{
		{"as large", 8 * quota.MiB, false, rm.StatusOK},
		{"more", 10 * quota.MiB, false, rm.StatusInvalidArgument},
		{"two GPUs", 8 * quota.MiB, true, rm.StatusNotSupported},
	} {
		t.Run(c.name, func(t *testing.T) {
			var seen []byte
			g := spillGuard(t, asked(&seen), 0)
			f := newFakeCall(t, g, fakeControl)
			spilled(t, f, fakeSpilled, 8*quota.MiB)
			if c.two {
				g.gpus = append(g.gpus, g.gpus[0])
			}
			p := fabricWanted{fakeSpilled, 4, c.size, 2 << 20}.params(g)
			before := bytes.Clone(p)
			if s := makeFabric(f, fakeFabric, p); s != c.status || (seen != nil) != (s == rm.StatusOK) || !bytes.Equal(p, before) {
				t.Fatalf("%s", rm.StatusName(s))
			}
			ch := g.account.clients[fakeClient].objects[fakeSpilled].charge
			if c.status != rm.StatusOK {
				if ch.handles != 1 || ch.fabrics != 0 {
					t.Errorf("held: %+v", ch)
				}
				return
			}
			form := g.abi.Fabric()
			if rm.U32(seen, form.Flags) != 4|rm.FabricFlexible || rm.U64(seen, form.Offset) != 0 || rm.U32(seen, form.Memory) != 0 {
				t.Errorf("the driver is asked for %x", seen)
			}
			if ch.handles != 2 || ch.fabrics != 1 {
				t.Errorf("held: %+v", ch)
			}
			fd, _ := exportFile(t)
			q := exportCall(fd, 3, fakeFabric)
			o := fakeControlCall(fakeClient, 0x3d0b, q)
			if f.escape(rm.EscControl, o, q); rm.U32(o, rm.ControlStatus) != rm.StatusNotSupported {
				t.Errorf("exported: %s", rm.StatusName(rm.U32(o, rm.ControlStatus)))
			}
		})
	}
}
