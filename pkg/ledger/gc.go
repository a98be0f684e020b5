package ledger

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencgpu/cgpu/pkg/page"
)

// leftoverAge is how old a socket or page without a record must be before GC removes it. They are made after the
// reservation, so there is no such thing as a socket of a record to come; the age is for the machine's clock.
const leftoverAge = 30 * time.Second

// GC drops the records of containers that are provably dead and removes the sockets and vGPU pages that they left. A release
// by poststop hook or guard normally comes first; this is for the case that both were killed.
func (l *Ledger) GC() (removed []Record, err error) {
	var leftovers error
	err = l.change(func(f *file) error {
		f.Records, removed = l.sift(f.Records)
		before := time.Now().Add(-leftoverAge)
		socket := func(name string) error { return os.Remove(filepath.Join(l.path(socketsName), name)) }
		folder := func(nonce string) error { return page.Remove(l.dir, nonce) }
		leftovers = errors.Join(l.removeLeftovers(f.Records, socketsName, before, socket, ".sock", ".ctl"),
			l.removeLeftovers(f.Records, pagesName, before, folder, ""))
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

// removeLeftovers removes files of a folder that are older than before and belong to no record: those whose names are a nonce
// and one of the suffixes.
func (l *Ledger) removeLeftovers(records []Record, folder string, before time.Time, remove func(name string) error, suffixes ...string) error {
	entries, err := os.ReadDir(l.path(folder))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("ledger: leftovers: %w", err)
	}
	used := make(map[string]bool, len(records))
	for _, r := range records {
		used[r.Nonce] = true
	}
	for _, e := range entries {
		ours := slices.ContainsFunc(suffixes, func(suffix string) bool {
			nonce, ok := strings.CutSuffix(e.Name(), suffix)
			return ok && isNonce(nonce) && !used[nonce]
		})
		info, err := e.Info()
		if !ours || err != nil || info.ModTime().After(before) {
			continue
		}
		if err := remove(e.Name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("ledger: leftovers: %w", err)
		}
	}
	return nil
}

// isNonce reports 16 hexadecimal digits.
func isNonce(s string) bool {
	return len(s) == 16 && strings.Trim(s, "0123456789abcdef") == ""
}
