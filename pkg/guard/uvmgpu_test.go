// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// registerGPU has a call register a GPU in a UVM address space. The control file, the client and the partition that it names are made up.
func registerGPU(c *fakeCall, uuid gpuUUID) (status uint32, o []byte) {
	form, _ := c.guard.abi.UVM(rm.UVMRegisterGPU)
	o = make([]byte, form.Size)
	copy(o, uuid[:])
	for i := range uint32(3) {
		rm.PutU32(o, form.FD+int(4*i), 7+i)
	}
	c.do(rm.UVMRegisterGPU, o)
	return rm.U32(o, form.Status), o
}

// TestRegisterGPU: UVM gets to know the container's GPUs only, and of the call no more than which.
func TestRegisterGPU(t *testing.T) {
	var seen []byte
	d := answering(0, func(call *rm.Call) {
		if call.Cmd == rm.UVMRegisterGPU {
			seen = append([]byte(nil), call.Outer...)
		}
	})
	c, _ := newFakeUVMCall(t, withClient(newFakeGuard(t, d)))
	if s, _ := registerGPU(c, gpuUUID{15: 9}); s != rm.StatusGPUNotFound || len(d.calls) != 0 {
		t.Errorf("another GPU of the node: %s, %d driver calls", rm.StatusName(s), len(d.calls))
	}
	s, o := registerGPU(c, testGPUUUID())
	if s != rm.StatusOK || seen == nil {
		t.Fatalf("an own one: %s", rm.StatusName(s))
	}
	form, _ := c.guard.abi.UVM(rm.UVMRegisterGPU)
	for i := range 3 {
		if off := form.FD + 4*i; rm.U32(seen, off) != 0 || rm.U32(o, off) != uint32(7+i) {
			t.Errorf("at %d UVM saw %d, the program has %d", off, rm.U32(seen, off), rm.U32(o, off))
		}
	}
}

// TestZombies: what a process leaves in an address space of several processes is freed when it ends, and at each look at maps. UVM is not
// asked for address spaces of one process, which have none.
func TestZombies(t *testing.T) {
	for name, x := range map[string]struct {
		flags uint64
		asked bool
	}{"one process": {0, false}, "without HMM": {rm.UVMInitFlagDisableHMM, false}, "several": {rm.UVMInitFlagSharing, true},
		"several, without HMM": {rm.UVMInitFlagSharing | rm.UVMInitFlagDisableHMM, true}} {
		t.Run(name, func(t *testing.T) {
			var cleaned atomic.Int32
			d := answering(0, func(call *rm.Call) {
				switch call.Cmd {
				case rm.UVMInitialize:
					if rm.U64(call.Outer, rm.UVMInitializeFlags) != x.flags {
						rm.PutU32(call.Outer, rm.UVMInitializeStatus, rm.StatusInvalidArgument)
					}
				case rm.UVMCleanUpZombies:
					cleaned.Add(1)
				}
			})
			g := withClient(newFakeGuard(t, d))
			c, _ := newFakeUVMCall(t, g)
			c.file = followedUVM(t, g)
			if s, _ := registerGPU(c, testGPUUUID()); s != rm.StatusOK {
				t.Fatal(rm.StatusName(s))
			}
			wait := func(n int32) {
				t.Helper()
				eventually(t, "UVM is asked", func() bool { return !c.file.cleaning.Load() && (!x.asked || cleaned.Load() >= n) })
			}
			g.managedGone(os.Getpid())
			wait(1)
			g.look()
			wait(2)
			if !x.asked && cleaned.Load() > 0 {
				t.Error("UVM was asked for nothing")
			}
			d.calls = nil
			g.endUVM(c.file)
			if slices.Contains(d.calls, rm.UVMUnregisterGPU) != x.asked { // the file may be in a socket
				t.Errorf("the GPU is unregistered: %v", !x.asked)
			}
			before := cleaned.Load()
			g.cleanUpZombies(c.file)
			if cleaned.Load() != before {
				t.Error("UVM was asked on a file that is closed")
			}
		})
	}
}
