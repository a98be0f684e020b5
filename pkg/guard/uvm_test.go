// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// uvmCall makes a UVM call with the addresses and names that it takes.
func uvmCall(g *Guard, cmd uint32, base, length uint64, ctl int) ([]byte, rm.UVMForm) {
	form, _ := g.abi.UVM(cmd)
	o := make([]byte, form.Size)
	rm.PutU64(o, form.Base, base)
	if form.Length >= 0 {
		rm.PutU64(o, form.Length, length)
	}
	if form.Object >= 0 {
		rm.PutU32(o, form.FD, uint32(ctl))
		rm.PutU32(o, form.Client, fakeClient)
		rm.PutU32(o, form.Object, fakeMemory)
	}
	if cmd == rm.UVMMapExternal { // one GPU
		rm.PutU64(o, form.FD-8, 1)
	}
	return o, form
}

// TestUVM: a mapping holds memory past its handle, and the object is open to UVM only for the moment of the call.
func TestUVM(t *testing.T) {
	var open, wasOpen, refuse bool
	var fds []uint32
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	d.answer = func(tgt Target, call *rm.Call) syscall.Errno {
		if rm.UVMShaped(call.Cmd) {
			wasOpen = wasOpen || open
			form, _ := g.abi.UVM(call.Cmd)
			if form.FD >= 0 {
				fds = append(fds, rm.U32(call.Outer, form.FD))
			}
			if refuse {
				rm.PutU32(call.Outer, form.Status, rm.StatusInvalidAddress)
			}
		} else if call.NR() == rm.EscShare {
			action := call.Outer[rm.SharePolicy+rm.SharePolicyAction]
			if open = action&shareActionRevoke == 0; action&shareActionCompose == 0 {
				t.Error("what the program itself has shared is forgotten")
			}
		}
		return 0
	}
	c, ctl := newFakeUVMCall(t, g)

	refuse = true
	o, form := uvmCall(g, rm.UVMMapExternal, 1<<32, 8<<20, ctl)
	c.do(rm.UVMMapExternal, o)
	if rm.U32(o, form.Status) != rm.StatusInvalidAddress || open || !wasOpen {
		t.Errorf("refused mapping: %s, open %v, was %v", rm.StatusName(rm.U32(o, form.Status)), open, wasOpen)
	}
	refuse = false
	o, form = uvmCall(g, rm.UVMMapExternal, 1<<32, 8<<20, ctl)
	if rep := c.do(rm.UVMMapExternal, o); rep != replyDone || rm.U32(o, form.Status) != 0 || open {
		t.Fatalf("%+v, %s, open %v", rep, rm.StatusName(rm.U32(o, form.Status)), open)
	}
	if rm.U32(o, form.FD) != uint32(ctl) || fds[1] == uint32(ctl) {
		t.Errorf("descriptors: the task sees %d, UVM saw %d, want the guard's own copy of %d", rm.U32(o, form.FD), fds[1], ctl)
	}
	g.account.freeObject(fakeClient, fakeMemory)
	wantUsage(t, g.account, 0, 8*quota.MiB)
	if !g.account.hasZombies() {
		t.Error("no zombie")
	}
	o, _ = uvmCall(g, rm.UVMUnmapExternal, 1<<32, 4<<20, 0)
	c.do(rm.UVMUnmapExternal, o)
	wantUsage(t, g.account, 0, 8*quota.MiB) // half of it still holds the memory
	refuse = true
	o, _ = uvmCall(g, rm.UVMUnmapExternal, 1<<32, 8<<20, 0)
	c.do(rm.UVMUnmapExternal, o)
	wantUsage(t, g.account, 0, 8*quota.MiB) // UVM said no
	refuse = false
	o, _ = uvmCall(g, rm.UVMUnmapExternal, 1<<32, 8<<20, 0)
	c.do(rm.UVMUnmapExternal, o)
	wantUsage(t, g.account, 0, 0)
	if g.account.hasZombies() {
		t.Error("a zombie")
	}
}

// TestUVMMapsHostMemory: host memory that the task made itself is mapped too: the guard opens the handle that the call names.
func TestUVMMapsHostMemory(t *testing.T) {
	const made = 0x5c0000ff
	shared, mapped := []uint32{}, false
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	d.answer = func(tgt Target, call *rm.Call) syscall.Errno {
		if rm.UVMShaped(call.Cmd) {
			mapped = true
		} else if call.NR() == rm.EscShare {
			shared = append(shared, rm.U32(call.Outer, rm.ShareObject))
		}
		return 0
	}
	g.cfg.Settings.MaxHostMemory.Bytes = quota.GiB
	newFakeCall(t, g, fakeControl).taskMemory(made, 8*quota.MiB)
	c, ctl := newFakeUVMCall(t, g)
	o, form := uvmCall(g, rm.UVMMapExternal, 1<<32, 8<<20, ctl)
	rm.PutU32(o, form.Object, made)
	c.do(rm.UVMMapExternal, o)
	if !mapped || !slices.Equal(shared, []uint32{made, made}) || rm.U32(o, form.Status) != rm.StatusOK {
		t.Errorf("mapped %v, shared %#x, status %#x; want the handle that was named opened and closed", mapped, shared, rm.U32(o, form.Status))
	}
}

// TestUVMMaps: what is mapped and unmapped over other mappings, on one GPU, is credited as UVM lets go of it: a piece that is left holds
// all.
func TestUVMMaps(t *testing.T) {
	const base, mib = 1 << 32, 1 << 20
	one, two := gpuUUID{1}, gpuUUID{2}
	type step struct {
		gpu      gpuUUID
		from, to uint64      // in MiB behind base
		memory   quota.Bytes // in MiB, that is mapped; 0: unmapped
		used     quota.Bytes // MiB, after it
	}
	for name, steps := range map[string][]step{
		"again":                    {{one, 0, 8, 8, 8}, {one, 0, 8, 1, 1}, {one, 0, 8, 0, 0}},
		"over the beginning":       {{one, 0, 8, 8, 8}, {one, 0, 1, 1, 9}, {one, 1, 8, 0, 1}, {one, 0, 1, 0, 0}},
		"over the end":             {{one, 0, 8, 8, 8}, {one, 7, 8, 1, 9}, {one, 0, 7, 0, 1}, {one, 7, 8, 0, 0}},
		"over the middle":          {{one, 0, 8, 8, 8}, {one, 3, 4, 1, 9}, {one, 0, 3, 0, 9}, {one, 4, 8, 0, 1}, {one, 0, 8, 0, 0}},
		"over several":             {{one, 0, 2, 2, 2}, {one, 2, 4, 4, 6}, {one, 6, 8, 8, 14}, {one, 1, 7, 1, 11}, {one, 0, 8, 0, 0}},
		"a union":                  {{one, 0, 2, 2, 2}, {one, 2, 4, 4, 6}, {one, 6, 8, 8, 14}, {one, 0, 8, 0, 0}},
		"a union, the end in part": {{one, 0, 2, 2, 2}, {one, 2, 4, 4, 6}, {one, 4, 8, 8, 14}, {one, 0, 5, 0, 8}, {one, 5, 8, 0, 0}},
		"a union, the beginning":   {{one, 0, 2, 2, 2}, {one, 2, 4, 4, 6}, {one, 1, 8, 0, 2}, {one, 0, 1, 0, 0}},
		"in two halves":            {{one, 0, 8, 8, 8}, {one, 0, 4, 0, 8}, {one, 4, 8, 0, 0}},
		"two holes": {{one, 0, 8, 8, 8}, {one, 2, 3, 0, 8}, {one, 5, 6, 0, 8}, {one, 3, 5, 0, 8},
			{one, 0, 2, 0, 8}, {one, 6, 8, 0, 0}},
		"where nothing is":             {{one, 2, 4, 8, 8}, {one, 0, 2, 0, 8}, {one, 4, 9, 0, 8}, {one, 2, 4, 0, 0}},
		"on another GPU":               {{one, 0, 8, 8, 8}, {two, 0, 8, 1, 9}, {one, 0, 8, 0, 1}, {two, 0, 8, 0, 0}},
		"a union beside another GPU's": {{one, 0, 4, 4, 4}, {two, 2, 6, 8, 12}, {one, 4, 8, 2, 14}, {one, 0, 8, 0, 8}, {two, 0, 8, 0, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			g := withClient(newFakeGuard(t, &fakeDriver{}))
			g.account.freeObject(fakeClient, fakeMemory)
			f := followedUVM(t, g)
			for i, s := range steps {
				x := addresses{base + s.from*mib, base + s.to*mib}
				if s.memory > 0 {
					memory := uint32(0x5c000700 + i)
					g.account.addObject(fakeClient, memoryObject(memory, fakeDevice), 0, 0, s.memory*quota.MiB)
					g.recordMapping(f, uvmMap{gpu: s.gpu, addresses: x, charge: g.account.holdOf(fakeClient, memory)})
					g.account.freeObject(fakeClient, memory)
				} else {
					g.recordUnmapping(f, x, s.gpu)
				}
				if used := g.account.usage(0).used; used != s.used*quota.MiB {
					t.Errorf("step %d: used %v, want %d MiB", i, used, s.used)
				}
			}
			if g.uvmMaps.Load() != 0 || len(f.maps) != 0 || g.account.hasZombies() {
				t.Errorf("%d mappings are left, zombies %v", g.uvmMaps.Load(), g.account.hasZombies())
			}
		})
	}
}

// TestUVMFree: a range that is freed gives back all that is mapped in it on any GPU, and nothing behind it. Since 590 the call does not say
// where the range ends; the guard knows what it has made.
func TestUVMFree(t *testing.T) {
	for _, version := range []string{"580.159.04", "590.48.01"} {
		t.Run(version, func(t *testing.T) {
			abi, err := rm.ForDriver(version, true)
			if err != nil {
				t.Fatal(err)
			}
			g := withClient(newFakeGuard(t, &fakeDriver{}))
			g.abi = abi
			g.cfg.Settings.MaxHostMemory.Bytes = quota.GiB
			g.account.freeObject(fakeClient, fakeMemory)
			c, _ := newFakeUVMCall(t, g)
			o, _ := uvmCall(g, rm.UVMCreateExternal, 1<<32, 8<<20, 0)
			c.do(rm.UVMCreateExternal, o)
			for i, m := range []uvmMap{
				{gpu: gpuUUID{1}, addresses: addresses{1 << 32, 1<<32 + 4<<20}},
				{gpu: gpuUUID{1}, addresses: addresses{1<<32 + 6<<20, 1<<32 + 8<<20}},
				{gpu: gpuUUID{1}, addresses: addresses{1<<32 + 8<<20, 1<<32 + 9<<20}}, // the next range
				{gpu: gpuUUID{2}, addresses: addresses{1<<32 + 2<<20, 1<<32 + 4<<20}},
				{gpu: gpuUUID{2}, addresses: addresses{1<<32 - 2<<20, 1 << 32}}, // the one before
			} {
				memory := uint32(0x5c000700 + i)
				g.account.addObject(fakeClient, memoryObject(memory, fakeDevice), 0, 0, quota.MiB<<i)
				m.charge = g.account.holdOf(fakeClient, memory)
				g.recordMapping(c.file, m)
				g.account.freeObject(fakeClient, memory)
			}
			wantUsage(t, g.account, 0, 31*quota.MiB)
			o, _ = uvmCall(g, rm.UVMFree, 1<<32, 8<<20, 0)
			c.do(rm.UVMFree, o)
			wantUsage(t, g.account, 0, (4+16)*quota.MiB)
		})
	}
}

// TestFullMaps: an address space of which no more mappings can be remembered has none cut in two, and those that it has can be unmapped.
func TestFullMaps(t *testing.T) {
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	c, _ := newFakeUVMCall(t, g)
	g.recordMapping(c.file, uvmMap{addresses: addresses{1 << 32, 1<<32 + 8<<20}, charge: g.account.holdOf(fakeClient, fakeMemory)})
	g.uvmMaps.Add(g.account.mostUVMMaps() - 1)
	unmap := func(base, length uint64) string {
		o, form := uvmCall(g, rm.UVMUnmapExternal, base, length, 0)
		c.do(rm.UVMUnmapExternal, o)
		return rm.StatusName(rm.U32(o, form.Status))
	}
	if s := unmap(1<<32+1<<20, 1<<20); s != "NV_ERR_INSUFFICIENT_RESOURCES" {
		t.Error("a mapping is cut in two: ", s)
	}
	for _, base := range []uint64{1 << 32, 1<<32 + 4<<20} {
		if s := unmap(base, 4<<20); s != "NV_OK" {
			t.Error("half of a mapping: ", s)
		}
	}
	if len(c.file.maps) != 0 {
		t.Error("something is left")
	}
}

// TestManyMaps: UVM has a handle of the node's for each mapping, so a container may have so many in all its address spaces together.
func TestManyMaps(t *testing.T) {
	g := withClient(newFakeGuard(t, &fakeDriver{}))
	most := g.account.mostUVMMaps()
	if want := int64(someUVMMaps + testLimit/quota.MiB); most != want {
		t.Fatalf("%d mappings, want %d", most, want)
	}
	one, ctl := newFakeUVMCall(t, g)
	two, _ := newFakeUVMCall(t, g)
	two.file = followedUVM(t, g)
	mapAt := func(c *fakeCall, base uint64) uint32 {
		o, form := uvmCall(g, rm.UVMMapExternal, base, 2<<20, ctl)
		rm.PutU32(o, form.Object, addMemory(g, uint32(base>>32)%256)) // one piece has so many references only
		c.do(rm.UVMMapExternal, o)
		return rm.U32(o, form.Status)
	}
	for i := range most / 2 {
		if s := mapAt(one, uint64(1+i)<<32) | mapAt(two, uint64(1+i)<<32); s != rm.StatusOK {
			t.Fatalf("mapping %d: %s", i, rm.StatusName(s))
		}
	}
	mapAt(two, uint64(1+most)<<32) // where the bound is odd
	if s := mapAt(one, uint64(2+most)<<32); s != rm.StatusInsufficientResources {
		t.Errorf("one too many: %s", rm.StatusName(s))
	}
	g.endUVM(one.file)
	if n := g.uvmMaps.Load(); n != most/2+most%2 {
		t.Errorf("%d mappings are left, want the other's %d", n, most/2+most%2)
	}
	if s := mapAt(two, uint64(2+most)<<32); s != rm.StatusOK {
		t.Errorf("again: %s", rm.StatusName(s))
	}
	g.account.gpus[0].limit = 1 << 50
	if most := g.account.mostUVMMaps(); most != maxUVMMaps {
		t.Errorf("a large card: %d", most)
	}
}

// TestUVMRefusals never reach the driver.
func TestUVMRefusals(t *testing.T) {
	d := &fakeDriver{}
	g := withClient(newFakeGuard(t, d))
	c, ctl := newFakeUVMCall(t, g)
	null, _ := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	defer unix.Close(null)
	for _, x := range []struct {
		name   string
		cmd    uint32
		fd     int
		client uint32
	}{
		{"another container's client", rm.UVMMapExternal, ctl, 0xc1d00000},
		{"a descriptor that is not nvidiactl", rm.UVMMapExternal, null, fakeClient},
		{"a descriptor that is not open", rm.UVMMapExternal, 9999, fakeClient},
		{"a window into the memory", rm.UVMAllocDeviceP2P, ctl, fakeClient},
	} {
		o, form := uvmCall(g, x.cmd, 1<<32, 8<<20, x.fd)
		rm.PutU32(o, form.Client, x.client)
		if rep := c.do(x.cmd, o); rep != replyDone || rm.U32(o, form.Status) == 0 || len(d.calls) != 0 {
			t.Errorf("%s: %+v, status %s, %d driver calls", x.name, rep, rm.StatusName(rm.U32(o, form.Status)), len(d.calls))
		}
	}
}

// TestEndUVM frees what is mapped in an address space that no process has any more, and only that. On each GPU the channels are stopped
// before anything is unmapped, which UVM_UNREGISTER_GPU_VASPACE does; only where that fails is each mapping taken away.
func TestEndUVM(t *testing.T) {
	for _, x := range []struct {
		name    string
		refuses bool
		want    []uint32
	}{
		{"stopped and unmapped by UVM", false, []uint32{rm.UVMUnregisterVASpace, rm.UVMUnregisterVASpace}},
		{"no longer registered", true, []uint32{rm.UVMUnregisterVASpace, rm.UVMUnmapExternal, rm.UVMUnmapExternal,
			rm.UVMUnregisterVASpace, rm.UVMUnmapExternal}},
	} {
		t.Run(x.name, func(t *testing.T) {
			d := &fakeDriver{answer: func(_ Target, call *rm.Call) syscall.Errno {
				if call.Cmd == rm.UVMUnregisterVASpace && x.refuses {
					rm.PutU32(call.Outer, rm.UVMUnregisterStatus, rm.StatusInvalidDevice)
				}
				return 0
			}}
			g := withClient(newFakeGuard(t, d))
			c, ctl := newFakeUVMCall(t, g)
			c.file = followedUVM(t, g)
			for i, gpu := range []byte{1, 1, 2} {
				o, _ := uvmCall(g, rm.UVMMapExternal, uint64(i+1)<<33, 8<<20, ctl)
				o[uvmMapAttributes] = gpu
				c.do(rm.UVMMapExternal, o)
			}
			g.account.freeObject(fakeClient, fakeMemory)
			wantUsage(t, g.account, 0, 8*quota.MiB+2*quota.Bytes(rm.UVMTables(8<<20, 64<<10))) // page tables, from the second mapping on
			d.calls = nil
			g.endUVM(c.file)
			wantUsage(t, g.account, 0, 0)
			stop, unmap := slices.Index(d.calls, rm.UVMUnregisterVASpace), slices.Index(d.calls, rm.UVMUnmapExternal)
			if unmap >= 0 && unmap < stop {
				t.Error("unmapped before the channels were stopped")
			}
			slices.Sort(d.calls) // the order of the mappings is not given
			slices.Sort(x.want)
			if !slices.Equal(d.calls, x.want) || g.files.count() != 0 || g.account.hasZombies() {
				t.Errorf("calls %d, want %d; %d files", d.calls, x.want, g.files.count())
			}
		})
	}
}

// followedUVM is a file that stands for nvidia-uvm, which only the guard has open.
func followedUVM(t *testing.T, g *Guard) *file {
	t.Helper()
	fd, err := unix.Open(filepath.Join(t.TempDir(), "uvm"), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	f, err := g.files.follow(fd, node{kind: nodeUVM}, unnamed)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestRMOnUVM: nothing that RM would act on may run natively on a UVM file, whose place a nvidiactl file could take.
func TestRMOnUVM(t *testing.T) {
	g := newFakeGuard(t, &fakeDriver{})
	c := newFakeCall(t, g, fakeUVM)
	for _, cmd := range []uint32{0xc030462b, 0xc020462a, 0xc01046d3, 0xc00446c9} {
		w := &worker{guard: g, mem: c.mem}
		notif := &seccompNotif{Arch: nativeArch, Args: [6]uint64{0, uint64(cmd)}}
		if rep := w.handle(&trappedCall{guard: g, notif: notif, task: c.task, mem: c.mem, fd: c.fd}); rep.resume || rep.errno == 0 {
			t.Errorf("%#x: %+v", cmd, rep)
		}
	}
}
