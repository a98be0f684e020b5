// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencgpu/cgpu/pkg/peerpage"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// gpuScheduler is the container's part of one GPU: it says what the container may have and wants, and does what the arbiter says.
type gpuScheduler struct {
	s        *Scheduler
	gpu      int // in Config.GPUs
	kick     chan struct{}
	rung     chan struct{} // there is another row
	priority *priority     // nil: nobody sees when a high-priority container has work
	channels channelCount
	active   atomic.Bool // the container has channel groups

	mu       sync.Mutex
	local    *sched.Local
	page     *peerpage.Entry // nil: nobody decides
	slice    time.Duration   // that was last set
	verified time.Duration   // when timeslices were read back last
	alone    time.Duration   // since when no arbiter has been seen; 0: there is one
	ask      time.Duration   // when one may be started next
	warn     sync.Once
	set      map[Group]time.Duration
	setting  sched.Setting       // what the arbiter is told of timeslices
	setters  int                 // goroutines that set some just now
	lost     map[Client]*absence // clients whose file is not found; see lostfile.go
	drift    uint64              // timeslices that somebody else had changed
	offAll   bool                // also those of other engines than graphics
	off      bool                // the channels are disabled; changed with Scheduler.running held too

	refused int // tries left to resume what the driver would not; 0: all runs. With Scheduler.running held
}

func newGPUScheduler(s *Scheduler, gpu int) *gpuScheduler {
	return &gpuScheduler{s: s, gpu: gpu, kick: make(chan struct{}, 1), rung: make(chan struct{}, 1),
		local: sched.NewLocal(s.timing, s.Config.Settings.Card()),
		set:   map[Group]time.Duration{}, lost: map[Client]*absence{}}
}

// run follows the GPU for as long as the guard lives.
func (x *gpuScheduler) run() {
	if !x.awaitFirst() {
		return
	}
	x.mu.Lock()
	joined := x.page != nil // by Rejoin
	x.mu.Unlock()
	if !joined { // in the state of a hand-over, or not on the page: a place that nobody remembers would count for a container of its own
		x.s.active(func() { x.joinPage(peerpage.Join) })
	}
	timer := time.NewTimer(0)
	for {
		select {
		case <-x.s.stop:
			return
		case <-x.kick:
		case <-timer.C:
		}
		var wait time.Duration
		x.s.active(func() { wait = x.step(x.s.Now()) })
		if wait > 0 {
			timer.Reset(wait)
		} else {
			timer.Stop()
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

// joinPage tells the arbiter of the GPU from now on, and hears from it.
func (x *gpuScheduler) joinPage(join func(runDir, uuid string) (*peerpage.Entry, error)) {
	p, err := join(x.s.Config.RunDir, x.s.Config.GPUs[x.gpu].UUID)
	if err != nil {
		x.s.Log.Error("the arbiter does not hear of this container: its timeslices stay as they are", "err", err)
		return
	}
	p.TellGang(x.s.gang, false)
	x.mu.Lock()
	x.page = p
	if x.setting.Slice > 0 { // of the container's first context
		p.TellSetting(x.setting)
	}
	x.mu.Unlock()
	x.channels.share(p)
	go x.watchPage(p)
	go x.watchLeader(p)
}

// tellLast tells the arbiter that no context is left. False: nobody hears it, or there never was one.
func (x *gpuScheduler) tellLast() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.page == nil {
		return false
	}
	x.page.Tell(x.part(nil))
	_, _, ok := x.page.Leader()
	return ok
}

// unsettled reports that the arbiter has not counted all that it has records of.
func (x *gpuScheduler) unsettled() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.receiveRow()
	return x.page != nil && x.local.Verdict().Open > 0
}

func (x *gpuScheduler) leavePage() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.page != nil {
		x.channels.share(nil)
		x.page.Leave()
		x.page = nil
	}
}

func (x *gpuScheduler) watchPage(p *peerpage.Entry) {
	for seen := p.Rung(); ; {
		p.AwaitRing(seen)
		select {
		case <-x.s.stop:
			return
		default:
		}
		seen = p.Rung()
		kick(x.rung)
		kick(x.kick)
	}
}

// step tells the arbiter what has changed, and sets the timeslices that it says. It returns when to look again; 0: when kicked.
func (x *gpuScheduler) step(now time.Duration) (again time.Duration) {
	groups := x.s.Container.Groups(x.gpu)
	again, set, verify := x.follow(now, groups)
	if set {
		x.apply(groups, verify)
	}
	return again
}

// hiddenLook is how often a container is looked at in which a client's file is not found.
const hiddenLook = 100 * time.Millisecond

// follow is step without what may take long.
func (x *gpuScheduler) follow(now time.Duration, groups []Group) (again time.Duration, set, verify bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.page == nil && len(groups) == 0 {
		return 0, false, false
	}
	if x.page != nil {
		x.page.Tell(x.part(groups))
		x.receiveRow()
	}
	verdict := x.local.Verdict()
	x.ruled(now, len(groups))
	if x.priority != nil {
		x.priority.follow(verdict.Look)
	}
	busy := verdict.Busy > 0 || x.alone > 0 && len(groups) > 0
	if verify = busy && now-x.verified >= sched.VerifyEvery; verify {
		x.verified = now
	}
	set = x.slice != x.local.Slice() || verify || len(x.set) != len(groups) || len(x.lost) > 0
	x.slice = x.local.Slice()
	switch {
	case len(x.lost) > 0:
		again = hiddenLook
	case busy:
		again = sched.VerifyEvery
	}
	return again, set, verify
}

// receiveRow reads the row that the arbiter decided for this container; mu is held.
func (x *gpuScheduler) receiveRow() {
	if x.page == nil {
		return
	}
	if v, ok := x.page.Row(); ok && x.local.Take(v) {
		kick(x.s.pausesKick)
	}
}

// part is what the arbiter is told.
func (x *gpuScheduler) part(groups []Group) peerpage.Guard {
	plan, since := x.local.Plan()
	g := peerpage.Guard{Plan: plan, Adopted: since, Contexts: distinct(groups)}
	g.Pressing = plan.Share.Priority == quota.PriorityHigh && x.priority != nil && x.priority.pressing()
	for _, r := range groups {
		g.PIDs = append(g.PIDs, r.Client.PID())
	}
	g.PIDs = append(g.PIDs, x.s.Container.Guests()...)
	slices.Sort(g.PIDs)
	if g.PIDs = slices.Compact(g.PIDs); len(g.PIDs) > peerpage.MaxPIDs {
		x.s.LogOnce("pids", "more processes have contexts than the arbiter can be told of; what the others do is nobody's",
			"most", peerpage.MaxPIDs)
	}
	return g
}

// distinct counts groups, each once.
func distinct(handles []Group) int {
	of := map[any]bool{}
	for _, r := range handles {
		of[r.Of] = true
	}
	return len(of)
}

const (
	// aloneTime is for how long there may be no arbiter before it is said.
	aloneTime = 2 * time.Second
	// askTime is between two tries to have one started: where that fails, it fails for all guards of the GPU.
	askTime = 10 * time.Second
)

// ruled notes whether an arbiter decides, and has one started where none does: with the container's first context, or where arbiter and
// standby were killed at once.
func (x *gpuScheduler) ruled(now time.Duration, groups int) {
	switch {
	case x.local.Ruled(now) || groups == 0:
		x.alone = 0
		return
	case x.alone == 0:
		x.alone = now
	case now-x.alone > aloneTime:
		const text = "no arbiter decides about the GPU's time: timeslices stay as they are, hard caps hold"
		x.s.LogOnce("alone", text, "gpu", x.s.Config.GPUs[x.gpu].Index)
		x.warn.Do(func() { x.s.Warn(text) })
	}
	if x.page != nil && now >= x.ask {
		x.ask = now + askTime
		go x.startArbiter()
	}
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
	x.tellSetting(slice, 1)
	s, e := control(r.Handle, controlSetTimeslice, p[:])
	x.tellSetting(slice, -1)
	if e != 0 || s != rm.StatusOK {
		status := rm.StatusName(s)
		x.s.LogOnce("slice"+status, "the driver refuses a timeslice", "status", status, "errno", e, "us", slice.Microseconds())
		return
	}
	x.mu.Lock()
	x.set[r] = slice
	x.mu.Unlock()
}

// tellSetting tells the arbiter that a timeslice is about to be set (n is 1), or has been (-1): that ends turns, whose groups have not
// blocked. What is set at once is told as one.
func (x *gpuScheduler) tellSetting(slice time.Duration, n int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	now := x.s.Now()
	if x.setters == 0 && now-x.setting.To > time.Millisecond {
		x.setting.From = now
	}
	x.setters += n
	x.setting.Slice, x.setting.To = slice, now
	if x.setters > 0 {
		x.setting.To = 0
	}
	if x.page != nil {
		x.page.TellSetting(x.setting)
	}
}
