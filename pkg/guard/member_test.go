// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestMemberContext: a member has no context of its own, by which it would have a second share of the GPU; for copies it has groups.
func TestMemberContext(t *testing.T) {
	r := newDomain(t, "team")
	_, c, own, group, _ := r.joined()
	c.refused("NV_ERR_NOT_SUPPORTED", "context", own)
	c.do("contextin", own, 0, rm.ChannelEngineTypeCopy0)
	unsaid := c.do("groupon", own, 0)[0] // before Ampere a group may be on no engine yet
	c.refused("NV_ERR_NOT_SUPPORTED", "engine", own, c.do("channel", own, unsaid, c.do("share", own, unsaid)[0])[0])
	c.do("engine", own, c.do("channel", own, group, c.do("share", own, group)[0])[0])
	_, free := r.member("")
	free.do("context", free.do("open")[0])
}

// TestMemberContextAnew: the server's context goes with its object, and a member's object makes another one. No kernel of a member's runs
// in one that is not switched in the middle of kernels, and the server makes none where others have handles.
func TestMemberContextAnew(t *testing.T) {
	r := newDomain(t, "team")
	_, c := r.member("team")
	own := c.do("open")[0]
	group := c.do("dupof", own, r.client, r.group)[0]
	preempts := func(when string, want bool) {
		t.Helper()
		for _, x := range r.sim.Snapshot().GPUs[0].TSGs {
			if x.CILP != want {
				t.Errorf("%s: CILP %v in client %#x", when, x.CILP, x.Client)
			}
		}
	}
	channel := func() int { return c.do("channel", own, group, c.do("share", own, group)[0])[0] }
	early, late := channel(), channel()
	first := c.do("engine", own, early)[0]
	c.do("schedulechannel", own, early)
	c.do("free", own, first)
	c.do("preempt", own, group) // libcuda does that with each context that it ends, also when it has ended another one
	preempts("a member's context", true)
	r.server.do("free", r.number, r.work)
	preempts("without an object there is no context", false)
	c.do("engine", own, late) // beside a channel that runs
	preempts("a member's object makes it anew", true)
	c.do("schedulechannel", own, late)
	c.do("preempt", own, group)
	made := r.server.do("share", r.number, r.group)[0]
	r.server.refused("NV_ERR_NOT_SUPPORTED", "engine", r.number, r.server.do("channel", r.number, r.group, made)[0])
}

// TestMemberDraws: nobody draws in the domain's group, also where its context is gone and a member's object would make one.
func TestMemberDraws(t *testing.T) {
	r := newDomain(t, "team")
	m, c := r.member("team")
	m.guard.cfg.Settings.Graphics = true
	own := c.do("open")[0]
	group := c.do("dupof", own, r.client, r.group)[0]
	channel := c.do("channel", own, group, c.do("share", own, group)[0])[0]
	c.refused("NV_ERR_NOT_SUPPORTED", "engine", own, channel, 0xcb97)
	r.server.do("free", r.number, r.work)
	c.refused("NV_ERR_NOT_SUPPORTED", "engine", own, channel, 0xcb97)
}

// TestMemberBound: one member does not have all contexts of the server's, however many clients and handles on the group it has.
func TestMemberBound(t *testing.T) {
	r := newDomain(t, "team")
	_, c, own, group, _ := r.joined() // one share, one channel
	other := c.do("open")[0]
	second := c.do("dupof", other, r.client, r.group)[0]
	var share int
	for i := range maxLentShares - 1 {
		share = c.do("share", []int{own, other}[i%2], []int{group, second}[i%2])[0]
	}
	c.refused("NV_ERR_INSUFFICIENT_RESOURCES", "share", own, group)
	c.refused("NV_ERR_INSUFFICIENT_RESOURCES", "share", other, second)
	own, group = []int{own, other}[maxLentShares%2], []int{group, second}[maxLentShares%2] // of the last share
	for range maxLentChannels - 1 {
		c.do("channel", own, group, share)
	}
	c.refused("NV_ERR_INSUFFICIENT_RESOURCES", "channel", own, group, share)
	copies := c.do("groupon", own, rm.ChannelEngineTypeCopy0)[0]
	c.do("channel", own, copies, c.do("share", own, copies)[0]) // its own groups' are not counted
	c.do("free", own, share)
	c.do("share", own, group)
	_, _, _, _, _ = r.joined() // and another member has its part
}

// TestMemberControls: what reaches a context as a whole is not for members, on whatever object; nor are profilers, whatever the node
// allows.
func TestMemberControls(t *testing.T) {
	for _, domain := range []string{"", "team"} {
		g := withClient(newFakeGuard(t, answering(0, nil)))
		g.cfg.Domain, g.cfg.Settings.Profiling = domain, true
		g.slowBucket = bucket{}
		status := func(id uint32) uint32 {
			form, ok := g.abi.Control(id)
			if !ok {
				t.Fatalf("%#x", id)
			}
			p := make([]byte, max(form.Size, 64))
			if form.Size > 0 {
				p = p[:form.Size]
			}
			o := fakeControlCall(fakeDevice, id, p)
			newFakeCall(t, g, fakeControl).escape(rm.EscControl, o, p)
			return rm.U32(o, rm.ControlStatus)
		}
		for _, id := range []uint32{0x801108, 0x20801208, 0x20800122, 0x83de0309, 0x83de0310, 0x83de0317, 0x83de0318, 0x83de031f, 0x906f0102} {
			if form, _ := g.abi.Control(id); !form.Context {
				t.Errorf("%s is not in the table as one", form.Name)
			}
			if s := status(id); domain != "" && s != rm.StatusNotSupported {
				t.Errorf("domain %q: %#x: %s", domain, id, rm.StatusName(s))
			}
		}
		for id, want := range map[uint32]map[string]uint32{
			0x801108:   {"": rm.StatusOK, "team": rm.StatusNotSupported},
			0x83de030c: {"": rm.StatusOK, "team": rm.StatusOK}, // libcuda asks for it when a context has failed
			0xb0cc0101: {"": rm.StatusOK, "team": rm.StatusInsufficientPermissions},
		} {
			if s := status(id); s != want[domain] {
				t.Errorf("domain %q: %#x: %s, want %s", domain, id, rm.StatusName(s), rm.StatusName(want[domain]))
			}
		}
	}
}

// TestMemberPreempts: a member takes the domain's group off the GPU as it ends a context, and its own.
func TestMemberPreempts(t *testing.T) {
	r := newDomain(t, "team")
	_, c, own, group, channel := r.joined()
	c.do("preempt", own, group)
	c.do("preempt", own, c.do("groupon", own, rm.ChannelEngineTypeCopy0)[0])
	c.refused("NV_ERR_NOT_SUPPORTED", "preempt", own, channel)
	r.server.do("preempt", r.number, r.group)
}

// TestStrayRootOfMember: where a root alloc went elsewhere, nobody could find a channel that it made in the domain's group: so what has a
// handle on that ends, the first time too, and nothing else.
func TestStrayRootOfMember(t *testing.T) {
	r := newDomain(t, "team")
	m, c, own, _, channel := r.joined()
	other := c.do("open")[0]
	c.do("alloc", other, 4*mib)
	m.guard.rootWentAstray(&pendingRoot{task: &task{proc: &process{tgid: c.cmd.Process.Pid}}})
	if c.lives(own, channel) {
		t.Error("it goes on")
	}
	c.do("alloc", other, 4*mib)
	r.guard.rootWentAstray(&pendingRoot{task: &task{proc: &process{tgid: r.server.cmd.Process.Pid}}})
	r.uses(0)
}

// TestLentMode: a context that a member makes anew below the lent group is switched in the middle of kernels, also where the channels that
// run are another member's.
func TestLentMode(t *testing.T) {
	r := newDomain(t, "team")
	_, c := r.member("team")
	own := c.do("open")[0]
	group := c.do("dupof", own, r.client, r.group)[0]
	channel := c.do("channel", own, group, c.do("share", own, group)[0])[0]
	_, d := r.member("team")
	its := d.do("open")[0]
	itsGroup := d.do("dupof", its, r.client, r.group)[0]
	runs := d.do("channel", its, itsGroup, d.do("share", its, itsGroup)[0])[0]
	work := d.do("engine", its, runs)[0]
	d.do("schedulechannel", its, runs)
	d.do("free", its, work)
	r.server.do("free", r.number, r.work) // the context goes, in the driver
	c.do("engine", own, channel)          // and is made anew
	for _, gpu := range r.sim.Snapshot().GPUs {
		for _, x := range gpu.TSGs {
			if x.EngineType == 1 && !x.CILP && !x.Paused {
				t.Errorf("a group whose channels run has a context without CILP")
			}
		}
	}
}
