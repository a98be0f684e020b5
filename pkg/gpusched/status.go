package gpusched

import (
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// Status is the GPU time of one vGPU, since the container's start unless said otherwise.
type Status struct {
	Policy   sched.Policy   `json:"policy"` // in effect on the GPU
	Weight   int            `json:"weight"`
	Percent  int            `json:"percent,omitempty"` // as asked
	Priority quota.Priority `json:"priority"`
	Cap      sched.Permille `json:"cap,omitempty"` // hard cap; 0: none
	Paused   bool           `json:"paused,omitempty"`
	TSGs     int            `json:"tsgs"` // channel groups on the graphics engine
	Busy     int            `json:"busy"` // of those, with work lately
	Slice    time.Duration  `json:"sliceNs"`

	// Ruled is false while no arbiter decides about the GPU's time, though the container has work.
	Ruled bool `json:"ruled"`

	// What follows comes from the driver's context-switch records. Exact is false where it gives none.
	Exact       bool           `json:"exact"`
	Utilization sched.Permille `json:"utilization"` // of the GPU's time, in about the last second
	Entitled    sched.Permille `json:"entitled"`    // what it should have been
	GPUTime     time.Duration  `json:"gpuTimeNs"`   // on the engine
	Waiting     time.Duration  `json:"waitingNs"`   // switched out in the middle of work
	Throttled   time.Duration  `json:"throttledNs"` // with work, while a hard cap, a turn or cgpu pause kept it off
	Switches    uint64         `json:"switches"`    // times that it was switched in
	Preemptions uint64         `json:"preemptions"` // of the times that it was switched out, those at the end of its timeslice
	Pauses      uint64         `json:"pauses"`      // by a hard cap or cgpu pause
	Granted     time.Duration  `json:"grantedNs"`   // what its share of the GPU's busy time would have been
}

// Status is what a vGPU's status says of its GPU time; nil for a native GPU.
func (s *Scheduler) Status(gpu int) *Status {
	x := s.onGPU(gpu)
	if x == nil {
		return nil
	}
	groups, now := len(s.Container.Groups(gpu)), s.Now()
	x.mu.Lock()
	defer x.mu.Unlock()
	x.take()
	p, _ := x.local.Plan()
	v := x.local.Verdict()
	pauses, throttled := x.local.Pauses()
	return &Status{Policy: p.Effective, Weight: p.Share.Weight, Percent: p.Share.Percent, Priority: p.Share.Priority, Cap: p.Cap,
		Paused: p.Suspended && x.offAll, TSGs: groups, Busy: min(v.Busy, groups), Slice: x.local.Slice(), Ruled: groups == 0 || x.local.Ruled(now), Exact: v.Exact,
		Utilization: v.Recently(v.Lately, now), Entitled: v.Recently(v.Entitled, now), GPUTime: v.Used(now), Waiting: v.Waiting, Throttled: throttled,
		Switches: v.Switches, Preemptions: v.Preemptions, Pauses: pauses, Granted: v.Granted}
}

// Looked is the GPU time of a vGPU up to the last switch record. False: the driver tells of none, or the GPU is not shared.
func (s *Scheduler) Looked(gpu int) (used time.Duration, exact bool) {
	x := s.onGPU(gpu)
	if x == nil {
		return 0, false
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.take()
	v := x.local.Verdict()
	return v.GPUTime, v.Exact
}
