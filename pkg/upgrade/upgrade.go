// SPDX-License-Identifier: Apache-2.0

// Package upgrade has the guards of running containers go on as another program (cgpu upgrade). Each guard does the work by itself
// (pkg/guard/upgrade.go); this asks them, some at a time. It keeps no state: who is stopped in the middle begins anew, and guards that are
// that program already say so.
package upgrade

import (
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
	case err != nil && gone(err):
		result.Outcome = Gone
	case errors.Is(err, io.EOF):
		result.Err = errors.New("its guard ended, or knows no hand-over: then it goes on as it is until the container is started anew")
	case err != nil:
		result.Err = err
	case answer.Error != "":
		result.Err = errors.New(answer.Error)
	case answer.Already:
		result.Outcome = Already
	case answer.Done:
		result.Outcome = Done
	default:
		result.Err = fmt.Errorf("its guard says nothing of it: %+v", answer)
	}
	return result
}

// gone reports that nobody listens.
func gone(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
}
