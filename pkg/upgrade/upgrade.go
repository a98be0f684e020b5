// SPDX-License-Identifier: Apache-2.0

// Package upgrade has the guards of running containers go on as another program (cgpu upgrade). Each guard does the work by itself
// (pkg/guard/upgrade.go); this asks them, some at a time. It keeps no state: who is stopped in the middle begins anew, and guards that are
// that program already say so.
package upgrade

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

// Patience is how long a guard may take. It tries for a quarter of that; the rest is a busy machine's.
const Patience = time.Minute

// Outcome is what came of a container.
type Outcome string

// Outcomes.
const (
	Done    Outcome = "upgraded" // another program serves it
	Already Outcome = "already"  // it was that program's
	Failed  Outcome = "failed"   // its guard goes on as it was
	Gone    Outcome = "gone"     // it has ended meanwhile
	Preload Outcome = "preload"  // it has no guard
	Skipped Outcome = "skipped"  // not asked: the command was stopped
)

// Result is what came of one container.
type Result struct {
	ledger.Record
	Outcome Outcome
	Stall   time.Duration // for how long its calls waited, the last time that it was tried
	Tries   int
	Err     error // of Failed
}

// Guards has the guards of containers go on as a program, parallel at a time, and tells of each as it is known.
func Guards(ctx context.Context, records []ledger.Record, program string, parallel int, tell func(Result)) {
	slots := make(chan struct{}, parallel)
	var all sync.WaitGroup
	var telling sync.Mutex
	say := func(r Result) {
		telling.Lock()
		defer telling.Unlock()
		tell(r)
	}
	for _, r := range records {
		slots <- struct{}{}
		if ctx.Err() != nil {
			say(Result{Record: r, Outcome: Skipped})
			<-slots
			continue
		}
		all.Go(func() {
			defer func() { <-slots }()
			say(guard(r, program))
		})
	}
	all.Wait()
}

// guard upgrades one.
func guard(r ledger.Record, program string) Result {
	if r.Preload {
		return Result{Record: r, Outcome: Preload}
	}
	answer, err := api.Upgrade(r, program, Patience)
	result := Result{Record: r, Outcome: Failed, Stall: answer.Stall, Tries: answer.Tries}
	switch {
	case err == nil && answer.Error == "" && answer.Already:
		result.Outcome = Already
	case err == nil && answer.Error == "" && answer.Done:
		result.Outcome = Done
	case over(r, err):
		result.Outcome = Gone
	case err == nil:
		result.Err = errors.New(cmp.Or(answer.Error, "its guard says nothing of it"))
	default:
		result.Err = why(r, err)
	}
	return result
}

const (
	// ending is how long a guard may take to end after its container, or after its last word.
	ending = 20 * time.Second
	look   = 20 * time.Millisecond
)

// over reports that there is no container any more, of which its guard may have said something else just before.
func over(r ledger.Record, err error) bool {
	if r.ContainerLives() {
		return false
	}
	return silent(err) || r.InitPID != 0 && ends(r)
}

// ends waits until the guard has ended. False: it lives.
func ends(r ledger.Record) bool {
	for begin := time.Now(); r.GuardLives(); time.Sleep(look) {
		if time.Since(begin) > ending {
			return false
		}
	}
	return true
}

// silent reports that nobody listens.
func silent(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
}

// why says what it means that there is no answer.
func why(r ledger.Record, err error) error {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("its guard has not answered for %v; it may go on as the other program yet: call it again", Patience)
	case silent(err), errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		_, asked := api.Ask(r)
		if !r.GuardLives() || asked != nil && ends(r) {
			return errors.New("its guard has ended, and no driver call of the container succeeds any more: start the container anew")
		}
		if silent(err) {
			return fmt.Errorf("its guard lives, and nobody reaches it any more: %w; start the container anew", err)
		}
		return errors.New("its guard knows no hand-over: it goes on as it is until the container is started anew")
	}
	return err
}
