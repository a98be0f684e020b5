// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sim"
)

// domainRig is a guard with a domain's MPS server, and what others are given to begin with: the server's client, a channel group with a
// context, and 2 MiB of memory, opened as the driver's server opens them.
type domainRig struct {
	*rig
	server                           *child
	number, client, group, mem, work int
	control                          *net.UnixListener
}

func newDomain(t *testing.T, domain string) *domainRig {
	r := &domainRig{rig: newRig(t)}
	control := filepath.Join(r.nodes, "s.ctl")
	r.guard.cfg.Domain, r.guard.cfg.DomainServer = domain, true
	reserveOther(t, r.guard, ledger.Record{Domain: domain, DomainServer: true, Control: control})
	r.listen(control)
	r.server = r.start()
	open := r.server.do("open")
	r.number, r.client = open[0], open[1]
	r.server.do("inherit", r.number, shareTypeToken, accessDup, 0, 0)
	r.group, r.work = r.context()
	r.mem = r.server.do("alloc", r.number, 2*mib)[0]
	r.server.do("policy", r.number, r.mem, shareTypeAll, accessDup, 0, 0)
	return r
}

func (r *domainRig) listen(path string) {
	var err error
	if r.control, err = net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { r.control.Close() })
	go r.guard.serveControl(r.control)
}

// context makes a channel group with a context, as the driver's server has it.
func (r *domainRig) context() (group, work int) {
	made := r.server.do("mpscontext", r.number)
	work = r.server.do("engine", r.number, made[1])[0]
	r.server.do("schedule", r.number, made[0])
	return made[0], work
}

// member is another container of the same machine, with a guard of its own.
func (r *domainRig) member(domain string) (*rig, *child) {
	m := &rig{t: r.t, sim: r.sim, nodes: r.nodes}
	m.newGuard()
	m.guard.gpuTime.StartRescuer = noRescuer
	m.guard.cfg.Domain, m.guard.cfg.Nonce = domain, "m"
	return m, m.start()
}

func (r *rig) uses(want quota.Bytes) {
	r.t.Helper()
	for deadline := time.Now().Add(patience); r.guard.account.usage(0).used != want; time.Sleep(5 * time.Millisecond) {
		if r.guard.sweep(); time.Now().After(deadline) {
			r.t.Fatalf("used %v, want %v", r.guard.account.usage(0).used, want)
		}
	}
}

// TestDomain: a member has handles on the channel group of its domain's server and on memory that the server has opened. Each pays
// for what it has, once.
func TestDomain(t *testing.T) {
	r := newDomain(t, "team")
	m, c := r.member("team")
	own := c.do("open")[0]
	group, memory := c.do("dupof", own, r.client, r.group)[0], c.do("dupof", own, r.client, r.mem)[0]
	const lent = sharedContext + sim.DefaultContextCost
	m.uses(lent + 2*quota.MiB)
	channel := c.do("channel", own, group, c.do("share", own, group)[0])[0]
	c.do("engine", own, channel)
	m.uses(lent + 2*quota.MiB)
	second := c.do("open")[0] // of another process, say: the same group is paid for once
	again := c.do("dupof", second, r.client, r.group)[0]
	m.uses(lent + 2*quota.MiB)
	r.uses(sim.DefaultContextCost + sim.SharedContextCost + 2*quota.MiB)
	c.do("schedulechannel", own, channel)
	if n := r.guard.gpuTime.Status(0).TSGs; n != 1 || m.guard.gpuTime.Status(0).TSGs != 0 {
		t.Errorf("groups: %d of the server's, %d of the member's", n, m.guard.gpuTime.Status(0).TSGs)
	}
	if pids := r.guard.guests.present(); len(pids) != 1 || pids[0] != c.cmd.Process.Pid {
		t.Errorf("guests %v", pids)
	}
	c.refused("NV_ERR_NOT_SUPPORTED", "schedule", own, group) // it would let the server's channels run, and all others'
	c.do("alloc", own, 860*mib)
	c.refused("NV_ERR_NO_MEMORY", "alloc", own, 30*mib)
	if err := m.handOver(); err != nil {
		t.Fatal(err)
	}
	c.refused("NV_ERR_NOT_SUPPORTED", "schedule", own, group)
	m.renew(1)
	c.do("free", second, again)
	m.uses(lent + 862*quota.MiB)
	c.do("free", own, memory)
	m.uses(lent + 860*quota.MiB)
	c.do("free", own, group) // as long as the member keeps the server's group it has its memory
	m.uses(860 * quota.MiB)
	c.kill()
	m.uses(0)
}

// renew has a member's guard tell n times what it has.
func (r *rig) renew(n int) {
	unanswered := map[string]int{}
	for range n {
		r.guard.renewLoans(unanswered)
	}
}

// lives reports that what a member does in the server's group goes on.
func (c *child) lives(client, channel int) bool {
	_, err := c.try("schedulechannel", client, channel)
	return err == nil
}

// joined is a member with a channel that runs in the server's group.
func (r *domainRig) joined() (m *rig, c *child, client, group, channel int) {
	m, c = r.member("team")
	client = c.do("open")[0]
	group = c.do("dupof", client, r.client, r.group)[0]
	channel = c.do("channel", client, group, c.do("share", client, group)[0])[0]
	c.do("engine", client, channel)
	c.do("schedulechannel", client, channel)
	return m, c, client, group, channel
}

// TestLoanOver: what was lent ends with the group, with the server, or with its guard, and not before.
func TestLoanOver(t *testing.T) {
	for name, test := range map[string]struct {
		end func(*domainRig)
		few int // how often the guard tells before it is over
	}{
		"the group":  {func(r *domainRig) { r.server.do("free", r.number, r.group) }, 0},
		"its client": {func(r *domainRig) { r.server.do("freeclient", r.number) }, 0},
		"the server, whose guard is still there": {func(r *domainRig) {
			r.server.kill()
			r.uses(0)
		}, 0},
		"the server's record": {func(r *domainRig) {
			if err := ledger.Open(r.nodes).Release("other"); err != nil {
				r.t.Fatal(err)
			}
		}, 0},
		"the server's guard":          {func(r *domainRig) { r.control.Close() }, renewTries - 1},
		"a guard that is not the own": {func(r *domainRig) { r.guard.cfg.Domain = "other" }, renewTries - 1},
	} {
		t.Run(name, func(t *testing.T) {
			r := newDomain(t, "team")
			m, c, own, group, channel := r.joined()
			other := c.do("open")[0] // which has nothing of the server's
			c.do("alloc", other, 4*mib)
			m.renew(renewTries + 1)
			test.end(r)
			if m.renew(test.few); !c.lives(own, channel) {
				t.Fatal("over too early")
			}
			m.renew(test.few + 1)
			m.uses(4 * quota.MiB)
			if c.lives(own, channel) {
				t.Error("the member's channel goes on, scheduled by nobody")
			}
			if _, err := c.try("channel", own, group); err == nil {
				t.Error("and it makes others")
			}
			m.renew(renewTries) // nothing is left to tell
		})
	}
}

// TestLoanOfAnother: of a member that has two of the server's groups, what is below the one that is gone ends.
func TestLoanOfAnother(t *testing.T) {
	r := newDomain(t, "team")
	m, c, own, _, channel := r.joined()
	old := r.group
	r.group, _ = r.context()
	second := c.do("open")[0]
	group := c.do("dupof", second, r.client, r.group)[0]
	later := c.do("channel", second, group, c.do("share", second, group)[0])[0]
	c.do("engine", second, later)
	r.server.do("free", r.number, old)
	m.renew(1)
	if c.lives(own, channel) || !c.lives(second, later) {
		t.Error("the first goes on, or the second does not")
	}
}

// TestGuests: the server's guard knows the member's processes after it has gone on as another program, and when one has ended whose client
// a child has.
func TestGuests(t *testing.T) {
	r := newDomain(t, "team")
	m, c, own, _, _ := r.joined()
	isGuest := func() bool { return slices.Contains(r.guard.guests.present(), c.cmd.Process.Pid) }
	if !isGuest() {
		t.Error("not known")
	}
	r.guard.guests.list = nil // as in another program
	if m.renew(1); !isGuest() {
		t.Error("not known after an upgrade")
	}
	child := c.do("fork", own)[0]
	t.Cleanup(func() { _ = unix.Kill(child, unix.SIGKILL) })
	c.kill()
	m.guard.sweep()
	r.guard.guests.list = nil
	if m.renew(1); !isGuest() {
		t.Error("not known by what a child has")
	}
}

// TestGuestsBound: who cannot be told to the arbiter is lent nothing, and keeps nothing.
func TestGuestsBound(t *testing.T) {
	r := newDomain(t, "team")
	m, c, own, _, channel := r.joined()
	r.guard.guests.list = map[int]time.Time{}
	for pid := range maxGuests {
		r.guard.guests.add(-1-pid, guestTime)
	}
	c.refused("NV_ERR_INVALID_CLIENT", "dupof", c.do("open")[0], r.client, r.group)
	if m.renew(renewTries); c.lives(own, channel) {
		t.Error("it goes on in nobody's account")
	}
	for pid := range r.guard.guests.list {
		r.guard.guests.list[pid] = time.Now().Add(-time.Second)
	}
	if n := len(r.guard.guests.present()); n != 0 {
		t.Errorf("%d are kept", n)
	}
}

// TestBorrowPatience: a server's guard that does not answer for a moment, as it goes on as another program, is asked again.
func TestBorrowPatience(t *testing.T) {
	r := newDomain(t, "team")
	_, c := r.member("team")
	own := c.do("open")[0]
	path := r.control.Addr().String()
	r.control.Close()
	c.send("dupof", own, r.client, r.group)
	time.Sleep(100 * time.Millisecond)
	r.listen(path)
	if _, err := c.answer(); err != nil {
		t.Error(err)
	}
}

// TestLegacyGroup: a group with a channel in its maker's address space is lent to nobody: the driver does not keep that.
func TestLegacyGroup(t *testing.T) {
	r := newDomain(t, "team")
	_, c := r.member("team")
	made := r.server.do("contextin", r.number, 0, engineGR)
	r.server.do("schedule", r.number, made[0])
	own := c.do("open")[0]
	c.refused("NV_ERR_INVALID_CLIENT", "dupof", own, r.client, made[0])
	group := c.do("dupof", own, r.client, r.group)[0]
	c.refused("NV_ERR_NOT_SUPPORTED", "channel", own, group) // nor does it get one there
	r.server.refused("NV_ERR_NOT_SUPPORTED", "channel", r.number, r.group)
}

// TestGroupWithin: within a container a group has one handle, in a domain too.
func TestGroupWithin(t *testing.T) {
	r := newDomain(t, "team")
	_, c, own, group, _ := r.joined()
	c.refused("NV_ERR_NOT_SUPPORTED", "dup", c.do("open")[0], own, group)
	r.server.refused("NV_ERR_NOT_SUPPORTED", "dup", r.server.do("open")[0], r.number, r.group)
}

// TestSharedLimit: what a group takes for a second client is the server's too, within its limit.
func TestSharedLimit(t *testing.T) {
	r := newDomain(t, "team")
	_, c := r.member("team")
	r.server.do("alloc", r.number, 900*mib)
	c.refused("NV_ERR_INVALID_CLIENT", "dupof", c.do("open")[0], r.client, r.group)
	r.uses(902*quota.MiB + sim.DefaultContextCost)
}

// TestDomainApart: nobody else has any of it, and a member nothing else.
func TestDomainApart(t *testing.T) {
	r := newDomain(t, "team")
	for _, domain := range []string{"", "other"} {
		_, c := r.member(domain)
		own := c.do("open")[0]
		for _, object := range []int{r.group, r.mem} {
			c.refused("NV_ERR_INVALID_CLIENT", "dupof", own, r.client, object)
		}
	}
	m, c := r.member("team")
	open := c.do("open")
	own := open[0]
	c.refused("NV_ERR_INVALID_CLIENT", "dupof", own, r.client, r.work)   // what is on a channel
	c.refused("NV_ERR_INVALID_CLIENT", "dupof", own, r.client, 0x123456) // what is not there
	c.refused("NV_ERR_INVALID_CLIENT", "dupof", own, r.client, r.client)
	c.refused("NV_ERR_INVALID_CLIENT", "dupof", own, r.client, r.server.do("alloc", r.number, 2*mib)[0]) // what its clients do not need
	r.server.do("policy", r.number, r.mem, shareTypePID, accessDup, 0, 0)
	c.refused("NV_ERR_INVALID_CLIENT", "dupof", own, r.client, r.mem) // what it has opened to nobody
	copies := r.server.do("contextin", r.number, 0, rm.ChannelEngineTypeCopy0)[0]
	c.refused("NV_ERR_INVALID_CLIENT", "dupof", own, r.client, copies)

	_, other := r.member("team")
	memory := c.do("alloc", own, 2*mib)[0]
	c.do("inherit", own, shareTypeToken, accessDup, 0, 0)
	other.refused("NV_ERR_INVALID_CLIENT", "dupof", other.do("open")[0], open[1], memory) // members lend each other nothing
	mine := r.server.do("open")[0]
	r.server.refused("NV_ERR_INVALID_CLIENT", "dupof", mine, open[1], memory) // nor the server
	m.uses(2 * quota.MiB)

	for name, l := range map[string]api.Loan{
		"another domain": {Domain: "other", Client: uint32(r.client), Object: uint32(r.group)},
		"another client": {Domain: "team", Client: uint32(open[1]), Object: uint32(memory)},
	} {
		if err := r.guard.whileLent(l, func(api.Lent) { t.Errorf("%s: lent", name) }); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	x := newUnguarded(r.rig)
	defer x.s.Close()
	if x.dups(r.client, r.group) {
		t.Error("the driver lets everybody have it")
	}
}

// TestLoanLimit: memory that a member is lent counts against its limit.
func TestLoanLimit(t *testing.T) {
	r := newDomain(t, "team")
	m, c := r.member("team")
	own := c.do("open")[0]
	c.do("alloc", own, 1024*mib)
	c.refused("NV_ERR_NO_MEMORY", "dupof", own, r.client, r.mem)
	m.uses(quota.GiB)
}

// TestLoanEnds: a guard that holds a loan for ever does not stop the server.
func TestLoanEnds(t *testing.T) {
	r := newDomain(t, "team")
	records, err := ledger.Open(r.nodes).List()
	if err != nil {
		t.Fatal(err)
	}
	server := records[0]
	done := make(chan error, 1)
	begun := make(chan bool)
	go func() {
		l := api.Loan{Domain: "team", Client: uint32(r.client), Object: uint32(r.group), PID: os.Getpid()}
		done <- api.Borrow(server, l, func(api.Lent) {
			close(begun)
			time.Sleep(2 * api.LoanTime)
		})
	}()
	<-begun
	r.server.do("alloc", r.number, mib)
	if err := <-done; err != nil {
		t.Error(err)
	}
}
