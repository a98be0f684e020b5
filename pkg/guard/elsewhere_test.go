package guard

import (
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

const (
	secondDevice = 0x5c000101
	secondMemory = 0x5c000102
	secondRange  = 0x5c000103
	strayDup     = 0x5c000104 // a second handle on fakeMemory, below the second device
)

// withTwoGPUs is withClient with a second GPU, a device of that, memory and a range of addresses there.
func withTwoGPUs(g *Guard) *Guard {
	second := g.cfg.GPUs[0]
	g.cfg.GPUs = append(g.cfg.GPUs, second)
	g.gpus = append(g.gpus, gpuIdentity{id: 0x200, minor: 1, bus: 2})
	g.account = newAccount(g.cfg.GPUs)
	withClient(g)
	a := g.account
	a.addObject(fakeClient, object{handle: fakeRange, parent: fakeDevice, class: classVirtual, kind: rm.ClassVirtual, gpu: noGPU}, noGPU, 0, 0)
	a.addObject(fakeClient, object{handle: secondDevice, parent: fakeClient, kind: rm.ClassDevice, gpu: 1}, noGPU, 0, 0)
	a.addObject(fakeClient, memoryObject(secondMemory, secondDevice), 1, 0, 8*quota.MiB)
	a.addObject(fakeClient, object{handle: secondRange, parent: secondDevice, class: classVirtual, kind: rm.ClassVirtual, gpu: noGPU}, noGPU, 0, 0)
	a.dupObject(fakeClient, secondDevice, strayDup, fakeClient, fakeMemory)
	return g
}

// TestElsewhere: no call has a GPU use another one's memory, or the other one's addresses, as its own.
func TestElsewhere(t *testing.T) {
	const host, channel, group = 0x81, 0x82, 0x83
	window := func(f *fakeCall, device, _, memory uint32) uint32 {
		fd, err := unix.Open("/dev/zero", unix.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		o := make([]byte, rm.MapMemorySize)
		putWords(o, 0, fakeClient, device, memory)
		rm.PutU64(o, rm.MapMemoryLength, 4096)
		rm.PutU32(o, rm.MapMemoryFD, uint32(fd))
		f.escape(rm.EscMapMemory, o)
		return rm.U32(o, rm.MapMemoryStatus)
	}
	dma := func(f *fakeCall, device, mapper, memory uint32) uint32 {
		o := mapDMA(fakeClient, mapper, memory, 0, 4096)
		rm.PutU32(o, rm.DMADevice, device)
		f.escape(rm.EscMapDMA, o)
		return rm.U32(o, 56)
	}
	peer := func(f *fakeCall, device, mapper, memory uint32) uint32 {
		o := mapDMA(fakeClient, mapper, memory, 0, 4096)
		rm.PutU32(o, rm.DMADevice, device)
		rm.PutU32(o, 32, 2<<20) // NVOS46_FLAGS_P2P_ENABLE_NOSLI
		f.escape(rm.EscMapDMA, o)
		return rm.U32(o, 56)
	}
	named := func(off int) func(f *fakeCall, device, mapper, memory uint32) uint32 {
		return func(f *fakeCall, device, _, memory uint32) uint32 {
			f.g.account.addObject(fakeClient, object{handle: group, parent: device, kind: rm.ClassTSG, gpu: noGPU}, noGPU, 0, 0)
			p := make([]byte, 368)
			rm.PutU32(p, rm.ChannelEngineType, rm.ChannelEngineTypeCopy0)
			rm.PutU32(p, off, memory)
			o := fakeAlloc(group, channel, 0xc36f, p)
			f.escape(rm.EscAlloc, o, p)
			return rm.U32(o, 40)
		}
	}
	grouped := func(i int) func(f *fakeCall, device, mapper, memory uint32) uint32 {
		return func(f *fakeCall, device, mapper, memory uint32) uint32 {
			o := object{handle: group, parent: device, kind: rm.ClassTSG, gpu: noGPU}
			o.notifiers[i] = memory
			f.g.account.addObject(fakeClient, o, noGPU, 0, 0)
			p := make([]byte, 368)
			rm.PutU32(p, rm.ChannelEngineType, rm.ChannelEngineTypeCopy0)
			alloc := fakeAlloc(group, channel, 0xc36f, p)
			f.escape(rm.EscAlloc, alloc, p)
			return rm.U32(alloc, 40)
		}
	}
	for name, call := range map[string]func(f *fakeCall, device, mapper, memory uint32) uint32{
		"the group's error notifier": grouped(0), "the group's ECC notifier": grouped(1),
		"window": window, "DMA": dma, "DMA between peers": peer,
		"error notifier": named(0), "USERD": named(32), "ECC notifier": named(140),
	} {
		for _, x := range []struct {
			what                   string
			device, mapper, memory uint32
			refused                bool
		}{
			{"the first's own", fakeDevice, fakeRange, fakeMemory, false},
			{"the second's own", secondDevice, secondRange, secondMemory, false},
			{"the first's on the second", secondDevice, secondRange, fakeMemory, true},
			{"the second's on the first", fakeDevice, fakeRange, secondMemory, true},
			{"the first's by a handle below the second", secondDevice, secondRange, strayDup, true},
			{"the same, on the first", fakeDevice, fakeRange, strayDup, true},
			{"host memory", secondDevice, secondRange, host, false},
			{"another GPU's addresses", secondDevice, fakeRange, secondMemory, name == "DMA" || name == "DMA between peers"},
		} {
			d := &fakeDriver{answer: func(_ Target, call *rm.Call) syscall.Errno { return 0 }}
			g := withTwoGPUs(newFakeGuard(t, d))
			g.account.addObject(fakeClient, object{handle: host, parent: fakeDevice, kind: rm.ClassSysmem, host: true, gpu: noGPU}, 0, 0, quota.MiB)
			status := call(newFakeCall(t, g, fakeControl), x.device, x.mapper, x.memory)
			if refused := status == rm.StatusInvalidDevice; refused != x.refused || refused && len(d.calls) > 0 {
				t.Errorf("%s, %s: %s, %d driver calls", name, x.what, rm.StatusName(status), len(d.calls))
			}
		}
	}
}
