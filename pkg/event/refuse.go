// SPDX-License-Identifier: Apache-2.0

package event

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	// RefusedAMinute is how many refusals a node tells one by one in a minute. Whoever may create containers can cause any number,
	// each by a process of its own, and would otherwise push all else out of the file.
	RefusedAMinute = 40
	// RefusedOfOne is how many of them are of one namespace, or of one name of an engine without namespaces: whose containers
	// crash in a loop does not silence the others.
	RefusedOfOne = 10

	refusedName = "events.refused"
	// lockWait bounds how long a refusal waits for others that are being told.
	lockWait = 100 * time.Millisecond
)

// refusals is what the node's processes know of refusals in common, in the file refusedName.
type refusals struct {
	Since  time.Time `json:"since"`  // when the minute began
	Told   []uint32  `json:"of"`     // whose were told in it, one number for each
	Untold int       `json:"untold"` // since the last line that tells of such
}

// admit counts a refusal and says whether it is told, and how many are before it that were not.
func (r refusals) admit(now time.Time, whose uint32) (next refusals, tell bool, untold int) {
	if age := now.Sub(r.Since); age < 0 || age >= time.Minute { // also where the clock was set back
		return refusals{Since: now, Told: []uint32{whose}}, true, max(r.Untold, 0)
	}
	his := 0
	for _, one := range r.Told {
		if one == whose {
			his++
		}
	}
	if his < RefusedOfOne && len(r.Told) < RefusedAMinute {
		r.Told = append(r.Told, whose)
		return r, true, 0
	}
	r.Untold++
	return r, false, 0
}

// whose is a number for whoever a refused container's name belongs to: that of Kubernetes' begins with the namespace. It is FNV-1a, and
// two of the same number share a bound.
func whose(name string) uint32 {
	owner, _, _ := strings.Cut(name, "/")
	n := uint32(2166136261)
	for i := range len(owner) {
		n = (n ^ uint32(owner[i])) * 16777619
	}
	return n
}

// due is how many refusals are to be told of although none comes after them: those of a minute that is over.
func (r refusals) due(now time.Time) (next refusals, untold int) {
	if age := now.Sub(r.Since); r.Untold <= 0 || age >= 0 && age < time.Minute {
		return r, 0
	}
	untold, r.Untold = r.Untold, 0
	return r, untold
}

// Refuse tells that a container was refused, or, where the event has a kind, what else its create shows of a mistake. Of more than
// RefusedAMinute, or RefusedOfOne, in a minute the rest is counted only, and told in one line with the first refusal after it, or by
// TellRefused.
func Refuse(runDir string, e Event) error { return refuse(runDir, e, time.Now().UTC()) }

func refuse(runDir string, e Event, now time.Time) error {
	var tell bool
	var untold int
	err := countRefusals(runDir, os.O_CREATE, func(r refusals) (next refusals) {
		next, tell, untold = r.admit(now, whose(e.Name))
		return next
	})
	if err != nil {
		return fmt.Errorf("event: %w", err)
	}
	if untold > 0 {
		_ = tellUntold(runDir, untold, now)
	}
	if !tell {
		return nil
	}
	e.Kind, e.Time = cmp.Or(e.Kind, Refused), now
	return Append(runDir, e)
}

// TellRefused tells of refusals that were counted in a minute that is over. Whoever shows events calls it, now and then: perhaps
// nobody is refused after them, who would tell.
func TellRefused(runDir string) error { return tellRefused(runDir, time.Now().UTC()) }

func tellRefused(runDir string, now time.Time) error {
	var untold int
	err := countRefusals(runDir, 0, func(r refusals) (next refusals) {
		next, untold = r.due(now)
		return next
	})
	switch {
	case errors.Is(err, fs.ErrNotExist): // nobody was refused
		return nil
	case err != nil:
		return fmt.Errorf("event: %w", err)
	case untold == 0:
		return nil
	}
	return tellUntold(runDir, untold, now)
}

func tellUntold(runDir string, untold int, now time.Time) error {
	return Append(runDir, Event{Time: now, Kind: Refused, Count: untold,
		Text: fmt.Sprintf("beyond %d of one namespace or %d of all in a minute, not told one by one", RefusedOfOne, RefusedAMinute)})
}

// countRefusals changes the counts in the file that all share. What is not its JSON counts as nothing.
func countRefusals(runDir string, create int, change func(refusals) refusals) error {
	f, err := os.OpenFile(filepath.Join(runDir, refusedName), os.O_RDWR|create|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer f.Close() // and with it the lock
	for deadline := time.Now().Add(lockWait); ; time.Sleep(time.Millisecond) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) || time.Now().After(deadline) {
			return fmt.Errorf("lock %s: %w", f.Name(), err)
		}
	}
	text, err := io.ReadAll(io.LimitReader(f, maxLine))
	if err != nil {
		return err
	}
	var was refusals
	if json.Unmarshal(text, &was) != nil {
		was = refusals{}
	}
	next := change(was)
	if next.Since.Equal(was.Since) && len(next.Told) == len(was.Told) && next.Untold == was.Untold {
		return nil
	}
	if text, err = json.Marshal(next); err != nil {
		return err
	}
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err = f.WriteAt(text, 0)
	return err
}
