package gpusched

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencgpu/cgpu/pkg/arbiter"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// gpuScheduler is the container's part of one GPU: it sees what pkg/sched decides by, and does it.
type gpuScheduler struct {
	s        *Scheduler
	gpu      int // in Config.GPUs
	kick     chan struct{}
	source   arbiter.Source // nil: the driver does not tell of context switches
	priority *priority      // nil: nobody sees when a high-priority container has work
	channels channelCount
	active   atomic.Bool // the container has channel groups
	idle     atomic.Bool // without work at the last step

	mu      sync.Mutex
	local   *sched.Local
	page    *peerPage // nil: others are not known
	records []sched.Switch
	set     map[Group]time.Duration
	lost    map[Client]*absence // clients whose file is not found; see lostfile.go
	drift   uint64              // timeslices that somebody else had changed
	offAll  bool                // also those of other engines than graphics
	off     bool                // the channels are disabled; changed with Scheduler.running held too

	refused int // tries left to resume what the driver would not; 0: all runs. With Scheduler.running held
}

func newGPUScheduler(s *Scheduler, gpu int) *gpuScheduler {
	return &gpuScheduler{s: s, gpu: gpu, kick: make(chan struct{}, 1), local: sched.NewLocal(s.timing, s.Config.Settings.Card()),
		set: map[Group]time.Duration{}, lost: map[Client]*absence{}}
}

// setSource is called before run, or with mu held.
func (x *gpuScheduler) setSource(source arbiter.Source) {
	x.source, x.local.Exact, x.local.Told = source, source != nil, source != nil
}

// run follows the GPU for as long as the guard lives.
func (x *gpuScheduler) run() {
	if !x.awaitFirst() {
		return
	}
	if x.source != nil {
		if err := x.source.Enable(); err != nil {
			x.s.Log.Warn(noRecords, "err", err)
			x.mu.Lock()
			x.setSource(nil)
			x.mu.Unlock()
		}
	}
	x.joinPage()
	if x.source != nil {
		go x.watchSource(x.source)
	}
	timer := time.NewTimer(0)
	for {
		select {
		case <-x.s.stop:
			return
		case <-x.kick:
		case <-timer.C:
		}
		if wait := x.step(x.s.Now()); wait > 0 {
			timer.Reset(wait)
		}
	}
}

// awaitFirst waits for the container's first context.
func (x *gpuScheduler) awaitFirst() bool {
	for !x.active.Load() {
		select {
		case <-x.s.stop:
			return false
		case <-x.kick:
		}
	}
	return true
}

// awake has the GPU looked at.
func (x *gpuScheduler) awake() {
	x.active.Store(true)
	kick(x.kick)
	kick(x.s.pausesKick)
}

// joinPage tells the other guards of the GPU from now on, and hears from them.
func (x *gpuScheduler) joinPage() {
	p, err := openPeerPage(x.s.Config.RunDir, x.s.Config.GPUs[x.gpu].UUID)
	if err != nil {
		x.s.Log.Error("cannot see how much work other containers have: this one's timeslices are set as if they had none", "err", err)
		return
	}
	x.mu.Lock()
	x.page = p
	x.mu.Unlock()
	x.channels.share(p)
	go x.watchPage(p)
	x.startArbiter()
}

func (x *gpuScheduler) leavePage() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.page != nil {
		x.channels.share(nil)
		x.page.leave()
		x.page = nil
	}
}

func (x *gpuScheduler) watchPage(p *peerPage) {
	for seen := p.generation(); ; {
		p.await(seen)
		select {
		case <-x.s.stop:
			return
		default:
		}
		seen = p.generation()
		kick(x.kick)
	}
}

// watchSource kicks when there are records. A source that cannot wait is looked at by step's timer.
func (x *gpuScheduler) watchSource(source arbiter.Source) {
	for source.Await() {
		select {
		case <-x.s.stop:
			return
		default:
		}
		kick(x.kick)
		// Several batches at once are fine; beside busy neighbours an idle container need not look at each of theirs.
		if x.idle.Load() {
			time.Sleep(sched.IdleLook)
		} else {
			time.Sleep(sched.Tick / 2)
		}
	}
}

// step looks at what happened, tells the others, and sets timeslices. It returns when to look again; 0: when kicked.
func (x *gpuScheduler) step(now time.Duration) (again time.Duration) {
	groups := x.s.Container.Groups(x.gpu)
	again, set, verify := x.decide(now, groups)
	if set {
		x.apply(groups, verify)
	}
	return again
}

// decide is step without what may take long.
func (x *gpuScheduler) decide(now time.Duration, groups []Group) (again time.Duration, set, verify bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.page == nil && len(groups) == 0 {
		return 0, false, false
	}
	x.local.Look(x.view(now, len(groups)))
	self := x.local.Self(now)
	if self.Priority == quota.PriorityHigh && x.priority != nil {
		self.Pressing = x.priority.pressing() || x.priority.work.blind() && self.Busy > 0
		self.Saturating = x.priority.saturating()
	}
	var others []sched.Tenant
	if x.page != nil {
		self.Place = x.page.place()
		x.page.publish(self)
		others = x.page.others()
	}
	d := x.local.Decide(now, self, others)
	if d.Turned {
		kick(x.s.pausesKick)
	}
	if x.priority != nil {
		x.priority.follow(self, others)
	}
	x.idle.Store(self.Busy == 0)
	set = d.Changed || d.Verify || len(x.set) != len(groups) || len(x.lost) > 0
	return x.local.Wait(now, len(groups)), set, d.Verify
}

// view takes new records; mu is held.
func (x *gpuScheduler) view(now time.Duration, groups int) sched.View {
	v := sched.View{Now: now, Groups: groups, Off: x.off, Load: x.load}
	if x.source == nil {
		return v
	}
	x.records, v.Lost = x.source.Read(x.records[:0])
	if v.Records = x.records; len(v.Records) > 0 || v.Lost {
		owners := x.s.Container.Owners()
		v.Mine = func(pid int) bool { return owners[pid] }
	}
	return v
}

// Controls of a channel group (ctrla06c.h).
const (
	controlSetTimeslice = 0xa06c0103
	controlGetTimeslice = 0xa06c0104
)

// apply sets the timeslice of every group that does not have it; with verify it asks the driver what they have. To find a file in
// the container can take long, so nothing is locked meanwhile.
func (x *gpuScheduler) apply(groups []Group, verify bool) {
	slices.SortFunc(groups, func(a, b Group) int { return cmp.Compare(a.Client.Handle(), b.Client.Handle()) })
	x.mu.Lock()
	slice := x.local.Slice()
	maps.DeleteFunc(x.set, func(r Group, _ time.Duration) bool { return !slices.Contains(groups, r) })
	maps.DeleteFunc(x.lost, func(c Client, _ *absence) bool {
		return !slices.ContainsFunc(groups, func(r Group) bool { return r.Client == c })
	})
	has := maps.Clone(x.set)
	x.mu.Unlock()
	for len(groups) > 0 {
		of := groups[0].Client
		n := 0
		for n < len(groups) && groups[n].Client == of {
			n++
		}
		todo := slices.DeleteFunc(slices.Clone(groups[:n]), func(r Group) bool { return has[r] == slice && !verify && !x.absent(of) })
		groups = groups[n:]
		if len(todo) == 0 || !x.mayLook(of) {
			continue
		}
		f, found := x.s.Container.File(of)
		x.found(of, found)
		if found {
			x.applyTo(f, todo, func(r Group) bool { return verify && has[r] == slice }, slice)
			f.Close()
		}
	}
}

// applyTo sets the timeslices of groups of one client, but of those that should have it and do.
func (x *gpuScheduler) applyTo(f File, groups []Group, verify func(Group) bool, slice time.Duration) {
	living, release := f.Hold(groups)
	defer release()
	for _, r := range living {
		if verify(r) {
			if x.keeps(f.Control, r, slice) {
				continue
			}
			x.mu.Lock()
			x.drift++
			x.mu.Unlock()
			x.s.LogOnce("drift", "a timeslice was changed by somebody else; it is set again", "pid", r.Client.PID())
		}
		x.setSlice(f.Control, r, slice)
	}
}

// keeps asks the driver whether a group has a timeslice.
func (x *gpuScheduler) keeps(control Control, r Group, slice time.Duration) bool {
	var p [8]byte
	s, e := control(r.Handle, controlGetTimeslice, p[:])
	return e == 0 && s == rm.StatusOK && time.Duration(rm.U64(p[:], 0))*time.Microsecond == slice.Truncate(time.Microsecond)
}

// setSlice sets one group's timeslice. It takes 0.16 ms (H200).
func (x *gpuScheduler) setSlice(control Control, r Group, slice time.Duration) {
	var p [8]byte
	rm.PutU64(p[:], 0, uint64(slice.Microseconds()))
	if s, e := control(r.Handle, controlSetTimeslice, p[:]); e != 0 || s != rm.StatusOK {
		status := rm.StatusName(s)
		x.s.LogOnce("slice"+status, "the driver refuses a timeslice", "status", status, "errno", e, "us", slice.Microseconds())
		return
	}
	x.mu.Lock()
	x.set[r] = slice
	x.mu.Unlock()
}

// load sums how long the GPU computed for the container between two times of its clock. False: the driver does not say.
func (x *gpuScheduler) load(from, to time.Duration) (sum time.Duration, ok bool) {
	own, err := x.s.Container.RM()
	if err != nil {
		return 0, false
	}
	for pid := range x.s.Container.Owners() {
		d, err := arbiter.Load(own, x.s.ABI, x.gpu, pid, from, to)
		if err != nil {
			x.s.LogOnce("gpumon", "the GPU's load is not known", "err", err)
			return 0, false
		}
		sum += d
	}
	return min(sum, to-from), true
}
