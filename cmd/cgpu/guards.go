package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

// States of a container.
const (
	stateStarting  = "starting"   // reserved; its first process does not run yet
	stateRunning   = "running"    // the guard answers
	stateNoAnswer  = "no answer"  // the guard is there and did not answer in time
	stateGuardDead = "guard dead" // GPU calls fail; the reservation stays until the container is gone
	stateNoPage    = "no page"    // preload mode: the vGPU page cannot be read
	statePaused    = "paused"     // it answers, and does no GPU work until cgpu resume; shown only
	stateGone      = "gone"       // nothing runs any more; cgpu gc gives the share back
)

// answer is what a guard said (in preload mode: the page), or why it said nothing.
type answer struct {
	status guard.Status
	err    error
	gone   bool // with err: neither guard nor container runs
}

// askTimeout bounds the wait for a guard: it answers in microseconds, unless something is wrong with it.
const askTimeout = 300 * time.Millisecond

// askAll asks the guards of all records at once.
func askAll(t *device.Table, records []ledger.Record) []answer {
	answers := make([]answer, len(records))
	slots := make(chan struct{}, 64) // open sockets at a time
	var wg sync.WaitGroup
	for i, r := range records {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			if r.Preload {
				answers[i] = readPage(t, r)
				return
			}
			answers[i].status, answers[i].err = ask(r)
			answers[i].gone = answers[i].err != nil && ended(r)
		})
	}
	wg.Wait()
	return answers
}

// readPage is askAll for a container in preload mode. Its page stays when it ends, so that is looked at first.
func readPage(t *device.Table, r ledger.Record) (a answer) {
	if ended(r) {
		return answer{err: errors.New("it has ended"), gone: true}
	}
	a.status, a.err = pageStatus(t, r)
	return a
}

func ask(r ledger.Record) (s guard.Status, err error) {
	deadline := time.Now().Add(askTimeout)
	conn, err := net.DialTimeout("unix", r.Control, askTimeout)
	if err != nil {
		return s, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(deadline); err != nil {
		return s, err
	}
	if err := json.NewEncoder(conn).Encode(guard.Request{Op: "status"}); err != nil {
		return s, err
	}
	// Many processes make a long line; a line without an end is none of a guard's.
	line, err := bufio.NewReader(io.LimitReader(conn, 16<<20)).ReadBytes('\n')
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(line, &s); err != nil {
		return s, err
	}
	if s.ID != r.ID || s.Nonce != r.Nonce {
		return s, errors.New("another container's guard answered")
	}
	return s, nil
}

// ended reports that the record's keeper (the guard; before there is one, the launcher) and the container's first process
// are gone.
func ended(r ledger.Record) bool {
	gone := func(pid int, start uint64) bool {
		now, err := ledger.ProcStart(pid)
		return errors.Is(err, fs.ErrNotExist) || err == nil && start != 0 && now != start
	}
	keeper, start := r.Keeper()
	return gone(keeper, start) && (r.InitPID == 0 || gone(r.InitPID, r.InitStart))
}

// state says in a word how a container fares.
func state(r ledger.Record, a answer) string {
	var timeout net.Error
	switch {
	case a.gone:
		return stateGone
	case a.err == nil && a.status.InitPID == 0, a.err != nil && r.GuardPID == 0 && r.InitPID == 0:
		return stateStarting
	case a.err == nil:
		return stateRunning
	case r.Preload:
		return stateNoPage
	case errors.As(a.err, &timeout) && timeout.Timeout(), errors.Is(a.err, syscall.EACCES):
		return stateNoAnswer
	}
	return stateGuardDead
}
