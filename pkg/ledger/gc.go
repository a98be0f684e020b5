package ledger

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"
)

// leftoverAge is how old a socket without a record must be before GC removes it. A guard makes its sockets after the
// reservation, so there is no such thing as a socket of a record to come; the age is for the machine's clock.
const leftoverAge = 30 * time.Second

// GC drops the records of containers that are provably dead and removes the sockets that dead guards left. A release
// by poststop hook or guard normally comes first; this is for the case that both were killed.
func (l *Ledger) GC() (removed []Record, err error) {
	var leftovers error
	err = l.change(func(f *file) error {
		f.Records, removed = l.sift(f.Records)
		leftovers = l.removeLeftovers(f.Records, time.Now().Add(-leftoverAge))
		if len(removed) == 0 {
			return errUnchanged
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return removed, leftovers
}

// roomy tries a decision on f. When it is refused, records of containers that are provably dead are dropped and it is
// tried once more.
func (l *Ledger) roomy(f *file, decide func() error) error {
	err := decide()
	if _, refused := errors.AsType[*Refusal](err); refused {
		if keep, gone := l.sift(f.Records); len(gone) > 0 {
			f.Records = keep
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
func (l *Ledger) provablyDead(r Record) bool {
	keeper, start := r.GuardPID, r.GuardStart
	if keeper == 0 {
		keeper, start = r.LauncherPID, r.LauncherStart
	}
	if keeper == 0 || l.status(keeper, start) != dead {
		return false
	}
	return r.InitPID == 0 || l.status(r.InitPID, r.InitStart) == dead
}

// removeLeftovers removes sockets that are older than before and belong to no record.
func (l *Ledger) removeLeftovers(records []Record, before time.Time) error {
	entries, err := os.ReadDir(l.path(socketsName))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("ledger: sockets: %w", err)
	}
	used := make(map[string]bool, len(records))
	for _, r := range records {
		used[r.Nonce] = true
	}
	for _, e := range entries {
		nonce, ok := strings.CutSuffix(e.Name(), ".sock")
		if !ok {
			nonce, ok = strings.CutSuffix(e.Name(), ".ctl")
		}
		info, err := e.Info()
		if !ok || used[nonce] || err != nil || info.ModTime().After(before) {
			continue
		}
		if err := os.Remove(l.path(socketsName) + "/" + e.Name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("ledger: sockets: %w", err)
		}
	}
	return nil
}
