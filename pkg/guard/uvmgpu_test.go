package guard

import (
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// registerGPU has a call register a GPU in a UVM address space. The control file, the client and the partition that it names are made up.
func registerGPU(c *fakeCall, uuid gpuUUID) (status uint32, o []byte) {
	form, _ := c.g.abi.UVM(rm.UVMRegisterGPU)
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
	form, _ := c.g.abi.UVM(rm.UVMRegisterGPU)
	for i := range 3 {
		if off := form.FD + 4*i; rm.U32(seen, off) != 0 || rm.U32(o, off) != uint32(7+i) {
			t.Errorf("at %d UVM saw %d, the program has %d", off, rm.U32(seen, off), rm.U32(o, off))
		}
	}
}
