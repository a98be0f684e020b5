package guard

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// UVM maps memory of an RM client into a UVM address space; the mapping holds the memory even after RM_FREE of its handle
// (uvm_map_external_allocation dups it into UVM's own client). If the mapping call ran in the task, a racing thread could
// make it name another object than the one the guard saw, free that object's handle, and keep uncharged memory. So the
// guard makes these calls itself: UVM takes the address space from the file, not from the caller (uvm.c, uvm_ioctl).
//
// RM lets UVM dup an object only for the process that owns it (cliresShareCallback_IMPL compares with the current process),
// which is not the guard; so the object is opened for the moment of the call.

// uvmMap is an external mapping on one GPU that holds memory, or is sparse. GPUs have their own at one address.
type uvmMap struct {
	gpu    gpuUUID
	length uint64
	charge *charge // of what is mapped; nil: nothing that is charged
	tables *charge // of the page tables; nil: not charged
}

type gpuUUID [16]byte

// uvmUnmapGPU is the offset of the GPU in UVM_UNMAP_EXTERNAL_PARAMS (uvm_ioctl.h).
const uvmUnmapGPU = 16

// maxUVMMaps bounds the mappings remembered for one address space.
const maxUVMMaps = 1 << 18

// uvmCalls are the rules of calls on nvidia-uvm.
var uvmCalls = map[uint32]rule{
	rm.UVMMapExternal:    {clients: mapClient, locks: true, check: (*Guard).checkMap},
	rm.UVMMapSparse:      {check: (*Guard).checkSparse},
	rm.UVMFree:           {check: (*Guard).checkUnmap},
	rm.UVMUnmapExternal:  {check: (*Guard).checkUnmap},
	rm.UVMAllocDeviceP2P: {check: denyDeviceP2P},
}

// onUVM handles a UVM call that makes or drops a reference to device memory.
func (g *Guard) onUVM(c *trappedCall, cmd uint32) reply {
	r, known := uvmCalls[cmd]
	form, ok := g.abi.UVM(cmd)
	if !ok || !known {
		return fail(unix.EINVAL)
	}
	if cmd == rm.UVMMapExternal {
		ok = c.loadMap(cmd, form)
	} else {
		ok = c.load(cmd, c.n.Args[2], form.Size)
	}
	if !ok {
		return fail(unix.EFAULT)
	}
	return g.serveBy(r, c)
}

// form is the layout of a UVM call.
func (c *trappedCall) form() rm.UVMForm {
	f, _ := c.g.abi.UVM(c.call.Cmd)
	return f
}

// denyDeviceP2P: a BAR1 window that holds memory too. Nothing that a container needs.
func denyDeviceP2P(_ *Guard, c *trappedCall) plan {
	return answer(c.deny(rm.StatusNotSupported, "uvmp2p", "denied UVM_ALLOC_DEVICE_P2P"))
}

// checkUnmap: UVM_UNMAP_EXTERNAL, and UVM_FREE, which takes the range that starts there as a whole: libcuda maps from the start of a range,
// and a mapping from the middle of one stays charged until its address space ends.
func (g *Guard) checkUnmap(c *trappedCall) plan {
	// An address space without mappings of the guard's is not followed: then the call drops nothing that is charged.
	f := c.file
	if f == nil {
		f = g.files.find(c.fd, nodeUVM)
	}
	if f == nil {
		return plan{ask: true, settle: func() { c.lost = true }}
	}
	f.uvm.Lock()
	return plan{ask: true, done: f.uvm.Unlock, settle: func() {
		c.lost = true
		o, form := c.call.Outer, c.form()
		var length uint64
		var gpu gpuUUID
		if c.call.Cmd == rm.UVMUnmapExternal {
			length = rm.U64(o, form.Length)
			copy(gpu[:], o[uvmUnmapGPU:])
		}
		g.uvmUnmapped(f, rm.U64(o, form.Base), length, gpu)
	}}
}

// Of UVM_MAP_EXTERNAL_ALLOCATION_PARAMS: base, length and offset are followed by room for the attributes of 256 GPUs, of
// which gpuAttributesCount, before rmCtrlFd, are meant (uvm_ioctl.h, UvmGpuMappingAttributes).
const (
	uvmMapAttributes     = 24
	uvmMapAttributesSize = 36
	uvmMapFewGPUs        = 8
	uvmMapMaxGPUs        = 32 // UVM_MAX_GPUS of the branches with the short form; no machine has more
	uvmMapCount          = 8  // bytes before rmCtrlFd
)

// loadMap copies the parameters of a mapping. Nearly all of their nine KiB is room for more GPUs than a machine has, so
// only the ends are copied. UVM does not look at the rest.
func (c *trappedCall) loadMap(cmd uint32, form rm.UVMForm) bool {
	b := c.mem.take(form.Size)
	if b == nil {
		return false
	}
	addr, tail := c.n.Args[2], form.FD-uvmMapCount
	if addr > ^uint64(0)-uint64(form.Size) ||
		!readTwo(c.k.tid, addr, b[:uvmMapAttributes+uvmMapFewGPUs*uvmMapAttributesSize], addr+uint64(tail), b[tail:]) {
		return false
	}
	if rm.U64(b, tail) > uvmMapFewGPUs && !readMemory(c.k.tid, addr, b) {
		return false
	}
	c.call.Cmd, c.call.Outer, c.outerAddr, c.statusOnly = cmd, b, addr, form.Status
	return true
}

func mapClient(c *trappedCall) (dst, src uint32) {
	h := rm.U32(c.call.Outer, c.form().Client)
	return h, h
}

// checkMap: an object of one of the container's clients is mapped.
func (g *Guard) checkMap(c *trappedCall) plan {
	o, form := c.call.Outer, c.form()
	client, memory := rm.U32(o, form.Client), rm.U32(o, form.Memory)
	obj, ok := g.account.lookup(client, memory)
	if !ok {
		obj.handle = memory // host memory of RM_ALLOC_MEMORY, which runs in the task: the guard has not seen it made
	}
	gpus := rm.U64(o, form.FD-uvmMapCount)
	if gpus > uvmMapMaxGPUs {
		return answer(c.status(rm.StatusInsufficientResources))
	}
	number := rm.U32(o, form.FD)
	fd, as, err := c.controlFile(number)
	if err != nil {
		return answer(c.status(rm.StatusInvalidArgument))
	}
	maps := make([]uvmMap, max(1, int(gpus)))
	for i := range maps {
		maps[i].length = rm.U64(o, form.Length)
		copy(maps[i].gpu[:], o[uvmMapAttributes+i*uvmMapAttributesSize:])
	}
	f, status := g.lockToMap(c, maps, g.account.mapPage(client, memory))
	if f == nil {
		_ = unix.Close(fd)
		return answer(c.status(status))
	}
	rm.PutU32(o, form.FD, as)
	p := plan{ask: true, done: func() {
		rm.PutU32(o, form.FD, number)
		f.uvm.Unlock()
		_ = unix.Close(fd)
	}}
	ch := g.account.hold(client, memory)
	// The owner of the control file vouches for the client: RM refuses a client that is not that file's.
	p.opened = &opening{Target{FD: fd, File: as, PID: c.k.proc.tgid, TID: c.k.tid}, client, obj}
	p.cancel = func() {
		g.account.unhold(ch)
		g.dropTables(maps)
	}
	p.settle = func() {
		for _, m := range maps {
			if m.charge = g.account.hold(client, memory); m.charge != nil || m.tables != nil {
				g.uvmMapped(f, rm.U64(o, form.Base), m)
			}
		}
		g.account.unhold(ch) // each mapping holds it now
	}
	return p
}

// lockUVM follows the call's address space and keeps it from being changed or ended meanwhile. One that has been torn down, since no process
// had it (it was in a socket), is followed anew.
func (c *trappedCall) lockUVM() (*file, error) {
	for {
		if c.file == nil {
			if err := c.followFile(); err != nil {
				return nil, err
			}
		}
		c.file.uvm.Lock()
		if !c.file.ended {
			return c.file, nil
		}
		c.file.uvm.Unlock()
		c.file = nil
	}
}

// uvmMapped records a mapping. It replaces what that GPU had there (uvm_map_external_allocation_on_gpu); of a longer one
// the rest stays.
func (g *Guard) uvmMapped(f *file, base uint64, m uvmMap) {
	f.mu.Lock()
	var gone uvmMap
	list := f.maps[base]
	for i, old := range list {
		if old.gpu != m.gpu {
			continue
		}
		list = slices.Delete(list, i, i+1)
		if rest := base + m.length; old.length > m.length {
			old.length -= m.length
			f.maps[rest] = append(f.maps[rest], old)
		} else {
			gone = old
			f.mapped--
		}
		break
	}
	f.maps[base] = append(list, m)
	f.mapped++
	f.mu.Unlock()
	g.unmapped(gone)
}

// unmapped lets go of what a mapping held.
func (g *Guard) unmapped(m uvmMap) {
	g.account.unhold(m.charge)
	g.account.unhold(m.tables)
}

// whileShared calls f while an object is open to every client, as it must be for the guard to refer to it. A status other than OK,
// or an errno, says that it could not be opened; f was not called then.
func (g *Guard) whileShared(t Target, client uint32, obj object, f func()) (uint32, unix.Errno) {
	if obj.sharedWithAll {
		f()
		return rm.StatusOK, 0
	}
	if s, e := g.share(t, client, obj.handle, 0); e != 0 || s != rm.StatusOK {
		return s, e
	}
	f()
	if s, e := g.share(t, client, obj.handle, shareActionRevoke); e != 0 || s != rm.StatusOK {
		g.logOnce("unshare", "cannot close an object again that was open for a moment", "status", rm.StatusName(s), "errno", e)
	}
	return rm.StatusOK, 0
}

// share opens an object to every client, or closes it again. It adds to what the program has shared, and takes away from that: without the
// flag for it the driver first forgets the object's policies and those of its client (clientShareResource_IMPL), by which libcuda opens its
// objects to a debugger.
func (g *Guard) share(t Target, client, object uint32, action byte) (uint32, unix.Errno) {
	outer := make([]byte, rm.ShareSize)
	rm.PutU32(outer, rm.ShareClient, client)
	rm.PutU32(outer, rm.ShareObject, object)
	rm.PutU32(outer, rm.SharePolicy+rm.SharePolicyTarget, client)
	rm.PutU32(outer, rm.SharePolicy+rm.SharePolicyAccess, accessDup)
	outer[rm.SharePolicy+rm.SharePolicyType] = shareTypeAll
	outer[rm.SharePolicy+rm.SharePolicyAction] = shareActionCompose | action
	e := g.driver.Exec(t, &rm.Call{Cmd: shareTypeCode, Outer: outer})
	return rm.U32(outer, rm.ShareStatus), e
}

// uvmUnmapped drops the mappings at base. With a length, only that of a GPU and only if it was covered whole: of a split
// mapping a part still holds the memory.
func (g *Guard) uvmUnmapped(f *file, base, length uint64, gpu gpuUUID) {
	f.mu.Lock()
	var gone []uvmMap
	left := slices.DeleteFunc(f.maps[base], func(m uvmMap) bool {
		drop := length == 0 || m.gpu == gpu && m.length <= length
		if drop {
			gone = append(gone, m)
		}
		return drop
	})
	if f.maps[base] = left; len(left) == 0 {
		delete(f.maps, base)
	}
	f.mapped -= len(gone)
	f.mu.Unlock()
	for _, m := range gone {
		g.unmapped(m)
	}
}
