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
	groups, now := len(s.Container.Groups(gpu)), s.Now()
	x.mu.Lock()
	defer x.mu.Unlock()
	x.take()
	p, _ := x.local.Plan()
	v := x.local.Verdict()
	pauses, throttled := x.local.Pauses()
	return &api.ComputeStatus{Policy: p.Effective, Weight: p.Share.Weight, Percent: p.Share.Percent, Priority: p.Share.Priority, Cap: p.Cap,
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
