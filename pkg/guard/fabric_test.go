package guard

import (
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

const fakeFabric = 0x5c0000f8

func fabricParams(g *Guard, memory, flags uint32, size quota.Bytes) []byte {
	class, _ := g.abi.Class(0xf8)
	p, form := make([]byte, class.ParamsSize), g.abi.Fabric()
	rm.PutU64(p, rm.FabricSize, uint64(size))
	rm.PutU32(p, form.Flags, flags)
	rm.PutU64(p, form.Offset, 4096)
	rm.PutU32(p, form.Memory, memory)
	return p
}

// makeFabric answers the status, and the parameters as the task reads them.
func makeFabric(f *fakeCall, handle uint32, p []byte) uint32 {
	o := fakeAlloc(fakeDevice, handle, 0xf8, p)
	f.escape(rm.EscAlloc, o, p)
	return rm.U32(o, 40)
}

// TestFabric: NVLink addresses are for device memory of the container's, once for each.
func TestFabric(t *testing.T) {
	const host, elsewhere = 0x81, secondMemory
	for _, c := range []struct {
		name          string
		memory, flags uint32
		status        uint32
	}{
		{"device memory", fakeMemory, 0, rm.StatusOK},
		{"device memory, another flag", fakeMemory, 4, rm.StatusOK},
		{"no memory", 0, 0, rm.StatusInvalidObjectHandle},
		{"what nobody knows", 0x4711, 0, rm.StatusInvalidObjectHandle},
		{"host memory", host, 0, rm.StatusInvalidObjectHandle},
		{"another GPU's", elsewhere, 0, rm.StatusInvalidDevice},
		{"flexible", fakeMemory, rm.FabricFlexible, rm.StatusNotSupported},
		{"flexible, without memory", 0, rm.FabricFlexible | 4, rm.StatusNotSupported},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := answering(0, nil)
			g := withTwoGPUs(newFakeGuard(t, d))
			g.account.addObject(fakeClient, object{handle: host, parent: fakeDevice, kind: rm.ClassSysmem, host: true, gpu: noGPU}, 0, 0, quota.MiB)
			f := newFakeCall(t, g, fakeControl)
			if s := makeFabric(f, fakeFabric, fabricParams(g, c.memory, c.flags, 8*quota.MiB)); s != c.status || len(d.calls) > 0 != (s == rm.StatusOK) {
				t.Fatalf("%s, %d calls", rm.StatusName(s), len(d.calls))
			}
			if c.status != rm.StatusOK {
				return
			}
			free := make([]byte, rm.FreeSize)
			putWords(free, 0, fakeClient, fakeDevice, fakeFabric)
			f.escape(rm.EscFree, free)
			if s := makeFabric(f, fakeFabric, fabricParams(g, c.memory, c.flags, 8*quota.MiB)); s != rm.StatusInsufficientResources {
				t.Errorf("again: %s", rm.StatusName(s))
			}
		})
	}
	// What the driver refuses has none: libcuda asks for large pages first.
	d := answering(rm.StatusNoMemory, nil)
	g := withClient(newFakeGuard(t, d))
	f := newFakeCall(t, g, fakeControl)
	for range 2 {
		if s := makeFabric(f, fakeFabric, fabricParams(g, fakeMemory, 0, 8*quota.MiB)); s != rm.StatusNoMemory {
			t.Errorf("refused by the driver: %s", rm.StatusName(s))
		}
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
		{"rounded up to a page", fabricPage, false, rm.StatusOK},
		{"more", 8*quota.MiB + fabricPage, false, rm.StatusNotSupported},
		{"all that there are", ^quota.Bytes(0), false, rm.StatusNotSupported},
		{"two GPUs", 8 * quota.MiB, true, rm.StatusNotSupported},
	} {
		t.Run(c.name, func(t *testing.T) {
			var seen []byte
			d := answering(0, func(call *rm.Call) {
				if call.NR() == rm.EscAlloc && rm.U32(call.Outer, rm.AllocClass) == 0xf8 {
					seen = append([]byte{}, call.Blocks[0].Data...)
				}
			})
			g := spillGuard(t, d, 0)
			f := newFakeCall(t, g, fakeControl)
			spilled(t, f, fakeSpilled, 8*quota.MiB)
			if c.two {
				g.gpus = append(g.gpus, g.gpus[0])
			}
			p := fabricParams(g, fakeSpilled, 4, c.size)
			if s := makeFabric(f, fakeFabric, p); s != c.status || (seen != nil) != (s == rm.StatusOK) {
				t.Fatalf("%s", rm.StatusName(s))
			}
			ch := g.account.clients[fakeClient].objects[fakeSpilled].charge
			if c.status != rm.StatusOK {
				if ch.handles != 1 || ch.fabric {
					t.Errorf("held: %+v", ch)
				}
				return
			}
			form := g.abi.Fabric()
			if rm.U32(seen, form.Flags) != 4|rm.FabricFlexible || rm.U64(seen, form.Offset) != 0 || rm.U32(seen, form.Memory) != 0 {
				t.Errorf("the driver is asked for %x", seen)
			}
			if rm.U32(p, form.Flags) != 4 || rm.U64(p, form.Offset) != 4096 || rm.U32(p, form.Memory) != fakeSpilled {
				t.Errorf("the task reads %x", p)
			}
			if ch.handles != 2 {
				t.Errorf("held: %+v", ch)
			}
		})
	}
}
