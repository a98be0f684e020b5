// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// rangeRig makes and frees ranges of a UVM address space on a guard whose container may have some of the host's memory.
type rangeRig struct {
	t      *testing.T
	g      *Guard
	d      *fakeDriver
	c      *fakeCall
	refuse uint32 // what UVM says
	groups uint64
}

func newRangeRig(t *testing.T, host quota.Bytes) *rangeRig {
	r := &rangeRig{t: t, d: &fakeDriver{}}
	r.d.answer = func(_ Target, call *rm.Call) syscall.Errno {
		if form, ok := r.g.abi.UVM(call.Cmd); ok {
			rm.PutU32(call.Outer, form.Status, r.refuse)
		}
		if call.Cmd == rm.UVMCreateRangeGroup {
			r.groups++
			rm.PutU64(call.Outer, 0, r.groups)
		}
		return 0
	}
	r.g = withClient(newFakeGuard(t, r.d))
	r.g.cfg.Settings.MaxHostMemory.Bytes = host
	r.g.account.freeObject(fakeClient, fakeMemory)
	r.c, _ = newFakeUVMCall(t, r.g)
	return r
}

func (r *rangeRig) do(cmd uint32, base, length uint64) (status uint32) {
	o, form := uvmCall(r.g, cmd, base, length, 0)
	if cmd == rm.UVMMapDynamicRegion {
		id := testGPUUUID()
		copy(o[uvmSparseGPU:], id[:])
	}
	r.c.do(cmd, o)
	return rm.U32(o, form.Status)
}

// want checks what is charged on the GPU, and how much of the host's memory is in use and charged.
func (r *rangeRig) want(what string, gpu, host quota.Bytes) {
	r.t.Helper()
	if used := r.g.account.usage(0).used; used != gpu || r.g.uvmHost.used != host {
		r.t.Errorf("%s: %v on the GPU, %v on the host; want %v, %v", what, used, r.g.uvmHost.used, gpu, host)
	}
	if taken := r.g.uvmHost.taken; taken != r.g.account.hostUsed || taken < host || taken > host+2*hostPiece {
		r.t.Errorf("%s: %v in use, %v taken, %v charged", what, host, taken, r.g.account.hostUsed)
	}
}

// TestRanges: what UVM keeps for a range of addresses, on the host and as page tables, is charged until the range is gone.
func TestRanges(t *testing.T) {
	const length = 2 << 20
	pool := quota.Bytes(rm.UVMTables(length, 4096)) + rm.UVMPageTables
	for _, x := range []struct {
		name      string
		cmd       uint32
		gpu, host quota.Bytes
		left      quota.Bytes // on the GPU, when the address space has lost it
	}{
		{"external", rm.UVMCreateExternal, 0, externalHost, 0},
		{"region", rm.UVMMapDynamicRegion, rm.UVMPageTables, rangeHost, 0},
		{"pool", rm.UVMAllocSemaphorePool, pool, externalHost + length, pool}, // it is mapped again when the GPU comes back
	} {
		t.Run(x.name, func(t *testing.T) {
			r := newRangeRig(t, quota.GiB)
			r.refuse = rm.StatusAddressInUse
			r.do(x.cmd, 1<<32, length)
			r.want("refused", 0, 0)
			r.refuse = rm.StatusOK
			for i := range uint64(3) {
				r.do(x.cmd, 1<<32+i<<30, length)
			}
			r.want("three", 3*x.gpu, 3*x.host)
			r.do(rm.UVMFree, 1<<32, length)
			r.do(rm.UVMFree, 1<<33, length) // nothing is there
			r.want("two", 2*x.gpu, 2*x.host)
			r.refuse = rm.StatusInvalidAddress
			r.do(rm.UVMFree, 1<<32+1<<30, length)
			r.want("not freed", 2*x.gpu, 2*x.host)
			r.refuse = rm.StatusOK
			id := testGPUUUID()
			o, _ := uvmCall(r.g, rm.UVMUnregisterGPU, 0, 0, 0)
			copy(o[rm.UVMGPU:], id[:])
			r.c.do(rm.UVMUnregisterGPU, o)
			r.want("without the GPU", 2*x.left, 2*x.host)
			r.d.calls = nil
			r.g.endUVM(r.c.file)
			if frees := slices.DeleteFunc(r.d.calls, func(cmd uint32) bool { return cmd != rm.UVMFree }); len(frees) != 2 {
				t.Errorf("%d ranges are freed, want two: the file may come back", len(frees))
			}
			r.want("end", 0, 0)
		})
	}
}

// TestRangeLimits: ranges and range groups end where the container's host memory does, and regions at its limit.
func TestRangeLimits(t *testing.T) {
	const most = 4 * quota.MiB
	for name, x := range map[string]struct {
		cmd  uint32
		many quota.Bytes
	}{
		"external": {rm.UVMCreateExternal, most / externalHost},
		"groups":   {rm.UVMCreateRangeGroup, most / groupHost},
		"regions":  {rm.UVMMapDynamicRegion, (testLimit + tableSlack) / rm.UVMPageTables},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRangeRig(t, most)
			if x.cmd == rm.UVMMapDynamicRegion {
				r.g.cfg.Settings.MaxHostMemory.Bytes = quota.GiB
			}
			n := quota.Bytes(0)
			for ; n <= x.many && r.do(x.cmd, 1<<32+uint64(n)<<21, 1<<21) == rm.StatusOK; n++ {
			}
			if n != x.many {
				t.Errorf("%d are made, want %d", n, x.many)
			}
			r.g.endUVM(r.c.file)
			r.want("end", 0, 0)
		})
	}
	r := newRangeRig(t, quota.GiB)
	for _, length := range []uint64{1<<30 + 4096, 1 << 63, ^uint64(0) &^ 4095} {
		if s := r.do(rm.UVMAllocSemaphorePool, 1<<32, length); s != rm.StatusNoMemory || len(r.d.calls) != 0 {
			t.Errorf("a pool of %#x: %s", length, rm.StatusName(s))
		}
	}
	r.want("too large", 0, 0)
}

// TestRangeGroups count until they are destroyed.
func TestRangeGroups(t *testing.T) {
	r := newRangeRig(t, quota.GiB)
	for range 3 {
		r.do(rm.UVMCreateRangeGroup, 0, 0)
	}
	r.do(rm.UVMDestroyRangeGroup, 2, 0)
	r.do(rm.UVMDestroyRangeGroup, 2, 0)
	r.want("two", 0, 2*groupHost)
	r.d.calls = nil
	r.g.endUVM(r.c.file)
	if len(r.d.calls) != 2 {
		t.Errorf("%d calls, want one for each group", len(r.d.calls))
	}
	r.want("end", 0, 0)
}
