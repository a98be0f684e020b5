// SPDX-License-Identifier: Apache-2.0

// Package event is what happened on the node: starts and ends of containers, what was refused to them, who was killed, what an
// administrator changed. It is a file of JSON lines in the run directory (events.jsonl) that everybody of cgpu appends to and
// `cgpu events` reads. Nobody needs it to work: an event that cannot be written is lost, and nothing else.
//
// The file is bounded (MaxSize, and one older file of that size), and so is what a tenant can add to it (Writer).
//
// cgpu-runtime, which starts for every container of the node, writes refusals, so this package links little.
package event

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/opencgpu/cgpu/pkg/ledger"
)

// Kind is what kind of thing happened.
type Kind string

// The kinds. Each is an interface: some may be added, none renamed.
const (
	Start   Kind = "start"   // the container's first process runs
	End     Kind = "end"     // its last process is gone, and its share given back
	Deleted Kind = "deleted" // an engine that names containers for itself alone has deleted it: Docker, podman, CRI-O, nerdctl
	Refused Kind = "refused" // a container was not created
	Denied  Kind = "denied"  // an allocation did not fit into the limit or the spill
	Killed  Kind = "killed"  // a process, for managed memory beyond the limit
	Freed   Kind = "freed"   // RM clients of the container, for memory that was never charged
	Held    Kind = "held"    // the guard paused GPU work by itself
	Let     Kind = "let"     // and lets it go on
	Paused  Kind = "paused"  // by cgpu pause
	Resumed Kind = "resumed" // by cgpu resume
	Set     Kind = "set"     // limit, spill, weight, percentage or priority of a container changed
	Policy  Kind = "policy"  // how a GPU is shared changed
	Warning Kind = "warning" // the guard could not do what it should
	Removed Kind = "removed" // cgpu gc gave back what a dead container held
	// Of a GPU, and of each container that has it (pkg/health).
	Unhealthy Kind = "unhealthy"
	Healthy   Kind = "healthy" // again
)

// Kinds lists them in the order of a container's life.
func Kinds() []Kind {
	return []Kind{Start, End, Deleted, Refused, Denied, Killed, Freed, Held, Let, Paused, Resumed, Set, Policy, Warning,
		Removed, Unhealthy, Healthy}
}

// Event is one thing that happened. Its JSON form is an interface, like the kinds.
type Event struct {
	Time time.Time `json:"time"`
	Kind Kind      `json:"kind"`
	// Container is the ID; empty for what is about a GPU. Nonce tells one create of an ID from the next.
	Container string `json:"container,omitempty"`
	Nonce     string `json:"nonce,omitempty"`
	Name      string `json:"name,omitempty"` // for people, where the engine told one
	GPU       *GPU   `json:"gpu,omitempty"`
	PID       int    `json:"pid,omitempty"` // on the host
	// Count is how many such things the event stands for; 0 is one.
	Count int `json:"count,omitempty"`
	// Text is a line for people. A tenant may have chosen parts of it.
	Text string `json:"text"`
}

// GPU is the one that an event is about.
type GPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
}

const (
	fileName = "events.jsonl"
	oldName  = fileName + ".1"
	lockName = "events.lock"
)

// File is where events are kept below the run directory; the older ones are in the same name with .1.
func File(runDir string) string { return filepath.Join(runDir, fileName) }

const (
	// MaxSize is when a file is put aside, in bytes, and another one begun.
	MaxSize = 4 << 20
	// maxLine bounds an event's line in bytes, its end included. Local file systems keep a single write of O_APPEND in one piece.
	maxLine = 4096
	// maxText bounds what an event quotes, in bytes.
	maxText = 1024
)

// Append writes an event, with the present time if it has none. It makes no folder: without a run directory nothing of cgpu is on
// the node.
func Append(runDir string, e Event) error {
	if e.Time.IsZero() {
		e.Time = time.Now().UTC()
	}
	line, err := encode(e)
	if err != nil {
		return fmt.Errorf("event: %w", err)
	}
	f, err := os.OpenFile(File(runDir), os.O_WRONLY|os.O_APPEND|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("event: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("event: %w", err)
	}
	if info.Size() >= 2*MaxSize { // whoever puts the file aside has been stopped at it; perhaps he has ended since
		_ = rotate(runDir)
		return fmt.Errorf("event: %s: has %d bytes, and nobody puts it aside: find who holds %s with lslocks", f.Name(), info.Size(), lockName)
	}
	if n, err := f.Write(line); err != nil {
		if n > 0 { // so that the next one is not lost too
			_, _ = f.Write([]byte{'\n'})
		}
		return fmt.Errorf("event: %w", err)
	}
	if info.Size()+int64(len(line)) >= MaxSize {
		return rotate(runDir)
	}
	return nil
}

// encode makes an event's line, cut to maxLine.
func encode(e Event) ([]byte, error) {
	if e.Count == 1 {
		e.Count = 0
	}
	e.Text, e.Name, e.Container = cut(e.Text, maxText), ledger.DisplayName(e.Name), cut(e.Container, ledger.MaxText)
	for {
		b, err := json.Marshal(e)
		switch {
		case err != nil:
			return nil, err
		case len(b) < maxLine:
			return append(b, '\n'), nil
		case e.Text != "": // one byte can take six (\u001b)
			e.Text = cut(e.Text, len(e.Text)/2)
		case e.Name != "":
			e.Name = ""
		default:
			return nil, fmt.Errorf("%d bytes: want less than %d", len(b), maxLine)
		}
	}
}

// cut shortens s to n bytes at the border of a rune.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// rotate puts the file aside, in place of the one before. Whoever writes at this moment may still add a line to it there. The
// lock keeps two from doing it at once, of which the second would put an almost empty file in the place of a full one; who does
// not get it need not wait.
func rotate(runDir string) error {
	lock, err := os.OpenFile(filepath.Join(runDir, lockName), os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("event: %w", err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); errors.Is(err, syscall.EWOULDBLOCK) {
		return nil
	} else if err != nil {
		return fmt.Errorf("event: lock %s: %w", lock.Name(), err)
	}
	defer syscall.Flock(int(lock.Fd()), syscall.LOCK_UN)
	if info, err := os.Stat(File(runDir)); err != nil || info.Size() < MaxSize {
		return nil // done by another
	}
	if err := os.Rename(File(runDir), filepath.Join(runDir, oldName)); err != nil {
		return fmt.Errorf("event: %w", err)
	}
	return nil
}
