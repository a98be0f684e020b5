// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/domain"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Domains. An MPS server makes one channel group for all its clients, and some memory. Each client makes second handles on these, and
// channels of its own below the group's (docs/internals/mps.md). The server is in a container of its own, whose guard lends what the server
// has opened to others: it opens the object for the moment of the member's call, and no other call of the server's client is served
// meanwhile. That is all that goes from one guard to another, and it goes in this direction only.
//
// What is lent stays with the server, and is charged to both: a group's context to the server alone, in whose name the group has its
// timeslice and is switched in the middle of kernels; memory to each who has a handle on it, since it lives as long as any.

// borrowPrice is what a second handle takes of the time of slow calls: the ledger is read, and another guard makes two calls.
const borrowPrice = 2 * time.Millisecond

// borrow serves RM_DUP_OBJECT of an object of the domain's server.
func (g *Guard) borrow(c *trappedCall, dst, src uint32) (rep reply) {
	if !g.waitToPay(c, borrowPrice) {
		return fail(unix.EINTR)
	}
	lock, ok := g.account.lockCalls(dst, dst)
	if !ok {
		return c.status(rm.StatusInvalidClient)
	}
	defer lock.unlock()
	c.locked = lock
	gpu, ok := g.gpuFor(dst, rm.U32(c.call.Outer, rm.DupParent))
	if !ok {
		return c.status(rm.StatusInvalidObjectParent)
	}
	server, err := g.domainServer(g.cfg.GPUs[gpu].UUID)
	if err == nil {
		loan := api.Loan{Domain: g.cfg.Domain, Client: src, Object: rm.U32(c.call.Outer, rm.DupObjectSrc), PID: lock[0].tgid}
		err = api.Borrow(server, loan, func(lent api.Lent) { rep = c.execute(g.planBorrowed(c, dst, gpu, lent)) })
	}
	if err != nil {
		return c.deny(rm.StatusInvalidClient, "borrow", "denied a second handle on an object of another container's client", "client", src,
			"err", err)
	}
	return rep
}

// planBorrowed is the plan of the call itself.
func (g *Guard) planBorrowed(c *trappedCall, dst uint32, gpu int, lent api.Lent) plan {
	if lent.UUID != g.cfg.GPUs[gpu].UUID {
		return answer(c.denyOtherGPU())
	}
	o := object{parent: rm.U32(c.call.Outer, rm.DupParent), class: lent.Class, gpu: noGPU, engine: lent.Engine}
	if lent.Class == classChannelGroup {
		o.kind, o.group = rm.ClassTSG, &channelGroup{graphics: true, context: true, preempts: true, shared: true, lent: true}
	} else {
		o.kind, o.size, o.length, o.page = rm.ClassVidmem, lent.Size, lent.Length, lent.Page
	}
	if !g.roomForObject(o.kind, gpu) {
		return answer(c.status(rm.StatusInsufficientResources))
	}
	p := g.planCharged(c, dst, cost{gpu: gpu, size: o.size}, func() (object, quota.Bytes) {
		o.handle = rm.U32(c.call.Outer, rm.DupObject)
		return o, o.size
	})
	commit := p.commit
	p.commit = func() {
		commit()
		g.gpuTime.Made(gpu) // from now on its channels follow the domain's plan
	}
	return p
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
		charge, _, ok := g.reserveShared(l.Client, *lent.group)
		if !ok {
			return errors.New("what the group takes for several clients does not fit into the server's memory limit")
		}
		charge()
	}
	g.guests.add(l.PID)
	g.gpuTime.Made(lent.gpu) // it tells the arbiter of the guest
	lent.answer.UUID = g.cfg.GPUs[lent.gpu].UUID
	s, e := g.whileShared(t, l.Client, []openRight{{l.Object, accessDup}}, func() { f(lent.answer) })
	if e != 0 || s != rm.StatusOK {
		return fmt.Errorf("the driver does not open it: %s, errno %d", rm.StatusName(s), e)
	}
	return nil
}

// guests are the processes that have been lent something, by which switch records may name the group. Each has its start time.
type guests struct {
	mu   sync.Mutex
	list map[int]uint64
}

// maxGuests is more than an MPS server takes.
const maxGuests = 128

func (x *guests) add(pid int) {
	start, err := ledger.ProcStart(pid)
	if err != nil {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.list == nil {
		x.list = map[int]uint64{}
	}
	if len(x.list) < maxGuests {
		x.list[pid] = start
	}
}

func (x *guests) living() (pids []int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for pid, start := range x.list {
		if s, err := ledger.ProcStart(pid); err != nil || s != start {
			delete(x.list, pid)
			continue
		}
		pids = append(pids, pid)
	}
	return pids
}

type lendable struct {
	gpu    int
	group  *object // nil: it is memory
	answer api.Lent
}

// lendable tells what there is to know of an object that others may have a handle on: a channel group with a context, or device memory. The
// server has opened either to its user, or to all.
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
	case (p.all|p.user)&accessDup == 0:
		return l, errors.New("the server has not opened it")
	case o.group != nil && o.group.graphics && o.group.context && o.group.preempts:
		group := *o
		l.group = &group
		return l, nil
	case isMemory:
		l.answer.Class, l.answer.Size, l.answer.Length, l.answer.Page = classVidmem, o.charge.size, o.charge.length, o.charge.page
		return l, nil
	}
	return l, fmt.Errorf("it is neither a channel group with a context nor device memory (class %s)", rm.ClassName(o.class))
}
