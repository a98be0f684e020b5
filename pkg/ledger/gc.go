// SPDX-License-Identifier: Apache-2.0

package ledger

import "errors"

// GC drops the records of containers that are provably dead. A release by poststop hook or guard normally comes first; this is
// for the case that both were killed.
func (l *Ledger) GC() (removed []Record, err error) {
	err = l.change(func(f *file) error {
		f.Records, f.gone = l.sift(f.Records)
		if removed = f.gone; len(removed) == 0 {
			return errUnchanged
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return removed, nil
}

// roomy tries a decision on f. When it is refused, records of containers that are provably dead are dropped and it is
// tried once more.
func (l *Ledger) roomy(f *file, decide func() error) error {
	err := decide()
	if _, refused := errors.AsType[*Refusal](err); refused {
		if keep, gone := l.sift(f.Records); len(gone) > 0 {
			f.Records, f.gone = keep, append(f.gone, gone...)
			err = decide()
		}
	}
	return err
}

// sift parts the records whose container is provably dead from the others.
func (l *Ledger) sift(records []Record) (keep, gone []Record) {
	for _, r := range records {
		if l.provablyDead(r) {
			gone = append(gone, r)
		} else {
			keep = append(keep, r)
		}
	}
	return keep, gone
}

// provablyDead: nobody is left who could use or release the reservation. The guard is gone, or never came and the
// launcher is gone; and so is the container's first process, because the processes of a container whose guard was
// killed keep the device memory they have. Doubt keeps the record.
//
// In preload mode there is no guard: once the first process is known (cgpu-hook records it), it alone counts.
func (l *Ledger) provablyDead(r Record) bool {
	keeper, start := r.Keeper()
	if keeper == 0 || l.status(keeper, start) != dead {
		return false
	}
	return r.InitPID == 0 || l.status(r.InitPID, r.InitStart) == dead
}

// Keeper is the process by whose end, together with that of the container's first one, the record is dead; 0 if none is
// known.
func (r Record) Keeper() (pid int, start uint64) {
	switch {
	case r.GuardPID != 0:
		return r.GuardPID, r.GuardStart
	case r.Preload && r.InitPID != 0:
		return r.InitPID, r.InitStart
	}
	return r.LauncherPID, r.LauncherStart
}
