// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"slices"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// presented makes a control whose answer f writes, and returns what the container sees.
func presented(t *testing.T, g *Guard, d *fakeDriver, object, cmd uint32, params []byte, f func(call *rm.Call)) uint32 {
	t.Helper()
	d.reset(f)
	o := fakeControlCall(object, cmd, params)
	if rep := newFakeCall(t, g, fakeControl).escape(rm.EscControl, o, params); rep != replyDone {
		t.Fatalf("control %#x: %+v", cmd, rep)
	}
	return rm.U32(o, rm.ControlStatus)
}

func words(b []byte, off, n int) []uint32 {
	list := make([]uint32, n)
	for i := range list {
		list[i] = rm.U32(b, off+4*i)
	}
	return list
}

func putWords(b []byte, off int, list ...uint32) {
	for i, v := range list {
		rm.PutU32(b, off+4*i, v)
	}
}

// TestFBInfo: both forms of the control show a card of the size of the limit.
func TestFBInfo(t *testing.T) {
	const real = 80 << 20 // KiB
	total, free := uint32(testLimit/quota.KiB), uint32((testLimit-8*quota.MiB)/quota.KiB)
	entries := []struct{ index, driver, want uint32 }{
		{rm.FBIndexRAMSize, real, total},
		{rm.FBIndexTotalRAMSize, real, total},
		{rm.FBIndexHeapSize, real - 100, total},
		{rm.FBIndexMappableHeapSize, 256 << 10, 256 << 10},
		{rm.FBIndexMappableHeapSize, real, total},
		{rm.FBIndexHeapFree, real - 200, free},
		{rm.FBIndexLargestFreeRegion, real - 200, free},
		{rm.FBIndexLargestFreeRegion, 64, 64},
		{rm.FBIndexUsableRAMSize, real, total},
		{rm.FBIndexBAR1Size, 256 << 10, 256 << 10},
		{rm.FBIndexTaxSize, 4096, 0},
		{rm.FBIndexProtectedMemTotal, real, total},
		{rm.FBIndexProtectedMemFree, real, free},
	}
	fill := func(b []byte) {
		for i, e := range entries {
			putWords(b, i*rm.FBInfoEntry, e.index, e.driver)
		}
	}
	check := func(b []byte) {
		t.Helper()
		for i, e := range entries {
			if got := rm.U32(b, i*rm.FBInfoEntry+4); got != e.want {
				t.Errorf("index %#x: %d KiB, want %d", e.index, got, e.want)
			}
		}
	}
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	p := make([]byte, 1028)
	rm.PutU32(p, rm.FBInfoCount, uint32(len(entries)))
	presented(t, g, d, fakeDevice, controlFBInfoV2, p, func(call *rm.Call) { fill(call.Blocks[0].Data[rm.FBInfoList:]) })
	check(p[rm.FBInfoList:])

	v1, list := make([]byte, 16), make([]byte, len(entries)*rm.FBInfoEntry)
	rm.PutU32(v1, rm.FBInfoV1Count, uint32(len(entries)))
	putPointer(v1, rm.FBInfoV1List, list)
	pointer := rm.U64(v1, rm.FBInfoV1List)
	presented(t, g, d, fakeDevice, 0x20801301, v1, func(call *rm.Call) { fill(call.Blocks[1].Data) })
	check(list)
	if rm.U64(v1, rm.FBInfoV1List) != pointer {
		t.Error("the container's pointer has changed")
	}

	// More entries than there is room for: the list ends where the block does.
	rm.PutU32(p, rm.FBInfoCount, 1<<31)
	presented(t, g, d, fakeDevice, controlFBInfoV2, p, func(call *rm.Call) { fill(call.Blocks[0].Data[rm.FBInfoList:]) })
	check(p[rm.FBInfoList:])

	// A native card, and one that is over its limit.
	g.account.gpus[0].used = testLimit + quota.GiB
	rm.PutU32(p, rm.FBInfoCount, 1)
	free1 := func(call *rm.Call) { putWords(call.Blocks[0].Data, rm.FBInfoList, rm.FBIndexHeapFree, real) }
	presented(t, g, d, fakeDevice, controlFBInfoV2, p, free1)
	if got := rm.U32(p, rm.FBInfoList+4); got != 0 {
		t.Errorf("%d KiB free beyond the limit", got)
	}
	g.account.gpus[0].native = true
	presented(t, g, d, fakeDevice, controlFBInfoV2, p, free1)
	if got := rm.U32(p, rm.FBInfoList+4); got != real {
		t.Errorf("a native card shows %d KiB", got)
	}
}

// withProcess gives the guard a second process: 5 in the container, 5000 on the host.
func withProcess(t *testing.T, g *Guard) {
	t.Helper()
	if _, err := g.tasks.acquire(os.Getpid()); err != nil {
		t.Fatal(err)
	}
	p := &process{tgid: 5000, nspid: 5, pidfd: -1}
	g.tasks.procs[5000], g.tasks.byNS[5] = p, p
}

// TestPids: processes are the container's own, in its numbers, in both directions.
func TestPids(t *testing.T) {
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	withProcess(t, g)
	p := make([]byte, 3812)
	presented(t, g, d, fakeDevice, 0x2080018d, p, func(call *rm.Call) {
		putWords(call.Blocks[0].Data, rm.PidsCount, 4, 4999, 5000, 5001, uint32(os.Getpid()))
	})
	self := g.tasks.byHostPid(os.Getpid()).nspid
	if got := words(p, rm.PidsCount, 5); !slices.Equal(got, []uint32{2, 5, uint32(self), 0, 0}) {
		t.Errorf("%d", got)
	}

	info := make([]byte, 14408)
	rm.PutU32(info, rm.PidInfoCount, 2)
	second := rm.PidInfoList + rm.PidInfoEntry
	rm.PutU32(info, rm.PidInfoList, 5)
	rm.PutU32(info, second, 4999) // a process of another container, by its number on the host
	presented(t, g, d, fakeDevice, 0x2080018e, info, func(call *rm.Call) {
		b := call.Blocks[0].Data
		if got := []uint32{rm.U32(b, rm.PidInfoList), rm.U32(b, second)}; !slices.Equal(got, []uint32{5000, noPid}) {
			t.Errorf("the driver is asked about %d", got)
		}
		for _, off := range []int{rm.PidInfoList, second} {
			rm.PutU64(b, off+rm.PidInfoPrivate, 1<<30)
			rm.PutU64(b, off+rm.PidInfoSharedDuped, 1<<20)
		}
	})
	if rm.U32(info, rm.PidInfoList) != 5 || rm.U64(info, rm.PidInfoList+rm.PidInfoPrivate) != 1<<30 {
		t.Error("the own process is wrong")
	}
	if rm.U64(info, second+rm.PidInfoPrivate) != 0 || rm.U64(info, second+rm.PidInfoSharedDuped) != 0 || rm.U32(info, second) == noPid {
		t.Error("another container's process is shown")
	}
	rm.PutU32(info, rm.PidInfoCount, rm.PidInfoMax+1)
	if s := presented(t, g, d, fakeDevice, 0x2080018e, info, nil); s != rm.StatusInvalidArgument || len(d.calls) != 0 {
		t.Errorf("too many processes: %s", rm.StatusName(s))
	}
}

func TestGPUMon(t *testing.T) {
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	withProcess(t, g)
	form := g.abi.GPUMon()
	p := make([]byte, 55888)
	presented(t, g, d, fakeDevice, 0x20802096, p, func(call *rm.Call) {
		b := call.Blocks[0].Data
		for i, pid := range []uint32{5000, 4999} {
			for _, off := range form.Pids {
				at := rm.GPUMonSamples + i*form.Entry + off
				rm.PutU32(b, at-8, 77)
				rm.PutU32(b, at, pid)
			}
		}
	})
	for _, off := range form.Pids {
		at := rm.GPUMonSamples + off
		if rm.U32(p, at) != 5 || rm.U32(p, at-8) != 77 {
			t.Errorf("own sample at %d: process %d, %d %%", off, rm.U32(p, at), rm.U32(p, at-8))
		}
		if at += form.Entry; rm.U32(p, at) != 0 || rm.U32(p, at-8) != 0 {
			t.Errorf("another's sample at %d: process %d, %d %%", off, rm.U32(p, at), rm.U32(p, at-8))
		}
	}
}

// TestHiddenGPUs: the guard of these tests has GPU 0x100 of a machine with 0x100, 0x200 and 0x300.
func TestHiddenGPUs(t *testing.T) {
	const own, none = 0x100, rm.GPUIDUnused
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	ids := func(call *rm.Call) {
		b := call.Blocks[0].Data
		for off := 0; off < len(b); off += 4 {
			rm.PutU32(b, off, none)
		}
		for off := 0; off < len(b); off += 4 * rm.GPUIDListLen {
			putWords(b, off, 0x200, own, 0x300)
		}
	}
	for _, c := range []struct {
		cmd  uint32
		size int
	}{{0x201, 128}, {0x214, 384}} {
		p := make([]byte, c.size)
		presented(t, g, d, fakeClient, c.cmd, p, ids)
		for off := 0; off < min(c.size, 256); off += 4 * rm.GPUIDListLen {
			if got := words(p, off, 3); !slices.Equal(got, []uint32{own, none, none}) {
				t.Errorf("control %#x, list at %d: %#x", c.cmd, off, got)
			}
		}
	}

	p := make([]byte, 3076)
	presented(t, g, d, fakeClient, 0x288, p, func(call *rm.Call) {
		putWords(call.Blocks[0].Data, 0, 3, 0x200, 1, 1, own, 2, 2, 0x300, 3, 3)
	})
	if got := words(p, 0, 7); !slices.Equal(got, []uint32{1, own, 2, 2, 0, 0, 0}) {
		t.Errorf("active devices: %#x", got)
	}

	for name, c := range map[string]struct{ ask, want []uint32 }{
		"all":       {[]uint32{rm.GPUIDAttach}, []uint32{own, none}},
		"a list":    {[]uint32{0x200, own, none}, []uint32{own, none}},
		"hidden":    {[]uint32{0x300, none}, []uint32{none, none}},
		"own twice": {[]uint32{own, own, none}, []uint32{own, own}},
	} {
		p := make([]byte, 132)
		for off := 0; off < 128; off += 4 {
			rm.PutU32(p, off, none)
		}
		putWords(p, 0, c.ask...)
		presented(t, g, d, fakeClient, 0x215, p, func(call *rm.Call) {
			if got := words(call.Blocks[0].Data, 0, 2); !slices.Equal(got, c.want) {
				t.Errorf("attach %s: the driver is asked for %#x", name, got)
			}
		})
	}

	for _, cmd := range []uint32{0x202, 0x203, 0x205, 0x21b, 0x275} {
		ctl, _ := g.abi.Control(cmd)
		p := make([]byte, ctl.Size)
		rm.PutU32(p, 0, 0x200)
		if s := presented(t, g, d, fakeClient, cmd, p, nil); s != rm.StatusInvalidArgument || len(d.calls) != 0 {
			t.Errorf("control %#x of a hidden GPU: %s", cmd, rm.StatusName(s))
		}
		rm.PutU32(p, 0, own)
		if s := presented(t, g, d, fakeClient, cmd, p, nil); s != 0 || len(d.calls) != 1 {
			t.Errorf("control %#x of the own GPU: %s", cmd, rm.StatusName(s))
		}
	}

	uuid := make([]byte, 272)
	for id, want := range map[uint32]uint32{own: 0, 0x200: rm.StatusObjectNotFound} {
		s := presented(t, g, d, fakeClient, 0x274, uuid, func(call *rm.Call) { rm.PutU32(call.Blocks[0].Data, rm.UUIDQueryGPUID, id) })
		if s != want || want != 0 && rm.U32(uuid, rm.UUIDQueryGPUID) != 0 {
			t.Errorf("UUID of %#x: %s", id, rm.StatusName(s))
		}
	}

	g.instances[1] = 0
	mask := make([]byte, 4)
	presented(t, g, d, fakeClient, 0x204, mask, func(call *rm.Call) { rm.PutU32(call.Blocks[0].Data, 0, 7) })
	if got := rm.U32(mask, 0); got != 2 {
		t.Errorf("device mask %#x", got)
	}

	cards := make([]byte, 3*rm.CardInfoSize)
	d.reset(func(call *rm.Call) {
		for i := range 3 {
			e := call.Outer[i*rm.CardInfoSize:]
			e[rm.CardInfoValid] = 1
			rm.PutU32(e, rm.CardInfoMinor, uint32(2-i)) // the own one is the last
			rm.PutU32(e, rm.CardInfoGPUID, uint32(0x100*(3-i)))
		}
	})
	newFakeCall(t, g, fakeControl).escape(rm.EscCardInfo, cards)
	if rm.U32(cards, rm.CardInfoGPUID) != own || cards[rm.CardInfoSize] != 0 || cards[2*rm.CardInfoSize] != 0 {
		t.Errorf("cards: %#x, then %d and %d", rm.U32(cards, rm.CardInfoGPUID), cards[rm.CardInfoSize], cards[2*rm.CardInfoSize])
	}
}

// TestControls: what is denied never reaches the driver.
func TestControls(t *testing.T) {
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	for _, c := range []struct {
		name   string
		cmd    uint32
		size   int
		change func(o, p []byte)
		status uint32
		asked  int
	}{
		{"unknown", 0x2080ffff &^ 0x8000, 4, nil, rm.StatusNotSupported, 0},
		{"preempt what is no group", 0xa06c0105, 8, nil, rm.StatusNotSupported, 0},
		{"set timeslice is swallowed", 0xa06c0103, 8, nil, 0, 0},
		{"serialised", controlFBInfoV2, 1028, func(o, _ []byte) { rm.PutU32(o, rm.ControlFlags, 4) }, rm.StatusInvalidArgument, 0},
		{"another container's client", controlFBInfoV2, 1028, func(o, _ []byte) { rm.PutU32(o, rm.ControlClient, 1) }, rm.StatusInvalidClient, 0},
		{"a size that is not known", controlFBInfoV2, 1024, nil, rm.StatusInvalidParamStruct, 0},
		{"too large", 0x503c0105, rm.MaxControlParams + 8, nil, rm.StatusInvalidParamStruct, 0},
		{"WFI preemption", 0x20801210, 32, func(_, p []byte) { rm.PutU32(p, 0, 1) }, rm.StatusNotSupported, 0},
		{"CILP preemption", 0x20801210, 32, func(_, p []byte) { putWords(p, 0, 1, 0, 0, rm.PreemptModeCILP) }, 0, 1},
		{"no parameters where there must be some", controlFBInfoV2, 1028, func(o, _ []byte) { rm.PutU64(o, rm.ControlParams, 0) },
			rm.StatusInvalidArgument, 0},
		{"a pointer that the driver must not see", 0x202, 40, func(_, p []byte) { rm.PutU32(p, 0, 0x100); rm.PutU64(p, 16, 0x1234) }, 0, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			d.reset(func(call *rm.Call) {
				if err := pointersCovered(g.abi, call); err != nil {
					t.Error(err)
				}
			})
			p := make([]byte, c.size)
			o := fakeControlCall(fakeDevice, c.cmd, p)
			if c.change != nil {
				c.change(o, p)
			}
			rep := newFakeCall(t, g, fakeControl).escape(rm.EscControl, o, p)
			if s := rm.U32(o, rm.ControlStatus); rep != replyDone || s != c.status || len(d.calls) != c.asked {
				t.Errorf("%+v, status %s, driver asked %d times", rep, rm.StatusName(s), len(d.calls))
			}
		})
	}
}
