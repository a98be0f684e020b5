// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"math"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

func TestNewRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"no GPU":         {func(c *Config) { c.GPUs = nil }, "no GPU"},
		"bus id":         {func(c *Config) { c.GPUs[0].BusID = "one" }, "PCI address"},
		"uuid":           {func(c *Config) { c.GPUs[0].UUID = "1" }, "32 hexadecimal"},
		"same minor":     {func(c *Config) { c.GPUs[1].Minor = 0 }, "another GPU's"},
		"driver version": {func(c *Config) { c.DriverVersion = "1.2" }, "rm:"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig()
			c.change(&cfg)
			if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
		})
	}
}

func TestGranularity(t *testing.T) {
	for _, c := range []struct {
		size uint64
		want quota.Bytes
		ok   bool
	}{
		{1, 64 * quota.KiB, true}, {64 << 10, 64 * quota.KiB, true}, {64<<10 + 1, 128 * quota.KiB, true},
		{2<<20 - 1, 2 * quota.MiB, true}, {2 << 20, 2 * quota.MiB, true}, {2<<20 + 1, 4 * quota.MiB, true},
		{1 << 63, 1 << 63, true}, {math.MaxUint64, 0, false}, {math.MaxUint64 - 2<<20 + 1, 0, false},
	} {
		if got, _, ok := granularity(c.size); got != c.want || ok != c.ok {
			t.Errorf("granularity(%#x) = %v, %v; want %v, %v", c.size, got, ok, c.want, c.ok)
		}
	}
}

func TestCapacity(t *testing.T) {
	d := newDriver(t)
	u := newGPUUser(t, d.Session([]int{0}), 100)
	var sum quota.Bytes
	for {
		_, granted, st := u.memory(1 << 30)
		if st == rm.StatusNoMemory {
			break
		}
		if st != 0 {
			t.Fatalf("status %#x", st)
		}
		sum += granted
	}
	if sum != 14*quota.GiB {
		t.Errorf("14.75 GiB gave %v in GiB", sum)
	}
	wantUsed(t, d, sum)
	for _, size := range []uint64{0, 1 << 40, math.MaxUint64, 1 << 63} {
		if _, _, st := u.memory(size); st == 0 {
			t.Errorf("size %#x was granted", size)
		}
	}
	wantUsed(t, d, sum)
	if st := u.free(u.dev); st != 0 { // a subtree
		t.Fatalf("free of the device: %#x", st)
	}
	wantUsed(t, d, 0)
	if s := d.Snapshot(); s.Objects != 1 {
		t.Errorf("%d objects left, want the client", s.Objects)
	}
}

func TestStrictClient(t *testing.T) {
	d := newDriver(t)
	a := newGPUUser(t, d.Session([]int{0}), 1)
	b := newGPUUser(t, d.Session([]int{0}), 2)
	if b.client != a.client+1 || a.client != 0xc1d00000 {
		t.Errorf("clients %#x and %#x are not consecutive from 0xc1d00000", a.client, b.client)
	}
	thief := *b
	thief.client = a.client
	for what, st := range map[string]uint32{
		"free":    thief.free(a.dev),
		"control": thief.control(a.subd, 0x20801303, make([]byte, 1028)),
		"client":  thief.free(a.client),
	} {
		if st != rm.StatusInvalidClient {
			t.Errorf("%s of a foreign client: %#x, want INVALID_CLIENT", what, st)
		}
	}
	if _, _, st := thief.memory(1 << 20); st != rm.StatusInvalidClient {
		t.Errorf("alloc of a foreign client: %#x", st)
	}
	// The same session on another file is a stranger too, until REGISTER_FD lends the identity.
	f, err := a.s.OpenFile(Control, 0)
	if err != nil {
		t.Fatal(err)
	}
	other := *a
	other.file = f
	if st := other.control(a.client, 0x201, make([]byte, 128)); st != rm.StatusInvalidClient {
		t.Errorf("another file: %#x, want INVALID_CLIENT", st)
	}
	reg := make([]byte, 4)
	rm.PutU32(reg, 0, uint32(a.file))
	if e := other.call(rm.EscRegisterFD, reg, 0, nil); e != 0 {
		t.Fatal(e)
	}
	if st := other.control(a.client, 0x201, make([]byte, 128)); st != 0 {
		t.Errorf("after REGISTER_FD: %#x", st)
	}
	// But not of another session's file.
	g, _ := b.s.OpenFile(Control, 0)
	rogue := *b
	rogue.file = g
	if e := rogue.call(rm.EscRegisterFD, reg, 0, nil); e != syscall.EINVAL {
		t.Errorf("REGISTER_FD of a foreign file: %v", e)
	}
}

func TestDeviceNeedsNode(t *testing.T) {
	d := newDriver(t)
	u := newUser(t, d.Session([]int{3}), 1) // has GPU 1 only
	dev := make([]byte, 56)
	if _, st := u.alloc(u.client, u.handle(), classDevice, dev); st != rm.StatusInsufficientPermissions {
		t.Errorf("device 0 without its node: %#x", st)
	}
	rm.PutU32(dev, rm.DeviceID, 1)
	if _, st := u.alloc(u.client, u.handle(), classDevice, dev); st != 0 {
		t.Errorf("device 1: %#x", st)
	}
	rm.PutU32(dev, rm.DeviceID, 2)
	if _, st := u.alloc(u.client, u.handle(), classDevice, dev); st != rm.StatusInvalidDevice {
		t.Errorf("device 2: %#x", st)
	}
	if _, err := u.s.OpenFile(GPUNode, 0); err == nil {
		t.Error("the session opened a node that it does not have")
	}
}

func TestHandles(t *testing.T) {
	d := newDriver(t)
	u := newGPUUser(t, d.Session([]int{0}), 1)
	p := make([]byte, 128)
	rm.PutU32(p, rm.MemoryOwner, 1)
	rm.PutU64(p, rm.MemorySize, 1<<20)
	if _, st := u.alloc(u.dev, u.subd, classMemoryLocal, p); st != rm.StatusInsertDuplicateName {
		t.Errorf("handle in use: %#x", st)
	}
	wantUsed(t, d, 0)
	h, st := u.alloc(u.dev, 0, classMemoryLocal, p)
	if st != 0 || h == 0 {
		t.Errorf("chosen handle: %#x, status %#x", h, st)
	}
	if rm.U64(p, rm.MemoryLimit) != 1<<20-1 {
		t.Errorf("limit %#x", rm.U64(p, rm.MemoryLimit))
	}
	if st := u.free(h); st != 0 {
		t.Fatalf("free: %#x", st)
	}
	if st := u.free(h); st != 0 { // as on the real driver
		t.Errorf("second free: %#x", st)
	}
	wantUsed(t, d, 0)
	// libcuda uses a handle again right after its free.
	if h2, st := u.alloc(u.dev, h, classMemoryLocal, p); st != 0 || h2 != h {
		t.Errorf("same handle again: %#x, status %#x", h2, st)
	}
}

func TestMemoryChecks(t *testing.T) {
	d := newDriver(t)
	u := newGPUUser(t, d.Session([]int{0}), 1)
	for name, c := range map[string]struct {
		parent uint32
		attr   uint32
		flags  uint32
		want   uint32
	}{
		"device":    {u.dev, 0, 0, 0},
		"subdevice": {u.subd, 0, 0, 0},
		"client":    {u.client, 0, 0, rm.StatusInvalidObjectParent},
		"nobody":    {0x1234, 0, 0, rm.StatusObjectNotFound},
		"host":      {u.dev, 1 << 25, 0, rm.StatusInvalidArgument},
		"virtual":   {u.dev, 0, rm.MemoryFlagVirtual, rm.StatusInvalidArgument},
	} {
		p := make([]byte, 128)
		rm.PutU32(p, rm.MemoryOwner, 1)
		rm.PutU64(p, rm.MemorySize, 1)
		rm.PutU32(p, rm.MemoryAttr, c.attr)
		rm.PutU32(p, rm.MemoryFlags, c.flags)
		if _, st := u.alloc(c.parent, 0, classMemoryLocal, p); st != c.want {
			t.Errorf("%s: %#x, want %#x", name, st, c.want)
		}
	}
	wantUsed(t, d, 128*quota.KiB)
	if _, st := u.alloc(u.dev, 0, classMemoryLocal, nil); st != rm.StatusInvalidArgument {
		t.Errorf("no parameters: %#x", st)
	}
	if _, st := u.alloc(u.dev, 0, 0xdead, nil); st != rm.StatusInvalidClass {
		t.Errorf("unknown class: %#x", st)
	}
}

func TestSerialisedParameters(t *testing.T) {
	d := newDriver(t)
	u := newGPUUser(t, d.Session([]int{0}), 1)
	out := make([]byte, 48)
	rm.PutU32(out, rm.AllocRoot, u.client)
	rm.PutU32(out, rm.AllocParent, u.dev)
	rm.PutU32(out, rm.AllocClass, classMemoryLocal)
	rm.PutU32(out, 36, 1)
	p := make([]byte, 128)
	rm.PutU32(p, rm.MemoryOwner, 1)
	rm.PutU64(p, rm.MemorySize, 1<<20)
	u.call(rm.EscAlloc, out, rm.AllocParams, p)
	if st := rm.U32(out, 40); st != rm.StatusInvalidArgument {
		t.Errorf("RM_ALLOC flags 1: %#x", st)
	}
	ctl := make([]byte, rm.ControlSize)
	rm.PutU32(ctl, rm.ControlClient, u.client)
	rm.PutU32(ctl, rm.ControlObject, u.client)
	rm.PutU32(ctl, rm.ControlCmd, 0x201)
	rm.PutU32(ctl, rm.ControlFlags, 4)
	u.call(rm.EscControl, ctl, rm.ControlParams, make([]byte, 128))
	if st := rm.U32(ctl, rm.ControlStatus); st != rm.StatusInvalidArgument {
		t.Errorf("RM_CONTROL flags 4: %#x", st)
	}
}

func TestDupAndShare(t *testing.T) {
	d := newDriver(t)
	a := newGPUUser(t, d.Session([]int{0}), 1)
	same := newGPUUser(t, d.Session([]int{0}), 1)
	other := newGPUUser(t, d.Session([]int{0}), 2)
	h, granted, st := a.memory(2 << 20)
	if st != 0 {
		t.Fatalf("%#x", st)
	}
	if _, st := other.dup(a.client, h); st != rm.StatusInsufficientPermissions {
		t.Errorf("another process: %#x", st)
	}
	if _, st := other.dup(a.client, 0x99); st != rm.StatusObjectNotFound {
		t.Errorf("no such object: %#x", st)
	}
	if _, st := other.dup(0xc1d0ffff, h); st != rm.StatusInvalidClient {
		t.Errorf("no such client: %#x", st)
	}
	dup, st := same.dup(a.client, h)
	if st != 0 {
		t.Fatalf("same process: %#x", st)
	}
	a.shareWithUser()
	dup2, st := other.dup(a.client, h)
	if st != 0 {
		t.Fatalf("after the share policy: %#x", st)
	}
	wantUsed(t, d, granted)
	if ps := d.Snapshot().GPUs[0].Processes; len(ps) != 2 || ps[0].Bytes != granted || ps[1].Bytes != granted {
		t.Errorf("processes %+v", ps)
	}
	if _, st := a.dup(a.client, a.dev); st != rm.StatusInvalidArgument {
		t.Errorf("dup of a device: %#x", st)
	}
	a.free(h)
	wantUsed(t, d, granted)
	same.free(dup)
	wantUsed(t, d, granted)
	other.free(dup2)
	wantUsed(t, d, 0)
}

// TestSharePolicies: what each kind of policy opens to another process, to the owner's, and to UVM's client, which is a guard's there.
func TestSharePolicies(t *testing.T) {
	owner, other, same := &client{handle: 1, pid: 1}, &client{handle: 2, pid: 2}, &client{handle: 3, pid: 1}
	owner.root = &object{client: owner, handle: 1}
	policyBytes := func(kind uint16, target, rights uint32, action byte) []byte {
		b := make([]byte, rm.SharePolicySize)
		rm.PutU32(b, rm.SharePolicyTarget, target)
		rm.PutU32(b, rm.SharePolicyAccess, rights)
		b[rm.SharePolicyType], b[rm.SharePolicyAction] = byte(kind), action
		return b
	}
	for _, c := range []struct {
		kind             uint16
		target           uint32
		other, same, uvm bool
	}{{0, 0, false, false, false}, {1, 0, true, true, true}, {2, 0, true, true, false}, {3, 2, true, false, false},
		{3, 9, false, false, false}, {4, 2, false, true, false}, {5, 0, false, false, false}} {
		o := &object{client: owner, parent: owner.root}
		for range 2 { // of the object itself, and of its client
			in := o
			if in.shared {
				o, in = &object{client: owner, parent: owner.root}, owner.root
			}
			st := in.share(policyBytes(c.kind, c.target, accessDup, 0))
			got := []bool{o.rights(other)&accessDup != 0, o.rights(same)&accessDup != 0, o.rights(nil)&accessDup != 0}
			if want := []bool{c.other, c.same, c.uvm}; st != 0 || !slices.Equal(got, want) {
				t.Errorf("type %d target %d: status %#x, allows %v, want %v", c.kind, c.target, st, got, want)
			}
		}
		o.share(policyBytes(c.kind, c.target, accessDebug, actionCompose))
		o.share(policyBytes(c.kind, c.target, accessDup, actionCompose|actionRevoke))
		if got := o.rights(other); got&accessDup != 0 || c.other != (got == accessDebug) {
			t.Errorf("type %d: rights %d after one of two was revoked", c.kind, got)
		}
		owner.root.shared, owner.root.shares = false, nil
	}
	o := &object{client: owner, parent: owner.root}
	if o.share(policyBytes(shareAll, 0, accessDup, actionCompose)); o.rights(same)&accessDup == 0 || o.rights(other)&accessDup == 0 {
		t.Error("a policy that was added has taken the place of the default")
	}
	if o.share(policyBytes(shareClient, 9, accessDup, actionCompose|actionRequire)); o.rights(same)|o.rights(other) != 0 {
		t.Error("a requirement that fails is ignored")
	}
	if o.share(policyBytes(8, 0, 0, 0)) == 0 {
		t.Error("type 8 was accepted")
	}
}

func TestExport(t *testing.T) {
	d := newDriver(t)
	s := d.Session([]int{0})
	u := newGPUUser(t, s, 1)
	h, granted, _ := u.memory(4 << 20)
	if st := u.export(77, h); st != 0 {
		t.Fatalf("export: %#x", st)
	}
	if st := u.export(77, h); st != rm.StatusInUse {
		t.Errorf("second export to one descriptor: %#x", st)
	}
	u.free(h)
	wantUsed(t, d, granted)
	if got := d.Snapshot().GPUs[0].Processes[0].Bytes; got != 0 {
		t.Errorf("memory of a descriptor counts %v for the process", got) // as RM: kernel clients are skipped
	}
	// The number means nothing to another session.
	if _, st := newGPUUser(t, d.Session([]int{0}), 1).imported(77); st != rm.StatusInvalidParameter {
		t.Errorf("import in another session: %#x", st)
	}
	imp, st := u.imported(77)
	if st != 0 {
		t.Fatalf("import: %#x", st)
	}
	if err := s.CloseExport(77); err != nil {
		t.Fatal(err)
	}
	wantUsed(t, d, granted)
	u.free(imp)
	wantUsed(t, d, 0)
	if err := s.CloseExport(77); err != nil {
		t.Errorf("close of nothing: %v", err)
	}
	// A dying session gives its descriptors back.
	h, _, _ = u.memory(4 << 20)
	u.export(5, h)
	u.free(h)
	s.Close()
	wantUsed(t, d, 0)
	if d.Snapshot().Exports != 0 {
		t.Error("an export is left")
	}
}

func TestHeap(t *testing.T) {
	d := newDriver(t)
	u := newGPUUser(t, d.Session([]int{0}), 1)
	heap := func(fn uint32, set func(b []byte)) ([]byte, uint32) {
		b := make([]byte, rm.HeapSize)
		rm.PutU32(b, rm.HeapRoot, u.client)
		rm.PutU32(b, rm.HeapParent, u.dev)
		rm.PutU32(b, rm.HeapFunction, fn)
		set(b)
		if e := u.call(rm.EscVidHeapControl, b, 0, nil); e != 0 {
			t.Fatal(e)
		}
		return b, rm.U32(b, rm.HeapStatus)
	}
	b, st := heap(rm.HeapFnAllocSize, func(b []byte) { rm.PutU64(b, rm.HeapAllocSize, 1<<20+1) })
	if st != 0 || rm.U64(b, rm.HeapAllocSize) != 1<<20+64<<10 {
		t.Errorf("function 2: status %#x size %#x", st, rm.U64(b, rm.HeapAllocSize))
	}
	first := rm.U32(b, rm.HeapAllocMemory)
	wantUsed(t, d, quota.MiB+64*quota.KiB)
	if _, st = heap(rm.HeapFnAllocSizeRange, func(b []byte) { rm.PutU64(b, rm.HeapAllocRangeSize, 2<<20) }); st != 0 {
		t.Errorf("function 14: %#x", st)
	}
	wantUsed(t, d, 3*quota.MiB+64*quota.KiB)
	b, st = heap(rm.HeapFnAllocTiled, func(b []byte) {
		rm.PutU32(b, rm.HeapTiledHeight, 1024)
		rm.PutU32(b, rm.HeapTiledPitch, 4096)
		rm.PutU64(b, rm.HeapAllocSize, 1) // the driver multiplies
	})
	if st != 0 || rm.U64(b, rm.HeapAllocSize) != 4<<20 {
		t.Errorf("function 6: status %#x size %#x", st, rm.U64(b, rm.HeapAllocSize))
	}
	if _, st = heap(rm.HeapFnAllocSize, func(b []byte) {
		rm.PutU64(b, rm.HeapAllocSize, 1<<30)
		rm.PutU32(b, rm.HeapAllocAttr, 1<<25) // host memory
	}); st != 0 {
		t.Errorf("host memory: %#x", st)
	}
	wantUsed(t, d, 7*quota.MiB+64*quota.KiB)
	if _, st = heap(rm.HeapFnFree, func(b []byte) { rm.PutU32(b, rm.HeapFreeMemory, first) }); st != 0 {
		t.Errorf("free: %#x", st)
	}
	wantUsed(t, d, 6*quota.MiB)
	b, st = heap(rm.HeapFnInfo, func([]byte) {})
	if total, free := rm.U64(b, rm.HeapTotal), rm.U64(b, rm.HeapFree); st != 0 || total != 15109<<20 || free != 15103<<20 {
		t.Errorf("info: status %#x total %d free %d", st, total, free)
	}
	if _, st = heap(27, func([]byte) {}); st != rm.StatusNotSupported {
		t.Errorf("function 27: %#x", st)
	}
}

// TestGlobalSpace: what the driver lets anybody do with address spaces that are not its own. Two users are in one if only the first gets an
// address.
func TestGlobalSpace(t *testing.T) {
	const address = 1 << 40
	d := newDriver(t)
	open := func() *user { return newUser(t, d.Session([]int{0}), 1) }
	device := func(u *user, share uint32) *user {
		p := make([]byte, 56)
		rm.PutU32(p, rm.DeviceClientShare, share)
		u.dev = u.must(u.alloc(u.client, u.handle(), classDevice, p))
		return u
	}
	take := func(u *user, space uint32) uint32 {
		p := make([]byte, 128)
		rm.PutU32(p, rm.MemoryFlags, rm.MemoryFlagVirtual|rm.MemoryFlagLazy|rm.MemoryFlagFixed)
		rm.PutU32(p, rm.MemoryOwner, 1)
		rm.PutU64(p, rm.MemorySize, 2<<20)
		rm.PutU64(p, rm.MemoryOffset, address)
		rm.PutU32(p, rm.MemoryVASpace, space)
		_, st := u.alloc(u.dev, u.handle(), classMemoryVirtual, p)
		return st
	}
	space := func(u *user, index uint32) uint32 {
		p := make([]byte, 56)
		rm.PutU32(p, rm.VASpaceIndex, index)
		return u.must(u.alloc(u.dev, u.handle(), classVASpace, p))
	}
	victim := device(open(), 0)
	if st := take(victim, 0); st != rm.StatusOK {
		t.Fatalf("the first: %#x", st)
	}
	own := open()
	device(own, own.client)
	for _, x := range []struct {
		name string
		st   uint32
		want uint32
	}{
		{"another container with 0", take(device(open(), 0), 0), rm.StatusNoMemory},
		{"another container with the first's client", take(device(open(), victim.client), 0), rm.StatusNoMemory},
		{"the GPU's by index", take(own, space(own, rm.VASpaceGlobal)), rm.StatusNoMemory},
		{"a new one", take(own, space(own, rm.VASpaceNew)), rm.StatusOK},
		{"its own", take(own, 0), rm.StatusOK},
		{"its own by index", take(own, space(own, rm.VASpaceDevice)), rm.StatusNoMemory},
	} {
		if x.st != x.want {
			t.Errorf("%s: %#x, want %#x", x.name, x.st, x.want)
		}
	}
	a, b := open(), open()
	device(a, b.client)
	device(b, a.client)
	if st := take(a, 0); st != rm.StatusInvalidState {
		t.Errorf("clients that name each other: %#x", st)
	}
	victim.s.Close()
	if st := take(device(open(), 0), 0); st != rm.StatusOK {
		t.Errorf("after the first has ended: %#x", st)
	}
}

func TestShapes(t *testing.T) {
	d := newDriver(t)
	s := d.Session([]int{0})
	u := newGPUUser(t, s, 1)
	gpu, err := s.OpenFile(GPUNode, 0)
	if err != nil {
		t.Fatal(err)
	}
	uvm, err := s.OpenFile(UVM, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		file FileID
		nr   uint32
		size int
		want syscall.Errno
	}{
		{"alloc of a wrong size", u.file, rm.EscAlloc, 44, syscall.EINVAL},
		{"alloc on a GPU node", gpu, rm.EscAlloc, 48, syscall.EINVAL},
		{"free of a wrong size", u.file, rm.EscFree, 20, syscall.EINVAL},
		{"control on a GPU node", gpu, rm.EscControl, 32, syscall.EINVAL},
		{"old alloc on nvidiactl", u.file, rm.EscAllocMemory, 56, syscall.EINVAL},
		{"old alloc", gpu, rm.EscAllocMemory, 56, 0},
		{"unknown number", u.file, 0xff, 4, syscall.EINVAL},
		{"XFER", u.file, rm.EscXferCmd, 16, syscall.EINVAL},
		{"on nvidia-uvm", uvm, rm.EscFree, 16, syscall.ENOTTY},
		{"unknown file", 9999, rm.EscFree, 16, syscall.EBADF},
		{"too few cards", u.file, rm.EscCardInfo, 72, syscall.EINVAL},
	} {
		if got := s.Ioctl(c.file, 1, 1, &rm.Call{Cmd: cmd(c.nr, c.size), Outer: make([]byte, c.size)}); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
	// The type byte means nothing.
	out := make([]byte, rm.FreeSize)
	rm.PutU32(out, 0, u.client)
	rm.PutU32(out, 8, u.subd)
	if e := s.Ioctl(u.file, 1, 1, &rm.Call{Cmd: 16<<16 | 'X'<<8 | rm.EscFree, Outer: out}); e != 0 || rm.U32(out, 12) != 0 {
		t.Errorf("another type byte: %v, status %#x", e, rm.U32(out, 12))
	}
}

func TestConcurrentUse(t *testing.T) {
	d := newDriver(t)
	s := d.Session([]int{0})
	var wg sync.WaitGroup
	for pid := range int32(8) {
		u := newGPUUser(t, s, pid)
		wg.Go(func() {
			for range 200 {
				h, _, st := u.memory(3 << 20)
				if st != 0 {
					t.Errorf("alloc: %#x", st)
					return
				}
				d.Snapshot()
				if st := u.free(h); st != 0 {
					t.Errorf("free: %#x", st)
					return
				}
			}
		})
	}
	wg.Wait()
	wantUsed(t, d, 0)
	s.Close()
	if s := d.Snapshot(); s.Clients != 0 || s.Files != 0 || s.Objects != 0 {
		t.Errorf("left over: %+v", s)
	}
}
