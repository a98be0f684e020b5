package gpusched

import (
	"github.com/opencgpu/cgpu/pkg/sched"
)

// switchSource tells of the context switches of one GPU: the driver's FECS records (fecs.go), or the simulated driver's.
type switchSource interface {
	// read appends the records since the last call; lost says that some before them are missing.
	read(to []sched.Switch) (records []sched.Switch, lost bool)
	// await returns when there may be new records, or when wake was called. False: it cannot wait, look again soon.
	await() bool
	wake()
}

// SimSwitches is what only a simulated driver has: its record of context switches, and whether processes have work.
type SimSwitches interface {
	Switches(minor int, since uint64) (records []sched.Switch, next uint64, lost bool, err error)
	Pending(minor int, pids []int) (bool, error)
}

type simSource struct {
	d     SimSwitches
	minor int
	next  uint64
}

func (s *simSource) read(to []sched.Switch) ([]sched.Switch, bool) {
	records, next, lost, err := s.d.Switches(s.minor, s.next)
	if err != nil {
		return to, true
	}
	s.next = next
	return append(to, records...), lost
}

func (s *simSource) await() bool { return false }
func (s *simSource) wake()       {}
