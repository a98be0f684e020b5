// SPDX-License-Identifier: Apache-2.0

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
	groups, now := distinct(s.Container.Groups(gpu)), s.Now()
	x.mu.Lock()
	defer x.mu.Unlock()
	x.receiveRow()
	p, _ := x.local.Plan()
	v := x.local.Verdict()
	pauses, throttled := x.local.Pauses(now)
	return &api.ComputeStatus{Policy: p.Effective, Share: p.Share, Cap: p.Cap,
		Paused: p.Suspended && x.offAll, TSGs: groups, Busy: min(v.Busy, groups), Slice: x.local.Slice(), Ruled: groups == 0 ||
			x.local.Ruled(now), Exact: v.Exact,
		Utilization: v.Recently(v.Lately, now), Entitled: v.Recently(v.Entitled, now), GPUTime: v.Used(now),
		Waiting: v.Waiting, Throttled: throttled,
		Switches: v.Switches, Preemptions: v.Preemptions, Pauses: pauses, Granted: v.Granted}
}

// Times are sums of a vGPU since its container's start.
type Times struct {
	Used      time.Duration // on the engine
	Waiting   time.Duration // from the end of a slice in the middle of work to the next turn
	Throttled time.Duration // with work, and off
	Entitled  time.Duration // by its share, beside those who had work, too
}

// Looked are the times of a vGPU up to the last switch record. False: the driver tells of none, or the GPU is not shared.
func (s *Scheduler) Looked(gpu int) (t Times, exact bool) {
	x := s.onGPU(gpu)
	if x == nil {
		return t, false
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.receiveRow()
	v := x.local.Verdict()
	_, throttled := x.local.Pauses(s.Now())
	return Times{v.GPUTime, v.Waiting, throttled, v.Granted}, v.Exact
}
