// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"time"

	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// Outcome is what became of a pause or resume.
type Outcome int

const (
	NotDone    Outcome = iota // with an error that says why
	CarriedOut                // by the guard
	NotStarted                // the container's first process does not run yet
	GuardGone
)

// WaitPaused asks the container's guard until it has carried out what the ledger says.
func WaitPaused(r ledger.Record, paused bool, deadline time.Time) (Outcome, error) {
	for {
		s, err := api.Ask(r)
		switch snapshot.StateOf(r, snapshot.Answer{Status: s, Err: err, Gone: err != nil && snapshot.Ended(r)}) {
		case snapshot.StateStarting:
			return NotStarted, nil
		case snapshot.StateGuardDead, snapshot.StateGone:
			return GuardGone, nil
		case snapshot.StateRunning:
			if err = carried(s, paused); err == nil {
				return CarriedOut, nil
			}
		}
		if time.Now().After(deadline) {
			return NotDone, err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// carried says what a guard has yet to do.
func carried(s api.Status, paused bool) error {
	for _, v := range s.VGPUs {
		switch {
		case v.Native:
		case v.Compute == nil:
			return errors.New("it does not schedule GPU " + v.UUID)
		case v.Compute.Paused != paused:
			return fmt.Errorf("on GPU %d paused is %v", v.Index, v.Compute.Paused)
		}
	}
	return nil
}
