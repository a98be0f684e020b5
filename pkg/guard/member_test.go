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
