// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"slices"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/view"
)

// Set is what cgpu set is to change, and how it was typed: refusals name flags and their values.
type Set struct {
	Table   *device.Table
	Old     ledger.Record
	Request ledger.ChangeRequest
	Typed   func(flag string) (value string, ok bool)
}

// Check refuses what can be refused before the ledger is asked. By force a container may have less than it uses.
func (s Set) Check(force bool) error {
	if err := s.enforceable(); err != nil {
		return err
	}
	if err := s.limitOfCard(); err != nil || force {
		return err
	}
	return s.roomToShrink()
}

// limitOfCard refuses a limit that no card of the container's has room for, whoever else is there: in the words that were typed, which
// the ledger does not know.
func (s Set) limitOfCard() error {
	req := s.Request
	if req.Limit == nil {
		return nil
	}
	for _, v := range s.Old.VGPUs {
		i := slices.IndexFunc(s.Table.GPUs, func(g device.GPU) bool { return g.UUID == v.UUID })
		if i < 0 || !req.Changes(v.UUID) || *req.Limit == v.Limit {
			continue
		}
		g := s.Table.GPUs[i]
		if *req.Limit >= quota.MinMemory && *req.Limit <= g.Memory {
			continue
		}
		memory, _ := s.Typed("memory")
		return fmt.Errorf("set: --memory %q: is %s: want %s to the %s of GPU %d; a number alone is GiB, 6000MiB are MiB",
			memory, *req.Limit, quota.MinMemory, g.Memory.FloorMiB(), g.Index)
	}
	return nil
}

// enforceable refuses what needs a guard, for a container that has only the preload library, or only the driver.
func (s Set) enforceable() error {
	r, req := s.Old, s.Request
	switch {
	case req.Weight != nil && *req.Weight > 1 && r.DriverOnly:
		return RefusePreload(r, "set", "weight", "share out time by weight")
	case req.Spill != nil && *req.Spill != 0:
		return RefusePreload(r, "set", "spill", "serve device memory from host memory")
	case req.Percent != nil && *req.Percent != 0:
		return RefusePreload(r, "set", "percent", "enforce a percentage")
	case req.Priority != nil && *req.Priority != quota.PriorityDefault:
		return RefusePreload(r, "set", "priority", "carry out priorities")
	}
	return nil
}

// roomToShrink refuses a limit or spill below what the container uses, or below what it has when nobody knows its use.
func (s Set) roomToShrink() error {
	r, lack := s.Old, ShortageOf(s.Table, s.Old, s.Request)
	if lack == nil {
		return nil
	}
	flag, uses := "memory", fmt.Sprintf("uses %s of its %s", view.MiB(lack.Use.Used), view.MiB(lack.Use.Limit))
	if lack.Spill {
		flag, uses = "spill", "has spilled "+view.MiB(lack.Use.Spilled)
	}
	value, _ := s.Typed(flag)
	about := fmt.Sprintf("set: --%s %q: container %s", flag, value, view.ShortID(r.ID))
	if lack.Unknown != nil {
		who := "guard does not answer"
		if r.Preload {
			who = "vGPU page cannot be read"
		}
		if r.DriverOnly {
			who = "driver alone counts it"
		}
		return fmt.Errorf("%s has more, and what it uses is not known, because its %s (%w): see cgpu smi; --force sets it anyway",
			about, who, lack.Unknown)
	}
	return fmt.Errorf("%s %s on GPU %d: free some first; --force sets it anyway, and new allocations fail until it fits",
		about, uses, lack.Use.Index)
}

// Refusal names the flag that the ledger's refusal is about.
func (s Set) Refusal(err error) error {
	r, ok := errors.AsType[*ledger.Refusal](err)
	if !ok {
		return err
	}
	flags := []string{"memory"}
	switch {
	case r.Time:
		flags = []string{"percent", "weight", "priority"}
	case r.Spill:
		flags = []string{"spill"}
	case r.Domain:
		flags = []string{"threads"}
	}
	where := ""
	if r.GPU.UUID != "" {
		where = r.GPU.String() + ": "
	}
	for _, name := range flags {
		if value, ok := s.Typed(name); ok {
			return fmt.Errorf("set: --%s %q: %s%s; %s", name, value, where, r.Reason, r.Remedy)
		}
	}
	return err
}
