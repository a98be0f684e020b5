// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// rule is how a call is served. Each call that is let through has one: rules of escapes are in escapes.go, of controls in control.go, of
// UVM calls in uvm.go, of object classes in alloc.go. What the calls take, and of whom, is in pkg/rm/testdata/effects.csv.
type rule struct {
	// clients reads whose objects the call names; they must be the container's. Nil: it names none.
	clients func(c *trappedCall) (dst, src uint32)
	// locks keeps other calls of those clients away, from before the check until the account knows what came of the call.
	locks bool
	// inTask: the task makes the call itself. All others the guard makes.
	inTask bool
	// check decides on the guard's copy. It asks the driver nothing about this call.
	check func(g *Guard, c *trappedCall) plan
}

// plan is what a check decides: an answer, or that the driver is asked, and what the account makes of that.
type plan struct {
	ask    bool
	answer reply    // where the driver is not asked
	opened *opening // an object that the guard must be able to refer to
	cancel func()   // the call was not made, or refused: gives back what was taken for it
	commit func()   // the driver has said OK. It may still refuse (c.status), if it undoes the call
	// retry is asked when the driver refuses: the call may be made in another way.
	retry func(status uint32) (plan, bool)
	done  func() // at the end in any case
	// through is told that the task makes the call itself, of a rule that is inTask.
	through func()
	// exec asks the driver in the task's place where the call itself is not made; nil: it is. The status goes to the call.
	exec func() syscall.Errno
}

// opening is what everybody may do with an object for the moment of a call (whileShared).
type opening struct {
	target Target
	client uint32
	rights []openRight
}

// answer is a plan that asks the driver nothing.
func answer(rep reply) plan { return plan{answer: rep} }

// pass is the plan of a call that takes nothing.
func pass() plan { return plan{ask: true} }

// serveByRule serves a call by its rule: who owns what it names, no other call of theirs meanwhile, the check, the driver.
func (g *Guard) serveByRule(r rule, c *trappedCall) reply {
	defer c.releaseObjects()
	if r.clients != nil {
		dst, src := r.clients(c)
		if !g.account.ownsClient(dst) {
			return c.status(rm.StatusInvalidClient)
		}
		if src != dst && !g.account.ownsClient(src) {
			if c.call.NR() == rm.EscDupObject && g.cfg.Domain != "" {
				return g.borrow(c, dst, src)
			}
			return c.deny(rm.StatusInvalidClient, "src", "denied a call on an object of another container's client", "client", src)
		}
		if r.locks {
			lock, ok := g.account.lockCalls(dst, src)
			if !ok {
				return c.status(rm.StatusInvalidClient)
			}
			defer lock.unlock()
			c.locked = lock
			g.settleDoubts(lock)
		}
	}
	p := r.check(g, c)
	if r.inTask && p.ask && p.exec == nil {
		if c.wrapped {
			return fail(syscall.EINVAL) // nobody wraps these; and for the task the wrapper could hold anything
		}
		if g.driver.ServesNodes() {
			return p.letThrough()
		}
	}
	return c.execute(p)
}

// letThrough has the task make the call itself.
func (p plan) letThrough() reply {
	if p.done != nil {
		defer p.done()
	}
	if p.through != nil {
		p.through()
	}
	return replyResume
}

// acquireObject looks up an object of a locked client that the call refers to. That is done once, before the driver is asked: what the
// driver makes of the call keeps this object, whatever has become of its handle by the time of the answer, or of its client, which ends
// with its file and waits for no call. False: the client is gone already.
func (c *trappedCall) acquireObject(client, handle uint32) (object, bool) {
	o, ok := c.guard.account.acquireObject(c.locked.of(client), handle)
	c.acquired = append(c.acquired, o)
	return o, ok
}

// releaseObjects drops what acquireObject has kept.
func (c *trappedCall) releaseObjects() {
	for _, o := range c.acquired {
		c.guard.account.releaseObject(o)
	}
	c.acquired = nil
}

// execute carries a plan out. It is the one place where the driver is asked for a task.
func (c *trappedCall) execute(p plan) reply {
	if p.done != nil {
		defer p.done()
	}
	if !p.ask {
		return p.answer
	}
	if !c.valid() {
		if p.cancel != nil {
			p.cancel()
		}
		return replyDone
	}
	if c.overtaken() {
		if p.cancel != nil {
			p.cancel()
		}
		return c.denyUnseen()
	}
	status, e := c.askDriver(p)
	if e == 0 && status == rm.StatusOK {
		if p.commit != nil {
			p.commit()
		}
		if status = c.statusWord(); status == rm.StatusOK {
			c.once = c.isMadeOnce()
			return replyDone
		}
	} else if p.cancel != nil {
		p.cancel()
	}
	if e == 0 && p.retry != nil {
		if again, ok := p.retry(status); ok {
			return c.execute(again)
		}
	}
	return fail(e)
}

// askDriver makes the call and reads the status that came back.
func (c *trappedCall) askDriver(p plan) (status uint32, e syscall.Errno) {
	if p.exec == nil {
		p.exec = func() syscall.Errno { return c.guard.driver.Exec(c.target(), &c.call) }
	}
	exec := func() {
		c.executed = true
		c.asked()
		begin := time.Since(c.start)
		e = p.exec()
		c.inDriver += time.Since(c.start) - begin
		status = c.statusWord()
	}
	if o := p.opened; o == nil {
		exec()
	} else if s, refused := c.guard.whileShared(o.target, o.client, o.rights, exec); refused != 0 || s != rm.StatusOK {
		c.status(rm.StatusInvalidClient)
		return rm.StatusInvalidClient, 0
	}
	return status, e
}

// statusOff is where a call's status word is; false: it has none.
func (c *trappedCall) statusOff() (int, bool) {
	if rm.UVMShaped(c.call.Cmd) {
		form, ok := c.guard.abi.UVM(c.call.Cmd)
		return form.Status, ok
	}
	return c.guard.abi.StatusOff(c.call.NR(), c.call.Size())
}

// statusWord is what the call's structure says of its outcome; OK where it says nothing.
func (c *trappedCall) statusWord() uint32 {
	if off, ok := c.statusOff(); ok {
		return rm.U32(c.call.Outer, off)
	}
	return rm.StatusOK
}

// status answers with a status and no effect.
func (c *trappedCall) status(s uint32) reply {
	off, ok := c.statusOff()
	if !ok {
		return fail(syscall.EINVAL)
	}
	rm.PutU32(c.call.Outer, off, s)
	return replyDone
}

// deny answers with a status, counts that, and says so once for each kind.
func (c *trappedCall) deny(status uint32, kind, msg string, args ...any) reply {
	c.guard.logOnce(kind, msg, args...)
	c.guard.stats.denied.Add(1)
	return c.status(status)
}

// rmControl makes a flat control of the guard's own on a file of the task.
func (g *Guard) rmControl(t Target, client, object, cmd uint32, params []byte) (uint32, syscall.Errno) {
	return rmclient.Control(g.driver, t, client, object, cmd, params)
}

// rmFree frees an object or a client for the guard's own reasons.
func (g *Guard) rmFree(t Target, client, handle uint32) (uint32, syscall.Errno) {
	return rmclient.Free(g.driver, t, client, handle)
}
