// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/sim"
)

// testGPUUUID is that of the test's first GPU, as UVM has it.
func testGPUUUID() gpuUUID { return gpuUUID{15: 1} }

// childUVM makes a UVM call: fill writes the parameters behind the GPU's UUID.
func childUVM(fd int, cmd uint32, fill func(o []byte, form rm.UVMForm)) error {
	abi, err := rm.ForDriver(testVersion, false)
	if err != nil {
		return err
	}
	form, _ := abi.UVM(cmd)
	o := make([]byte, form.Size)
	if cmd != rm.UVMUnregisterChannel {
		uuid := testGPUUUID()
		copy(o[rm.UVMGPU:], uuid[:])
	}
	fill(o, form)
	if e := rawIoctl(fd, uintptr(cmd), o); e != 0 {
		return fmt.Errorf("UVM call %d: %w", cmd, e)
	}
	runtime.KeepAlive(o)
	return statusError("uvm", rm.U32(o, form.Status))
}

func init() {
	// naming makes a call that names an object of a client: FD CLIENT CLIENT_HANDLE OBJECT.
	naming := func(cmd uint32) func(*childState, []int) (string, error) {
		return func(s *childState, a []int) (string, error) {
			return "", childUVM(a[0], cmd, func(o []byte, form rm.UVMForm) {
				if form.FD >= 0 {
					rm.PutU32(o, form.FD, uint32(s.clients[a[1]].fd))
				}
				rm.PutU32(o, form.Client, uint32(a[2]))
				rm.PutU32(o, form.Object, uint32(a[3]))
			})
		}
	}
	bare := func(cmd uint32) func(*childState, []int) (string, error) {
		return func(_ *childState, a []int) (string, error) {
			return "", childUVM(a[0], cmd, func([]byte, rm.UVMForm) {})
		}
	}
	for name, f := range map[string]func(*childState, []int) (string, error){
		"uvm": func(s *childState, _ []int) (string, error) { // → descriptor
			fd, err := s.open("nvidia-uvm", unix.O_CLOEXEC)
			return fmt.Sprint(fd), err
		},
		"addspace":    naming(rm.UVMRegisterGPUVASpace),
		"dropspace":   bare(rm.UVMUnregisterVASpace),
		"dropgpu":     bare(rm.UVMUnregisterGPU),
		"addchannel":  naming(rm.UVMRegisterChannel),
		"dropchannel": naming(rm.UVMUnregisterChannel),
		// mapuvm FD CLIENT HANDLE BASE LENGTH
		"mapuvm": func(s *childState, a []int) (string, error) {
			return "", childUVM(a[0], rm.UVMMapExternal, func(o []byte, form rm.UVMForm) {
				clear(o[rm.UVMGPU : rm.UVMGPU+16])
				c, uuid := s.clients[a[1]], testGPUUUID()
				copy(o[uvmMapAttributes:], uuid[:])
				rm.PutU64(o, form.FD-uvmMapCount, 1)
				rm.PutU32(o, form.FD, uint32(c.fd))
				rm.PutU32(o, form.Client, c.client)
				rm.PutU32(o, form.Object, uint32(a[2]))
				rm.PutU64(o, form.Base, uint64(a[3]))
				rm.PutU64(o, form.Length, uint64(a[4]))
			})
		},
		// space CLIENT → an address space
		"space": func(s *childState, a []int) (string, error) {
			c := s.clients[a[0]]
			h, err := c.alloc(c.dev, 0, 0x90f1, make([]byte, 56))
			return fmt.Sprint(h), err
		},
		// contextin CLIENT SPACE ENGINE → a group, its channel, and an object on it
		"contextin": func(s *childState, a []int) (string, error) {
			c := s.clients[a[0]]
			p := make([]byte, 20)
			rm.PutU32(p, rm.TSGEngineType, uint32(a[2]))
			group, err := c.alloc(c.dev, 0, 0xa06c, p)
			if err != nil {
				return "", err
			}
			p = make([]byte, 368)
			rm.PutU32(p, rm.ChannelVASpace, uint32(a[1]))
			rm.PutU32(p, rm.ChannelEngineType, uint32(a[2]))
			channel, err := c.alloc(group, 0, 0xc86f, p)
			if err != nil {
				return "", err
			}
			class := uint32(0xcbc0)
			if a[2] > engineGRLast {
				class = 0xc8b5
			}
			object, err := c.alloc(channel, 0, class, nil)
			return fmt.Sprint(group, channel, object), err
		},
		// policy CLIENT OBJECT TYPE RIGHTS ACTION TARGET, by RM_SHARE; inherit, by the control, without OBJECT
		"policy": func(s *childState, a []int) (string, error) {
			c, o := s.clients[a[0]], make([]byte, rm.ShareSize)
			rm.PutU32(o, rm.ShareClient, c.client)
			rm.PutU32(o, rm.ShareObject, uint32(a[1]))
			copy(o[rm.SharePolicy:], testPolicy(a[2], a[3], a[4], a[5]))
			if err := c.ioctl(rm.EscShare, o); err != nil {
				return "", err
			}
			if got := o[rm.SharePolicy : rm.SharePolicy+rm.SharePolicySize]; string(got) != string(testPolicy(a[2], a[3], a[4], a[5])) {
				return "", fmt.Errorf("the policy came back as % x", got)
			}
			return "", statusError("policy", rm.U32(o, rm.ShareStatus))
		},
		"inherit": func(s *childState, a []int) (string, error) {
			c := s.clients[a[0]]
			return "", c.control(c.client, 0xd04, testPolicy(a[1], a[2], a[3], a[4]))
		},
		// dupof TO CLIENT_HANDLE HANDLE → handle
		"dupof": func(s *childState, a []int) (string, error) {
			h, err := s.clients[a[0]].dup(uint32(a[1]), uint32(a[2]))
			return fmt.Sprint(h), err
		},
		// debug CLIENT CLIENT_HANDLE OBJECT → a debugger object
		"debug": func(s *childState, a []int) (string, error) {
			c, p := s.clients[a[0]], make([]byte, 12)
			rm.PutU32(p, rm.DebuggerAppClient, uint32(a[1]))
			rm.PutU32(p, rm.DebuggerObject, uint32(a[2]))
			h, err := c.alloc(c.subdev, 0, 0x83de, p)
			return fmt.Sprint(h), err
		},
	} {
		childCommands[name] = f
	}
}

// beside is another container on the machine.
func (r *rig) beside() *rig {
	r.t.Helper()
	other := &rig{t: r.t, sim: r.sim, nodes: makeNodes(r.t)}
	other.newGuard()
	return other
}

// unguarded is a process of the machine without a guard: what the driver itself lets it have.
type unguarded struct {
	t           *testing.T
	s           *sim.Session
	uvm, ctl    sim.FileID
	client, dev uint32
}

func newUnguarded(r *rig) *unguarded {
	x := &unguarded{t: r.t, s: r.sim.Session([]int{0})}
	var err error
	if x.uvm, err = x.s.OpenFile(sim.UVM, 0); err != nil {
		r.t.Fatal(err)
	}
	if x.ctl, err = x.s.OpenFile(sim.Control, 0); err != nil {
		r.t.Fatal(err)
	}
	x.client = x.alloc(0, rmclient.ClassClient, make([]byte, 4))
	x.dev = x.alloc(x.client, rmclient.ClassDevice, make([]byte, 56))
	return x
}

func (x *unguarded) call(file sim.FileID, call *rm.Call) {
	x.t.Helper()
	if e := x.s.Ioctl(file, 1<<22, 1<<22, call); e != 0 {
		x.t.Fatal(e)
	}
}

func (x *unguarded) alloc(parent, class uint32, params []byte) uint32 {
	x.t.Helper()
	o := make([]byte, 48)
	rm.PutU32(o, rm.AllocRoot, x.client)
	rm.PutU32(o, rm.AllocParent, parent)
	rm.PutU32(o, rm.AllocClass, class)
	x.call(x.ctl, &rm.Call{Cmd: uint32(testCmd(rm.EscAlloc, 48)), Outer: o, Blocks: []rm.Block{{In: -1, Off: rm.AllocParams, Data: params}}})
	if s := rm.U32(o, 40); s != rm.StatusOK {
		x.t.Fatal(rm.StatusName(s))
	}
	return rm.U32(o, rm.AllocObject)
}

// takesSpace reports that UVM takes an address space for it.
func (x *unguarded) takesSpace(client, space int) bool {
	x.t.Helper()
	o, uuid := make([]byte, 32), testGPUUUID()
	copy(o, uuid[:])
	rm.PutU32(o, 20, uint32(client))
	rm.PutU32(o, 24, uint32(space))
	x.call(x.uvm, &rm.Call{Cmd: rm.UVMRegisterGPUVASpace, Outer: o})
	return rm.U32(o, 28) == rm.StatusOK
}

// dups reports that the driver lets it refer to an object.
func (x *unguarded) dups(client, object int) bool {
	x.t.Helper()
	o := make([]byte, rm.DupSize)
	rm.PutU32(o, rm.DupClient, x.client)
	rm.PutU32(o, rm.DupParent, x.dev)
	rm.PutU32(o, rm.DupClientSrc, uint32(client))
	rm.PutU32(o, rm.DupObjectSrc, uint32(object))
	x.call(x.ctl, &rm.Call{Cmd: uint32(testCmd(rm.EscDupObject, rm.DupSize)), Outer: o})
	return rm.U32(o, rm.DupStatus) == rm.StatusOK
}

// TestSteal: whatever a program shares, UVM takes its address space and channel for no other container, nor does the driver for anybody who
// has no guard; and what is refused tells nothing of what others have.
func TestSteal(t *testing.T) {
	for _, test := range []struct {
		name      string
		kind      int
		inherited bool
	}{
		{"shares nothing", 0, false},
		{"shares with everybody", shareTypeAll, false}, {"shares with the user", shareTypeToken, false},
		{"shares on the GPU", shareTypeGPU, false},
		{"shares all with everybody", shareTypeAll, true}, {"shares all with the user", shareTypeToken, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			thief := r.beside()
			v, a := r.start(), thief.start()
			open := v.do("open")
			victim, client := open[0], open[1]
			space := v.do("space", victim)[0]
			channel := v.do("contextin", victim, space, engineGR)[1]
			if test.inherited {
				v.do("inherit", victim, test.kind, accessDup, shareActionCompose, 0)
			} else {
				v.do("policy", victim, space, test.kind, accessDup, shareActionCompose, 0)
			}
			own := a.do("open")
			ownSpace := a.do("space", own[0])[0]
			uvm := a.do("uvm")[0]
			a.do("addspace", uvm, own[0], own[1], ownSpace) // else a refusal means nothing
			other := a.do("uvm")[0]
			for _, x := range []struct {
				command string
				uvm     int
				object  int
			}{{"addspace", other, space}, {"addchannel", uvm, channel}} {
				_, taken := a.try(x.command, x.uvm, own[0], client, x.object)
				_, none := a.try(x.command, x.uvm, own[0], 0xc1d0ffff, x.object)
				_, free := a.try(x.command, x.uvm, own[0], client, 0x7fff)
				if taken == nil || none == nil || free == nil || taken.Error() != none.Error() || taken.Error() != free.Error() {
					t.Errorf("%s: of a neighbour's %v, of no client's %v, of a client without it %v", x.command, taken, none, free)
				}
			}
			x := newUnguarded(r)
			if x.takesSpace(client, space) || x.dups(client, space) {
				t.Error("the driver lets others have it")
			}
			mine := v.do("uvm")[0]
			v.do("addspace", mine, victim, client, space)
			v.do("addchannel", mine, victim, client, channel)
			if x.takesSpace(client, space) || x.dups(client, space) {
				t.Error("the driver lets others have it after its owner has used it")
			}
		})
	}
}

// TestUVMNames: of the container's own handles too UVM gets only those of the right kind.
func TestUVMNames(t *testing.T) {
	r := newRig(t)
	c := r.start()
	open := c.do("open")
	a, client := open[0], open[1]
	memory := c.do("alloc", a, mib)[0]
	space := c.do("space", a)[0]
	uvm := c.do("uvm")[0]
	c.refused("INVALID_OBJECT_HANDLE", "addspace", uvm, a, client, memory)
	c.refused("INVALID_OBJECT_HANDLE", "addspace", uvm, a, client, client)
	c.refused("INVALID_OBJECT_HANDLE", "addchannel", uvm, a, client, space)
	c.do("addspace", uvm, a, client, space)
	c.do("freeclient", a)
	c.refused("INVALID_CLIENT", "addspace", c.do("uvm")[0], a, client, space)
	c.kill()
	r.empty()
}

// kept is how many freed channels the guard knows that UVM keeps, and how many channels it keeps.
func (r *rig) kept() (guard, driver int) {
	a := r.guard.account
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.gpus[0].keptChannels, r.sim.Snapshot().GPUs[0].Kept
}

// TestRetain: what UVM keeps of freed contexts stays charged and counted, whatever way it is let go.
func TestRetain(t *testing.T) {
	const context = sim.DefaultContextCost
	for _, test := range []struct {
		name   string
		letGo  func(c *child, uvm, client, handle int, channels []int)
		killed bool
	}{
		{name: "each channel", letGo: func(c *child, uvm, client, handle int, channels []int) {
			for _, ch := range channels {
				c.do("dropchannel", uvm, client, handle, ch)
			}
		}},
		{name: "the address space", letGo: func(c *child, uvm, _, _ int, _ []int) { c.do("dropspace", uvm) }},
		{name: "the GPU", letGo: func(c *child, uvm, _, _ int, _ []int) { c.do("dropgpu", uvm) }},
		{name: "the file", letGo: func(c *child, uvm, _, _ int, _ []int) { c.do("closefd", uvm) }},
		{name: "the process", letGo: func(c *child, _, _, _ int, _ []int) { c.kill() }, killed: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			c := r.start()
			open := c.do("open")
			a, client := open[0], open[1]
			space, uvm := c.do("space", a)[0], c.do("uvm")[0]
			c.do("addspace", uvm, a, client, space)
			memory := c.do("alloc", a, 8*mib)[0]
			c.do("mapuvm", uvm, a, memory, 1<<32, 8*mib)
			c.do("free", a, memory)
			r.agree(8*quota.MiB + vaSpaceSize)
			var channels []int
			for i := range 5 {
				x := c.do("contextin", a, space, engineGR)
				c.do("addchannel", uvm, a, client, x[1])
				if i == 0 { // refused, and of no consequence
					c.refused("INVALID_CHANNEL", "addchannel", uvm, a, client, x[1])
				}
				channels = append(channels, x[1])
				c.do("free", a, x[0])
				r.agree(8*quota.MiB + vaSpaceSize + quota.Bytes(i+1)*context)
			}
			if n, k := r.kept(); n != 5 || k != 5 {
				t.Errorf("the guard counts %d channels that are kept, the driver %d: want 5", n, k)
			}
			test.letGo(c, uvm, a, client, channels)
			switch {
			case test.name == "each channel":
				r.agree(8*quota.MiB + vaSpaceSize)
			case test.killed:
				r.agree(0)
			default:
				r.agree(vaSpaceSize)
			}
			if n, k := r.kept(); n != 0 || k != 0 {
				t.Errorf("the guard counts %d channels that are kept, the driver %d: want none", n, k)
			}
			c.kill()
			r.empty()
		})
	}
}

// TestRetainLimits: a loop that makes contexts, has UVM keep them, and frees them, ends at the container's limits.
func TestRetainLimits(t *testing.T) {
	const copies = 9 // a group that has no context
	for _, test := range []struct {
		name   string
		engine int
		why    string
		want   int
	}{
		{"memory", engineGR, "NO_MEMORY", 3},
		{"channels", copies, "INSUFFICIENT_RESOURCES", 7},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			r.guard.cfg.Settings.MaxChannels = 7
			r.guard.account.gpus[0].limit = 3*sim.DefaultContextCost + quota.MiB
			c := r.start()
			open := c.do("open")
			a, client := open[0], open[1]
			space, uvm := c.do("space", a)[0], c.do("uvm")[0]
			c.do("addspace", uvm, a, client, space)
			one := func() error {
				s, err := c.try("contextin", a, space, test.engine)
				if err != nil {
					return err
				}
				var group, channel, object int
				_, _ = fmt.Sscan(s, &group, &channel, &object)
				c.do("addchannel", uvm, a, client, channel)
				c.do("free", a, group)
				return nil
			}
			n := 0
			var err error
			for ; n < 20 && err == nil; n++ {
				err = one()
			}
			if n-1 != test.want || err == nil || !strings.Contains(err.Error(), test.why) {
				t.Errorf("ended after %d with %v: want %d and %s", n-1, err, test.want, test.why)
			}
			c.do("dropspace", uvm)
			c.do("addspace", uvm, a, client, space)
			if err := one(); err != nil {
				t.Errorf("when UVM has let go: %v", err)
			}
			c.kill()
			r.empty()
		})
	}
}

// TestTwoRegistrations: a channel that UVM refuses to take once more is still the one that it has.
func TestTwoRegistrations(t *testing.T) {
	a := newAccount(testConfig("/dev").GPUs)
	a.addClient(testClient, 1, nil)
	a.addObject(testClient, object{handle: 1, parent: testClient, kind: rm.ClassTSG, gpu: noGPU}, noGPU, 0, 0)
	a.addObject(testClient, object{handle: 2, parent: 1, kind: rm.ClassChannel, gpu: noGPU}, noGPU, 0, 0)
	name := channelName{testClient, 2}
	first := a.retainChannel(name)
	a.reserve(cost{size: quota.MiB}, false)
	a.chargeContext(testClient, 1, 0, quota.MiB)
	a.releaseChannel(a.retainChannel(name)) // the driver said no
	a.freeObject(testClient, 1)
	if a.gpus[0].keptChannels != 1 || a.usage(0).used != quota.MiB {
		t.Errorf("%d kept, %v charged", a.gpus[0].keptChannels, a.usage(0).used)
	}
	a.releaseChannel(first)
	if a.gpus[0].keptChannels != 0 || a.usage(0).used != 0 || a.zombies != 0 || a.retainChannel(name) != nil {
		t.Errorf("at the end %d kept, %v charged, %d zombies", a.gpus[0].keptChannels, a.usage(0).used, a.zombies)
	}
}
