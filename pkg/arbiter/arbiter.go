// SPDX-License-Identifier: Apache-2.0

// Package arbiter decides about the time of one GPU, for all the containers on it: it reads the driver's records of context switches,
// and what guards say on the GPU's page (pkg/peerpage), decides by pkg/sched, and writes a row for each guard there, with the account of
// its GPU time. It makes no goroutine, holds no lock, and keeps nothing that a successor could not find on the page or in records.
package arbiter

import (
	"log/slog"
	"maps"
	"math"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/peerpage"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// Options are what an Arbiter works with.
type Options struct {
	RunDir string
	UUID   string // of the GPU
	Timing sched.Timing
	Source Source // nil: the driver does not tell of context switches; every context counts as one with work
	// Samples are of the GPU's load lately; nil, or an error: nobody knows. See the function Samples.
	Samples func() ([]sched.Sample, error)
	Log     *slog.Logger
	Now     func() time.Duration // the clock; nil: CLOCK_MONOTONIC
}

// Arbiter decides about one GPU. Its methods but Generation, Await and Wake are of one goroutine.
type Arbiter struct {
	Options
	page     *peerpage.Page
	leads    bool
	guests   []peerpage.Guest
	vgpus    map[string]*vgpu      // by Guest.ID
	owners   map[int]string        // vGPUs by processes
	left     map[int]time.Duration // processes that nobody names any more, since when
	observer *sched.Observer
	state    sched.State
	clock    clock
	records  []sched.Switch
	read     time.Duration // when some came last
	stepped  time.Duration
	judged   time.Duration // until when the GPU's load is known
	asked    time.Duration // for the GPU's load
	patience time.Duration
	said     map[string]bool // lines in the log
}

// vgpu is what is remembered of one.
type vgpu struct {
	contexts       int
	young          []time.Duration // when groups were made lately, that may not have run yet
	worked         time.Duration   // when it had work last; 0: never
	part           float64         // of the GPU's time, that it was entitled to since the last step
	lately, should float64         // of the GPU's time
	said           sched.Verdict
	setting        sched.Setting // as its guard says
}

// New makes one that has decided nothing, and maps the GPU's page. It may be one that stands by: only Step writes there.
func New(o Options) (*Arbiter, error) {
	if o.Now == nil {
		o.Now = monotonic
	}
	page, err := peerpage.Open(o.RunDir, o.UUID)
	if err != nil {
		return nil, err
	}
	return &Arbiter{Options: o, page: page, vgpus: map[string]*vgpu{}, owners: map[int]string{}, observer: sched.NewObserver(),
		said: map[string]bool{}}, nil
}

// Living counts the guards on the page that live.
func (a *Arbiter) Living() int { return a.page.Living() }

// Generation changes when a guard came, went, or says something new.
func (a *Arbiter) Generation() uint32 { return a.page.Generation() }

// Await waits until Generation is not what was seen.
func (a *Arbiter) Await(seen uint32) { a.page.Await(seen) }

// Wake has Await return.
func (a *Arbiter) Wake() { a.page.Wake() }

// Close unmaps the page. Nobody may be in Await.
func (a *Arbiter) Close() { a.page.Close() }

const (
	// idleAfter is for how long a group without a run counts as one with work.
	idleAfter = 200 * time.Millisecond
	// settled is after how long without a context switch a context with work counts as alone on the GPU, and how often accounts go on.
	settled = time.Second
	// manyUnsettled is when they go on sooner: a successor has the last 4096 records (fecsRecords).
	manyUnsettled = 1024
	// maxPatience bounds the time between looks at one that is; the driver's samples reach back 14 seconds.
	maxPatience = 8 * time.Second
	// capIdle is after how long without work a capped vGPU is left alone. Its first work then goes on until it is noticed, and is made up
	// for later.
	capIdle = 30 * time.Second
	// late is how much longer than it said an arbiter may take, until guards do without.
	late = 500 * time.Millisecond
	// maxYoung bounds what is remembered of new groups; max_tsgs is 64 by default.
	maxYoung = 256
)

const never = time.Duration(math.MaxInt64)

// Step reads what is new, decides, and writes rows; now is of CLOCK_MONOTONIC. It is called only by who holds the GPU's lock: at once when
// it has got it, when Source.Await or Await returned, and when the time that Step returned has passed, whatever comes first; 0: no time.
// After Source.Await no sooner than sched.Tick/2 after the last Step: there may be several batches at once.
//
// The first Step of a successor reads what its Source has kept since Enable and goes on where the accounts on the page end.
func (a *Arbiter) Step(now time.Duration) (again time.Duration) {
	first := !a.leads
	if first {
		a.lead()
	}
	a.follow(now)
	a.readSwitches(now, first)
	card, vgpus := a.card(now), make([]sched.VGPU, len(a.guests))
	for i := range a.guests {
		vgpus[i] = a.seen(&a.guests[i], now)
	}
	a.judge(now)
	var rows []sched.Row
	rows, a.state = a.Timing.Decide(card, vgpus, a.observer.Costs(), a.state, now)
	again = a.again(vgpus, now)
	a.page.Reach(a.observer.UpTo())
	a.say(card, vgpus, rows, now, again, first)
	a.page.Stepped(now, peerpage.Found{Pace: a.state.Pace(), Ahead: a.clock.ahead, Amiss: a.state.Amiss()})
	a.stepped = now
	return again
}

// lead goes on where the arbiter before ended.
func (a *Arbiter) lead() {
	if err := a.page.Lead(); err != nil {
		a.Log.Error("cannot say on the page who decides", "err", err)
	}
	found := a.page.Found()
	a.leads, a.state = true, sched.Begin(found.Pace, found.Amiss)
	a.clock = clock{ahead: found.Ahead, known: found.Ahead != 0}
}

// follow takes in what guards say.
func (a *Arbiter) follow(now time.Duration) {
	former := a.guests
	a.guests = a.page.Guests(former)
	same := len(former) == len(a.guests)
	there := make(map[string]bool, len(a.guests))
	for i := range a.guests {
		g := &a.guests[i]
		same = same && former[i].ID == g.ID && former[i].Version == g.Version
		there[g.ID] = true
		v := a.vgpus[g.ID]
		if v == nil {
			v = a.meet(g, now)
		}
		for n := v.contexts; n < g.Contexts && len(v.young) < maxYoung; n++ {
			v.young = append(v.young, now)
		}
		v.contexts = g.Contexts
	}
	if same && !a.gone(now) {
		return
	}
	maps.DeleteFunc(a.vgpus, func(id string, _ *vgpu) bool {
		if !there[id] {
			a.observer.Forget(id)
		}
		return !there[id]
	})
	a.own(now)
}

// leaveTime is for how long a process that a guard names no more is its vGPU's: the driver hands out its last records a Tick later.
const leaveTime = 4 * sched.Tick

// gone reports that the time of a process that has left is over.
func (a *Arbiter) gone(now time.Duration) bool {
	for _, since := range a.left {
		if now-since >= leaveTime {
			return true
		}
	}
	return false
}

// meet begins with a vGPU, or goes on with what the arbiter before knew of it. The row is in the guard's entry: times to come in it must
// not become everybody's.
func (a *Arbiter) meet(g *peerpage.Guest, now time.Duration) *vgpu {
	v := &vgpu{}
	if said, ok := a.page.RowOf(g.Place); ok {
		latest := a.page.Found().UpTo
		said.At = min(max(said.At, 0), now)
		said.UpTo, said.Since = min(max(said.UpTo, 0), latest), min(max(said.Since, 0), latest)
		v.said, v.contexts = said, g.Contexts
		v.lately, v.should = float64(said.Lately)/float64(sched.Whole), float64(said.Entitled)/float64(sched.Whole)
		if said.Busy > 0 {
			v.worked = said.At
		}
		a.observer.Resume(g.ID, said.Account)
		a.observer.Applied(g.ID, said.Row, 0)
	}
	a.vgpus[g.ID] = v
	return v
}

// own notes whose processes are whose. One that two guards name stays whose it was.
func (a *Arbiter) own(now time.Duration) {
	owners := map[int]string{}
	for pass := range 2 {
		for i := range a.guests {
			for _, pid := range a.guests[i].PIDs {
				if owners[pid] == "" && (pass == 1 || a.owners[pid] == a.guests[i].ID) {
					owners[pid] = a.guests[i].ID
				}
			}
		}
	}
	left := map[int]time.Duration{}
	for pid, id := range a.owners {
		if _, there := a.vgpus[id]; owners[pid] != "" || !there {
			continue
		}
		since, known := a.left[pid]
		if !known {
			since = now
		}
		if now-since < leaveTime {
			owners[pid], left[pid] = id, since
		}
	}
	a.owners, a.left = owners, left
	a.observer.Own(a.owner)
}

func (a *Arbiter) owner(pid int) string { return a.owners[pid] }

// readSwitches reads the switch records that are new, and tells the observer.
func (a *Arbiter) readSwitches(now time.Duration, first bool) {
	if a.Source == nil {
		return
	}
	var lost bool
	a.records, lost = a.Source.Read(a.records[:0])
	records := a.records
	if n := len(records); n > 0 {
		a.clock.note(records[n-1].At, a.Now(), first) // by now: they were made before this, and perhaps after Step was called
		a.read = now
	}
	a.observer.Ahead = a.clock.ahead
	a.settings(now)
	end := a.clock.gpu(now)
	// Who comes new has the records of some time: they fade as if they had been read one after the other.
	for first && len(records) > 0 && records[len(records)-1].At-records[0].At > 2*sched.Tick {
		n := slices.IndexFunc(records, func(s sched.Switch) bool { return s.At-records[0].At > sched.Tick })
		if n <= 0 {
			break
		}
		a.observer.Add(records[:n], records[n-1].At, a.owner, lost)
		records, lost = records[n:], false
	}
	a.observer.Add(records, end, a.owner, lost)
	a.settle(now)
}

// settings tells the observer what guards say of their timeslices.
func (a *Arbiter) settings(now time.Duration) {
	for _, g := range a.guests {
		s, ok := a.page.Setting(g, now)
		if v := a.vgpus[g.ID]; ok && a.clock.known && (s != v.setting || s.To < s.From) {
			v.setting = s
			a.observer.Sliced(g.ID, sched.Setting{Slice: s.Slice, From: s.From + a.clock.ahead, To: s.To + a.clock.ahead})
		}
	}
}

// settle has accounts go on.
func (a *Arbiter) settle(now time.Duration) {
	switch {
	case a.Samples == nil || !a.clock.known:
		a.observer.SettleAll()
		return
	case a.observer.Unsettled() == 0 && !a.observer.Alone() || now < a.asked+a.askEvery():
		return
	}
	a.asked = now
	if samples, ok := a.samples("load", "contexts on the GPU count as ones with work"); ok {
		a.observer.Settle(samples, a.clock.gpu(now)-sched.SamplePeriod) // records that are younger may be still to come
	} else {
		a.observer.SettleAll()
	}
}

// askEvery is how often the GPU's load is asked for, which takes 1.5 ms: seldom, unless much waits for it, or a guard that is about to end.
func (a *Arbiter) askEvery() time.Duration {
	leaves := func(g peerpage.Guest) bool {
		return g.Contexts == 0 && len(g.PIDs) == 0 && a.observer.Open(g.ID, 0) > 0
	}
	if a.observer.Unsettled() >= manyUnsettled || slices.ContainsFunc(a.guests, leaves) {
		return sched.SamplePeriod
	}
	return settled
}

// samples asks for the GPU's load. Without an answer it says once what that means.
func (a *Arbiter) samples(key, otherwise string) ([]sched.Sample, bool) {
	if a.Samples == nil || !a.clock.known {
		return nil, false
	}
	samples, err := a.Samples()
	if err != nil {
		a.logOnce(key, otherwise, err)
	}
	return samples, err == nil
}

// kept reports that nobody leaves a gang's slots because another GPU's arbiter says otherwise.
func (a *Arbiter) kept() bool {
	return !slices.ContainsFunc(a.guests, func(g peerpage.Guest) bool { return a.vgpus[g.ID].said.Gang && !g.Gang.Kept })
}

// judge looks whether the GPU computes while some of its vGPUs are off for others.
func (a *Arbiter) judge(now time.Duration) {
	since, apart := a.state.Apart()
	if !apart || !a.kept() {
		return
	}
	from, to := max(since, a.judged), now-sched.SamplePeriod
	if to-from < settled {
		return
	}
	load := -1.
	if samples, ok := a.samples("apart", "containers that would be on one after the other are on together"); ok {
		gpu := a.clock.gpu(now) - now
		load = meanLoad(samples, gpu+from, gpu+to)
	}
	a.judged, a.state = to, a.Timing.Judge(a.state, load, now)
}

func (a *Arbiter) logOnce(key, msg string, err error) {
	if !a.said[key] {
		a.said[key] = true
		a.Log.Warn(msg, "gpu", a.UUID, "err", err)
	}
}

// card is how the GPU is shared: as the guard has it whose plan is the newest.
func (a *Arbiter) card(now time.Duration) (card sched.Card) {
	newest := time.Duration(-1)
	for i := range a.guests {
		if g := &a.guests[i]; g.Adopted > newest && g.Adopted <= now {
			newest, card = g.Adopted, g.Card
		}
	}
	if card.MaxInst == 0 {
		card = sched.Card{Policy: sched.PolicyPreempt, MaxInst: sched.MaxMaxInst, PrioRatio: sched.DefaultPrioRatio}
	}
	return card
}

// seen is a vGPU as it is to be decided about.
func (a *Arbiter) seen(g *peerpage.Guest, now time.Duration) sched.VGPU {
	v := a.vgpus[g.ID]
	x := sched.VGPU{ID: g.ID, Share: g.Share, Contexts: g.Contexts, Pressing: g.Pressing, Gang: g.Gang}
	if g.Cap > 0 {
		x.Slot = g.Slot
	}
	if a.Source == nil {
		x.Seen = sched.Unseen(g.Contexts)
	} else {
		x.Seen = a.observer.Seen(g.ID, max(idleAfter, 2*max(x.Slot.Cycle, v.said.Slot.Cycle)))
		// A group that was just made has not run, but will: one program after the other, each new, must not have the slices of who is alone.
		v.young = slices.DeleteFunc(v.young, func(made time.Duration) bool { return now-made > idleAfter })
		x.Busy = min(x.Busy+len(v.young), g.Contexts)
	}
	if g.Suspended {
		x.Busy = 0
	}
	if x.Endless = min(x.Endless, x.Busy); x.Busy > 0 {
		v.worked = now
	} else if v.worked == 0 || now-v.worked > capIdle {
		x.Slot = sched.Slot{}
	}
	return x
}

// again is when to look if nobody tells of anything; 0: not at all.
func (a *Arbiter) again(vgpus []sched.VGPU, now time.Duration) time.Duration {
	again, busy, capped := never, false, false
	for i, x := range vgpus {
		busy = busy || x.Busy > 0
		if v := a.vgpus[x.ID]; x.Slot.Cycle > 0 && x.Busy == 0 {
			again = min(again, capIdle-(now-v.worked)+sched.Tick)
		}
		capped = capped || a.guests[i].Cap > 0
	}
	if a.Source != nil && a.observer.Unsettled() > 0 {
		again = min(again, max(a.asked+a.askEvery()-now, sched.Tick))
	}
	switch {
	case busy && a.Source == nil:
		again = min(again, settled)
	case busy && now-a.read < settled:
		a.patience = settled / 2
		again = min(again, 3*sched.Tick)
	case busy || a.observer.Alone(): // who is alone may have no work, and some again, and no record tells
		a.patience = min(max(2*a.patience, settled), maxPatience)
		if capped {
			a.patience = settled
		}
		again = min(again, a.patience)
	}
	if again == never {
		return 0
	}
	return again
}

// say writes the rows, and wakes those for whom they are others.
func (a *Arbiter) say(card sched.Card, vgpus []sched.VGPU, rows []sched.Row, now, again time.Duration, first bool) {
	until := never
	if again > 0 {
		until = now + again + late
	}
	parts, busy, yielding := card.Parts(vgpus), a.observer.Seen("", 0).Ran, 0
	for _, x := range vgpus {
		busy += x.Ran
		if x.Priority < quota.PriorityHigh {
			yielding += x.Busy
		}
	}
	for i, x := range vgpus {
		g, v := &a.guests[i], a.vgpus[x.ID]
		said := sched.Verdict{Row: rows[i], At: now, Until: until, Adopted: g.Adopted, Busy: x.Busy, Exact: a.Source != nil,
			Look: x.Priority == quota.PriorityHigh && x.Contexts > 0 && yielding > 0, Gang: a.state.Ganged() && rows[i].Slot.Cycle > 0}
		said.Account = a.book(g, v, parts[i], now, busy, x)
		said.Lately, said.Entitled = permille(v.lately), permille(v.should)
		said.Open = a.observer.Open(g.ID, a.clock.gpu(now))
		a.apply(g, &said)
		a.page.Put(*g, &said, first || !same(&said, &v.said))
		v.said = said
	}
}

// same reports that a guard need not be woken.
func same(x, y *sched.Verdict) bool {
	return x.Row == y.Row && x.Adopted == y.Adopted && (x.Busy > 0) == (y.Busy > 0) && x.Exact == y.Exact && x.Look == y.Look &&
		x.Gang == y.Gang
}

// book brings the account of a vGPU up to date.
func (a *Arbiter) book(g *peerpage.Guest, v *vgpu, part float64, now, busy time.Duration, x sched.VGPU) sched.Account {
	entitled, since := v.part, a.stepped
	if a.stepped == 0 && v.said.UpTo > 0 {
		entitled, since = part, v.said.At // nobody knows who had work since the arbiter before; but what was before a newcomer is not his
	}
	of := busy
	if g.Cap > 0 {
		of = now - since
		if entitled > 0 {
			entitled = float64(g.Cap) / float64(sched.Whole)
		}
	}
	v.part = part
	if dt := now - a.stepped; a.stepped > 0 && dt > 0 {
		keep := math.Exp(-float64(dt) / float64(sched.FadeTime))
		should := part * float64(busy) / float64(dt)
		if g.Cap > 0 && part > 0 {
			should = float64(g.Cap) / float64(sched.Whole)
		}
		v.lately = v.lately*keep + (1-keep)*float64(x.Ran)/float64(dt)*a.observer.Load(g.ID)
		v.should = v.should*keep + (1-keep)*should
	}
	return a.observer.Book(g.ID, entitled, g.Cap > 0, of, max(0, now-since))
}

// apply has the observer know what is in force from now on.
func (a *Arbiter) apply(g *peerpage.Guest, v *sched.Verdict) {
	row := v.Row
	if v.Gang && !g.Gang.Kept {
		row.Slot = sched.Slot{} // it is on all the time, so ends of turns tell what they did
	}
	if g.Suspended {
		row.Slot = sched.Slot{Cycle: time.Second} // never on: who is switched out then has not blocked
	}
	a.observer.Applied(g.ID, row, a.clock.gpu(v.At))
}

func permille(x float64) sched.Permille {
	return sched.Permille(math.Round(min(max(x, 0), 1) * float64(sched.Whole)))
}

func monotonic() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return time.Duration(ts.Nano())
}

// clock knows by how much the GPU's clock is ahead of CLOCK_MONOTONIC: as far as the newest record that was read at once was.
type clock struct {
	ahead time.Duration
	at    time.Duration
	last  time.Duration // newest record
	known bool
}

// drift is by how much one clock may run faster than the other.
const drift = 1000 // 1 / 0.1 %

// stale is by how much the newest record may seem older than it can be when it is read; more is a clock that was set anew.
const stale = 3 * time.Second

// note takes the newest record of a look. The first look's may be old: nobody may have read for long.
func (c *clock) note(record, now time.Duration, first bool) {
	if c.known && c.at > 0 {
		c.ahead -= max(0, now-c.at) / drift
	}
	if ahead := record - now; !c.known || ahead > c.ahead || record < c.last-time.Second || !first && ahead < c.ahead-stale {
		c.ahead, c.known = ahead, true
	}
	c.at, c.last = now, record
}

// gpu is a time of the GPU's clock.
func (c *clock) gpu(now time.Duration) time.Duration {
	return max(now+c.ahead, c.last)
}
