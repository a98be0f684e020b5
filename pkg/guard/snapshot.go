// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/guard/handover"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// The state of a guard for the program that goes on in its place (upgrade.go), and back (restore.go). Both are called while nothing is
// under way (still), so no lock keeps one part in step with another. What is not in it is found anew: threads and mount namespaces of the
// container, what was logged, timeslices that were set, pages that are looked at.

// kindNames name kinds of objects for other versions, in which their numbers may be others.
var kindNames = map[rm.ClassKind]string{
	rm.ClassDeny: "deny", rm.ClassRoot: "root", rm.ClassPlain: "plain", rm.ClassVidmem: "vidmem", rm.ClassDevice: "device",
	rm.ClassSubdevice: "subdevice", rm.ClassVASpace: "vaspace", rm.ClassTSG: "tsg", rm.ClassChannel: "channel", rm.ClassCompute: "compute",
	rm.ClassEvent: "event", rm.ClassDebugger: "debugger", rm.ClassSysmem: "sysmem", rm.ClassVirtual: "virtual", rm.ClassInTask: "intask",
	rm.ClassFabric: "fabric", rm.ClassMulticast: "multicast", rm.ClassUserShared: "usershared", rm.ClassProfiler: "profiler",
	rm.ClassContextDMA: "contextdma", rm.ClassSemaphores: "semaphores", rm.ClassP2P: "p2p", rm.ClassEncoder: "encoder", rm.ClassFD: "fd",
	rm.ClassGraphics: "graphics", rm.ClassMapper: "mapper",
}

var fileKindNames = map[nodeKind]string{nodeControl: "control", nodeGPU: "gpu", nodeUVM: "uvm"}

// places number what others refer to, from 1 on.
type places[T comparable] struct {
	at   map[T]int
	list []T
}

// of is the place of x, which gets one; 0: there is no x.
func (p *places[T]) of(x T) int {
	var none T
	if x == none {
		return 0
	}
	if p.at == nil {
		p.at = map[T]int{}
	}
	if p.at[x] == 0 {
		p.list = append(p.list, x)
		p.at[x] = len(p.list)
	}
	return p.at[x]
}

// snapshotter is a state while it is written.
type snapshotter struct {
	guard    *Guard
	charges  places[*charge]
	clients  places[*client]
	objects  places[*object]
	windows  places[*window]
	retained places[*retained]
	files    places[*file]
	state    *handover.State
}

// snapshot writes the state down, but for what only upgrade.go knows: sockets, filters, and the connection to a simulated driver. An
// error says what cannot be handed over now.
func (g *Guard) snapshot() (*handover.State, error) {
	s := &snapshotter{guard: g, state: &handover.State{Version: handover.Version, Config: g.cfg}}
	s.numberFiles()
	if err := s.account(); err != nil {
		return nil, err
	}
	if err := s.allFiles(); err != nil {
		return nil, err
	}
	if err := s.tasks(); err != nil {
		return nil, err
	}
	s.allRetained()
	s.allCharges() // last: all others refer to some
	s.process()
	s.managed()
	s.outside()
	s.state.Bill = g.billState()
	s.state.GPUTime, s.state.Rescuer = g.gpuTime.State()
	return s.state, nil
}

func (s *snapshotter) numberFiles() {
	t := s.guard.files
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, f := range slices.Concat(t.list, t.closed) {
		s.files.of(f)
	}
}

func (s *snapshotter) account() error {
	a := s.guard.account
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, handle := range slices.Sorted(maps.Keys(a.clients)) {
		c := a.clients[handle]
		s.clients.of(c)
		for _, h := range slices.Sorted(maps.Keys(c.objects)) {
			s.objects.of(c.objects[h])
		}
	}
	x := &s.state.Account
	for i := range a.gpus {
		x.GPUs = append(x.GPUs, gpuState(&a.gpus[i]))
	}
	for _, c := range s.clients.list {
		if err := s.client(c); err != nil {
			return err
		}
	}
	for _, w := range a.loose {
		x.Loose = append(x.Loose, s.windows.of(w))
	}
	for _, w := range s.windows.list {
		v := w.plainState()
		v.Charge, v.Own = s.charges.of(w.charge), s.guard.oldOwner(w)
		x.Windows = append(x.Windows, v)
	}
	for r, n := range a.runlists {
		x.Runlists = append(x.Runlists, handover.Runlist{GPU: r.gpu, Engine: r.engine, N: n})
	}
	slices.SortFunc(x.Runlists, func(p, q handover.Runlist) int {
		return cmp.Or(cmp.Compare(p.GPU, q.GPU), cmp.Compare(p.Engine, q.Engine))
	})
	x.HostUsed, x.Windowed, x.Zombies = uint64(a.hostUsed), a.windows, a.zombies
	x.Exported, x.UVMMaps = s.guard.exportedObjects.Load(), s.guard.uvmMaps.Load()
	x.PoolUsed, x.PoolTaken = uint64(s.guard.uvmHost.used), uint64(s.guard.uvmHost.taken)
	return nil
}

func gpuState(g *gpuAccount) handover.GPU {
	return handover.GPU{Limit: uint64(g.limit), Native: g.native, Used: uint64(g.used), Peak: uint64(g.peak), Denied: g.denied,
		Managed: uint64(g.managed), Spill: uint64(g.spill), Spilled: uint64(g.spilled), Windows: uint64(g.windows),
		Firmware: g.firmware, Events: g.events, Encoders: g.encoders, Surfaces: g.surfaces, TSGs: g.tsgs, VASpaces: g.vaSpaces,
		Channels: g.channels, KeptChannels: g.keptChannels}
}

func (w weakRef) state() *handover.WeakFile { return &handover.WeakFile{Epoll: w.epfd, FD: w.tfd} }

// plainState is a window's without what it refers to, as are those of others.
func (w *window) plainState() handover.Window {
	v := handover.Window{Address: w.address, Handle: w.handle, GPU: w.gpu, Size: uint64(w.size), Kept: w.kept}
	if !w.kept {
		v.File = w.file.state()
	}
	return v
}

// oldOwner is the RM client of a guard that was killed, which has the window; 0: this guard's has.
func (g *Guard) oldOwner(w *window) uint32 {
	if slices.Contains(g.oldClients, w.own) {
		return w.own.Handle()
	}
	return 0
}

func (s *snapshotter) client(c *client) error {
	v := c.plainState()
	if c.file != nil {
		if v.File = s.files.at[c.file]; v.File == 0 {
			return fmt.Errorf("the file of RM client %#x is on its way out", c.handle)
		}
	}
	s.state.Account.Clients = append(s.state.Account.Clients, v)
	for _, h := range slices.Sorted(maps.Keys(c.objects)) {
		if err := s.object(c, c.objects[h]); err != nil {
			return err
		}
	}
	return nil
}

func (c *client) plainState() handover.Client {
	v := handover.Client{Handle: c.handle, PID: c.tgid, EUID: c.euid, Ending: c.ending,
		Seen: [3]int{c.fileSeenAt.tgid, c.fileSeenAt.tid, c.fileSeenAt.fd}}
	for _, h := range slices.Sorted(maps.Keys(c.policies)) {
		v.Policies = append(v.Policies, handover.Policy{Object: h, All: c.policies[h].all, User: c.policies[h].user})
	}
	for number, e := range c.osEvents {
		if v.Events == nil {
			v.Events = map[uint32]handover.WeakFile{}
		}
		v.Events[number] = *e.state()
	}
	return v
}

func (s *snapshotter) object(c *client, o *object) error {
	v := o.plainState()
	if v.Kind == "" {
		return fmt.Errorf("an object is of kind %d, which has no name", o.kind)
	}
	v.Client, v.Charge, v.SecondCharge, v.Retained = s.clients.of(c), s.charges.of(o.charge), s.charges.of(o.secondCharge),
		s.retained.of(o.retained)
	for channel := range o.notifies {
		if i := s.objects.at[channel]; i > 0 {
			v.Notifies = append(v.Notifies, i)
		}
	}
	slices.Sort(v.Notifies)
	for _, w := range o.windows {
		v.Windows = append(v.Windows, s.windows.of(w))
	}
	for _, w := range o.keptWindows {
		v.KeptWindows = append(v.KeptWindows, s.windows.of(w))
	}
	x := &s.state.Account
	x.Objects = append(x.Objects, v)
	byPlace := func(p, q dmaPlace) int {
		return cmp.Or(cmp.Compare(p.device, q.device), cmp.Compare(p.address, q.address))
	}
	for _, at := range slices.SortedFunc(maps.Keys(o.dmaMaps), byPlace) {
		for _, m := range o.dmaMaps[at] {
			d := m.plainState()
			d.Mapper, d.Memory = s.objects.at[m.mapper], s.objects.at[m.memory]
			if d.Mapper == 0 || d.Memory == 0 {
				return fmt.Errorf("a mapping of object %#x is on its way out", o.handle)
			}
			x.DMA = append(x.DMA, d)
		}
	}
	return nil
}

func (o *object) plainState() handover.Object {
	v := handover.Object{Handle: o.handle, Parent: o.parent, Class: o.class, Kind: kindNames[o.kind], CountsOn: o.countsOn, GPU: o.gpu,
		Length: uint64(o.length), Size: uint64(o.size), Page: uint64(o.page), Space: o.space, ContextShare: o.contextShare, ID: o.id,
		Spilled: o.spilled, Host: o.host, MadeInTask: o.madeInTask, Doubtful: o.doubtful, Flexible: o.flexible, Unbound: o.unbound,
		Scheduled:   o.scheduled,
		UserdMemory: o.userd.memory, UserdOffset: o.userd.offset, RunlistGPU: o.runlist.gpu, RunlistEngine: o.runlist.engine,
		Engine: o.engine, Notifiers: o.notifiers}
	if x := o.group; x != nil {
		v.Group, v.Lender, v.LentGroup, v.Scheduled, v.Graphics, v.Context = x.number, x.lender.nonce, x.lender.group, x.scheduled,
			x.graphics, x.context
		v.GFXP, v.Shared, v.Preempts, v.Draws, v.Legacy = x.gfxp, x.shared, x.preempts, x.draws, x.legacy
	}
	if o.streams != nil {
		v.Streams = &handover.Streams{Asked: o.streams.asked, Given: o.streams.given}
	}
	return v
}

func (m *dmaMap) plainState() handover.DMA {
	return handover.DMA{Device: m.at.device, Address: m.at.address, Length: m.length, GPU: m.gpu, Tables: uint64(m.tables)}
}

func (s *snapshotter) allFiles() error {
	closed := len(s.guard.files.list)
	for i, f := range s.files.list {
		v, err := s.file(f)
		if err != nil {
			return err
		}
		v.Closed = i >= closed
		s.state.Files = append(s.state.Files, v)
	}
	return nil
}

func (s *snapshotter) file(f *file) (handover.File, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.plainState()
	switch {
	case f.pending != nil:
		return v, fmt.Errorf("an RM client is being made")
	case f.ended || f.tornDown != nil:
		return v, fmt.Errorf("a UVM address space is being torn down")
	}
	for _, e := range f.exports {
		v.Exports = append(v.Exports, handover.Export{There: e.there, Charge: s.charges.of(e.charge), Fabric: e.fabric, Size: uint64(e.size)})
	}
	for _, id := range slices.SortedFunc(maps.Keys(f.maps), compareUUIDs) {
		for _, m := range f.maps[id] {
			v.Maps = append(v.Maps, handover.UVMMap{Base: m.base, End: m.end, GPU: handover.UUID(m.gpu), Charge: s.charges.of(m.charge),
				Tables: s.charges.of(m.tables)})
		}
	}
	byName := func(p, q channelName) int {
		return cmp.Or(cmp.Compare(p.client, q.client), cmp.Compare(p.handle, q.handle))
	}
	for _, name := range slices.SortedFunc(maps.Keys(f.channels), byName) {
		ch := f.channels[name]
		v.Channels = append(v.Channels, handover.UVMChannel{Client: name.client, Handle: name.handle, GPU: handover.UUID(ch.gpu),
			Kept: s.retained.of(ch.kept)})
	}
	for _, base := range slices.Sorted(maps.Keys(f.ranges)) {
		r := f.ranges[base]
		w := r.plainState()
		for _, t := range r.tables {
			w.Tables = append(w.Tables, s.charges.of(t))
		}
		v.Ranges = append(v.Ranges, w)
	}
	return v, nil
}

// plainState is called with the file locked.
func (f *file) plainState() handover.File {
	v := handover.File{Kind: fileKindNames[f.kind], Minor: f.minor, Registered: f.registered, Rooted: f.rooted, Clients: f.clients,
		Exporter: f.exporter, Zombies: f.zombies.Load(), Sim: uint32(f.sim), Owners: slices.Sorted(maps.Keys(f.owners)),
		Groups: slices.Sorted(maps.Keys(f.groups))}
	if f.strong >= 0 {
		v.Strong = f.strong
	} else {
		v.Weak = f.weakRef.state()
	}
	for _, id := range slices.SortedFunc(maps.Keys(f.spaces), compareUUIDs) {
		v.Spaces = append(v.Spaces, handover.UUID(id))
	}
	return v
}

func (r *uvmRange) plainState() handover.UVMRange {
	return handover.UVMRange{Base: r.base, End: r.end, Host: uint64(r.host), GPU: handover.UUID(r.gpu)}
}

func compareUUIDs(p, q gpuUUID) int { return slices.Compare(p[:], q[:]) }

func (s *snapshotter) allRetained() {
	for _, r := range s.retained.list {
		v := r.plainState()
		v.Context, v.Channel = s.charges.of(r.context), s.objects.at[r.channel]
		s.state.Account.Retained = append(s.state.Account.Retained, v)
	}
}

func (r *retained) plainState() handover.Retained {
	return handover.Retained{Calls: r.calls, RunlistGPU: r.runlist.gpu, RunlistEngine: r.runlist.engine, CountsOn: r.countsOn}
}

func (s *snapshotter) allCharges() {
	for _, ch := range s.charges.list {
		s.state.Account.Charges = append(s.state.Account.Charges, ch.state())
	}
}

func (ch *charge) state() handover.Charge {
	return handover.Charge{GPU: ch.gpu, Size: uint64(ch.size), Handles: ch.handles, References: ch.references, Windows: ch.windows,
		Length: uint64(ch.length), Spilled: ch.spilled, Host: ch.host, Tables: ch.tables, Page: uint64(ch.page), Fabric: ch.fabric,
		Fabrics: ch.fabrics, Flexible: uint64(ch.flexible)}
}

// tasks are those for which an answer is kept; others are found again by their next call.
func (s *snapshotter) tasks() error {
	if s.guard.undos.Load() > 0 {
		return fmt.Errorf("the result of an interrupted call waits for its caller")
	}
	t := s.guard.tasks
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, pid := range slices.Sorted(maps.Keys(t.procs)) {
		p := t.procs[pid]
		s.state.Processes = append(s.state.Processes, handover.TaskProcess{PID: p.tgid, NSPID: p.nspid, Name: p.name, PidFD: p.pidfd})
	}
	for _, tid := range slices.Sorted(maps.Keys(t.tasks)) {
		task := t.tasks[tid]
		v := handover.Task{TID: task.tid, PID: task.proc.tgid}
		if task.exact {
			v.PidFD = task.pidfd
		}
		if x := task.saved; x != nil {
			v.Saved = savedState(x)
		}
		if x := &task.lastAnswer; x.valid {
			v.Last = &handover.Last{Args: x.args, Outer: x.outer, Block: x.block}
		}
		if (v.Saved != nil || v.Last != nil) && t.procs[task.proc.tgid] == task.proc {
			s.state.Tasks = append(s.state.Tasks, v)
		}
	}
	return nil
}

func savedState(x *savedCall) *handover.Saved {
	v := &handover.Saved{Args: x.args, Resume: x.rep.resume, Errno: int(x.rep.errno), Lost: x.once, Repeated: x.repeated, Blocks: x.blocks,
		Size: x.size}
	for i := range x.out {
		v.Out = append(v.Out, handover.Part{Address: x.out[i].addr, Data: x.out[i].data})
		v.Before = append(v.Before, handover.Part{Address: x.before[i].addr, Data: x.before[i].data})
	}
	return v
}

// counters are those of the guard's that are in no file.
func (g *Guard) counters() map[string]interface {
	Load() uint64
	Store(uint64)
} {
	return map[string]interface {
		Load() uint64
		Store(uint64)
	}{"denied": &g.stats.denied, "replayed": &g.stats.replayed, "undone": &g.stats.undone, "interrupted": &g.stats.interrupted,
		"throttled": &g.stats.throttled, "spills": &g.stats.spills}
}

func (s *snapshotter) process() {
	g, p := s.guard, &s.state.Process
	g.mu.Lock()
	defer g.mu.Unlock()
	g.processState(p)
	p.Instances = g.instances
	if own := g.rmClient; own != nil {
		p.RM = new(handover.RMClient)
		*p.RM = handover.RMClient(own.State())
	}
	for _, x := range g.oldClients {
		p.OldRM = append(p.OldRM, handover.RMClient(x.State()))
	}
	for _, b := range g.bar1 {
		p.BAR1 = append(p.BAR1, uint64(b))
	}
	for b, size := range g.contextBuffers {
		p.Buffers = append(p.Buffers, handover.ContextBuffer{GPU: b.gpu, Buffer: b.buffer, Size: size})
	}
	slices.SortFunc(p.Buffers, func(x, y handover.ContextBuffer) int {
		return cmp.Or(cmp.Compare(x.GPU, y.GPU), cmp.Compare(x.Buffer, y.Buffer))
	})
	p.Counts = map[string]uint64{}
	for name, c := range g.counters() {
		p.Counts[name] = c.Load()
	}
	if g.looksAtRoots() { // the next program looks at once
		p.AuditUntil = unixNano(time.Now().Add(auditTime))
	}
	p.WindowsRest, p.Record = g.windowsRest.Load(), g.lastRecord
}

// processState is what Guard.mu guards, which is held.
func (g *Guard) processState(p *handover.Process) {
	p.Roots = g.settledRoots.state()
	p.GPUNodes, p.Held = g.gpuNodes, g.leaseHeld
	p.InitPID, p.InitStart = g.initPID, g.initStart
	p.Procs, p.CPU, p.Quota = g.cgroups.procs, g.cgroups.cpu, g.cgroups.quota
	p.DevDevice, p.DevFirst = g.devDevice, g.devFirst
	p.BeganAt, p.AstrayAt, p.AllEndedAt = g.beganAt.Load(), g.astrayAt.Load(), g.allEndedAt.Load()
	if g.auditing {
		p.AuditUntil = unixNano(g.auditUntil)
	}
	if g.tallyFile != nil {
		p.Tally = g.tallyFile.FD()
	}
}

// unixNano and unixTime translate times; 0 is none.
func unixNano(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func unixTime(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n)
}

func (s *snapshotter) managed() {
	m := &s.guard.managed
	v := &s.state.Managed
	for _, pid := range slices.Sorted(maps.Keys(m.procs)) {
		v.Spans = append(v.Spans, spansState(pid, m.procs[pid])...)
	}
	v.Over, v.Last, v.CPU = m.over, m.killed, int64(m.cpu)
}

func spansState(pid int, list []span) (states []handover.Span) {
	for _, x := range list {
		states = append(states, handover.Span{PID: pid, Base: x.base, End: x.end, Agreed: x.agreed, Announced: unixNano(x.announced)})
	}
	return states
}

func (s *snapshotter) outside() {
	o := &s.guard.sentFDs
	v := &s.state.Outside
	for x, clean := range o.clean {
		if clean {
			v.Clean = append(v.Clean, handover.Outsider{PID: x.PID, Start: x.Start})
		}
	}
	slices.SortFunc(v.Clean, func(p, q handover.Outsider) int { return cmp.Compare(p.PID, q.PID) })
	v.Everywhere, v.SuspectAfter = unixNano(o.everywhere), unixNano(o.suspectAfter)
}

func (g *Guard) billState() handover.Bill {
	b := g.bill
	return handover.Bill{Calls: b.calls.state(), Free: b.free.state(), Quota: b.quota.state(), Searches: b.searches.state(),
		Slow: g.slowBucket.state()}
}

func (b *bucket) state() handover.Bucket {
	b.mu.Lock()
	defer b.mu.Unlock()
	return handover.Bucket{PerSecond: b.perSecond, Tokens: b.tokens, Last: unixNano(b.last)}
}

// restore leaves the rate as the configuration has it, but where that was none.
func (b *bucket) restore(v handover.Bucket) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.perSecond == 0 {
		b.perSecond = v.PerSecond
	}
	b.tokens, b.last = min(v.Tokens, b.burst), unixTime(v.Last)
}
