package guard

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// compute gives the container its share of its GPUs' time: it sets the timeslices of the container's channel groups, and
// pauses and resumes its channels. What to set, pkg/sched decides; how much to promise, the ledger. Nothing of it is on the
// way of a kernel launch.
//
// It has a goroutine for each GPU (card.run), one for pauses (duty.go), and sleeps while the container has no context on a
// graphics engine.
type compute struct {
	g      *Guard
	timing sched.Timing
	cards  []*card // the sliced GPUs
	stop   chan struct{}
	once   sync.Once

	// running is held over calls that stop channels or let them run, and by trapped calls that would let some run. So a pause
	// cannot be undone behind the guard's back.
	running  sync.Mutex
	turned   chan struct{} // closed, and made anew, when channels were stopped or let run
	dutyKick chan struct{}
	told     *ledger.Record // the container's, as events told it last; of the goroutine that follows the ledger
	closed   bool           // with running held: the container is over
	rescue   *rescue        // the process that resumes when this one is killed; nil before the first pause, and at the end
}

// card is the container's part of one GPU.
type card struct {
	c      *compute
	gpu    int // in Config.GPUs
	kick   chan struct{}
	source switchSource // nil: the driver does not tell of context switches
	board  *board
	shared atomic.Pointer[board] // the board, for whoever does not hold mu
	press  pressure
	active atomic.Bool // the container has channel groups
	idle   atomic.Bool // without work at the last step

	mu       sync.Mutex
	plan     entitlement
	paused   bool // by cgpu pause
	held     bool // by the guard itself, see hold
	tracker  *sched.Tracker
	read     time.Time // when records came last
	records  []sched.Switch
	busy     int
	worked   time.Duration // monotonic time of the last step with work
	setBusy  int           // busy when slice was set
	since    time.Duration // monotonic time since which another slice would be right
	settling time.Duration // monotonic time until which slices are not prolonged, after a change
	acted    int           // busy at the last step
	young    []time.Time   // when groups were made lately, that may not have run yet
	budget   time.Duration // under a hard cap: GPU time that the container may still use, see spend
	spent    time.Duration // GPU time at the last step
	spentAt  time.Time
	// spentPauses is how often it had been paused then.
	spentPauses uint64
	owing       time.Duration // monotonic time until which the container stays off to make up for what it used too much
	slice       time.Duration // of each group with work
	set         map[groupRef]time.Duration
	missing     map[*client]*absence // clients whose file is not found; see missing.go
	verified    time.Time            // when timeslices were read back last
	counted     counters
	turn        sched.Slot // while the container takes turns with others that give way to a high-priority one; else zero
	offAll      bool       // also those of other engines than graphics
	off         bool       // the channels are disabled; changed with compute.running held too
	// stoppedAt is when off changed last.
	stoppedAt time.Time
	refused   int            // tries left to resume what the driver would not; 0: all runs. With compute.running held
	corrected time.Duration  // up to when the GPU's own load was looked at, see resident
	lately    sched.Permille // and what it was then
	patience  time.Duration  // between looks while nothing is switched
}

// entitlement is what the ledger says of the container on a GPU.
type entitlement struct {
	card      sched.Card
	effective sched.Policy
	share     sched.Share
	cap       sched.Permille // 0: none
	slot      sched.Slot     // with cap
	suspended bool           // by cgpu pause, or held
}

// counters are the accounts that the tracker does not keep.
type counters struct {
	granted time.Duration
	pauses  uint64
	stopped time.Duration // paused
	card    time.Duration // the GPU's time at the last step
	at      time.Time     // of the last step
	drift   uint64        // timeslices that somebody else had changed
}

func newCompute(g *Guard) *compute {
	s := g.cfg.Settings
	c := &compute{g: g, stop: make(chan struct{}), turned: make(chan struct{}), dutyKick: make(chan struct{}, 1), timing: sched.Timing{
		Base: s.BaseTimeslice, Min: s.MinTimeslice, MaxRound: s.MaxRound, HighPrio: s.HighPrioTimeslice, Cycle: s.CapCycle}}
	for i, x := range g.cfg.GPUs {
		if !x.Native {
			c.cards = append(c.cards, &card{c: c, gpu: i, kick: make(chan struct{}, 1), tracker: sched.NewTracker(),
				set: map[groupRef]time.Duration{}, missing: map[*client]*absence{}, slice: c.timing.Base, plan: entitlement{card: s.Card(), share: sched.Share{Weight: 1}}})
		}
	}
	return c
}

// Arm takes what needs root's powers, before they are dropped: the records of context switches.
func (g *Guard) Arm() {
	begin := time.Now()
	for _, x := range g.compute.cards {
		if sim, ok := g.driver.(SimSwitches); ok {
			x.source = &simSource{d: sim, minor: g.cfg.GPUs[x.gpu].Minor}
			x.press = &simPressure{x: x, d: sim}
			continue
		}
		own, err := g.ownClient()
		if err != nil {
			g.log.Error("cannot schedule GPU time", "err", err)
			return
		}
		x.press = newUserdPressure(x)
		if g.cfg.Settings.NoSwitchRecords {
			continue
		}
		b, err := bindFecs(own, x.gpu)
		if err != nil {
			g.log.Warn("the driver does not tell of context switches: every context counts as one with work", "gpu", g.cfg.GPUs[x.gpu].Index, "err", err)
			continue
		}
		x.source = b
	}
	g.log.Info("ready to schedule", "took", time.Since(begin))
}

// begin starts to schedule.
func (c *compute) begin() {
	if len(c.cards) == 0 {
		return
	}
	go c.follow()
	go c.duty()
	for _, x := range c.cards {
		go x.run()
	}
}

// end gives up the container's places.
func (c *compute) end() {
	c.once.Do(func() { close(c.stop) })
	for _, x := range c.cards {
		x.mu.Lock()
		if x.board != nil {
			x.board.leave()
			x.board = nil
			x.shared.Store(nil)
		}
		x.mu.Unlock()
	}
	c.running.Lock()
	defer c.running.Unlock()
	c.closed = true
	for _, x := range c.cards {
		if x.off { // who still has them must not find them off, nor run what a process that has ended left in them
			channels := c.g.account.channelsOn(x.gpu, true)
			c.disable(x.gpu, channels, chanStopped)
			c.disable(x.gpu, c.mayRun(channels), chanRuns)
		}
	}
	if c.rescue != nil {
		c.rescue.close()
		c.rescue = nil
	}
}

func kick(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

const (
	// tick is how often a card with work is looked at: as often as the driver hands out its records.
	tick = 33 * time.Millisecond
	// idleAfter is for how long a group without a run counts as one with work.
	idleAfter = 200 * time.Millisecond
	// idleLook is how often a container without work looks whether it has some, while others have.
	idleLook = 100 * time.Millisecond
	// verifyEvery is how often timeslices are read back.
	verifyEvery = time.Second
)

// run follows one GPU for as long as the guard lives.
func (x *card) run() {
	if !x.awaitFirst() {
		return
	}
	var err error
	if b, ok := x.source.(*fecsBuffer); ok {
		if err = b.enable(); err != nil {
			x.c.g.log.Warn("the driver does not tell of context switches: every context counts as one with work", "err", err)
			x.mu.Lock()
			x.source = nil
			x.mu.Unlock()
		}
	}
	if b, err := openBoard(x.c.g.cfg.RunDir, x.c.g.cfg.GPUs[x.gpu].UUID); err != nil {
		x.c.g.log.Error("cannot see how much work other containers have: this one's timeslices are set as if they had none", "err", err)
	} else {
		x.mu.Lock()
		x.board = b
		x.mu.Unlock()
		x.shareBoard(b)
		go x.watchBoard(b)
	}
	if x.source != nil {
		go x.watchSource(x.source)
	}
	timer := time.NewTimer(0)
	for {
		select {
		case <-x.c.stop:
			return
		case <-x.kick:
		case <-timer.C:
		}
		if wait := x.step(time.Now()); wait > 0 {
			timer.Reset(wait)
		}
	}
}

// awaitFirst waits for the container's first context.
func (x *card) awaitFirst() bool {
	for !x.active.Load() {
		select {
		case <-x.c.stop:
			return false
		case <-x.kick:
		}
	}
	return true
}

func (x *card) watchBoard(b *board) {
	for seen := b.generation(); ; {
		b.await(seen)
		select {
		case <-x.c.stop:
			return
		default:
		}
		seen = b.generation()
		kick(x.kick)
	}
}

// watchSource kicks when there are records. A source that cannot wait is looked at by step's timer.
func (x *card) watchSource(source switchSource) {
	for source.await() {
		select {
		case <-x.c.stop:
			return
		default:
		}
		kick(x.kick)
		// Several batches at once are fine; beside busy neighbours an idle container need not look at each of theirs.
		if x.idle.Load() {
			time.Sleep(idleLook)
		} else {
			time.Sleep(tick / 2)
		}
	}
}

// step looks at what happened, tells the others, and sets timeslices. It returns when to look again; 0: when kicked.
func (x *card) step(now time.Time) (again time.Duration) {
	groups := x.c.g.account.groupsOn(x.gpu)
	again, set, verify := x.decide(now, groups)
	if set {
		x.apply(groups, verify)
	}
	return again
}

// decide is step without what may take long.
func (x *card) decide(now time.Time, groups []groupRef) (again time.Duration, set, verify bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.board == nil && len(groups) == 0 {
		return 0, false, false
	}
	x.look(now, len(groups))
	x.spend(now)
	self := sched.Tenant{Share: x.plan.share, Busy: x.busy}
	if _, slotted := x.slot(); !slotted && monotonic() >= x.settling {
		self.Saturating = x.tracker.Saturating()
	}
	if self.Priority == quota.PriorityHigh && x.press != nil {
		self.Pressing = x.press.pressing() || x.press.blind() && x.busy > 0
		self.Saturating = x.press.saturating()
	}
	var others []sched.Tenant
	if x.board != nil {
		self.Place = x.board.place()
		self.Lingers = x.busy == 0 && x.lingers()
		x.board.publish(self)
		others = x.board.others()
	}
	x.grant(now, self, others)
	slice := x.damped(x.c.timing.Slice(x.plan.card, self, others), others)
	verify = x.busy > 0 && now.Sub(x.verified) >= verifyEvery
	if set = slice != x.slice || verify || len(x.set) != len(groups) || len(x.missing) > 0; set {
		x.slice = slice
		x.tracker.SetSlice(slice)
		if verify {
			x.verified = now
		}
	}
	turn, turns := x.c.timing.Turn(x.plan.card, self, others)
	if !turns {
		turn = sched.Slot{}
	}
	if turn != x.turn || (x.acted == 0) != (x.busy == 0) && x.plan.cap > 0 {
		x.turn = turn
		kick(x.c.dutyKick)
	}
	x.acted = x.busy
	if x.busy > 0 {
		x.worked = monotonic()
	}
	if x.press != nil {
		x.press.follow(self, others)
	}
	x.idle.Store(x.busy == 0)
	return x.wait(now, len(groups)), set, verify
}

// damped keeps a timeslice that is about right because of what the other containers do. The driver takes up its list of groups
// from the beginning when one is set: with many containers that each follow every change of the others, those at the end of the
// list would never run, and so change again what is right.
func (x *card) damped(slice time.Duration, others []sched.Tenant) time.Duration {
	now := monotonic()
	low, wait := x.c.timing.Min, 0*time.Second
	for _, o := range others {
		if o.Busy > 0 || o.Lingers {
			wait += dampEach
		}
	}
	near, busy := slice > x.slice-x.slice/32 && slice < x.slice+x.slice/32, max(x.busy, 1)
	switch {
	case near && slice != x.slice && busy == x.setBusy && x.slice >= low && now >= x.settling:
		x.since = 0
		return x.slice
	case near, busy != x.setBusy, x.slice < low, slice < low, now < x.settling, slice < x.slice-x.slice/5:
	case x.since == 0:
		x.since = now
		return x.slice
	case now-x.since < min(wait, dampTime):
		return x.slice
	}
	x.since, x.setBusy = 0, busy
	return slice
}

// lingers reports that the container had work a moment ago.
func (x *card) lingers() bool { return x.worked > 0 && monotonic()-x.worked < lingerTime }

const lingerTime = 2 * time.Second

// For how long another timeslice must be right before it is set: so long for each container with work, up to dampTime.
const (
	dampEach = 50 * time.Millisecond
	dampTime = time.Second
)

const (
	// settled is after how long without a context switch a busy container counts as alone on the GPU.
	settled = time.Second
	// maxPatience bounds the time between looks at one that is; the driver's samples reach back 14 seconds.
	maxPatience = 8 * time.Second
)

// wait is when to look again if nobody kicks; 0: not at all.
func (x *card) wait(now time.Time, groups int) time.Duration {
	_, kicks := x.source.(*fecsBuffer)
	switch {
	case x.busy > 0 && x.source == nil:
		return verifyEvery
	case x.busy > 0 && (now.Sub(x.read) < settled || x.plan.cap > 0 || x.turn.Cycle > 0):
		x.patience = settled
		return tick
	case x.busy > 0:
		x.patience = min(max(2*x.patience, settled), maxPatience)
		return x.patience
	case x.lingers():
		return lingerTime / 4
	case groups > 0 && x.source != nil && !kicks:
		return 3 * tick
	}
	return 0
}

// look takes new records in and counts the groups with work.
func (x *card) look(now time.Time, groups int) {
	if x.source == nil {
		if x.busy = groups; x.off && x.plan.suspended {
			x.busy = 0
		}
		return
	}
	var lost bool
	x.records, lost = x.source.read(x.records[:0])
	if len(x.records) > 0 || lost {
		owners := x.c.g.account.owners()
		x.tracker.Add(x.records, func(pid int) bool { return owners[pid] }, lost)
		x.read = now
	}
	idle := idleAfter
	if slot, ok := x.slot(); ok {
		idle = max(idle, 2*slot.Cycle)
	}
	// A group that was just made has not run, but will: one program after the other, each new, must not have base slices.
	x.young = slices.DeleteFunc(x.young, func(made time.Time) bool { return now.Sub(made) > idleAfter })
	if x.busy = min(x.tracker.Busy(x.gpuNow(now), idle)+len(x.young), groups); x.off && x.plan.suspended {
		x.busy = 0
	}
	if x.busy > 0 && !x.read.IsZero() && now.Sub(x.read) >= settled && !x.resident(x.gpuNow(now)) {
		x.busy = 0
	}
}

// slot is when the channels are to be on, if they are not always.
func (x *card) slot() (sched.Slot, bool) {
	switch {
	case x.plan.cap > 0 && x.plan.slot.Cycle > 0:
		return x.plan.slot, true
	case x.turn.Cycle > 0:
		return x.turn, true
	}
	return sched.Slot{}, false
}

// spend keeps the account of a hard cap. What a container used beyond it, because it was idle and its first work was noticed
// late, or because a pause takes a moment, it does without later: in the long run it gets its percentage and no more.
func (x *card) spend(now time.Time) {
	own, _ := x.tracker.Usage(x.gpuNow(now))
	pauses := time.Duration(x.counted.pauses - x.spentPauses)
	used, passed := own.GPUTime-x.spent-pauses*pauseCost, now.Sub(x.spentAt)
	first := x.spentAt.IsZero() || x.plan.cap == 0
	x.spent, x.spentAt, x.spentPauses = own.GPUTime, now, x.counted.pauses
	slot := x.plan.slot
	if first || slot.Cycle == 0 || x.source == nil {
		x.budget, x.owing = 0, 0
		return
	}
	x.budget += passed*time.Duration(x.plan.cap)/time.Duration(sched.Whole) - used
	x.budget = max(min(x.budget, slot.On), -maxDebt*slot.On)
	// Records come late: only a debt of a whole slot is surely one.
	if x.budget < -slot.On && x.owing < monotonic() {
		wait := -x.budget * time.Duration(sched.Whole) / time.Duration(x.plan.cap)
		x.owing = monotonic() + min(wait, maxOff-slot.Cycle)
		kick(x.c.dutyKick)
	}
}

// capIdle is after how long without work a capped container is left alone. Its first work then goes on until it is noticed
// (idleLook, and the driver's own delay of a tick), and is made up for later.
const capIdle = 30 * time.Second

// pauseCost is what a context is on the engine longer than its channels are: until it is saved, and while it is restored (H200).
const pauseCost = 1200 * time.Microsecond

const (
	maxDebt = 20                     // slots
	maxOff  = 500 * time.Millisecond // what programs and the driver do not take for a hang
)

// gpuNow is about the present time of the GPU's clock.
func (x *card) gpuNow(now time.Time) time.Duration {
	if x.read.IsZero() {
		return 0
	}
	return x.tracker.Last() + now.Sub(x.read)
}

// grant counts what the container's share of the GPU's busy time was since the last step.
func (x *card) grant(now time.Time, self sched.Tenant, others []sched.Tenant) {
	_, used := x.tracker.Usage(x.gpuNow(now))
	passed, elapsed := max(0, used-x.counted.card), now.Sub(x.counted.at)
	first := x.counted.at.IsZero()
	x.counted.card, x.counted.at = used, now
	if first || self.Busy == 0 {
		return
	}
	if x.plan.cap > 0 {
		x.counted.granted += elapsed * time.Duration(x.plan.cap) / time.Duration(sched.Whole)
		return
	}
	sum := self.Weight
	for _, o := range others {
		if o.Busy > 0 {
			sum += o.Weight
		}
	}
	x.counted.granted += passed * time.Duration(self.Weight) / time.Duration(max(sum, 1))
}

// Controls of a channel group (ctrla06c.h).
const (
	controlSetTimeslice = 0xa06c0103
	controlGetTimeslice = 0xa06c0104
)

// apply sets the timeslice of every group that does not have it; with verify it asks the driver what they have. To find a file in
// the container can take long, so nothing is locked meanwhile.
func (x *card) apply(groups []groupRef, verify bool) {
	slices.SortFunc(groups, func(a, b groupRef) int { return cmp.Compare(a.client.handle, b.client.handle) })
	x.mu.Lock()
	slice := x.slice
	maps.DeleteFunc(x.set, func(r groupRef, _ time.Duration) bool { return !slices.Contains(groups, r) })
	maps.DeleteFunc(x.missing, func(c *client, _ *absence) bool {
		return !slices.ContainsFunc(groups, func(r groupRef) bool { return r.client == c })
	})
	has := maps.Clone(x.set)
	x.mu.Unlock()
	for len(groups) > 0 {
		of := groups[0].client
		n := 0
		for n < len(groups) && groups[n].client == of {
			n++
		}
		todo := slices.DeleteFunc(slices.Clone(groups[:n]), func(r groupRef) bool { return has[r] == slice && !verify && !x.absent(of) })
		groups = groups[n:]
		if len(todo) == 0 || !x.mayLook(of) {
			continue
		}
		t, found := x.c.g.fileOf(of)
		x.found(of, found)
		if !found {
			continue
		}
		unlock := of.holdCalls()
		for _, r := range x.c.g.account.living(todo) {
			if has[r] == slice && verify {
				var p [8]byte
				if s, e := x.c.g.control(t, of.handle, r.handle, controlGetTimeslice, p[:]); e == 0 && s == rm.StatusOK &&
					time.Duration(rm.U64(p[:], 0))*time.Microsecond == slice.Truncate(time.Microsecond) {
					continue
				}
				x.mu.Lock()
				x.counted.drift++
				x.mu.Unlock()
				x.c.g.logOnce("drift", "a timeslice was changed by somebody else; it is set again", "pid", of.tgid)
			}
			x.setSlice(t, r, slice)
		}
		unlock()
		t.Done()
	}
}

// setSlice sets one group's timeslice. It takes 0.16 ms (H200).
func (x *card) setSlice(t Target, r groupRef, slice time.Duration) {
	var p [8]byte
	rm.PutU64(p[:], 0, uint64(slice.Microseconds()))
	if s, e := x.c.g.control(t, r.client.handle, r.handle, controlSetTimeslice, p[:]); e != 0 || s != rm.StatusOK {
		x.c.g.logOnce("slice"+rm.StatusName(s), "the driver refuses a timeslice", "status", rm.StatusName(s), "errno", e, "us", slice.Microseconds())
		return
	}
	x.mu.Lock()
	x.set[r] = slice
	x.mu.Unlock()
}

// onGPU is the card of a GPU by its place in Config.GPUs; nil for a native one.
func (c *compute) onGPU(gpu int) *card {
	for _, x := range c.cards {
		if x.gpu == gpu {
			return x
		}
	}
	return nil
}

// made is told of a new channel group on a GPU.
func (c *compute) made(gpu int) {
	if x := c.onGPU(gpu); x != nil {
		x.mu.Lock()
		if len(x.young) < maxYoung {
			x.young = append(x.young, time.Now())
		}
		x.mu.Unlock()
		c.awake(x)
	}
}

// maxYoung bounds what is remembered of new groups; max_tsgs is 64 by default.
const maxYoung = 256

// awake has a card looked at.
func (c *compute) awake(x *card) {
	x.active.Store(true)
	kick(x.kick)
	kick(c.dutyKick)
}

// started is told, with compute.running held, that a trapped call let channels of the container run: those that a handle
// names. The group gets its timeslice before the first work can.
func (c *compute) started(t Target, client, handle uint32) {
	channels, gpu, graphics := c.g.account.channelsOf(client, handle)
	if len(channels) == 0 {
		return
	}
	x := c.onGPU(gpu)
	if x == nil || !graphics {
		return
	}
	for _, r := range c.g.account.groupsOn(gpu) {
		if r.client.handle != client || r.handle != handle && r.handle != channels[0].object.parent {
			continue
		}
		x.mu.Lock()
		slice, set := x.slice, x.set[r]
		x.mu.Unlock()
		if set == 0 {
			x.setSlice(t, r, slice)
		}
	}
	c.awake(x)
}

// status fills in what a vGPU's status says of its GPU time.
func (x *card) status() *ComputeStatus {
	groups := len(x.c.g.account.groupsOn(x.gpu))
	now := time.Now()
	x.mu.Lock()
	defer x.mu.Unlock()
	p := x.plan
	s := &ComputeStatus{Policy: p.effective, Weight: p.share.Weight, Percent: p.share.Percent, Priority: p.share.Priority, Cap: p.cap,
		Paused: p.suspended && x.offAll, TSGs: groups, Slice: x.slice, Exact: x.source != nil, Pauses: x.counted.pauses, Granted: x.counted.granted}
	if x.active.Load() {
		x.look(now, groups)
	}
	s.Busy = x.busy
	own, _ := x.tracker.Usage(x.gpuNow(now))
	s.GPUTime, s.Waiting, s.Switches, s.Preemptions = own.GPUTime, own.Waiting+x.counted.stopped, own.Switches, own.Preemptions
	s.Utilization = x.tracker.Utilization(x.gpuNow(now), time.Second)
	if _, alone := x.tracker.Running(); alone && now.Sub(x.read) >= settled {
		s.Utilization = min(s.Utilization, x.lately)
	}
	return s
}

// adopt makes a plan out of what the ledger says.
func (x *card) adopt(p entitlement) {
	x.mu.Lock()
	x.paused = p.suspended
	p.suspended = p.suspended || x.held
	changed := x.change(p)
	x.mu.Unlock()
	if changed {
		kick(x.kick)
		kick(x.c.dutyKick)
	}
}

// hold pauses the container's GPU work for the guard's own reasons, or no longer.
func (c *compute) hold(on bool) {
	for _, x := range c.cards {
		x.mu.Lock()
		x.held = on
		p := x.plan
		p.suspended = x.paused || x.held
		x.change(p)
		x.mu.Unlock()
		kick(x.kick)
	}
	kick(c.dutyKick)
}

// change puts a plan in force and tells whether it is another one. The caller holds x.mu.
func (x *card) change(p entitlement) bool {
	changed := x.plan != p
	x.plan = p
	if changed {
		x.settling = monotonic() + settleTime
	}
	return changed
}

// settleTime is for how long after a change slices are short, so that shares are right soon.
const settleTime = 2 * time.Second

// plans reads the ledger's records into a plan for each card.
func (c *compute) plans(records []ledger.Record, cards map[string]sched.Card) {
	own := slices.IndexFunc(records, func(r ledger.Record) bool { return r.Nonce == c.g.cfg.Nonce })
	if own < 0 {
		return
	}
	cardOf := func(uuid string) sched.Card {
		if card, ok := cards[uuid]; ok {
			return card
		}
		return c.g.cfg.Settings.Card()
	}
	var claims []sched.Claim
	shares := map[string][]sched.Share{}
	for _, r := range records {
		claim := sched.Claim{ID: r.Nonce, Caps: map[string]sched.Permille{}}
		for _, v := range r.VGPUs {
			shares[v.UUID] = append(shares[v.UUID], v.Share())
			if p, capped := cardOf(v.UUID).Cap(v.Share()); capped {
				claim.Caps[v.UUID] = p
			}
		}
		claims = append(claims, claim)
	}
	slots := c.timing.Layout(claims)[c.g.cfg.Nonce]
	for _, x := range c.cards {
		gpu := c.g.cfg.GPUs[x.gpu]
		for _, v := range records[own].VGPUs {
			if v.UUID != gpu.UUID {
				continue
			}
			card := cardOf(gpu.UUID)
			p := entitlement{card: card, effective: card.Effective(shares[gpu.UUID]), share: v.Share(), suspended: records[own].Paused}
			if capped, ok := card.Cap(p.share); ok {
				p.cap, p.slot = capped, slots[gpu.UUID]
			}
			x.adopt(p)
			c.g.account.setLimits(x.gpu, v.Limit, v.Spill)
		}
	}
}
