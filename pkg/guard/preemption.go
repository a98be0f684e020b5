// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// A kernel is stopped at the end of its timeslice only in a context with compute preemption in the middle of instructions (CILP).
// Otherwise the GPU waits for its end, or for that of its blocks, and so does everybody else. A program that never asks for a mode has the
// driver's default, so the guard sets the mode of every context before its first work: before GPFIFO_SCHEDULE, if there is a context by
// then, else when there is one. Before it the driver has nothing to set it in, and the GPU nothing to compute with: the context is made
// with the first object of the graphics engine (_kgrAlloc in kernel_graphics_object.c). Of whatever class that is, kernels can be launched
// then.
//
// A context that draws cannot have CILP: by a 2D or 3D object the driver refuses the mode (NV_ERR_INVALID_REQUEST), and in a context that
// has the mode it refuses the object (NV_ERR_INVALID_OBJECT; H200, 580.159.04). It is switched at the end of a block of threads or a
// triangle at best, so it holds the GPU while one of them lasts, and is made only where the node's settings say so.
//
// Firmware looks the group up in the client that makes the call, so it is made in the name of the task's.

const controlPreemptionMode = 0x20801210 // NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE

// preemption is what the account knows of a channel group and its context.
type preemption struct {
	group     *object // nil: it is none on a GPU that containers share
	subdevice uint32  // of the same client, on the same GPU; 0: none
	context   bool
	preempts  bool
	draws     bool
	shared    bool // others have handles on it, in other containers
	lent      bool // and one of them made it
	alone     bool // it is a channel in no group, which is on no graphics engine
	whole     bool // it is on a GPU that nobody else has
	runs      bool // work could begin: the group, or a channel of it, was let run
}

// preemptionOf finds the group that a handle of it or of a channel stands for.
func (a *account) preemptionOf(client, handle uint32) (p preemption) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	o := c.object(handle)
	if o != nil && o.kind == rm.ClassChannel {
		p.alone = true
		o = c.objects[o.parent]
	}
	if o == nil || o.group == nil {
		return p
	}
	gpu := c.gpuOf(o)
	if gpu == noGPU || a.gpus[gpu].native {
		return preemption{whole: gpu != noGPU}
	}
	x := o.group
	p = preemption{group: o, context: x.context, preempts: x.preempts, draws: x.draws, runs: x.scheduled, shared: x.shared, lent: x.lent()}
	for _, ch := range x.channels() {
		p.runs = p.runs || objectOf(ch).scheduled
	}
	for h, x := range c.subdevices {
		if c.gpuOf(x) == gpu {
			p.subdevice = h
			break
		}
	}
	return p
}

// setContext notes that a group has a context, setPreempts that it is switched in the middle of kernels, setDraws that it never will be.
func (a *account) setContext(o *object)  { a.setFlag(o, &o.group.context) }
func (a *account) setPreempts(o *object) { a.setFlag(o, &o.group.preempts) }
func (a *account) setDraws(o *object)    { a.setFlag(o, &o.group.draws) }

func (a *account) isSet(flag *bool) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return *flag
}

func (a *account) setFlag(o *object, flag *bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	*flag = true
	a.noteHandles(o)
}

// engineObjectGone forgets the mode: the context may have gone with the object, and the next object would make another. The account is
// locked.
func (a *account) engineObjectGone(c *client, o *object) {
	channel := c.objects[o.parent]
	if channel == nil {
		return
	}
	if group := c.objects[channel.parent]; group != nil && group.group != nil && !group.group.lent() {
		group.group.preempts = false
		a.noteHandles(group)
	}
}

// ensurePreemption makes sure that a group's context, if it has one, is switched in the middle of kernels. The caller holds the calls of
// the client, so that the handle stays the same group's. It takes 0.2 ms (H200), once for each context.
func (g *Guard) ensurePreemption(t Target, client uint32, p preemption) bool {
	if p.group == nil || !p.context || p.preempts || p.draws {
		return true
	}
	if p.subdevice == 0 {
		g.logOnce("nosubdevice", "denied a context: its client has no subdevice, by which compute preemption could be set")
		g.stats.denied.Add(1)
		return false
	}
	if s, e := g.setPreemption(t, client, p); e != 0 || s != rm.StatusOK {
		g.logOnce("cilp"+rm.StatusName(s), "denied a context: the driver refuses compute preemption (CILP) for it",
			"status", rm.StatusName(s), "errno", e)
		g.stats.denied.Add(1)
		return false
	}
	g.account.setPreempts(p.group)
	return true
}

func (g *Guard) setPreemption(t Target, client uint32, p preemption) (uint32, syscall.Errno) {
	var params [rm.PreemptSize]byte
	rm.PutU32(params[:], rm.PreemptFlags, 1)
	rm.PutU32(params[:], rm.PreemptChannel, p.group.handle)
	rm.PutU32(params[:], rm.PreemptCILP, rm.PreemptModeCILP)
	return g.rmControl(t, client, p.subdevice, controlPreemptionMode, params[:])
}

// preemptUnseen sets the mode in contexts that the guard has not seen made: a root alloc that went elsewhere can have made one of any group
// (rootalloc.go). Clients in whose name the driver cannot be asked have their channels stopped.
func (g *Guard) preemptUnseen() {
	for _, r := range g.account.notPreempting() {
		if !g.preemptGroup(r) {
			g.logOnce("unseencontext", "channels are stopped: a context that was made unseen would be switched at the end of kernels only",
				"pid", r.client.tgid)
			g.stopChannels(func(c *client) bool { return c == r.client })
		}
	}
}

// preemptWhilePending is preemptUnseen for all root allocs that do not end. It holds the driver's locks and some 1 ms for each group, so
// it is done once at a time for all of them, with a rest by the clock on the wall.
func (g *Guard) preemptWhilePending() {
	if !g.preemptMu.TryLock() {
		return
	}
	defer g.preemptMu.Unlock()
	begin := time.Now()
	if begin.Before(g.preemptNotBefore) {
		return
	}
	g.preemptUnseen()
	g.preemptNotBefore = time.Now().Add(backgroundShare * time.Since(begin))
}

// preemptGroup is preemptUnseen of one group. Where there is no context the driver refuses, and the mode is set when there is one.
func (g *Guard) preemptGroup(r groupRef) bool {
	client := r.client.handle
	lock, ok := g.account.lockCalls(client, client)
	if !ok {
		return true // it is gone
	}
	defer lock.unlock()
	t, found := g.fileWithin(r.client, &bucket{}) // not to have looked must not stop it, and who calls rests by himself
	defer t.Done()
	g.gpuTime.Lock()
	defer g.gpuTime.Unlock()
	p := g.account.preemptionOf(client, r.handle)
	if p.group == nil || p.preempts || p.draws {
		return true
	}
	if !found || p.subdevice == 0 {
		return false
	}
	if p.runs {
		resume, ok := g.pauseGroup(client, r.handle)
		if !ok {
			return false
		}
		defer resume()
	}
	s, _ := g.setPreemption(t, client, p)
	return s != rm.StatusInvalidRequest || g.cfg.Settings.Graphics // else it draws
}

// notPreempting lists the channel groups, on whatever engine, of which the guard has not seen a context that is switched in the middle of
// kernels. Those of clients that end do not run again.
func (a *account) notPreempting() (list []groupRef) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.clients {
		if c.ending {
			continue
		}
		for h, o := range c.objects {
			if o.group != nil && !o.group.preempts && !o.group.draws {
				list = append(list, groupRef{c, h})
			}
		}
	}
	return list
}

// planPreemption is the plan of an object of the graphics engine, with the first one of which a group gets its context. If the group was
// let run before, its channels are off until the mode is set, or a kernel could begin in between that cannot be stopped.
//
// In a group of which others have handles nobody can stop all channels. So its maker gets no second context there. In a lent one any object
// of a member's makes the context anew where those of all others are gone: the mode is set after each.
func (g *Guard) planPreemption(c *trappedCall, client, group uint32, p plan) plan {
	if x := g.account.preemptionOf(client, group); !p.ask || x.group == nil || x.preempts && !x.lent {
		return p
	}
	g.gpuTime.Lock() // GPFIFO_SCHEDULE waits
	x, resume, ok := g.account.preemptionOf(client, group), func() {}, true
	switch {
	case x.lent || x.preempts:
	case x.shared:
		ok = false
	case x.runs:
		resume, ok = g.pauseGroup(client, group)
	}
	if !ok {
		g.gpuTime.Unlock()
		if p.cancel != nil {
			p.cancel()
		}
		return answer(c.deny(rm.StatusNotSupported, "still", "denied a context in a channel group that runs: there is nobody to stop it "+
			"meanwhile and let it run again", "shared", x.shared))
	}
	commit := p.commit
	p.commit = func() {
		commit()
		g.account.setContext(x.group)
		x.context = true
		if c.class.Kind == rm.ClassGraphics {
			g.account.setDraws(x.group)
			x.draws = true
		}
		x.preempts = x.preempts && !x.lent                                    // which the account says all the while: a PREEMPT may come
		if (x.runs || x.lent) && !g.ensurePreemption(c.target(), client, x) { // of a lent group, others' channels may run
			g.refuseContext(c, client, group)
		}
	}
	p.done = func() {
		resume()
		g.gpuTime.Unlock()
	}
	return p
}

// refuseContext takes an object back with which a context came that must not run. The context stays charged to its group.
func (g *Guard) refuseContext(c *trappedCall, client, group uint32) {
	for _, handle := range []uint32{rm.U32(c.call.Outer, rm.AllocObject), group, client} { // one of them must go
		if s, e := g.rmFree(c.target(), client, handle); e == 0 && s == rm.StatusOK {
			g.account.freeObject(client, handle)
			break
		}
	}
	c.undo = nil
	c.restoreInput()
	c.status(rm.StatusNotSupported)
}

// pauseGroup stops the channels of a group, with gpuTime locked, until the returned function is called. False: there would be nobody to
// resume them, should this process be killed.
func (g *Guard) pauseGroup(client, group uint32) (resume func(), ok bool) {
	channels, gpu, _ := g.account.channelsOf(client, group)
	return g.gpuTime.Still(gpu, channels)
}

// checkPreemptionMode: a program's own SET_CTXSW_PREEMPTION_MODE. That of a context which has the mode already, as libcuda asks for it, is
// answered at once.
func (g *Guard) checkPreemptionMode(c *trappedCall) plan {
	flags, mode := rm.U32(c.params, rm.PreemptFlags), rm.U32(c.params, rm.PreemptCILP)
	x := g.account.preemptionOf(c.controlClient(), rm.U32(c.params, rm.PreemptChannel))
	switch {
	case flags == 1 && (x.preempts && mode == rm.PreemptModeCILP || x.alone && x.group == nil):
		return answer(c.status(rm.StatusOK)) // Vulkan asks it of a channel of a copy engine, too
	case flags&1 != 0 && mode != rm.PreemptModeCILP && (mode != rm.PreemptModeCTA || !x.draws) && !x.whole:
		return answer(c.deny(rm.StatusNotSupported, "cilp", "denied a compute preemption mode other than CILP"))
	}
	p := plan{ask: true, commit: func() {
		if flags&1 != 0 && mode == rm.PreemptModeCILP && x.context {
			g.account.setPreempts(x.group)
		}
	}}
	if flags&2 != 0 && rm.U32(c.params, rm.PreemptGFXP) != 0 {
		return g.planGFXP(c, p)
	}
	return p
}

// checkGraphics: a 2D or 3D object, whose context is one that draws.
func (g *Guard) checkGraphics(c *trappedCall) plan {
	owner, _ := g.account.contextOwner(c.allocClient(), c.allocParent())
	x := g.account.preemptionOf(c.allocClient(), owner)
	gpu, known := g.gpuFor(c.allocClient(), owner)
	switch {
	case x.group == nil: // on no graphics engine, or on a whole GPU
	case !g.cfg.Settings.Graphics:
		return answer(c.deny(rm.StatusNotSupported, "graphics", "denied a graphics object: its context is switched at the end of a draw or a "+
			"dispatch only, so it could hold the GPU for seconds; graphics = true in cgpu.toml allows them", "class", c.class.Name))
	case x.lent: // the driver refuses it while the context has its mode, and would make one that draws where there is none
		return answer(c.deny(rm.StatusNotSupported, "graphicslent", "denied a graphics object below the channel group that all members of the "+
			"trust domain have: nobody's kernels there would be stopped in the middle; draw in a container without CGPU_DOMAIN (--domain)"))
	case known && g.gpuTime.Plan(gpu).Cap > 0: // on an H200 what a library draws first then never ran, most times
		return answer(c.deny(rm.StatusNotSupported, "graphicscap", "denied a graphics object: its context would be stopped for a hard cap while "+
			"it is being made, and not begin; start the container without a percentage and set it later (cgpu set)", "class", c.class.Name))
	}
	return g.checkEngineObject(c)
}

// planGFXP is the plan of graphics preemption: the buffers that it takes are charged to the group, once, until that ends. Firmware makes
// them, so whether they are there already nobody can see. A pool of them would be shared with other containers.
func (g *Guard) planGFXP(c *trappedCall, p plan) plan {
	client := c.controlClient()
	o, _ := g.account.lookup(client, rm.U32(c.params, rm.PreemptChannel))
	if o.kind == rm.ClassChannel {
		o, _ = g.account.lookup(client, o.parent)
	}
	gpu, ok := g.gpuFor(client, o.handle)
	if !ok || o.kind != rm.ClassTSG || o.group.lent() || rm.U32(c.params, rm.PreemptGFXP) != rm.PreemptModeGFXP {
		return answer(c.deny(rm.StatusNotSupported, "gfxp", "denied a graphics preemption mode"))
	}
	if g.account.isSet(&o.group.gfxp) {
		return p
	}
	sum, ok := rm.GFXPMemory(g.bufferSizes(gpu))
	if !ok {
		return answer(c.deny(rm.StatusNotSupported, "gfxpsize", "denied graphics preemption: the driver does not say what it takes"))
	}
	want := cost{gpu: gpu, size: quota.Bytes(sum)}
	if !g.reserve(want) {
		return answer(c.status(rm.StatusNoMemory))
	}
	p.cancel = func() { g.account.unreserve(want) }
	commit := p.commit
	p.commit = func() {
		commit()
		if !g.account.chargeGroup(client, o.handle, want, &o.group.gfxp) {
			g.account.unreserve(want)
		}
	}
	return p
}
