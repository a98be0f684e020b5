// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Managed memory of a process that has ended stays in a UVM address space of several processes (UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE),
// as zombies, with its pages on the GPU, until the file is closed or UVM is asked to free them (uvm_vm_close_managed). No memory map shows
// it then. MPS makes such address spaces, so they are not refused: the guard has zombies freed wherever it looks at maps.

// isMultiProcess reports that an address space, in which a GPU is registered, is of several processes. UVM_INITIALIZE of one that is
// initialized compares the flags, and does nothing (uvm_api_initialize); these are all others that there are.
func (g *Guard) isMultiProcess(t Target) bool {
	for _, flags := range []uint64{0, rm.UVMInitFlagDisableHMM} {
		o := make([]byte, rm.UVMInitializeSize)
		rm.PutU64(o, rm.UVMInitializeFlags, flags)
		if e := g.driver.Exec(t, &rm.Call{Cmd: rm.UVMInitialize, Outer: o}); e == 0 && rm.U32(o, rm.UVMInitializeStatus) == rm.StatusOK {
			return false
		}
	}
	return true
}

// freeZombies has UVM free what processes that are over have left. It does not wait for that: a call of the container's can be under way in
// the address space for as long as its kernels run, and nothing is mapped there meanwhile.
func (g *Guard) freeZombies() {
	for _, f := range g.files.snapshot() {
		if f.zombies.Load() && f.cleaning.CompareAndSwap(false, true) {
			go g.cleanUpZombies(f)
		}
	}
}

// forgetGPUs takes its GPUs from an address space that is about to be forgotten. If it comes back from a socket, zombies can be on a GPU
// again only when that was registered again, and then the guard knows of them.
func (g *Guard) forgetGPUs(f *file) {
	form, _ := g.abi.UVM(rm.UVMUnregisterGPU)
	for _, x := range g.cfg.GPUs {
		if id, ok := uuidOf(x); ok {
			o := make([]byte, form.Size)
			copy(o[rm.UVMGPU:], id[:])
			_ = g.driver.Exec(f.target(), &rm.Call{Cmd: rm.UVMUnregisterGPU, Outer: o}) // it refuses those that are not registered
		}
	}
}

func (g *Guard) cleanUpZombies(f *file) {
	defer f.cleaning.Store(false)
	f.uvm.Lock()
	defer f.uvm.Unlock()
	if f.ended {
		return
	}
	g.chargeTime(func() {
		form, _ := g.abi.UVM(rm.UVMCleanUpZombies)
		o := make([]byte, form.Size)
		if e := g.driver.Exec(f.target(), &rm.Call{Cmd: rm.UVMCleanUpZombies, Outer: o}); e != 0 || rm.U32(o, form.Status) != rm.StatusOK {
			g.logOnce("zombies", "cannot free managed memory of processes that are over",
				"errno", e, "status", rm.StatusName(rm.U32(o, form.Status)))
		}
	})
}
