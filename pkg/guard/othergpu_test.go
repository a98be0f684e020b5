// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
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
	g.gpus = append(g.gpus, gpuIdentity{rmclient.Address{Bus: 2}, 1})
	g.account = newAccount(g.cfg.GPUs)
	withClient(g)
	a := g.account
	a.addObject(fakeClient, object{handle: fakeRange, parent: fakeDevice, class: classVirtual, kind: rm.ClassVirtual, gpu: noGPU}, noGPU, 0, 0)
	a.addObject(fakeClient, object{handle: secondDevice, parent: fakeClient, kind: rm.ClassDevice, gpu: 1}, noGPU, 0, 0)
	a.addObject(fakeClient, memoryObject(secondMemory, secondDevice), 1, 0, 8*quota.MiB)
	a.addObject(fakeClient, object{handle: secondRange, parent: secondDevice, class: classVirtual, kind: rm.ClassVirtual, gpu: noGPU},
		noGPU, 0, 0)
	a.dupOf(fakeClient, secondDevice, strayDup, fakeClient, fakeMemory)
	return g
}

// TestElsewhere: no call has a GPU use another one's memory, or the other one's addresses, as its own.
func TestElsewhere(t *testing.T) {
	const host, channel, group, context = 0x81, 0x82, 0x83, 0x84
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
			f.guard.account.addObject(fakeClient, object{handle: group, parent: device, kind: rm.ClassTSG, gpu: noGPU}, noGPU, 0, 0)
			p := make([]byte, 368)
			rm.PutU32(p, rm.ChannelEngineType, rm.ChannelEngineTypeCopy0)
			rm.PutU32(p, off, memory)
			o := fakeAlloc(group, channel, 0xc36f, p)
			f.escape(rm.EscAlloc, o, p)
			return rm.U32(o, 40)
		}
	}
	// ofGroup is a channel that names nothing, in a group that does.
	ofGroup := func(off int) func(f *fakeCall, device, mapper, memory uint32) uint32 {
		return func(f *fakeCall, device, mapper, memory uint32) uint32 {
			p := make([]byte, 20)
			rm.PutU32(p, off, memory)
			rm.PutU32(p, rm.TSGEngineType, rm.ChannelEngineTypeCopy0)
			o := fakeAlloc(device, group, 0xa06c, p)
			f.escape(rm.EscAlloc, o, p)
			f.guard.driver.(*fakeDriver).calls = nil
			p = make([]byte, 368)
			o = fakeAlloc(group, channel, 0xc36f, p)
			f.escape(rm.EscAlloc, o, p)
			return rm.U32(o, 40)
		}
	}
	contextDMA := func(f *fakeCall, device, subdevice, memory uint32) uint32 {
		p := make([]byte, 32)
		rm.PutU32(p, rm.ContextDMASubdevice, subdevice)
		rm.PutU32(p, rm.ContextDMAMemory, memory)
		o := fakeAlloc(device, context, 0x2, p)
		f.escape(rm.EscAlloc, o, p)
		return rm.U32(o, 40)
	}
	ofDevice := func(f *fakeCall, device, _, memory uint32) uint32 { return contextDMA(f, device, 0, memory) }
	// byDMA is a channel with a context DMA of the memory, which is on its own GPU.
	byDMA := func(f *fakeCall, device, mapper, memory uint32) uint32 {
		if s := contextDMA(f, f.guard.account.clients[fakeClient].objects[memory].parent, 0, memory); s != rm.StatusOK {
			return s
		}
		f.guard.driver.(*fakeDriver).calls = nil
		return named(0)(f, device, mapper, context)
	}
	for name, call := range map[string]func(f *fakeCall, device, mapper, memory uint32) uint32{
		"window": window, "DMA": dma, "DMA between peers": peer,
		"error notifier": named(0), "USERD": named(32), "ECC notifier": named(140),
		"group's error notifier": ofGroup(0), "group's ECC notifier": ofGroup(4),
		"context DMA": contextDMA, "context DMA of the device": ofDevice, "error notifier by context DMA": byDMA,
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
			{"another GPU's addresses", secondDevice, fakeRange, secondMemory,
				slices.Contains([]string{"DMA", "DMA between peers", "context DMA"}, name)},
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

// TestHandlesElsewhere: nor is there a handle on one GPU's memory below another's device, by a dup or by a file.
func TestHandlesElsewhere(t *testing.T) {
	const host, handle = 0x81, 0x82
	dup := func(_ *testing.T, f *fakeCall, parent, memory uint32) uint32 {
		o := make([]byte, rm.DupSize)
		putWords(o, 0, fakeClient, parent, handle, fakeClient, memory)
		f.escape(rm.EscDupObject, o)
		return rm.U32(o, rm.DupStatus)
	}
	list := func(t *testing.T, f *fakeCall, parent, memory uint32) uint32 {
		fd, _ := exportFile(t)
		p := exportCall(fd, 3, memory)
		f.escape(rm.EscControl, fakeControlCall(fakeClient, 0x3d0b, p), p)
		p = importCall(fd, 3, handle)
		rm.PutU32(p, importObjectsParent, parent)
		o := fakeControlCall(fakeClient, 0x3d0c, p)
		f.escape(rm.EscControl, o, p)
		return rm.U32(o, rm.ControlStatus)
	}
	for name, make := range map[string]func(t *testing.T, f *fakeCall, parent, memory uint32) uint32{"dup": dup, "import": list} {
		for _, x := range []struct {
			what           string
			parent, memory uint32
			refused        bool
		}{
			{"its own", secondDevice, secondMemory, false}, {"the first's", secondDevice, fakeMemory, true},
			{"the second's", fakeDevice, secondMemory, true}, {"host memory", secondDevice, host, false},
		} {
			g := withTwoGPUs(newFakeGuard(t, &fakeDriver{}))
			g.account.addObject(fakeClient, object{handle: host, parent: fakeDevice, kind: rm.ClassSysmem, host: true, gpu: noGPU}, 0, 0, quota.MiB)
			if s := make(t, newFakeCall(t, g, fakeControl), x.parent, x.memory); (s == rm.StatusInvalidDevice) != x.refused {
				t.Errorf("%s, %s: %s", name, x.what, rm.StatusName(s))
			}
		}
	}
}
