// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

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
}

func newDomain(t *testing.T, domain string) *domainRig {
	r := &domainRig{rig: newRig(t)}
	control := filepath.Join(r.nodes, "s.ctl")
	r.guard.cfg.Domain, r.guard.cfg.DomainServer = domain, true
	reserveOther(t, r.guard, ledger.Record{Domain: domain, DomainServer: true, Control: control})
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: control, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go r.guard.serveControl(l)
	r.server = r.start()
	open := r.server.do("open")
	r.number, r.client = open[0], open[1]
	r.server.do("inherit", r.number, shareTypeToken, accessDup, 0, 0)
	made := r.server.do("contextin", r.number, 0, engineGR)
	r.group, r.work = made[0], made[2]
	r.server.do("schedule", r.number, r.group)
	r.mem = r.server.do("alloc", r.number, 2*mib)[0]
	return r
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
// for what it has, once; and what the member has outlives the server.
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
	c.do("free", second, again)
	m.uses(lent + 2*quota.MiB)
	r.uses(sim.DefaultContextCost + sim.SharedContextCost + 2*quota.MiB)
	c.do("schedulechannel", own, channel)
	if n := r.guard.gpuTime.Status(0).TSGs; n != 1 || m.guard.gpuTime.Status(0).TSGs != 0 {
		t.Errorf("groups: %d of the server's, %d of the member's", n, m.guard.gpuTime.Status(0).TSGs)
	}
	if pids := r.guard.guests.living(); len(pids) != 1 || pids[0] != c.cmd.Process.Pid {
		t.Errorf("guests %v", pids)
	}
	c.refused("NV_ERR_NOT_SUPPORTED", "schedule", own, group) // it would let the server's channels run, and all others'
	c.do("alloc", own, 860*mib)
	c.refused("NV_ERR_NO_MEMORY", "alloc", own, 30*mib)
	if err := m.handOver(); err != nil {
		t.Fatal(err)
	}
	c.refused("NV_ERR_NOT_SUPPORTED", "schedule", own, group)
	r.server.kill()
	r.uses(0)
	m.uses(lent + 862*quota.MiB)
	c.do("free", own, memory)
	m.uses(lent + 860*quota.MiB)
	c.do("free", own, group) // as long as the member keeps the server's group it has its memory
	m.uses(860 * quota.MiB)
	c.kill()
	m.uses(0)
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
