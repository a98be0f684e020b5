package gpusched

import (
	"time"

	"github.com/opencgpu/cgpu/pkg/guard/api"
)

// Status is what a vGPU's status says of its GPU time; nil for a native GPU.
func (s *Scheduler) Status(gpu int) *api.ComputeStatus {
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
	return &api.ComputeStatus{Policy: p.Effective, Weight: p.Share.Weight, Percent: p.Share.Percent, Priority: p.Share.Priority, Cap: p.Cap,
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
