// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"time"

	"github.com/opencgpu/cgpu/pkg/domain/server"
	"github.com/opencgpu/cgpu/pkg/gc"
	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/view"
)

// pauseWait is how long a guard has to carry it out: milliseconds are enough, but for a machine that has no processor for it.
const pauseWait = 10 * time.Second

// Pause pauses a container, or lets it go on, and returns what became of it, as a line.
func Pause(runDir string, old ledger.Record, paused bool) (string, error) {
	command, done, already := "resume", "goes on", "was not paused"
	if paused {
		command, done, already = "pause", "paused", "was paused already"
	}
	if err := RefusePreload(old, command, "", "stop its GPU work"); err != nil {
		return "", err
	}
	req := ledger.ChangeRequest{Paused: &paused}
	r, err := ledger.Open(runDir).Change(old.Nonce, req)
	if err == nil {
		err = server.Keep(runDir, r, req)
	}
	if err != nil {
		return "", err
	}
	if old.Paused == paused {
		done = already
	}
	what := view.ShortID(r.ID) + view.Label(old)
	switch outcome, err := WaitPaused(r, paused, time.Now().Add(pauseWait)); outcome {
	case CarriedOut:
		return fmt.Sprintf("%s: %s\n", what, done), nil
	case NotStarted:
		return fmt.Sprintf("%s: %s; it has not started yet\n", what, done), nil
	case GuardGone:
		return withoutGuard(r, what, paused)
	default:
		return "", fmt.Errorf("%s: container %s: noted, but its guard has not done it after %v (%w); see its log in %s/log, and cgpu smi",
			command,
			what, pauseWait, err, runDir)
	}
}

// withoutGuard lets run what a guard that is gone has left paused.
func withoutGuard(r ledger.Record, what string, paused bool) (string, error) {
	if paused {
		return "", fmt.Errorf("pause: container %s: its guard is gone, so nobody stops what runs on the GPU (new GPU calls fail); stop the "+
			"container, then cgpu gc gives back what it held", what)
	}
	n, err := gc.ResumeLeftovers(gpusched.LeftoversFile(r.Socket))
	if err != nil {
		return "", fmt.Errorf("resume: container %s: its guard is gone, and what it had paused stays paused (%w); stop the container, then cgpu "+
			"gc gives back what it held", what, err)
	}
	if n == 0 {
		return "", fmt.Errorf("resume: container %s: its guard is gone, so its GPU calls fail for good; nothing of it is paused; stop the "+
			"container, then cgpu gc gives back what it held", what)
	}
	return fmt.Sprintf("%s: resumed %s; its guard is gone, so new GPU calls fail: restart the container\n", what,
		terminal.Plural(n, "channel")), nil
}

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
