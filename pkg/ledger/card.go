// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"fmt"
	"maps"

	"github.com/opencgpu/cgpu/pkg/sched"
)

// SetCard changes how a GPU is shared and returns what it is then. f gets the present settings, or def where there are
// none; an error of f leaves them. Settings that the containers with a slice of the GPU do not fit are refused with a
// *Refusal: what they were promised stands until they end.
func (l *Ledger) SetCard(gpu GPU, def sched.Card, f func(*sched.Card) error) (sched.Card, error) {
	if gpu.UUID == "" {
		return sched.Card{}, errors.New("ledger: a GPU without a UUID")
	}
	if err := l.makeDir(); err != nil {
		return sched.Card{}, err
	}
	var card sched.Card
	err := l.change(func(state *file) error {
		card = state.card(gpu.UUID, def)
		if err := f(&card); err != nil {
			return err
		}
		if err := card.Validate(); err != nil {
			return fmt.Errorf("ledger: %s: %w", gpu, err)
		}
		if old, ok := state.Cards[gpu.UUID]; ok && old == card {
			return errUnchanged
		}
		if err := l.roomy(state, func() error { return fits(state.Records, gpu, card) }); err != nil {
			return err
		}
		state.Cards = maps.Clone(state.Cards)
		if state.Cards == nil {
			state.Cards = map[string]sched.Card{}
		}
		state.Cards[gpu.UUID] = card
		return nil
	})
	if err != nil {
		return sched.Card{}, err
	}
	return card, nil
}

// fits refuses a card that the slices of a GPU do not fit: each is admitted beside those reserved before it.
func fits(records []Record, gpu GPU, card sched.Card) error {
	l := load{gpu: gpu, card: card}
	for _, r := range records {
		for _, v := range r.VGPUs {
			if v.UUID != gpu.UUID {
				continue
			}
			if refusal := l.refusePreload(); refusal != nil && r.Preload {
				refusal.Reason = fmt.Sprintf("policy %s needs a guard, and container %s has none", card.Policy, r.label())
				refusal.Remedy = "choose preempt, weight-preempt or native, or stop the container"
				return refusal
			}
			if refusal := l.refuseShare(v.Share); refusal != nil {
				refusal.Reason = fmt.Sprintf("policy %s with max-inst %d: container %s %s", card.Policy, card.MaxInst, r.label(), refusal.Reason)
				refusal.Remedy = "choose another policy, change the container (cgpu set), or stop it"
				return refusal
			}
			l.shares = append(l.shares, v.Share)
		}
	}
	if n := len(l.shares); n > card.MaxInst {
		return &Refusal{GPU: gpu, Reason: fmt.Sprintf("max-inst %d: %d containers share it", card.MaxInst, n),
			Remedy: "stop some (cgpu smi lists them), or allow at least that many"}
	}
	return nil
}
