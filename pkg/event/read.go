// SPDX-License-Identifier: Apache-2.0

package event

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Read returns all events that are kept, in the order in which they were written. What is no event is left out: a full disk or a
// kill can leave half a line, of which the next event is told apart. A node on which nothing happened has no file.
func Read(runDir string) ([]Event, error) {
	old, now, err := pair(runDir, open)
	if err != nil {
		return nil, fmt.Errorf("event: %w", err)
	}
	f := follower{runDir: runDir, old: old, now: now}
	defer f.close()
	var list []Event
	if err := f.drain(func(e Event) { list = append(list, e) }); err != nil {
		return nil, fmt.Errorf("event: %w", err)
	}
	return list, nil
}

// pair opens the file that was put aside and the present one, as they were at one moment: a rotation between the two would hide a
// whole file. nil is one that is not there.
func pair(runDir string, open func(path string) (*reader, error)) (old, now *reader, err error) {
	optional := func(name string) (*reader, error) {
		r, err := open(filepath.Join(runDir, name))
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		return r, err
	}
	const most = 100 // between two rotations somebody writes MaxSize
	for range most {
		if old, err = optional(oldName); err != nil {
			return nil, nil, err
		}
		if now, err = optional(fileName); err != nil {
			old.close()
			return nil, nil, err
		}
		again, err := optional(oldName)
		if err != nil {
			old.close()
			now.close()
			return nil, nil, err
		}
		same := old.same(again)
		again.close()
		if same {
			return old, now, nil
		}
		old.close()
		now.close()
	}
	return nil, nil, fmt.Errorf("%s is put aside again and again", File(runDir))
}

// reader reads the lines of one file as they are written.
type reader struct {
	f    *os.File
	rest []byte // of a line whose end is not there yet
}

func open(path string) (*reader, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	return &reader{f: f}, nil
}

// eachNew hands over the events that were written since the last call.
func (r *reader) eachNew(each func(Event)) error {
	buf := make([]byte, 64<<10)
	for {
		n, err := r.f.Read(buf)
		r.rest = append(r.rest, buf[:n]...)
		for {
			line, rest, whole := bytes.Cut(r.rest, []byte{'\n'})
			if !whole {
				break
			}
			if e, ok := decode(line); ok {
				each(e)
			}
			r.rest = rest
		}
		if len(r.rest) > maxLine { // no line of ours, but one may have begun
			if at := bytes.LastIndex(r.rest, lineStart); at > 0 {
				r.rest = r.rest[at:]
			}
			if len(r.rest) > maxLine {
				r.rest = r.rest[len(r.rest)-len(lineStart):] // of which half may be here
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// lineStart is how each line begins, and what is nowhere else in one: within a string its quotes are escaped.
var lineStart = []byte(`{"time":`)

// decode makes an event of a line. Who was killed while it wrote leaves half a line, which the next event is in.
func decode(line []byte) (Event, bool) {
	var e Event
	if json.Unmarshal(line, &e) == nil {
		return e, e.Kind != ""
	}
	if at := bytes.LastIndex(line, lineStart); at > 0 {
		e = Event{}
		ok := json.Unmarshal(line[at:], &e) == nil && e.Kind != ""
		return e, ok
	}
	return Event{}, false
}

// same says whether two readers read the same file. No file is the same as no file.
func (r *reader) same(other *reader) bool {
	if r == nil || other == nil {
		return r == other
	}
	a, err := r.f.Stat()
	if err != nil {
		return false
	}
	b, err := other.f.Stat()
	return err == nil && os.SameFile(a, b)
}

func (r *reader) close() {
	if r != nil {
		r.f.Close()
	}
}

// follower reads the present file, and the one before.
type follower struct {
	runDir   string
	old, now *reader // nil: not there
}

// drain hands over what is new in the files that are open.
func (f *follower) drain(each func(Event)) error {
	for _, r := range []*reader{f.old, f.now} {
		if r != nil {
			if err := r.eachNew(each); err != nil {
				return err
			}
		}
	}
	return nil
}

// eachNew hands over what is new. A file that was put aside is read on until the next one is: who was about to write to it may
// still do so.
func (f *follower) eachNew(each func(Event)) error {
	old, now, err := pair(f.runDir, open)
	if err != nil {
		return err
	}
	// Only now: what was written before a file was put aside comes before what is in the next.
	if err := f.drain(each); err != nil {
		old.close()
		now.close()
		return err
	}
	held := follower{old: f.old, now: f.now}
	known := func(r *reader) *reader { // with what was read of it
		for _, h := range []*reader{held.old, held.now} {
			if r != nil && h.same(r) {
				r.close()
				return h
			}
		}
		return r
	}
	f.old, f.now = known(old), known(now)
	if held.now != nil && f.old != held.now && f.now != held.now {
		// Put aside twice since. Of a third time nothing would be left to see.
		each(Event{Time: time.Now().UTC(), Kind: Warning, Text: "too many events at once: some may be missing before the next ones"})
	}
	for _, h := range []*reader{held.old, held.now} {
		if h != f.old && h != f.now {
			h.close()
		}
	}
	for _, r := range []*reader{f.old, f.now} {
		if r != nil && r != held.old && r != held.now {
			if err := r.eachNew(each); err != nil {
				return err
			}
		}
	}
	return nil
}

func (f *follower) close() {
	f.old.close()
	f.now.close()
}

// Follow hands over the events that are kept, in one list, and then what is written, as it comes, until ctx ends or each fails.
func Follow(ctx context.Context, runDir string, each func([]Event) error) error {
	return followFrom(ctx, runDir, false, each)
}

// FollowNew hands over what is written from now on, as Follow does. What is kept is not read.
func FollowNew(ctx context.Context, runDir string, each func([]Event) error) error {
	return followFrom(ctx, runDir, true, each)
}

func followFrom(ctx context.Context, runDir string, onlyNew bool, each func([]Event) error) error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return fmt.Errorf("event: inotify: %w", err)
	}
	watch := os.NewFile(uintptr(fd), "inotify") // not blocking, so that a deadline ends a Read
	defer watch.Close()
	if _, err := unix.InotifyAddWatch(fd, runDir, unix.IN_MODIFY|unix.IN_MOVED_TO|unix.IN_CREATE); err != nil {
		return fmt.Errorf("event: watch %s: %w", runDir, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = watch.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	f := follower{runDir: runDir}
	defer f.close()
	if onlyNew {
		if err := f.skip(); err != nil {
			return fmt.Errorf("event: %w", err)
		}
	}
	buf := make([]byte, 4096)
	for first := !onlyNew; ; first = false {
		var list []Event
		if err := f.eachNew(func(e Event) { list = append(list, e) }); err != nil {
			return fmt.Errorf("event: %w", err)
		}
		if first || len(list) > 0 {
			if err := each(list); err != nil {
				return err
			}
		}
		// What changed is not looked at: the ledger is in this folder too, and is not changed often.
		if _, err := watch.Read(buf); ctx.Err() != nil {
			return nil
		} else if err != nil {
			return fmt.Errorf("event: wait for changes in %s: %w", runDir, err)
		}
	}
}

// skip passes over what is kept. A line that is just being written may be passed over as well.
func (f *follower) skip() (err error) {
	if f.old, f.now, err = pair(f.runDir, open); err != nil {
		return err
	}
	for _, r := range []*reader{f.old, f.now} {
		if r != nil {
			if _, err := r.f.Seek(0, io.SeekEnd); err != nil {
				return err
			}
		}
	}
	return nil
}
