// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/guard/handover"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// restorer is a guard while it is made of a state, whose references Decode has checked.
type restorer struct {
	guard    *Guard
	state    *handover.State
	charges  []*charge
	clients  []*client
	objects  []*object
	windows  []*window
	retained []*retained
	files    []*file
	groups   map[int]*channelGroup
}

// at is what a reference names; nil: nothing.
func at[T any](list []*T, i int) *T {
	if i == 0 {
		return nil
	}
	return list[i-1]
}

// Restore makes a guard of a state. It changes nothing outside of itself, so that it can be tried; Begin goes on where the other one was.
func Restore(s *handover.State, driver Driver, log *slog.Logger) (*Guard, error) {
	r, err := restore(s, driver, log)
	if err != nil {
		return nil, err
	}
	return r.guard, r.balanced()
}

// Revive is Restore of what the books of a guard say that was killed.
func Revive(v *Revived, driver Driver, log *slog.Logger) (*Guard, error) {
	r, err := restore(v.State, driver, log)
	if err != nil {
		return nil, err
	}
	r.recount()
	if g := r.guard; g.rmClient != nil {
		g.oldClients = slices.Insert(g.oldClients, 0, g.rmClient)
		g.rmClient, g.bar1 = nil, nil
	}
	return r.guard, r.balanced()
}

func restore(s *handover.State, driver Driver, log *slog.Logger) (*restorer, error) {
	g, err := newGuard(s.Config, driver, log)
	if err != nil {
		return nil, err
	}
	if err := g.openNodes(false); err != nil {
		return nil, err
	}
	r := &restorer{guard: g, state: s, groups: map[int]*channelGroup{}}
	r.process()
	r.account()
	if err := errors.Join(r.allObjects(), r.allFiles()); err != nil {
		return nil, err
	}
	r.dma()
	r.tasks()
	r.managed()
	r.outside()
	r.bill()
	g.gpuTime.Restore(s.GPUTime, func(handle uint32) (gpusched.Client, bool) {
		c := g.account.clients[handle]
		return c, c != nil
	})
	return r, nil
}

func (r *restorer) process() {
	g, p := r.guard, &r.state.Process
	g.gpuNodes, g.leaseHeld = p.GPUNodes, p.Held
	for instance, gpu := range p.Instances {
		g.instances[instance] = gpu
	}
	if p.RM != nil {
		g.rmClient = rmclient.Resume(g.driver, g.abi, g.cfg.ControlNode.HostPath, rmclient.State(*p.RM))
	}
	for _, x := range p.OldRM {
		g.oldClients = append(g.oldClients, rmclient.Resume(g.driver, g.abi, g.cfg.ControlNode.HostPath, rmclient.State(x)))
	}
	for _, b := range p.BAR1 {
		g.bar1 = append(g.bar1, quota.Bytes(b))
	}
	for _, b := range p.Buffers {
		g.contextBuffers[contextBuffer{b.GPU, b.Buffer}] = b.Size
	}
	for name, c := range g.counters() {
		c.Store(p.Counts[name])
	}
	g.initPID, g.initStart = p.InitPID, p.InitStart
	g.cgroups = cgroups{p.Procs, p.CPU, p.Quota}
	g.devDevice, g.devFirst = p.DevDevice, p.DevFirst
	g.beganAt.Store(p.BeganAt)
	g.astrayAt.Store(p.AstrayAt)
	g.allEndedAt.Store(p.AllEndedAt)
	g.windowsRest.Store(p.WindowsRest)
	g.settledRoots.restore(p.Roots)
	if g.lastRecord = p.Record; p.Record != nil {
		g.events.GoOn(p.Record.Name)
	}
}

func (r *restorer) account() {
	a, x := r.guard.account, &r.state.Account
	for i, v := range x.GPUs {
		show := a.gpus[i].show
		a.gpus[i] = gpuAccount{limit: quota.Bytes(v.Limit), native: v.Native, used: quota.Bytes(v.Used), peak: quota.Bytes(v.Peak),
			denied:  v.Denied,
			managed: quota.Bytes(v.Managed), spill: quota.Bytes(v.Spill), spilled: quota.Bytes(v.Spilled), windows: quota.Bytes(v.Windows),
			counts: counts{firmware: v.Firmware, events: v.Events, encoders: v.Encoders, surfaces: v.Surfaces, tsgs: v.TSGs, vaSpaces: v.VASpaces,
				channels: v.Channels, keptChannels: v.KeptChannels}, show: show}
	}
	for _, v := range x.Charges {
		r.charges = append(r.charges, &charge{gpu: v.GPU, size: quota.Bytes(v.Size), handles: v.Handles, references: v.References,
			windows: v.Windows, length: quota.Bytes(v.Length), spilled: v.Spilled, host: v.Host, tables: v.Tables, page: quota.Bytes(v.Page),
			fabric: v.Fabric, fabrics: v.Fabrics, flexible: quota.Bytes(v.Flexible)})
		if v.Flexible > 0 {
			a.gpus[v.GPU].flexible += quota.Bytes(v.Flexible)
		}
	}
	for _, v := range x.Windows {
		w := &window{address: v.Address, handle: v.Handle, gpu: v.GPU, size: quota.Bytes(v.Size), charge: at(r.charges, v.Charge), kept: v.Kept}
		if w.handle != 0 {
			w.own = r.guard.rmClient
		}
		for _, old := range r.guard.oldClients {
			if old.Handle() == v.Own {
				w.own = old
			}
		}
		if v.File != nil {
			w.file = weakRef{v.File.Epoll, v.File.FD}
		}
		r.windows = append(r.windows, w)
	}
	for _, v := range x.Retained {
		r.retained = append(r.retained, &retained{calls: v.Calls, context: at(r.charges, v.Context), runlist: runlist{v.RunlistGPU,
			v.RunlistEngine},
			countsOn: v.CountsOn})
	}
	for range r.state.Files {
		r.files = append(r.files, &file{})
	}
	for i := range x.Clients {
		r.client(&x.Clients[i])
	}
	for _, i := range x.Loose {
		a.loose = append(a.loose, at(r.windows, i))
	}
	for _, v := range x.Runlists {
		a.runlists[runlist{v.GPU, v.Engine}] = v.N
	}
	a.hostUsed, a.windows, a.zombies = quota.Bytes(x.HostUsed), x.Windowed, x.Zombies
	r.guard.exportedObjects.Store(x.Exported)
	r.guard.uvmMaps.Store(x.UVMMaps)
	r.guard.uvmHost.used, r.guard.uvmHost.taken = quota.Bytes(x.PoolUsed), quota.Bytes(x.PoolTaken)
}

func (r *restorer) client(v *handover.Client) {
	c := r.guard.account.addClient(v.Handle, v.PID, at(r.files, v.File))
	c.euid, c.ending, c.fileSeenAt = v.EUID, v.Ending, place{v.Seen[0], v.Seen[1], v.Seen[2]}
	for _, p := range v.Policies {
		if c.policies == nil {
			c.policies = map[uint32]policy{}
		}
		c.policies[p.Object] = policy{all: p.All, user: p.User}
	}
	for number, e := range v.Events {
		if c.osEvents == nil {
			c.osEvents = map[uint32]weakRef{}
		}
		c.osEvents[number] = weakRef{e.Epoll, e.FD}
		r.guard.account.osEvents++
	}
	r.clients = append(r.clients, c)
}

func (r *restorer) allObjects() error {
	kinds := map[string]rm.ClassKind{}
	for kind, name := range kindNames {
		kinds[name] = kind
	}
	for i := range r.state.Account.Objects {
		v := &r.state.Account.Objects[i]
		kind, ok := kinds[v.Kind]
		if !ok {
			return fmt.Errorf("an object of kind %.40q, which this program does not know", v.Kind)
		}
		r.object(v, kind)
	}
	for i, v := range r.state.Account.Objects {
		r.relate(r.objects[i], at(r.clients, v.Client), v)
	}
	for i, v := range r.state.Account.Retained {
		r.retained[i].channel = at(r.objects, v.Channel)
	}
	return nil
}

func (r *restorer) object(v *handover.Object, kind rm.ClassKind) {
	o := &object{handle: v.Handle, parent: v.Parent, class: v.Class, kind: kind, countsOn: v.CountsOn, gpu: v.GPU, charge: at(r.charges,
		v.Charge),
		secondCharge: at(r.charges, v.SecondCharge), length: quota.Bytes(v.Length), size: quota.Bytes(v.Size), page: quota.Bytes(v.Page),
		space: v.Space, contextShare: v.ContextShare, id: v.ID, retained: at(r.retained, v.Retained), spilled: v.Spilled, host: v.Host,
		madeInTask: v.MadeInTask, flexible: v.Flexible, unbound: v.Unbound, userd: userd{v.UserdMemory, v.UserdOffset},
		runlist: runlist{v.RunlistGPU, v.RunlistEngine}, engine: v.Engine,
		notifiers: v.Notifiers}
	if v.Streams != nil {
		o.streams = &streams{asked: v.Streams.Asked, given: v.Streams.Given}
	}
	if o.kind == rm.ClassTSG || o.class == classChannelGroup {
		o.group = r.group(v)
	} else {
		o.scheduled = v.Scheduled
	}
	for _, i := range v.Windows {
		o.windows = append(o.windows, at(r.windows, i))
	}
	for _, i := range v.KeptWindows {
		o.keptWindows = append(o.keptWindows, at(r.windows, i))
	}
	o.owner = at(r.clients, v.Client)
	o.owner.objects[v.Handle] = o
	r.objects = append(r.objects, o)
	r.guard.account.objects++
}

// group is what a handle of a channel group is a handle of: the first makes it.
func (r *restorer) group(v *handover.Object) *channelGroup {
	if x := r.groups[v.Group]; x != nil && v.Group != 0 {
		return x
	}
	x := &channelGroup{number: v.Group, graphics: v.Graphics, context: v.Context, gfxp: v.GFXP, shared: v.Shared, preempts: v.Preempts,
		draws: v.Draws, legacy: v.Legacy, scheduled: v.Scheduled, lender: lender{v.Lender, v.LentGroup}}
	r.groups[v.Group] = x
	return x
}

// relate finds again by what else an object is known.
func (r *restorer) relate(o *object, c *client, v handover.Object) {
	c.countBelow(o, 1)
	c.index(o)
	r.guard.account.noteGroup(c, o)
	for _, i := range v.Notifies {
		if o.notifies == nil {
			o.notifies = map[*object]bool{}
		}
		if c.notified == nil {
			c.notified = map[*object]bool{}
		}
		o.notifies[at(r.objects, i)], c.notified[o] = true, true
	}
}

func (r *restorer) dma() {
	for _, v := range r.state.Account.DMA {
		r.guard.account.linkDMA(&dmaMap{mapper: at(r.objects, v.Mapper), memory: at(r.objects, v.Memory), at: dmaPlace{v.Device, v.Address},
			length: v.Length, gpu: v.GPU, tables: quota.Bytes(v.Tables)})
	}
}

func (r *restorer) allFiles() error {
	kinds := map[string]nodeKind{}
	for kind, name := range fileKindNames {
		kinds[name] = kind
	}
	t := r.guard.files
	for i := range r.state.Files {
		v, f := &r.state.Files[i], r.files[i]
		kind, ok := kinds[v.Kind]
		if !ok {
			return fmt.Errorf("a file of kind %.40q, which this program does not know", v.Kind)
		}
		f.kind = kind
		r.file(f, v)
		if v.Closed {
			t.closed = append(t.closed, f)
		} else {
			t.list = append(t.list, f)
		}
	}
	return nil
}

func (r *restorer) file(f *file, v *handover.File) {
	f.minor, f.registered, f.rooted, f.clients, f.exporter, f.sim = v.Minor, v.Registered, v.Rooted, v.Clients, v.Exporter, simFile(v.Sim)
	f.weakRef, f.strong = weakRef{epfd: -1}, -1
	if v.Weak != nil {
		f.weakRef = weakRef{v.Weak.Epoll, v.Weak.FD}
	} else {
		f.strong, f.owners, f.maps = v.Strong, map[int]bool{}, map[gpuUUID][]*uvmMap{}
		f.spaces, f.channels = map[gpuUUID]bool{}, map[channelName]uvmChannel{}
	}
	f.zombies.Store(v.Zombies)
	for _, pid := range v.Owners {
		if f.owners != nil {
			f.owners[pid] = true
		}
	}
	for _, e := range v.Exports {
		f.exports = append(f.exports, export{e.There, at(r.charges, e.Charge), e.Fabric, quota.Bytes(e.Size)})
	}
	if f.maps != nil {
		for _, m := range v.Maps {
			id := gpuUUID(m.GPU)
			f.maps[id] = append(f.maps[id], &uvmMap{on: f, addresses: addresses{m.Base, m.End}, gpu: id, charge: at(r.charges, m.Charge),
				tables: at(r.charges, m.Tables)})
		}
		for _, id := range v.Spaces {
			f.spaces[gpuUUID(id)] = true
		}
		for _, ch := range v.Channels {
			f.channels[channelName{ch.Client, ch.Handle}] = uvmChannel{gpu: gpuUUID(ch.GPU), kept: at(r.retained, ch.Kept)}
		}
	}
	for _, x := range v.Ranges {
		w := &uvmRange{addresses: addresses{x.Base, x.End}, host: quota.Bytes(x.Host), gpu: gpuUUID(x.GPU)}
		for _, t := range x.Tables {
			w.tables = append(w.tables, at(r.charges, t))
		}
		f.recordRange(w)
	}
	for _, id := range v.Groups {
		if f.groups == nil {
			f.groups = map[uint64]bool{}
		}
		f.groups[id] = true
	}
}

func (r *restorer) tasks() {
	t := r.guard.tasks
	for _, v := range r.state.Processes {
		p := &process{tgid: v.PID, nspid: v.NSPID, name: v.Name, pidfd: v.PidFD, tasks: map[*task]bool{}}
		t.procs[p.tgid], t.byNS[p.nspid] = p, p
	}
	for _, v := range r.state.Tasks {
		x := &task{tid: v.TID, proc: t.procs[v.PID], pidfd: v.PidFD, exact: v.PidFD > 0}
		if !x.exact {
			x.pidfd = x.proc.pidfd
		}
		t.tasks[v.TID], x.at = x, t.used.PushFront(x)
		x.proc.tasks[x] = true
		if v.Last != nil {
			x.lastAnswer = lastAnswer{args: v.Last.Args, outer: v.Last.Outer, block: v.Last.Block, valid: true}
		}
		if v.Saved != nil {
			x.saved = r.saved(v.Saved)
		}
	}
}

func (r *restorer) saved(v *handover.Saved) *savedCall {
	g := r.guard
	s := &savedCall{args: v.Args, rep: reply{resume: v.Resume, errno: syscall.Errno(v.Errno)}, once: v.Lost, repeated: v.Repeated,
		blocks: v.Blocks, size: v.Size, fd: -1}
	for i := range v.Out {
		s.out = append(s.out, savedPart{v.Out[i].Address, v.Out[i].Data})
		s.before = append(s.before, savedPart{v.Before[i].Address, v.Before[i].Data})
	}
	g.savedBytes.Add(s.size)
	s.onRelease = func() { g.savedBytes.Add(-s.size) }
	return s
}

func (r *restorer) managed() {
	m, v := &r.guard.managed, &r.state.Managed
	spans := map[int][]span{}
	for _, x := range v.Spans {
		spans[x.PID] = append(spans[x.PID], span{x.Base, x.End, x.Agreed, unixTime(x.Announced)})
	}
	for pid, list := range spans {
		m.setSpans(pid, list)
	}
	m.over, m.killed, m.cpu = v.Over, v.Last, time.Duration(v.CPU)
}

func (r *restorer) outside() {
	o, v := &r.guard.sentFDs, &r.state.Outside
	o.clean = map[outsider]bool{}
	for _, x := range v.Clean {
		o.clean[outsider{PID: x.PID, Start: x.Start}] = true
	}
	o.everywhere, o.suspectAfter = unixTime(v.Everywhere), unixTime(v.SuspectAfter)
}

func (r *restorer) bill() {
	b, v := r.guard.bill, &r.state.Bill
	b.calls.restore(v.Calls)
	b.free.restore(v.Free)
	b.quota.restore(v.Quota)
	b.searches.restore(v.Searches)
	r.guard.slowBucket.restore(v.Slow)
}

// balanced compares what is charged with what there is charged for: a state that has lost something must not be gone on with.
func (r *restorer) balanced() error {
	a := r.guard.account
	host := r.guard.uvmHost.taken
	used, spilled := make([]quota.Bytes, len(a.gpus)), make([]quota.Bytes, len(a.gpus))
	for _, ch := range r.charges {
		switch {
		case ch.host:
			host += ch.size
		case ch.spilled:
			spilled[ch.gpu] += ch.size
		default:
			used[ch.gpu] += ch.size
		}
	}
	for _, m := range r.state.Account.DMA {
		used[m.GPU] += quota.Bytes(m.Tables)
	}
	for i := range a.gpus {
		g := &a.gpus[i]
		if g.used != used[i]+g.managed || g.spilled != spilled[i] {
			return fmt.Errorf("of GPU %d %v is in use and %v spilled, and there are %v, %v managed, and %v", i, g.used, g.spilled, used[i],
				g.managed,
				spilled[i])
		}
	}
	if host != a.hostUsed {
		return fmt.Errorf("of the host's memory %v is in use, and there are %v", a.hostUsed, host)
	}
	return nil
}
