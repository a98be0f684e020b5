// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/domain"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Domains. An MPS server makes one channel group for all its clients, and some memory. Each client makes second handles on these, and
// channels of its own below the group's (docs/internals/mps.md). The server is in a container of its own, whose guard lends what the server
// has opened to others: it opens the object for the moment of the member's call, and no other call of the server's client is served
// meanwhile. That is all that goes from one guard to another, and it goes in this direction only.
//
// What is lent stays with the server, in whose name a group has its timeslice and is switched in the middle of kernels. It is charged to
// the server, and to each member that has a handle on it: it lives as long as any, also where the server has ended or made another.

// borrowPrice is what a second handle takes of the time of slow calls: the ledger is read, and another guard makes two calls.
const borrowPrice = 2 * time.Millisecond

// borrow serves RM_DUP_OBJECT of an object of the domain's server.
func (g *Guard) borrow(c *trappedCall, dst, src uint32) (rep reply) {
	if !g.waitToPay(c, borrowPrice) {
		return fail(unix.EINTR)
	}
	rep, ok := c.lock(dst, dst)
	if !ok {
		return rep
	}
	defer c.locked.unlock()
	parent := rm.U32(c.call.Outer, rm.DupParent)
	gpu, ok := g.gpuFor(dst, parent)
	if !ok {
		return c.status(rm.StatusInvalidObjectParent)
	}
	if c.isUnseen(c.target(), dst, parent) {
		return c.denyUnseen()
	}
	err := g.borrowFrom(c, gpu, api.Loan{Domain: g.cfg.Domain, Client: src, Object: rm.U32(c.call.Outer, rm.DupObjectSrc),
		PID: c.locked[0].tgid},
		func(lent api.Lent, from lender, until time.Time) {
			rep = c.execute(g.planBorrowed(c, dst, gpu, lent, from, until))
		})
	if err != nil {
		return c.deny(rm.StatusInvalidClient, "borrow", "denied a second handle on an object of another container's client", "client", src,
			"err", err)
	}
	return rep
}

// borrowPatience is for how long the server's guard may not answer, since another program goes on in its place.
const borrowPatience = 3 * time.Second

// borrowFrom calls f while the server's object is open; until is when it is no more.
func (g *Guard) borrowFrom(c *trappedCall, gpu int, loan api.Loan, f func(lent api.Lent, from lender, until time.Time)) error {
	for begin := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		server, err := g.domainServer(g.cfg.GPUs[gpu].UUID)
		if err != nil {
			return err
		}
		until := time.Now().Add(api.LoanTime)
		err = api.Borrow(server, loan, func(lent api.Lent) { f(lent, lender{server.Nonce, lent.Group}, until) })
		if _, refused := errors.AsType[api.Refused](err); err == nil || refused || time.Since(begin) > borrowPatience || !c.valid() {
			return err
		}
	}
}

// lender is whose a lent channel group is: the record of the server, and the group's number with its guard, which no other ever has there.
type lender struct {
	nonce string
	group int
}

// planBorrowed is the plan of the call itself. until is when the loan ends: from then on the server may do with the object what it likes,
// and what it told of it says nothing.
func (g *Guard) planBorrowed(c *trappedCall, dst uint32, gpu int, lent api.Lent, from lender, until time.Time) plan {
	if lent.UUID != g.cfg.GPUs[gpu].UUID {
		return answer(c.denyOtherGPU())
	}
	o := object{parent: rm.U32(c.call.Outer, rm.DupParent), class: lent.Class, gpu: noGPU, engine: lent.Engine, size: lent.Size}
	had := false
	if lent.Class == classChannelGroup {
		o.kind = rm.ClassTSG
		if o.group, o.charge = g.acquireBorrowed(c, from); o.group != nil {
			had = true
		} else {
			o.group = &channelGroup{graphics: true, context: true, preempts: true, shared: true, lender: from}
		}
	} else {
		o.kind, o.length, o.page = rm.ClassVidmem, lent.Length, lent.Page
	}
	if !g.roomForObject(o.kind, gpu) {
		return answer(c.status(rm.StatusInsufficientResources))
	}
	var p plan
	if had { // it is charged
		p = plan{ask: true, cancel: func() {}, commit: func() {
			h := rm.U32(c.call.Outer, rm.DupObject)
			g.account.dupObject(dst, o.parent, h, o)
			c.undo = g.undoObject(c.target(), dst, h)
		}}
	} else {
		p = g.planCharged(c, dst, cost{gpu: gpu, size: o.size}, func() (object, quota.Bytes) {
			o.handle = rm.U32(c.call.Outer, rm.DupObject)
			return o, o.size
		})
	}
	if !p.ask {
		return p
	}
	commit := p.commit
	p.commit = func() {
		handle := rm.U32(c.call.Outer, rm.DupObject)
		if !time.Now().Before(until) {
			if s, e := g.rmFree(c.target(), dst, handle); e == 0 && s == rm.StatusOK {
				p.cancel()
				c.restoreInput()
				c.deny(rm.StatusInvalidClient, "lateloan", "denied a second handle on an object of the domain's server: the driver took too long")
				return
			}
		}
		commit()
		g.gpuTime.Made(gpu) // from now on its channels follow the domain's plan
	}
	return p
}

// acquireBorrowed finds a lent group that the container has a handle on, and keeps its charge for the call; nil: there is none.
func (g *Guard) acquireBorrowed(c *trappedCall, from lender) (*channelGroup, *charge) {
	of, handle := g.account.borrowed(from)
	if of == nil {
		return nil, nil
	}
	o, ok := g.account.acquireObject(of, handle)
	if !ok {
		return nil, nil
	}
	c.acquired = append(c.acquired, o)
	if o.group == nil || o.group.lender != from {
		return nil, nil
	}
	return o.group, o.charge
}

func (a *account) borrowed(from lender) (*client, uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.clients {
		for h, o := range c.groups {
			if o.group.lender == from {
				return c, h
			}
		}
	}
	return nil, 0
}

const (
	// maxLentShares is how many context shares a member's container may have below the server's groups, one for each CUDA context, and
	// maxLentChannels how many channels, of which a context has two (580.159.04). A group has 64, and 128.
	maxLentShares   = 16
	maxLentChannels = 2 * maxLentShares
)

// roomBelowLent reports that an object of a class may be made below another one, as far as that is a channel group that is lent.
func (a *account) roomBelowLent(client, parent uint32, class rm.Class) bool {
	isShare, isChannel := class.ID == classContextShare, class.Kind == rm.ClassChannel
	if !isShare && !isChannel || !a.isLent(client, parent) {
		return true
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	n := 0
	for _, c := range a.clients {
		for _, o := range c.dependants {
			group := c.objects[o.parent]
			if group != nil && group.group != nil && group.group.lent() && (o.kind == rm.ClassChannel) == isChannel {
				n++
			}
		}
	}
	return isShare && n < maxLentShares || isChannel && n < maxLentChannels
}

// denyOwnContext refuses a member's container a context outside of its domain's server, for which it would have a share of the GPU's time
// beside the domain's. A program makes one where it does not find the server's pipes.
func (g *Guard) denyOwnContext(c *trappedCall) plan {
	text := fmt.Sprintf("denied a CUDA context: a member of trust domain %q computes through the domain's MPS server alone, which CUDA "+
		"finds by CUDA_MPS_PIPE_DIRECTORY=%s; leave that variable as it is in the container, or leave CGPU_DOMAIN (--domain) out", g.cfg.Domain,
		page.PipesPath)
	g.events.Note(event.Event{Kind: event.Warning, PID: c.task.proc.tgid, Text: text})
	return answer(c.deny(rm.StatusNotSupported, "owncontext", text))
}

// domainServer finds the record of the domain's MPS server on a GPU.
func (g *Guard) domainServer(uuid string) (ledger.Record, error) {
	if g.cfg.DomainServer {
		return ledger.Record{}, errors.New("a domain's server borrows from nobody")
	}
	r, ok, err := domain.Server(g.cfg.RunDir, uuid, g.cfg.Domain)
	if err == nil && !ok {
		err = fmt.Errorf("domain %s has no MPS server on GPU %s", g.cfg.Domain, uuid)
	}
	return r, err
}

// lend answers the guard of a member.
func (g *Guard) lend(conn net.Conn, l api.Loan) {
	g.work.RLock() // what is open now another program would not close
	defer g.work.RUnlock()
	say := json.NewEncoder(conn)
	if err := g.whileLent(l, func(lent api.Lent) {
		if say.Encode(lent) == nil {
			_ = conn.SetReadDeadline(time.Now().Add(api.LoanTime))
			_, _ = conn.Read(make([]byte, 1)) // until the other guard has made its call, and closes
		}
	}); err != nil {
		_ = say.Encode(api.Lent{Error: err.Error()})
	}
}

// whileLent calls f while an object is open to the domain.
func (g *Guard) whileLent(l api.Loan, f func(api.Lent)) error {
	if !g.cfg.DomainServer || l.Domain != g.cfg.Domain {
		return errors.New("it is not the domain's server")
	}
	lock, ok := g.account.lockCalls(l.Client, l.Client)
	if !ok {
		return errors.New("the client is not the server's")
	}
	defer lock.unlock()
	lent, err := g.account.lendable(lock[0], l.Object)
	if err != nil {
		return err
	}
	t, ok := g.fileOf(lock[0])
	if !ok {
		return errors.New("the client's file is not found")
	}
	defer t.Done()
	if lent.group != nil { // it stays charged where the call fails
		if !g.chargeShared(l.Client, *lent.group) {
			return errors.New("what the group takes for several clients does not fit into the server's memory limit")
		}
		g.books.commit(nil)
		lent.answer.Size = sharedContext + g.contextMemory(lent.gpu)
		if !g.noteGuest(lent.gpu, l.PID, newGuestTime) {
			return errors.New("others with its groups are as many as it can keep account of")
		}
	}
	lent.answer.UUID = g.cfg.GPUs[lent.gpu].UUID
	s, e := g.whileShared(t, l.Client, []openRight{{l.Object, accessDup}}, func() { f(lent.answer) })
	if e != 0 || s != rm.StatusOK {
		return fmt.Errorf("the driver does not open it: %s, errno %d", rm.StatusName(s), e)
	}
	return nil
}

type lendable struct {
	gpu    int
	group  *object // nil: it is memory
	answer api.Lent
}

// lendable tells what there is to know of an object that others may have a handle on: a channel group with a context, which the server has
// opened to its user, as all that its client has; or device memory, which it has opened to all, as nothing else of it.
func (a *account) lendable(c *client, handle uint32) (l lendable, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	o := c.objects[handle]
	if o == nil {
		return l, errors.New("the object is not known")
	}
	l.gpu, l.answer.Class, l.answer.Engine = c.gpuOf(o), o.class, o.engine
	p := c.policiesOf(handle)
	isMemory := o.kind == rm.ClassVidmem && o.charge.isDeviceMemory() && o.secondCharge == nil
	switch {
	case l.gpu == noGPU || isMemory && o.charge.gpu != l.gpu:
		return l, errors.New("it is on no GPU")
	case p.all&accessDup == 0 && (o.group == nil || p.user&accessDup == 0):
		return l, errors.New("the server has not opened it")
	case o.group != nil && o.group.graphics && o.group.context && o.group.preempts && !o.group.legacy:
		group := *o
		l.group, l.answer.Group = &group, o.group.number
		return l, nil
	case isMemory:
		l.answer.Class, l.answer.Size, l.answer.Length, l.answer.Page = classVidmem, o.charge.size, o.charge.length, o.charge.page
		return l, nil
	}
	return l, fmt.Errorf("it is neither a channel group with a context, whose channels have context shares, nor device memory (class %s)",
		rm.ClassName(o.class))
}
