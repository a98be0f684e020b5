// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"errors"
	"io/fs"
	"net"
	"sync"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

// States of a container.
const (
	StateStarting  = "starting"   // reserved; its first process does not run yet
	StateRunning   = "running"    // the guard answers
	StateNoAnswer  = "no answer"  // the guard is there and did not answer in time
	StateGuardDead = "guard dead" // GPU calls fail; the reservation stays until the container is gone
	StateNoPage    = "no page"    // preload mode: the vGPU page cannot be read
	StatePaused    = "paused"     // the engine has paused it; shown, too, of one that does no GPU work until cgpu resume
	StateGone      = "gone"       // nothing runs any more; cgpu gc gives the share back
)

// Answer is what a guard said (in preload mode: the page), or why it said nothing.
type Answer struct {
	Status api.Status
	Err    error
	Gone   bool // with Err: neither guard nor container runs
	Frozen bool // without Err: the engine has paused the container
}

// AskAll asks the guards of all records at once.
func AskAll(t *device.Table, records []ledger.Record) []Answer {
	answers := make([]Answer, len(records))
	slots := make(chan struct{}, 64) // open sockets at a time
	var wg sync.WaitGroup
	for i, r := range records {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			defer func() {
				a := &answers[i]
				a.Frozen = (a.Err == nil || errors.Is(a.Err, ErrDriverOnly)) && frozen("/", a.Status.InitPID)
			}()
			if r.Preload {
				answers[i] = unguarded(t, r)
				return
			}
			answers[i].Status, answers[i].Err = api.Ask(r)
			answers[i].Gone = answers[i].Err != nil && Ended(r)
		})
	}
	wg.Wait()
	return answers
}

// unguarded is AskAll for a container without a guard. A page stays when it ends, so that is looked at first.
func unguarded(t *device.Table, r ledger.Record) (a Answer) {
	if Ended(r) {
		return Answer{Err: errors.New("it has ended"), Gone: true}
	}
	if r.DriverOnly {
		return Answer{Status: api.Status{InitPID: r.InitPID}, Err: ErrDriverOnly}
	}
	a.Status, a.Err = PageStatus(t, r)
	return a
}

// ErrDriverOnly is why nothing is known of what a container uses that NVIDIA's driver alone limits.
var ErrDriverOnly = errors.New(`there is no guard to ask: limits = "driver" in cgpu.toml`)

// Ended reports that the record's keeper (the guard; before there is one, the launcher) and the container's first process
// are gone.
func Ended(r ledger.Record) bool {
	gone := func(pid int, start uint64) bool {
		now, err := ledger.ProcStart(pid)
		return errors.Is(err, fs.ErrNotExist) || err == nil && start != 0 && now != start
	}
	keeper, start := r.Keeper()
	return gone(keeper, start) && (r.InitPID == 0 || gone(r.InitPID, r.InitStart))
}

// StateOf says in a word how a container fares.
func StateOf(r ledger.Record, a Answer) string {
	var timeout net.Error
	switch {
	case a.Gone:
		return StateGone
	case a.Err == nil && a.Status.InitPID == 0, a.Err != nil && r.GuardPID == 0 && r.InitPID == 0:
		return StateStarting
	case a.Frozen:
		return StatePaused
	case a.Err == nil, r.DriverOnly:
		return StateRunning
	case r.Preload:
		return StateNoPage
	case errors.As(a.Err, &timeout) && timeout.Timeout(), errors.Is(a.Err, syscall.EACCES):
		return StateNoAnswer
	}
	return StateGuardDead
}
