// SPDX-License-Identifier: Apache-2.0

// Package sched decides how containers share the time of a GPU: timeslices from weights, hard caps as slots of a cycle,
// priorities. It is pure. The ledger asks it whether a share can be promised, each container's guard (pkg/guard) asks it what
// to set, and pkg/sim's model of a GPU shows in virtual time that the answers are right.
//
// docs/policies.md tells users what the policies mean; docs/internals/sched.md tells how they are carried out.
package sched

import (
	"fmt"
	"slices"
	"strconv"
	"time"
)

// Policy says how the containers of one GPU share its time. Numbers and names are those of Alibaba's cGPU
// (/proc/cgpu_km/N/policy).
type Policy int

// Policies.
const (
	PolicyFair    Policy = 0 // 1/max_inst of the GPU each, also when others are idle
	PolicyPreempt Policy = 1 // equal shares of those with work
	PolicyWeight  Policy = 2 // shares of those with work in proportion to their weights
	PolicyFixed   Policy = 3 // a percentage of the GPU each, also when others are idle
	PolicySoft    Policy = 4 // as PolicyWeight, and a percentage is a guarantee instead of a cap
	PolicyNative  Policy = 5 // what the driver does by itself
)

var policyNames = [...]string{"fair", "preempt", "weight-preempt", "fixed", "soft", "native"}

// String is the policy's name.
func (p Policy) String() string {
	if p < 0 || int(p) >= len(policyNames) {
		return strconv.Itoa(int(p))
	}
	return policyNames[p]
}

// PolicyNames lists the names in the order of the numbers.
func PolicyNames() []string { return slices.Clone(policyNames[:]) }

// ParsePolicy reads a name or a number from 0 to 5.
func ParsePolicy(s string) (Policy, error) {
	for i, name := range policyNames {
		if s == name || s == strconv.Itoa(i) {
			return Policy(i), nil
		}
	}
	if s == "weight" {
		return PolicyWeight, nil
	}
	return 0, fmt.Errorf("policy %q: want fair, preempt, weight-preempt, fixed, soft or native (0 to 5)", s)
}

// Bounds of a card's settings. cGPU's prio_ratio has the same bounds; its max_inst ends at 25.
const (
	MaxMaxInst       = 64
	MinPrioRatio     = 20
	MaxPrioRatio     = 99
	DefaultPrioRatio = 99
)

// Card is how one GPU is shared.
type Card struct {
	Policy Policy `json:"policy"`
	// MaxInst is the number of containers that the GPU is for, 1 to 64: a slot under PolicyFair, and a weight of 1 under
	// PolicyFixed, is 1/MaxInst of the GPU.
	MaxInst int `json:"maxInst"`
	// PrioRatio is the most that high-priority containers may have of the GPU while others want it, in percent.
	PrioRatio int `json:"prioRatio"`
}

// Validate refuses settings out of bounds.
func (c Card) Validate() error {
	switch {
	case c.Policy < PolicyFair || c.Policy > PolicyNative:
		_, err := ParsePolicy(c.Policy.String())
		return err
	case c.MaxInst < 1 || c.MaxInst > MaxMaxInst:
		return fmt.Errorf("max-inst %d: want 1 to %d", c.MaxInst, MaxMaxInst)
	case c.PrioRatio < MinPrioRatio || c.PrioRatio > MaxPrioRatio:
		return fmt.Errorf("prio-ratio %d: want %d to %d percent", c.PrioRatio, MinPrioRatio, MaxPrioRatio)
	}
	return nil
}

// Effective is the policy that shares of the card lead to: a weight above 1 turns PolicyPreempt into PolicyWeight, as in
// cGPU.
func (c Card) Effective(shares []Share) Policy {
	if c.Policy != PolicyPreempt {
		return c.Policy
	}
	for _, s := range shares {
		if s.Weight > 1 {
			return PolicyWeight
		}
	}
	return PolicyPreempt
}

// PreloadSlice is the timeslice of a share's channel groups where no guard schedules and the limiter sets it once: in proportion to
// the weight, or 0 under PolicyNative, which leaves the driver's own.
func (c Card) PreloadSlice(s Share, base time.Duration) time.Duration {
	if c.Policy == PolicyNative {
		return 0
	}
	return time.Duration(max(s.Weight, 1)) * base
}
