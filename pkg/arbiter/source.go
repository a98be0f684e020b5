// SPDX-License-Identifier: Apache-2.0

package arbiter

import (
	"sync/atomic"
	"time"

	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// Source tells of the context switches of one GPU: the driver's FECS records (fecs.go), or the simulated driver's.
type Source interface {
	// Enable has the driver keep records from now on. What is kept and not read is bounded; the newest stay.
	Enable() error
	// Read appends the records since the last call; lost says that some before them are missing.
	Read(to []sched.Switch) (records []sched.Switch, lost bool)
	// Await returns when there are new records, or when Wake was called. Until it is called for the first time the driver wakes nobody.
	// False: the source is broken. It is called by one goroutine, beside Read.
	Await() bool
	Wake()
}

// SimSwitches is what a simulated driver has in place of FECS records.
type SimSwitches interface {
	Switches(minor int, since uint64) (records []sched.Switch, next uint64, lost bool, err error)
}

// Bind takes the records of a GPU, the gpu-th of a client. With NVIDIA's driver it needs CAP_SYS_ADMIN.
func Bind(own *rmclient.Client, driver rmclient.Driver, gpu, minor int) (Source, error) {
	if sim, ok := driver.(SimSwitches); ok {
		if _, _, _, err := sim.Switches(minor, 0); err != nil {
			return nil, err
		}
		return &simSource{d: sim, minor: minor, woken: make(chan struct{}, 1)}, nil
	}
	return bindFecs(own, gpu)
}

type simSource struct {
	d     SimSwitches
	minor int
	next  atomic.Uint64
	woken chan struct{}
}

func (*simSource) Enable() error { return nil }

func (s *simSource) Read(to []sched.Switch) ([]sched.Switch, bool) {
	records, next, lost, err := s.d.Switches(s.minor, s.next.Load())
	if err != nil {
		return to, true
	}
	s.next.Store(next)
	return append(to, records...), lost
}

// Await looks as often as the real driver tells.
func (s *simSource) Await() bool {
	every := time.NewTicker(sched.Tick)
	defer every.Stop()
	for {
		if _, next, _, err := s.d.Switches(s.minor, s.next.Load()); err != nil || next != s.next.Load() {
			return err == nil
		}
		select {
		case <-s.woken:
			return true
		case <-every.C:
		}
	}
}

func (s *simSource) Wake() {
	select {
	case s.woken <- struct{}{}:
	default:
	}
}
