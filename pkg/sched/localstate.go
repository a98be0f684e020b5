// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// LocalState is a Local as a guard hands it over (package handover); what an arbiter says is not in it, since that stands on the GPU's
// page.
type LocalState struct {
	Plan      PlanState     `json:"plan"`
	Since     time.Duration `json:"since,omitempty"`
	Paused    bool          `json:"paused,omitempty"`
	Held      bool          `json:"held,omitempty"`
	Busy      bool          `json:"busy,omitempty"`
	Lapsed    time.Duration `json:"lapsed,omitempty"`
	Budget    time.Duration `json:"budget,omitempty"`
	Spent     time.Duration `json:"spent,omitempty"`
	At        time.Duration `json:"at,omitempty"`
	DebtSeen  uint64        `json:"debtPauses,omitempty"`
	Owing     time.Duration `json:"owing,omitempty"`
	Pauses    uint64        `json:"pauses,omitempty"`
	Throttled time.Duration `json:"throttled,omitempty"`
	Stopped   time.Duration `json:"stopped,omitempty"`
	Had       bool          `json:"had,omitempty"`
}

// PlanState is a Plan.
type PlanState struct {
	Policy    int `json:"policy"`
	MaxInst   int `json:"maxInst"`
	PrioRatio int `json:"prioRatio"`
	Effective int `json:"effective"`
	Share
	Cap       Permille         `json:"cap,omitempty"`
	Slot      [3]time.Duration `json:"slot,omitzero"` // start, on, cycle
	Suspended bool             `json:"suspended,omitempty"`
}

// Valid reports a plan that can be in force.
func (p PlanState) Valid() bool {
	card := Card{Policy: Policy(p.Policy), MaxInst: p.MaxInst, PrioRatio: p.PrioRatio}
	s := Slot{p.Slot[0], p.Slot[1], p.Slot[2]}
	return card.Validate() == nil && p.Weight >= 1 && p.Weight <= quota.MaxWeight && p.Percent >= 0 && p.Percent <= quota.MaxPercent &&
		p.Cap >= 0 && p.Cap <= Whole && (s == Slot{} || s.Start >= 0 && s.On > 0 && s.Cycle > 0 && s.Start <= s.Cycle && s.On <= s.Cycle)
}

// State tells what a successor has to know.
func (l *Local) State() LocalState {
	p, d := l.plan, l.debt
	return LocalState{Plan: PlanState{Policy: int(p.Card.Policy), MaxInst: p.Card.MaxInst, PrioRatio: p.Card.PrioRatio,
		Effective: int(p.Effective),
		Share:     p.Share, Cap: p.Cap, Slot: [3]time.Duration{p.Slot.Start, p.Slot.On, p.Slot.Cycle},
		Suspended: p.Suspended}, Since: l.since, Paused: l.paused, Held: l.held, Busy: l.busy, Lapsed: l.lapsed, Budget: d.budget,
		Spent: d.spent, At: d.at,
		DebtSeen: d.pauses, Owing: d.owing, Pauses: l.pauses, Throttled: l.throttled, Stopped: l.stopped, Had: l.had}
}

// Restore goes on from another Local's State.
func (l *Local) Restore(s LocalState) {
	p := s.Plan
	l.plan = Plan{Card: Card{Policy: Policy(p.Policy), MaxInst: p.MaxInst, PrioRatio: p.PrioRatio}, Effective: Policy(p.Effective),
		Share: p.Share, Cap: p.Cap, Slot: Slot{p.Slot[0], p.Slot[1], p.Slot[2]},
		Suspended: p.Suspended}
	l.since, l.paused, l.held, l.busy, l.lapsed = s.Since, s.Paused, s.Held, s.Busy, s.Lapsed
	l.debt = debt{budget: s.Budget, spent: s.Spent, at: s.At, pauses: s.DebtSeen, owing: s.Owing}
	l.pauses, l.throttled, l.stopped, l.had = s.Pauses, s.Throttled, s.Stopped, s.Had
}
