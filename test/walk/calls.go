// SPDX-License-Identifier: Apache-2.0

package walk

import "github.com/opencgpu/cgpu/pkg/rm"

// Classes.
const (
	classRoot      = 0x41
	classSystem    = 0x3e
	classVidmem    = 0x40
	classPinned    = 0x71
	classDevice    = 0x80
	classSubdevice = 0x2080
	classVirtual   = 0x50a0
	classShare     = 0x9067
	classVASpace   = 0x90f1
	classGroup     = 0xa06c
	classChannel   = 0xc86f
	classCopy      = 0xc8b5
	classCompute   = 0xcbc0
)

// Escapes that pkg/rm does not name, and their structures (NVOS46_PARAMETERS and NVOS47_PARAMETERS since 570).
const (
	escMapDMA    = 0x57
	escUnmapDMA  = 0x58
	mapDMASize   = 64
	unmapDMASize = 48
)

// UVM calls without a form in pkg/rm (uvm_ioctl.h).
const (
	uvmUnregisterChannelSize = 28
	uvmMapSparse             = 74
	uvmMapSparseSize         = 40
	uvmCreateSize            = 24
)

// groupVASpace is where NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS names an address space.
const groupVASpace = 8

// firstHandle is the handle of o0.
const firstHandle = 0x5c000000

func handle(o int) uint32 { return firstHandle + uint32(o) }

// call is an ioctl that an operation comes to.
type call struct {
	fd     int
	cmd    uint32
	outer  []byte
	blocks []block
	status int // offset of the status word; -1: none
	// done is called with the structures that came back, if the call was accepted.
	done func(outer []byte, blocks [][]byte)
}

// refer says what an operation needs, and is counted on to be there if calls must be well-formed.
type refer struct {
	w  *walk
	op Op
	p  *process
	ok bool
}

// file is the descriptor that the process has of an argument.
func (r *refer) file(i int) int {
	fd, ok := r.p.files[r.op.n(i)]
	if !ok {
		r.ok = false
		return -1
	}
	return fd
}

// client is the handle of a client, and a descriptor of its file.
func (r *refer) client(i int) (uint32, int) {
	c := r.w.clients[r.op.n(i)]
	if c == nil {
		r.ok = false
		return 0xc1d0ffff, r.anyFile()
	}
	fd, ok := r.p.files[c.file]
	if !ok {
		r.ok = false
		return c.handle, r.anyFile()
	}
	return c.handle, fd
}

// anyFile is a file of the process for a call that is wrong anyway.
func (r *refer) anyFile() int {
	fd := -1
	for f, d := range r.p.files {
		if r.w.kinds[f] == "ctl" && (fd < 0 || d < fd) {
			fd = d
		}
	}
	return fd
}

// object is the handle of an object of a client.
func (r *refer) object(client, i int) uint32 {
	if !r.w.objects[[2]int{r.op.n(client), r.op.n(i)}] {
		r.ok = false
	}
	return handle(r.op.n(i))
}

// parent is an object of the client that the call names first, or the client itself.
func (r *refer) parent(i int) uint32 {
	if r.op.arg(i)[0] == 'c' {
		h, _ := r.client(i)
		return h
	}
	return r.object(0, i)
}

func words(size int, pairs ...uint32) []byte {
	b := make([]byte, size)
	for i := 0; i+1 < len(pairs); i += 2 {
		rm.PutU32(b, int(pairs[i]), pairs[i+1])
	}
	return b
}

// made notes that the object is there that the call names second, of the client that it names first.
func (r *refer) made() func([]byte, [][]byte) {
	key := [2]int{r.op.n(0), r.op.n(1)}
	return func([]byte, [][]byte) { r.w.objects[key] = true }
}

// calls are the operations that come to one ioctl of the process. The comments tell the arguments.
var calls = map[string]func(*refer) call{
	// root FILE CLIENT
	"root": func(r *refer) call {
		f, c := r.op.n(0), r.op.n(1)
		out := words(48, rm.AllocClass, classRoot)
		return call{fd: r.file(0), cmd: escape(rm.EscAlloc, 48), outer: out, status: 40, done: func(out []byte, _ [][]byte) {
			r.w.clients[c] = &client{handle: rm.U32(out, rm.AllocObject), file: f}
		}}
	},
	// alloc CLIENT OBJECT PARENT CLASS [SIZE | ENGINE] [ADDRESSES]
	"alloc": func(r *refer) call {
		client, fd := r.client(0)
		class := uint32(r.op.size(3))
		out := words(48, rm.AllocRoot, client, rm.AllocParent, r.parent(2), rm.AllocObject, handle(r.op.n(1)), rm.AllocClass, class)
		params := r.params(class)
		return call{fd: fd, cmd: escape(rm.EscAlloc, 48), outer: out, blocks: []block{{Off: rm.AllocParams, Data: params}}, status: 40,
			done: r.made()}
	},
	// heap CLIENT OBJECT PARENT FUNCTION SIZE
	"heap": func(r *refer) call {
		client, fd := r.client(0)
		fn, size := uint32(r.op.n(3)), r.op.size(4)
		out := words(rm.HeapSize, rm.HeapRoot, client, rm.HeapParent, r.parent(2), rm.HeapFunction, fn, 40, owner,
			rm.HeapAllocMemory, handle(r.op.n(1)), rm.HeapAllocFlags, 0x4000)
		switch fn {
		case rm.HeapFnAllocSizeRange:
			rm.PutU32(out, rm.HeapAllocAttr, vidmemAttr)
			rm.PutU64(out, rm.HeapAllocRangeSize, size)
		case rm.HeapFnAllocTiled:
			rm.PutU32(out, rm.HeapTiledHeight, uint32(size>>16))
			rm.PutU32(out, rm.HeapTiledPitch, 1<<16)
			rm.PutU32(out, rm.HeapTiledAttr, vidmemAttr)
			rm.PutU64(out, rm.HeapAllocSize, size)
		default:
			rm.PutU32(out, rm.HeapAllocAttr, vidmemAttr)
			rm.PutU64(out, rm.HeapAllocSize, size)
		}
		return call{fd: fd, cmd: escape(rm.EscVidHeapControl, rm.HeapSize), outer: out, status: rm.HeapStatus, done: r.made()}
	},
	// heapfree CLIENT OBJECT PARENT
	"heapfree": func(r *refer) call {
		client, fd := r.client(0)
		out := words(rm.HeapSize, rm.HeapRoot, client, rm.HeapParent, r.parent(2), rm.HeapFunction, rm.HeapFnFree, 40, owner,
			rm.HeapFreeMemory, r.object(0, 1))
		return call{fd: fd, cmd: escape(rm.EscVidHeapControl, rm.HeapSize), outer: out, status: rm.HeapStatus, done: r.gone(0, 1)}
	},
	// pin CLIENT OBJECT PARENT GPUFILE SIZE: memory of the process
	"pin": func(r *refer) call {
		client, _ := r.client(0)
		size := r.op.size(4)
		out := words(rm.AllocMemorySize, rm.AllocMemoryRoot, client, rm.AllocMemoryParent, r.parent(2), rm.AllocMemoryObject, handle(r.op.n(1)),
			rm.AllocMemoryClass, classPinned, rm.AllocMemoryFlags, pinnedFlags)
		rm.PutU64(out, rm.AllocMemoryLimit, size-1)
		rm.PutU32(out, rm.AllocMemoryFD, ^uint32(0))
		return call{fd: r.file(3), cmd: escape(rm.EscAllocMemory, rm.AllocMemorySize), outer: out,
			blocks: []block{{Off: rm.AllocMemoryPointer, Data: make([]byte, min(size, 1<<12))}}, status: rm.AllocMemoryStatus, done: r.made()}
	},
	// hostmap CLIENT OBJECT PARENT GPU-FILE CTL-FILE SIZE
	"hostmap": func(r *refer) call {
		client, _ := r.client(0)
		out := words(rm.AllocMemorySize, rm.AllocMemoryRoot, client, rm.AllocMemoryParent, r.parent(2), rm.AllocMemoryObject, handle(r.op.n(1)),
			rm.AllocMemoryClass, classSystem, rm.AllocMemoryFD, uint32(r.file(4)))
		rm.PutU64(out, rm.AllocMemoryLimit, r.op.size(5)-1)
		return call{fd: r.file(3), cmd: escape(rm.EscAllocMemory, rm.AllocMemorySize), outer: out, status: rm.AllocMemoryStatus, done: r.made()}
	},
	// dup CLIENT OBJECT PARENT FROM-CLIENT FROM-OBJECT
	"dup": func(r *refer) call {
		client, fd := r.client(0)
		from := uint32(0xc1d0ffff)
		if c := r.w.clients[r.op.n(3)]; c != nil {
			from = c.handle
		}
		out := words(rm.DupSize, rm.DupClient, client, rm.DupParent, r.parent(2), rm.DupObject, handle(r.op.n(1)),
			rm.DupClientSrc, from, rm.DupObjectSrc, r.object(3, 4))
		return call{fd: fd, cmd: escape(rm.EscDupObject, rm.DupSize), outer: out, status: rm.DupStatus, done: r.made()}
	},
	// share CLIENT OBJECT TYPE ACTION
	"share": func(r *refer) call {
		client, fd := r.client(0)
		out := words(rm.ShareSize, rm.ShareClient, client, rm.ShareObject, r.parent(1), rm.SharePolicy+rm.SharePolicyTarget, client,
			rm.SharePolicy+rm.SharePolicyAccess, 1)
		out[rm.SharePolicy+rm.SharePolicyType], out[rm.SharePolicy+rm.SharePolicyAction] = byte(r.op.n(2)), byte(r.op.n(3))
		return call{fd: fd, cmd: escape(rm.EscShare, rm.ShareSize), outer: out, status: rm.ShareStatus}
	},
	// free CLIENT OBJECT
	"free": func(r *refer) call {
		client, fd := r.client(0)
		out := words(rm.FreeSize, rm.FreeRoot, client, rm.FreeObject, r.object(0, 1))
		return call{fd: fd, cmd: escape(rm.EscFree, rm.FreeSize), outer: out, status: rm.FreeStatus, done: r.gone(0, 1)}
	},
	// drop CLIENT
	"drop": func(r *refer) call {
		client, fd := r.client(0)
		n := r.op.n(0)
		out := words(rm.FreeSize, rm.FreeRoot, client, rm.FreeObject, client)
		return call{fd: fd, cmd: escape(rm.EscFree, rm.FreeSize), outer: out, status: rm.FreeStatus,
			done: func([]byte, [][]byte) { delete(r.w.clients, n) }}
	},
	// export CLIENT OBJECT PARENT FILE
	"export": func(r *refer) call {
		p := words(24, rm.ExportFDObject+rm.ExportObjectType, 1, rm.ExportFDObject+rm.ExportObjectDevice, r.parent(2),
			rm.ExportFDObject+rm.ExportObjectParent, r.parent(2), rm.ExportFDObject+rm.ExportObjectHandle, r.object(0, 1),
			rm.ExportFDFD, uint32(r.file(3)))
		return r.control(-1, 0x3d05, p, nil)
	},
	// import CLIENT OBJECT PARENT FILE
	"import": func(r *refer) call {
		p := words(20, rm.ImportFDFD, uint32(r.file(3)), rm.ImportFDObject+rm.ExportObjectType, 1,
			rm.ImportFDObject+rm.ExportObjectDevice, r.parent(2), rm.ImportFDObject+rm.ExportObjectParent, r.parent(2),
			rm.ImportFDObject+rm.ExportObjectHandle, handle(r.op.n(1)))
		return r.control(-1, 0x3d06, p, r.made())
	},
	// schedule CLIENT GROUP
	"schedule": func(r *refer) call { return r.control(1, 0xa06c0101, []byte{1, 0, 0}, nil) }, // since 575
	// timeslice CLIENT GROUP
	"timeslice": func(r *refer) call { return r.control(1, 0xa06c0104, make([]byte, 8), nil) },
	// info CLIENT SUBDEVICE
	"info": func(r *refer) call {
		p := words(1028, rm.FBInfoCount, 2, rm.FBInfoList, rm.FBIndexTotalRAMSize, rm.FBInfoList+rm.FBInfoEntry, rm.FBIndexHeapFree)
		return r.control(1, 0x20801303, p, nil)
	},
	// uuid CLIENT SUBDEVICE: asked once, for UVM
	"uuid": func(r *refer) call {
		return r.control(1, 0x2080014a, words(268, 4, 2), func(_ []byte, blocks [][]byte) { copy(r.w.uuid[:], blocks[0][12:]) })
	},
	// register FILE WHOSE: lends a file the identity of another
	"register": func(r *refer) call {
		return call{fd: r.file(0), cmd: escape(rm.EscRegisterFD, rm.RegisterFDSize),
			outer: words(rm.RegisterFDSize, 0, uint32(r.file(1))), status: -1}
	},
	// cards CLIENT
	"cards": func(r *refer) call {
		_, fd := r.client(0)
		return call{fd: fd, cmd: escape(rm.EscCardInfo, rm.CardInfoSize*rm.GPUIDListLen),
			outer: make([]byte, rm.CardInfoSize*rm.GPUIDListLen), status: -1,
			done: func(out []byte, _ [][]byte) {
				for i := range rm.GPUIDListLen {
					if e := out[i*rm.CardInfoSize:]; e[rm.CardInfoValid] != 0 && r.w.gpuID == 0 {
						r.w.gpuID = rm.U32(e, rm.CardInfoGPUID)
					}
				}
			}}
	},
	// attach CLIENT
	"attach": func(r *refer) call {
		ids := make([]byte, rm.GPUIDFailedID+4)
		for i := range rm.GPUIDListLen {
			rm.PutU32(ids, 4*i, rm.GPUIDUnused)
		}
		rm.PutU32(ids, 0, r.w.gpuID)
		return r.control(-1, 0x215, ids, nil)
	},
	// instance CLIENT: the number by which the GPU's device is made
	"instance": func(r *refer) call {
		return r.control(-1, 0x205, words(32, 0, r.w.gpuID), func(_ []byte, blocks [][]byte) { r.w.instance = rm.U32(blocks[0], 8) })
	},
	// bar CLIENT OBJECT PARENT GPUFILE SIZE: a window for the processor
	"bar": func(r *refer) call {
		client, fd := r.client(0)
		out := words(rm.MapMemorySize, rm.MapMemoryClient, client, rm.MapMemoryDevice, r.parent(2), rm.MapMemoryMemory, r.object(0, 1),
			rm.MapMemoryFD, uint32(r.file(3)))
		rm.PutU64(out, rm.MapMemoryLength, r.op.size(4))
		return call{fd: fd, cmd: escape(rm.EscMapMemory, rm.MapMemorySize), outer: out, status: rm.MapMemoryStatus}
	},
	// mapdma CLIENT MEMORY PARENT VIRTUAL SIZE
	"mapdma": func(r *refer) call {
		client, fd := r.client(0)
		out := words(mapDMASize, 0, client, 4, r.parent(2), 8, r.object(0, 3), 12, r.object(0, 1))
		rm.PutU64(out, 24, r.op.size(4))
		key := [3]int{r.op.n(0), r.op.n(3), r.op.n(1)}
		return call{fd: fd, cmd: escape(escMapDMA, mapDMASize), outer: out, status: 56,
			done: func(out []byte, _ [][]byte) { r.w.dma[key] = rm.U64(out, 48) }}
	},
	// unmapdma CLIENT MEMORY PARENT VIRTUAL
	"unmapdma": func(r *refer) call {
		client, fd := r.client(0)
		key := [3]int{r.op.n(0), r.op.n(3), r.op.n(1)}
		at, ok := r.w.dma[key]
		r.ok = r.ok && ok
		out := words(unmapDMASize, 0, client, 4, r.parent(2), 8, r.object(0, 3), 12, r.object(0, 1))
		rm.PutU64(out, 24, at)
		return call{fd: fd, cmd: escape(escUnmapDMA, unmapDMASize), outer: out, status: 40, done: func([]byte, [][]byte) { delete(r.w.dma, key) }}
	},
	// uvm SPACE: makes an address space of the file
	"uvm": func(r *refer) call {
		// UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE: else a second file is needed before anything can be registered.
		return r.uvm(rm.UVMInitialize, words(rm.UVMInitializeSize, rm.UVMInitializeFlags, 2), rm.UVMInitializeStatus)
	},
	// uvmgpu SPACE CLIENT
	"uvmgpu": func(r *refer) call {
		client, fd := r.client(1)
		out := words(40, 24, uint32(fd), 28, client)
		copy(out, r.w.uuid[:])
		return r.uvm(rm.UVMRegisterGPU, out, 36)
	},
	// uvmspace SPACE CLIENT OBJECT
	"uvmspace": func(r *refer) call {
		client, fd := r.client(1)
		out := words(32, 16, uint32(fd), 20, client, 24, r.object(1, 2))
		copy(out, r.w.uuid[:])
		return r.uvm(rm.UVMRegisterGPUVASpace, out, 28)
	},
	// uvmnospace SPACE
	"uvmnospace": func(r *refer) call {
		out := make([]byte, rm.UVMUnregisterSize)
		copy(out, r.w.uuid[:])
		return r.uvm(rm.UVMUnregisterVASpace, out, rm.UVMUnregisterStatus)
	},
	// uvmchannel SPACE CLIENT CHANNEL ADDRESS SIZE
	"uvmchannel": func(r *refer) call {
		client, fd := r.client(1)
		out := words(56, 16, uint32(fd), 20, client, 24, r.object(1, 2))
		copy(out, r.w.uuid[:])
		rm.PutU64(out, 32, r.op.size(3))
		rm.PutU64(out, 40, r.op.size(4))
		return r.uvm(rm.UVMRegisterChannel, out, 48)
	},
	// uvmnochannel SPACE CLIENT CHANNEL
	"uvmnochannel": func(r *refer) call {
		client, _ := r.client(1)
		out := words(uvmUnregisterChannelSize, 16, client, 20, handle(r.op.n(2)))
		copy(out, r.w.uuid[:])
		return r.uvm(rm.UVMUnregisterChannel, out, 24)
	},
	// uvmrange SPACE ADDRESS SIZE
	"uvmrange": func(r *refer) call { return r.uvm(rm.UVMCreateExternal, r.uvmBlock(uvmCreateSize), 16) },
	// uvmregion SPACE ADDRESS SIZE: a page for the GPU's scheduler
	"uvmregion": func(r *refer) call { return r.uvm(rm.UVMMapDynamicRegion, r.uvmGPU(r.uvmBlock(40)), 32) },
	// uvmpool SPACE ADDRESS SIZE
	"uvmpool": func(r *refer) call { return r.uvm(rm.UVMAllocSemaphorePool, r.uvmBlock(uvmPoolSize), uvmPoolSize-8) },
	// uvmmap SPACE ADDRESS SIZE CLIENT OBJECT OFFSET
	"uvmmap": func(r *refer) call {
		client, fd := r.client(3)
		out := r.uvmBlock(uvmMapSize)
		rm.PutU64(out, 16, r.op.size(5))
		copy(out[24:], r.w.uuid[:])
		rm.PutU64(out, uvmMapSize-24, 1)
		rm.PutU32(out, uvmMapSize-16, uint32(fd))
		rm.PutU32(out, uvmMapSize-12, client)
		rm.PutU32(out, uvmMapSize-8, r.object(3, 4))
		return r.uvm(rm.UVMMapExternal, out, uvmMapSize-4)
	},
	// uvmsparse SPACE ADDRESS SIZE
	"uvmsparse": func(r *refer) call { return r.uvm(uvmMapSparse, r.uvmGPU(r.uvmBlock(uvmMapSparseSize)), 32) },
	// uvmunmap SPACE ADDRESS SIZE
	"uvmunmap": func(r *refer) call { return r.uvm(rm.UVMUnmapExternal, r.uvmGPU(r.uvmBlock(40)), 32) },
	// uvmfree SPACE ADDRESS SIZE
	"uvmfree": func(r *refer) call { return r.uvm(rm.UVMFree, r.uvmBlock(24), 16) },
}

// Sizes of UVM_MAP_EXTERNAL_ALLOCATION_PARAMS and UVM_ALLOC_SEMAPHORE_POOL_PARAMS since 550.
const (
	uvmMapSize  = 9264
	uvmPoolSize = 9248
)

func (r *refer) uvm(cmd uint32, outer []byte, status int) call {
	return call{fd: r.file(0), cmd: cmd, outer: outer, status: status}
}

// uvmBlock is a structure that begins with address and size.
func (r *refer) uvmBlock(size int) []byte {
	b := make([]byte, size)
	rm.PutU64(b, 0, r.op.size(1))
	rm.PutU64(b, 8, r.op.size(2))
	return b
}

func (r *refer) uvmGPU(b []byte) []byte {
	copy(b[16:], r.w.uuid[:])
	return b
}

// control is one on an object of the client that the call names first, or on the client itself (object < 0).
func (r *refer) control(object int, cmd uint32, params []byte, done func([]byte, [][]byte)) call {
	h, fd := r.client(0)
	on := h
	if object >= 0 {
		on = r.object(0, object)
	}
	out := words(rm.ControlSize, rm.ControlClient, h, rm.ControlObject, on, rm.ControlCmd, cmd, rm.ControlParamsSize, uint32(len(params)))
	return call{fd: fd, cmd: escape(rm.EscControl, rm.ControlSize), outer: out, blocks: []block{{Off: rm.ControlParams, Data: params}},
		status: rm.ControlStatus, done: done}
}

// gone notes that an object is no longer there. What was below it is not there either; calls on that fail, which does no harm.
func (r *refer) gone(client, i int) func([]byte, [][]byte) {
	key := [2]int{r.op.n(client), r.op.n(i)}
	return func([]byte, [][]byte) { delete(r.w.objects, key) }
}

// How libcuda asks for memory (nvos.h: NVOS32_ALLOC_FLAGS_IGNORE_BANK_PLACEMENT, MEMORY_HANDLE_PROVIDED, MAP_NOT_REQUIRED;
// PHYSICALITY_ALLOW_NONCONTIGUOUS; for host memory LOCATION PCI, COHERENCY CACHED, PAGE_SIZE 4KB), and for its own pages
// (NVOS02_FLAGS: LOCATION PCI, PHYSICALITY NONCONTIGUOUS, COHERENCY CACHED, MAPPING NO_MAP).
const (
	owner       = 0x63677075
	memoryFlags = 0xc001
	vidmemAttr  = 3 << 27
	systemAttr  = 0x2a800000
	systemAttr2 = 0x9
	pinnedFlags = 1<<4 | 1<<12 | 1<<30
)

// params are the parameters of a class.
func (r *refer) params(class uint32) []byte {
	size := r.op.size(4)
	switch class {
	case classVidmem, classSystem, classVirtual:
		p := words(128, rm.MemoryOwner, owner, rm.MemoryFlags, memoryFlags, rm.MemoryAttr, vidmemAttr)
		switch class {
		case classSystem:
			rm.PutU32(p, rm.MemoryAttr, systemAttr)
			rm.PutU32(p, rm.MemoryAttr2, systemAttr2)
		case classVirtual:
			rm.PutU32(p, rm.MemoryFlags, memoryFlags|rm.MemoryFlagVirtual)
			rm.PutU32(p, rm.MemoryAttr, 0)
			if r.op.arg(5) != "" {
				rm.PutU32(p, rm.MemoryVASpace, r.object(0, 5))
			}
		}
		rm.PutU64(p, rm.MemorySize, size)
		return p
	case classDevice:
		return words(56, rm.DeviceID, r.w.instance)
	case classGroup:
		p := words(20, rm.TSGEngineType, uint32(size))
		if r.op.arg(5) != "" {
			rm.PutU32(p, groupVASpace, r.object(0, 5))
		}
		return p
	case classChannel:
		return words(368, rm.ChannelEngineType, uint32(size))
	case classVASpace:
		return words(56, 4, uint32(size))
	}
	return make([]byte, 16)
}
