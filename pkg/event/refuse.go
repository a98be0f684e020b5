package event

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

const (
	// RefusedAMinute is how many refusals a node tells one by one in a minute. Whoever may create containers can cause any number,
	// each by a process of its own, and would otherwise push all else out of the file.
	RefusedAMinute = 10

	refusedName = "events.refused"
	// lockWait bounds how long a refusal waits for others that are being told.
	lockWait = 100 * time.Millisecond
)

// refusals is what the node's processes know of refusals in common, in the file refusedName.
type refusals struct {
	Since  time.Time `json:"since"`  // when the minute began
	Told   int       `json:"told"`   // in it
	Untold int       `json:"untold"` // since the last line that tells of such
}

// admit counts a refusal and says whether it is told, and how many are before it that were not.
func (r refusals) admit(now time.Time) (next refusals, tell bool, untold int) {
	if age := now.Sub(r.Since); age < 0 || age >= time.Minute { // also where the clock was set back
		return refusals{Since: now, Told: 1}, true, max(r.Untold, 0)
	}
	if r.Told < RefusedAMinute {
		r.Told++
		return r, true, 0
	}
	r.Untold++
	return r, false, 0
}

// Refuse tells that a container was refused. Of more than RefusedAMinute in a minute the rest is counted only, and told in one line
// with the first refusal after it.
func Refuse(runDir string, e Event) error { return refuse(runDir, e, time.Now().UTC()) }

func refuse(runDir string, e Event, now time.Time) error {
	tell, untold, err := countRefusal(runDir, now)
	if err != nil {
		return fmt.Errorf("event: %w", err)
	}
	if untold > 0 {
		_ = Append(runDir, Event{Time: now, Kind: Refused, Count: untold, Text: fmt.Sprintf("beyond %d in a minute, not told one by one", RefusedAMinute)})
	}
	if !tell {
		return nil
	}
	e.Kind, e.Time = Refused, now
	return Append(runDir, e)
}

// countRefusal counts a refusal in the file that all share. What is not its JSON counts as nothing.
func countRefusal(runDir string, now time.Time) (tell bool, untold int, err error) {
	f, err := os.OpenFile(filepath.Join(runDir, refusedName), os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return false, 0, err
	}
	defer f.Close() // and with it the lock
	for deadline := time.Now().Add(lockWait); ; time.Sleep(time.Millisecond) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) || time.Now().After(deadline) {
			return false, 0, fmt.Errorf("lock %s: %w", f.Name(), err)
		}
	}
	text, err := io.ReadAll(io.LimitReader(f, maxLine))
	if err != nil {
		return false, 0, err
	}
	var was refusals
	if json.Unmarshal(text, &was) != nil {
		was = refusals{}
	}
	next, tell, untold := was.admit(now)
	text, err = json.Marshal(next)
	if err != nil {
		return false, 0, err
	}
	if err := f.Truncate(0); err != nil {
		return false, 0, err
	}
	_, err = f.WriteAt(text, 0)
	return tell, untold, err
}
