// SPDX-License-Identifier: Apache-2.0

package rm

import "time"

// ControlKind is what a control means to the guard. The zero value denies.
type ControlKind uint8

const (
	ControlDeny           ControlKind = iota
	ControlFlat                       // allowed; no special treatment beyond Pointers and ClientHandles
	ControlSwallow                    // answered without being executed: what sets something that containers share
	ControlFBInfo                     // 0x20801301: memory sizes behind a pointer, rewritten
	ControlFBInfoV2                   // 0x20801303: memory sizes, rewritten
	ControlPids                       // 0x2080018d: filtered
	ControlPidInfo                    // 0x2080018e: filtered
	ControlGPUMon                     // 0x20802096: filtered by pid
	ControlGPUList                    // 0x201, 0x214: lists of GPU ids, filtered
	ControlDeviceMask                 // 0x204: bit mask of device instances
	ControlGPUQuery                   // GPU id at 0; hidden ones are refused
	ControlAttach                     // 0x215: a list of GPU ids, or all
	ControlActiveDevices              // 0x288: filtered
	ControlUUIDQuery                  // 0x274: GPU by UUID
	ControlSharePolicy                // 0xd04 (policy at 0), 0xd06 (policy at 4)
	ControlPreemptionMode             // 0x20801210
	ControlExportFD                   // 0x3d05: an object into a file
	ControlImportFD                   // 0x3d06: an object out of a file
	ControlCreateExportFD             // 0x3d0a
	ControlExportFDs                  // 0x3d0b
	ControlImportFDs                  // 0x3d0c
	ControlFD                         // other controls with a file descriptor of the caller
	ControlSchedule                   // enables a channel or a group: may undo a pause
	ControlOwnChannel                 // names a channel of the caller's client at 0
	ControlResetChannel               // 0x906f0102: ends a channel whose kernel failed
	ControlDebugRead                  // 0x83de0315: memory, through a debugger object
	ControlDebugWrite                 // 0x83de0316
	ControlRegOps                     // 0x20800122: registers of a channel's own context
	ControlPeerMemory                 // 0x503c0102, …4, …5: an address space, or device memory, for other devices' access, or no longer
	ControlCacheFlush                 // 0x2080130e: empties caches of the whole GPU
	ControlStreamAlloc                // 0xb0cc0105: a stream of a profiler's samples into memory
	ControlStreamFree                 // 0xb0cc0106
	ControlStreamBind                 // 0xb0cc0107
	ControlStopChannel                // 0xa06f0112: at once, or when the channel is idle
	ControlPreempt                    // 0xa06c0105: takes a channel group off the GPU until its next turn
	ControlDisable                    // 0x2080110b: takes channels off the GPU, or lets them run again
	ControlThermal                    // 0x20800513: a list of instructions
	ControlBoost                      // 0x2080200a: keeps the clocks up while the client lives
	ControlHide                       // reads what everybody does; answered with zeros
	ControlFlexibleAttach             // 0xf80103: device memory to flexible NVLink addresses
	ControlFlexibleDetach             // 0xf80104
)

// Control is a control call that a container may make.
type Control struct {
	ID            uint32
	Name          string
	Kind          ControlKind
	Answer        uint32        // the status of a swallowed one
	Profiling     bool          // of a profiler: only where the node's settings allow those
	Context       bool          // reaches a graphics context as a whole, which in a trust domain is all members'
	Size          int           // size of the parameters; 0: any up to MaxControlParams
	Pointers      []Pointer     // user pointers in the parameters
	ClientHandles []int         // offsets of client handles in the parameters; each must be 0 or the container's own
	Clear         []int         // offsets of pointers that mean nothing to the driver; zeroed before it sees them
	FDOff         int           // offset of a file descriptor of the caller, -1: none
	HoldsLocks    time.Duration // for how long it holds the driver's locks, where that is much more than a call's usual time
	Source        string
}

// MaxControlParams bounds the parameters of one control. The largest seen has 67396 bytes (0x2080a0a4, nvidia-smi -q).
const MaxControlParams = 128 << 10

// Pointer is a user pointer inside a parameter block. The memory behind it is either Fixed bytes, or ElemSize times the
// count at CountOff.
type Pointer struct {
	Off      int
	CountOff int // u32 in the block; -1: Fixed counts
	ElemSize int
	Squared  bool // the count counts twice: a matrix
	Fixed    int
	MaxBytes int // more is refused
}

// Bytes is the size of the memory behind the pointer. False: the block is too short for it, or it asks for more than
// MaxBytes.
func (p Pointer) Bytes(params []byte) (int, bool) {
	if p.Off < 0 || p.Off > len(params)-8 {
		return 0, false
	}
	if p.CountOff < 0 {
		if p.Fixed < 0 || p.Fixed > p.MaxBytes {
			return 0, false
		}
		return p.Fixed, true
	}
	if p.CountOff > len(params)-4 || p.ElemSize <= 0 || p.MaxBytes < 0 {
		return 0, false
	}
	n := uint64(U32(params, p.CountOff))
	if p.Squared {
		n *= n // 32 bits each: fits
	}
	if n > uint64(p.MaxBytes/p.ElemSize) {
		return 0, false
	}
	return int(n) * p.ElemSize, true
}

// Control looks a control up. Not found means deny, like ControlDeny.
func (a *ABI) Control(id uint32) (Control, bool) {
	if id&gssBit != 0 {
		return gssControl(id)
	}
	i, ok := findControl(id)
	if !ok {
		return Control{}, false
	}
	for ; i < len(controls) && controls[i].id == id; i++ {
		r := &controls[i]
		if a.branch < r.from || r.to != 0 && a.branch > r.to {
			continue
		}
		c := Control{ID: r.id, Name: r.name, Kind: r.kind, Answer: r.answer, Profiling: r.profiling, Context: r.context,
			Size: at(r.sizes, a.layout()), Pointers: r.pointers,
			ClientHandles: r.clients, Clear: r.clear, FDOff: -1, HoldsLocks: r.locks, Source: r.source}
		switch r.kind {
		case ControlExportFD, ControlImportFD, ControlCreateExportFD, ControlExportFDs, ControlImportFDs, ControlFD:
			c.FDOff = r.fd
		}
		return c, true
	}
	return Control{}, false
}

// controlRow is a line of the control table. A control whose layout matters has one line per layout.
type controlRow struct {
	id        uint32
	name      string
	kind      ControlKind
	answer    uint32 // of a swallowed one, where that is not OK
	profiling bool
	context   bool
	from, to  int // branches whose headers have the control; 0: from the first, up to the last
	sizes     []since
	pointers  []Pointer
	clients   []int
	clear     []int
	fd        int // only with kinds that have one
	locks     time.Duration
	source    string
}

// findControl is the first line of a control.
func findControl(id uint32) (int, bool) {
	lo, hi := 0, len(controls)
	for lo < hi {
		mid := (lo + hi) / 2
		if controls[mid].id < id {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo, lo < len(controls) && controls[lo].id == id
}

// GPUMonForm is the layout of one utilisation sample of 0x20802096: its size and where each engine's pid sits. Samples
// start at GPUMonSamples.
type GPUMonForm struct {
	Entry int
	Pids  []int // offsets of procId, u32
}

// GPUMon is the form of the driver's utilisation samples (NV2080_CTRL_PERF_GPUMON_PERFMON_UTIL_SAMPLE, ctrl2080perf.h).
func (a *ABI) GPUMon() GPUMonForm {
	switch {
	case a.branch < 550:
		return GPUMonForm{472, gpuMonPids[:4]}
	case a.branch < 570:
		return GPUMonForm{704, gpuMonPids[:]}
	}
	return GPUMonForm{776, gpuMonPids570[:]}
}

var (
	gpuMonPids    = [...]int{16, 132, 248, 364, 480, 596} // fb gr nvenc nvdec nvjpg nvofa
	gpuMonPids570 = [...]int{16, 144, 272, 400, 528, 656}
)
