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

	// What follows comes from the driver's context-switch records. Exact is false where it gives none.
	Exact       bool           `json:"exact"`
	Utilization sched.Permille `json:"utilization"` // of the GPU's time, in the last second
	GPUTime     time.Duration  `json:"gpuTimeNs"`   // on the engine
	Waiting     time.Duration  `json:"waitingNs"`   // switched out in the middle of work, or paused
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
	if x.active.Load() {
		x.local.Look(x.view(now, groups))
	}
	p, a := x.local.Plan(), x.local.Account(now)
	return &Status{Policy: p.Effective, Weight: p.Share.Weight, Percent: p.Share.Percent, Priority: p.Share.Priority, Cap: p.Cap,
		Paused: p.Suspended && x.offAll, TSGs: groups, Busy: x.local.Busy(), Slice: x.local.Slice(), Exact: x.source != nil,
		Utilization: a.Utilization, GPUTime: a.GPUTime, Waiting: a.Waiting + a.Stopped, Switches: a.Switches, Preemptions: a.Preemptions,
		Pauses: a.Pauses, Granted: a.Granted}
}

// Looked is the GPU time of a vGPU up to the last look at the records: it is known then, and later perhaps corrected. False: the driver tells
// of none, or the GPU is not shared.
func (s *Scheduler) Looked(gpu int) (used time.Duration, exact bool) {
	x := s.onGPU(gpu)
	if x == nil {
		return 0, false
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.local.Looked(), x.source != nil
}
