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
// kill can leave half a line. A node on which nothing happened has no file.
func Read(runDir string) ([]Event, error) {
	var list []Event
	keep := func(e Event) { list = append(list, e) }
	for _, name := range []string{oldName, fileName} {
		r, err := open(filepath.Join(runDir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("event: %w", err)
		}
		err = r.take(keep)
		r.f.Close()
		if err != nil {
			return nil, fmt.Errorf("event: %w", err)
		}
	}
	return list, nil
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

// take hands over the events that were written since the last call.
func (r *reader) take(each func(Event)) error {
	buf := make([]byte, 64<<10)
	for {
		n, err := r.f.Read(buf)
		r.rest = append(r.rest, buf[:n]...)
		for {
			line, rest, whole := bytes.Cut(r.rest, []byte{'\n'})
			if !whole {
				break
			}
			var e Event
			if json.Unmarshal(line, &e) == nil && e.Kind != "" {
				each(e)
			}
			r.rest = rest
		}
		if len(r.rest) > maxLine { // no line of ours
			r.rest = r.rest[:0]
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// follower reads the present file, and for a while the one before.
type follower struct {
	runDir   string
	now, old *reader // nil: not there
}

// begin opens what is there.
func (f *follower) begin() (err error) {
	for _, x := range []struct {
		name string
		to   **reader
	}{{oldName, &f.old}, {fileName, &f.now}} {
		if *x.to, err = open(filepath.Join(f.runDir, x.name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// take hands over what is new. A file that was put aside is read on until the next one is: who was about to write to it may
// still do so.
func (f *follower) take(each func(Event)) error {
	for _, r := range []*reader{f.old, f.now} {
		if r != nil {
			if err := r.take(each); err != nil {
				return err
			}
		}
	}
	named, err := os.Stat(File(f.runDir))
	if err != nil {
		return nil // there is none at the moment
	}
	if f.now != nil {
		if held, err := f.now.f.Stat(); err == nil && os.SameFile(held, named) {
			return nil
		}
	}
	next, err := open(File(f.runDir))
	if err != nil {
		return nil
	}
	if f.old != nil {
		f.old.f.Close()
	}
	f.old, f.now = f.now, next
	return next.take(each)
}

func (f *follower) close() {
	for _, r := range []*reader{f.old, f.now} {
		if r != nil {
			r.f.Close()
		}
	}
}

// Follow hands over the events that are kept, in one list, and then what is written, as it comes, until ctx ends or each fails.
func Follow(ctx context.Context, runDir string, each func([]Event) error) error {
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
	if err := f.begin(); err != nil {
		return fmt.Errorf("event: %w", err)
	}
	buf := make([]byte, 4096)
	for first := true; ; first = false {
		var list []Event
		if err := f.take(func(e Event) { list = append(list, e) }); err != nil {
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
