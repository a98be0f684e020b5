// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// TestReviewOrphan: when the server is gone, what its members still hold of its group must be in somebody's account, and then gone.
func TestReviewOrphan(t *testing.T) {
	r := newDomain(t, "team")
	m, c, own, group, channel := r.joined()
	agree := func() {
		t.Helper()
		if driver, counted := m.sim.Snapshot().GPUs[0].Used, m.guard.account.usage(0).used+r.guard.account.usage(0).used; driver != counted {
			t.Errorf("the driver has %v, the two guards count %v", driver, counted)
		}
	}
	r.server.kill()
	r.uses(0)
	agree()
	m.renew(1)
	m.guard.sweep()
	agree()
	if _, err := c.try("schedulechannel", own, channel); err == nil {
		t.Errorf("the member's channel still runs: groups that anybody schedules: %d of the server's, %d of the member's",
			r.guard.gpuTime.Status(0).TSGs, m.guard.gpuTime.Status(0).TSGs)
	}
	if _, err := c.try("channel", own, group); err == nil {
		t.Error("the member makes new channels in the group of a server that is gone")
	}
}

// TestReviewPlanAlone: under a policy with hard caps a member whose server is gone has a cap, as everybody has.
func TestReviewPlanAlone(t *testing.T) {
	g := withClient(newFakeGuard(t, answering(0, nil)))
	uuid := g.cfg.GPUs[0].UUID
	records := []ledger.Record{{ID: "m", Nonce: "m", Domain: "team", VGPUs: []ledger.VGPU{{UUID: uuid,
		Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 1}}}}}}
	for _, policy := range []sched.Policy{sched.PolicyFair, sched.PolicyFixed} {
		card := sched.Card{Policy: policy, MaxInst: 20, PrioRatio: 99}
		p := g.plans(records, records[0], map[string]sched.Card{uuid: card})[uuid]
		if p.Cap == 0 || p.Slot.Cycle == 0 {
			t.Errorf("policy %v: %+v: no slot, so it is always on", policy, p)
		}
	}
}

// TestReviewGuests: a process that is lent a group is told to the arbiter, or is lent nothing.
func TestReviewGuests(t *testing.T) {
	var x guests
	for pid := range 400 {
		x.add(1+pid, guestTime)
	}
	if _, ok := x.add(1000, guestTime); ok || len(x.present()) != maxGuests {
		t.Error(len(x.present()))
	}
}

func init() {
	// groupin CLIENT SPACE → group
	childCommands["groupin"] = func(s *childState, a []int) (string, error) {
		p := make([]byte, 20)
		rm.PutU32(p, rm.TSGVASpace, uint32(a[1]))
		rm.PutU32(p, rm.TSGEngineType, engineGR)
		c := s.clients[a[0]]
		h, err := c.alloc(c.dev, 0, 0xa06c, p)
		return fmt.Sprint(h), err
	}
	// groupon CLIENT ENGINE → group
	childCommands["groupon"] = func(s *childState, a []int) (string, error) {
		p := make([]byte, 20)
		rm.PutU32(p, rm.TSGEngineType, uint32(a[1]))
		h, err := s.clients[a[0]].alloc(s.clients[a[0]].dev, 0, 0xa06c, p)
		return fmt.Sprint(h), err
	}
	// contextshare CLIENT GROUP SPACE → share
	childCommands["contextshare"] = func(s *childState, a []int) (string, error) {
		p := make([]byte, 12)
		rm.PutU32(p, 0, uint32(a[2]))
		h, err := s.clients[a[0]].alloc(uint32(a[1]), 0, classContextShare, p)
		return fmt.Sprint(h), err
	}
	// duplow CLIENT PARENT OTHER HANDLE → handle
	childCommands["dupbelow"] = func(s *childState, a []int) (string, error) {
		c := s.clients[a[0]]
		dev := c.dev
		c.dev = uint32(a[1])
		defer func() { c.dev = dev }()
		h, err := c.dup(s.clients[a[2]].client, uint32(a[3]))
		return fmt.Sprint(h), err
	}
}

// TestReviewLegacyChannel: the driver gives a channel that names no context share the address space of the group's maker, which it has only
// a bare pointer to (kernel_ctxshare.c:120): no second handle may have such a channel.
func TestReviewLegacyChannel(t *testing.T) {
	r := newDomain(t, "team")
	_, c := r.member("team")
	own := c.do("open")[0]
	second := c.do("dupof", own, r.client, r.group)[0]
	r.server.do("freeclient", r.number) // and the address space
	if _, err := c.try("channel", own, second); err == nil {
		t.Error("a channel in the address space of a client that is gone: the guard asks the driver for a use after free")
	}
}

// TestReviewDupContextShare: the driver does not keep the address space of a context share for a second handle on that.
func TestReviewDupContextShare(t *testing.T) {
	r := newRig(t)
	c := r.start()
	maker, other := c.do("open")[0], c.do("open")[0]
	space := c.do("vaspace", maker)[0]
	share := c.do("contextshare", maker, c.do("groupin", maker, space)[0], space)[0]
	own := c.do("groupin", other, 0)[0]
	if _, err := c.try("dupbelow", other, own, maker, share); err == nil {
		t.Error("a second handle on a context share")
	}
}

// TestReviewOrphanOfDead: the process that was lent a group has ended, a child of its goes on with the client. When the server has ended
// the group, the client's channels are off for good.
func TestReviewOrphanOfDead(t *testing.T) {
	r := newDomain(t, "team")
	m, c, own, _, _ := r.joined()
	child := c.do("fork", own)[0]
	t.Cleanup(func() { _ = unix.Kill(child, unix.SIGKILL) })
	c.kill()
	r.server.do("free", r.number, r.group)
	m.guard.sweep()
	m.renew(1)
	m.guard.account.mu.Lock()
	defer m.guard.account.mu.Unlock()
	for _, x := range m.guard.account.clients {
		if len(x.groups) > 0 && !x.ending {
			t.Error("who has the lost group computes unscheduled")
		}
	}
}

// TestReviewLongLoans: a member with many groups and processes gets an answer, or its contexts would be ended without a reason.
func TestReviewLongLoans(t *testing.T) {
	r := newDomain(t, "team")
	l := api.Loans{Domain: "team", Groups: make([]int, 2000)}
	for i := range l.Groups {
		l.Groups[i] = 1<<40 + i
	}
	if lost, err := api.Renew(ledger.Record{Control: filepath.Join(r.nodes, "s.ctl")}, l); err != nil || len(lost) != len(l.Groups) {
		t.Errorf("%d of %d, %v", len(lost), len(l.Groups), err)
	}
}

// TestReviewLateSchedule: a handle that becomes one of the domain's group after a call of it was looked at lets nobody else's channels run.
func TestReviewLateSchedule(t *testing.T) {
	r := newDomain(t, "team")
	m, _, _, group, _ := r.joined()
	m.guard.account.mu.Lock()
	var client uint32
	for h, c := range m.guard.account.clients {
		if c.objects[uint32(group)] != nil {
			client = h
		}
	}
	m.guard.account.mu.Unlock()
	p := m.guard.planSchedule(&newFakeCall(t, m.guard, "/dev/null").trappedCall, client, uint32(group), true, func() {})
	p.done()
	if p.ask {
		t.Error("GPFIFO_SCHEDULE of the domain's group")
	}
}
