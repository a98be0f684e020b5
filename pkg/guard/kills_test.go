// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sim"
)

// childCompute: a program that computes without end with memory that is mapped in a UVM address space, and goes on to allocate and map
// more, in a thread of its own → UVM's descriptor, nvidiactl's descriptor. The handles of every other piece are freed: UVM alone holds it
// then.
func childCompute(s *childState, _ []int) (string, error) {
	c, err := s.newClient(unix.O_CLOEXEC)
	if err != nil {
		return "", err
	}
	uvm, err := s.open("nvidia-uvm", unix.O_CLOEXEC)
	if err != nil {
		return "", err
	}
	p := make([]byte, 20)
	rm.PutU32(p, rm.TSGEngineType, engineGR)
	group, err := c.alloc(c.dev, 0, classChannelGroup, p)
	if err == nil {
		_, err = c.alloc(group, 0, 0xc86f, make([]byte, 368))
	}
	if err == nil {
		err = c.control(group, 0xa06c0101, []byte{1, 0, 0})
	}
	p = make([]byte, sim.SubmitSize)
	rm.PutU64(p, sim.SubmitLength, uint64(time.Millisecond))
	if err == nil {
		err = c.control(group, sim.CtrlSubmit, p)
	}
	if err == nil {
		err = c.mapMore(uvm, 0)
	}
	if err != nil {
		return "", err
	}
	go func() {
		for i := 1; c.mapMore(uvm, i) == nil && i < 64; i++ {
		}
	}()
	return fmt.Sprint(uvm, " ", c.fd), nil
}

func (c *rmClient) mapMore(uvm, i int) error {
	h, err := c.memory(0, 1<<20)
	if err != nil {
		return err
	}
	const form, uuid = 9264, "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01"
	o := make([]byte, form)
	rm.PutU64(o, 0, uint64(i+1)<<30)
	rm.PutU64(o, 8, 1<<20)
	copy(o[uvmMapAttributes:], uuid)
	rm.PutU64(o, 9240, 1)
	rm.PutU32(o, 9248, uint32(c.fd))
	rm.PutU32(o, 9252, c.client)
	rm.PutU32(o, 9256, h)
	if e := rawIoctl(uvm, rm.UVMMapExternal, o); e != 0 {
		return e
	}
	if err := statusError("map", rm.U32(o, 9260)); err != nil || i%2 == 0 {
		return err
	}
	return c.free(h)
}

// TestHundredEnds: programs end in the middle of their work at random moments, in all ways in which programs end. Each time everything is
// back, and no kernel has lost its memory while it ran. What the guard ends has its channels stopped before anything else happens to it.
func TestHundredEnds(t *testing.T) {
	seed := rand.Uint64()
	if s := os.Getenv("SEED"); s != "" {
		fmt.Sscan(s, &seed)
	}
	t.Logf("SEED=%d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	r := newRig(t)
	var first atomic.Uint32 // what the driver is asked first since it was 0
	note := func(call *rm.Call) {
		cmd := call.NR()
		switch {
		case cmd == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == controlDisableChannels && call.Blocks[0].Data[disableRewind] == 1:
			cmd = controlDisableChannels
		case cmd == rm.EscFree && rm.U32(call.Outer, rm.FreeObject) == rm.U32(call.Outer, rm.FreeRoot),
			call.Cmd == rm.UVMUnregisterVASpace, call.Cmd == rm.UVMUnmapExternal, call.Cmd == rm.UVMFree:
		default:
			return
		}
		first.CompareAndSwap(0, cmd)
	}
	r.seen.Store(&note)
	by := func(pid int) func(*client) bool { return func(c *client) bool { return c.tgid == pid } }
	ways := []struct {
		name    string
		guarded bool // the guard ends it
		end     func(c *child, uvm, ctl int)
	}{
		{"SIGKILL", false, func(c *child, _, _ int) { _ = c.cmd.Process.Kill() }},
		{"exit", false, func(c *child, _, _ int) { _ = c.in.Close() }},
		{"killed by the guard", true, func(c *child, _, _ int) { r.guard.killProcess(c.cmd.Process.Pid) }},
		{"its clients freed by the guard", true, func(c *child, _, _ int) {
			r.guard.killClients(by(c.cmd.Process.Pid))
			_ = c.cmd.Process.Kill()
		}},
		{"it closes UVM", false, func(c *child, uvm, _ int) {
			c.do("closefd", uvm)
			r.guard.sweep()
			_ = c.cmd.Process.Kill()
		}},
		{"it closes its client, and UVM later", false, func(c *child, uvm, ctl int) {
			c.do("closefd", ctl)
			r.guard.startSweep()
			c.do("closefd", uvm)
			_ = c.in.Close()
		}},
		{"killed while off", false, func(c *child, _, _ int) {
			r.guard.gpuTime.Turn(0, true)
			_ = c.cmd.Process.Kill()
			r.guard.gpuTime.Turn(0, false)
		}},
	}
	for i := range 100 {
		way := ways[rnd.IntN(len(ways))]
		c := r.start()
		fds := c.do("compute")
		time.Sleep(time.Duration(rnd.IntN(3000)) * time.Microsecond)
		var looks sync.WaitGroup
		if rnd.IntN(4) == 0 { // somebody looks, as cgpu smi does
			looks.Go(r.guard.sweep)
		}
		first.Store(0)
		way.end(c, fds[0], fds[1])
		_ = c.cmd.Wait()
		looks.Wait() // what is at rest is written down next
		r.empty()
		if n := r.sim.Snapshot().Faults; n != 0 {
			t.Errorf("end %d, %s: %d kernels lost their memory while they ran", i, way.name, n)
		}
		if f := first.Load(); way.guarded && f != controlDisableChannels {
			t.Errorf("end %d, %s: the driver was first asked for %#x, want the channels to be stopped", i, way.name, f)
		}
		if t.Failed() {
			return
		}
	}
}
