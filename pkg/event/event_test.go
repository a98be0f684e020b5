// SPDX-License-Identifier: Apache-2.0

package event

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func read(t *testing.T, dir string) []Event {
	t.Helper()
	list, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestAppendRead(t *testing.T) {
	dir := t.TempDir()
	if list := read(t, dir); len(list) != 0 {
		t.Errorf("of a node without events: %v", list)
	}
	at := time.Date(2026, 11, 21, 10, 0, 0, 0, time.UTC)
	want := []Event{
		{Time: at, Kind: Start, Container: "a", Nonce: "n", Name: "web?[31m", Text: "two\nlines"},
		{Time: at, Kind: Denied, Container: "a", GPU: &GPU{Index: 0, UUID: "GPU-0"}, Count: 7, Text: "memory"},
	}
	for _, e := range want {
		if err := Append(dir, e); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(want, read(t, dir)); diff != "" {
		t.Error(diff)
	}
	info, err := os.Stat(File(dir))
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v: want a file for root alone", info, err)
	}
	// Half a line costs that line, not the next one's successor.
	f, _ := os.OpenFile(File(dir), os.O_WRONLY|os.O_APPEND, 0)
	f.WriteString(`{"kind":"end"` + "\n{}\n" + strings.Repeat("x", 1<<20) + "\n")
	f.Close()
	if err := Append(dir, Event{Kind: End}); err != nil {
		t.Fatal(err)
	}
	if list := read(t, dir); len(list) != 3 || list[2].Kind != End || time.Since(list[2].Time) > time.Minute {
		t.Errorf("%v", list)
	}
}

func TestAppendRefuses(t *testing.T) {
	if err := Append(filepath.Join(t.TempDir(), "none"), Event{Kind: Start}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a run directory: %v", err)
	}
	dir, elsewhere := t.TempDir(), filepath.Join(t.TempDir(), "precious")
	if err := os.Symlink(elsewhere, File(dir)); err != nil {
		t.Fatal(err)
	}
	if err := Append(dir, Event{Kind: Start}); err == nil {
		t.Error("it followed a link")
	}
}

// One line is one write, whatever a tenant has put into it.
func TestLongTexts(t *testing.T) {
	for what, text := range map[string]string{
		"long": strings.Repeat("x", 1<<20), "escapes": strings.Repeat("\x1b", 4096), "runes": strings.Repeat("ñ", 4096),
		"invalid": strings.Repeat("\xff", 4096),
	} {
		b, err := encode(Event{Kind: Refused, Container: text, Name: text, Text: text})
		if err != nil || len(b) > maxLine || b[len(b)-1] != '\n' || strings.Count(string(b), "\n") != 1 {
			t.Errorf("%s: %d bytes, %v", what, len(b), err)
		}
	}
	if s := cut("añb", 2); s != "a" {
		t.Errorf("cut within a rune: %q", s)
	}
}

// Many write at once; two files stay, and no line of the last two is lost or torn.
func TestRotate(t *testing.T) {
	dir := t.TempDir()
	const writers, lines = 8, 900 // 9 MiB in all
	pad := strings.Repeat("x", maxText)
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for n := range lines {
				if err := Append(dir, Event{Kind: Set, Container: fmt.Sprint(w), PID: n, Text: pad}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	size := int64(0)
	for _, e := range entries {
		info, _ := e.Info()
		size += info.Size()
		names = append(names, e.Name())
	}
	if diff := cmp.Diff([]string{fileName, oldName, lockName}, names); diff != "" || size > 2*MaxSize+64*maxLine {
		t.Errorf("%d bytes in %v", size, names)
	}
	// Of each writer the last lines are there, without a gap.
	last := map[string]int{}
	list := read(t, dir)
	for _, e := range list {
		if before, ok := last[e.Container]; ok && e.PID != before+1 {
			t.Errorf("writer %s: %d follows %d", e.Container, e.PID, before)
		}
		last[e.Container] = e.PID
	}
	for w, n := range last {
		if n != lines-1 {
			t.Errorf("writer %s: the last is %d", w, n)
		}
	}
	if len(last) != writers || len(list) < MaxSize/(maxText+200) {
		t.Errorf("%d events of %d writers", len(list), len(last))
	}
}

// TestBoundWithoutRotation: whoever is stopped while he puts the file aside does not make it grow without a bound.
func TestBoundWithoutRotation(t *testing.T) {
	dir := t.TempDir()
	lock, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(File(dir), []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(File(dir), 2*MaxSize-1); err != nil {
		t.Fatal(err)
	}
	if err := Append(dir, Event{Kind: Set, Text: "the last"}); err != nil {
		t.Error(err)
	}
	if err := Append(dir, Event{Kind: Set, Text: "one more"}); err == nil || !strings.Contains(err.Error(), lockName) {
		t.Errorf("one more: %v", err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	if err := Append(dir, Event{Kind: Set, Text: "after"}); err == nil {
		t.Error("written beyond the bound")
	}
	if err := Append(dir, Event{Kind: Set, Text: "after"}); err != nil {
		t.Errorf("it was not put aside: %v", err)
	}
}

func TestFollow(t *testing.T) {
	dir := t.TempDir()
	if err := Append(dir, Event{Kind: Start, Text: "before"}); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	got := make(chan []Event, 1000)
	ended := make(chan error)
	go func() { ended <- Follow(ctx, dir, func(list []Event) error { got <- list; return nil }) }()
	next := func() []Event {
		t.Helper()
		select {
		case list := <-got:
			return list
		case <-time.After(time.Minute):
			t.Fatal("nothing comes")
		}
		return nil
	}
	if list := next(); len(list) != 1 || list[0].Text != "before" {
		t.Errorf("history: %v", list)
	}
	want := func(text string) {
		t.Helper()
		if err := Append(dir, Event{Kind: End, Text: text}); err != nil {
			t.Fatal(err)
		}
		if list := next(); len(list) != 1 || list[0].Text != text {
			t.Errorf("%v, want %s", list, text)
		}
	}
	want("one")
	// Who has the file open while it is put aside still gets through.
	late, err := os.OpenFile(File(dir), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	if err := os.Rename(File(dir), filepath.Join(dir, oldName)); err != nil {
		t.Fatal(err)
	}
	want("two")
	line, _ := encode(Event{Kind: End, Text: "late"})
	if _, err := late.Write(line); err != nil {
		t.Fatal(err)
	}
	if list := next(); len(list) != 1 || list[0].Text != "late" {
		t.Errorf("%v, want the late one", list)
	}
	want("three")
	stop()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("it goes on")
	}
	fault := errors.New("fault")
	if err := Follow(context.Background(), dir, func([]Event) error { return fault }); !errors.Is(err, fault) {
		t.Error(err)
	}
	if err := Follow(context.Background(), filepath.Join(dir, "none"), func([]Event) error { return nil }); err == nil {
		t.Error("it follows a folder that is not there")
	}
}

// Half a line without an end costs itself, not the event after it, however long it is and wherever a read ends.
func TestHalfLine(t *testing.T) {
	whole, err := encode(Event{Time: time.Now(), Kind: Set, Container: "half", Text: strings.Repeat("\x1b", 600)})
	if err != nil {
		t.Fatal(err)
	}
	for n := 1; n < len(whole); n += 97 {
		for _, half := range []string{string(whole[:n]), strings.Repeat(string(whole[:n]), 30),
			strings.Repeat("x", 64<<10-4) + string(whole[:n])} {
			dir := t.TempDir()
			if err := os.WriteFile(File(dir), []byte(half), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := Append(dir, Event{Kind: End, Text: `next {"time":`}); err != nil {
				t.Fatal(err)
			}
			if list := read(t, dir); len(list) != 1 || list[0].Kind != End || list[0].Container != "" || list[0].Text != `next {"time":` {
				t.Fatalf("after %d bytes, of %d: %v", n, len(half), list)
			}
		}
	}
}

// aside puts the present file aside, however short.
func aside(t *testing.T, dir string) {
	t.Helper()
	if err := os.Rename(File(dir), filepath.Join(dir, oldName)); err != nil {
		t.Error(err)
	}
}

func add(t *testing.T, dir, text string) {
	t.Helper()
	if err := Append(dir, Event{Kind: End, Text: text}); err != nil {
		t.Error(err)
	}
}

func texts(list []Event) string {
	var all []string
	for _, e := range list {
		all = append(all, e.Text)
	}
	return strings.Join(all, " ")
}

// A file is put aside while the two are opened: none is lost, none comes twice.
func TestReadWhileRotating(t *testing.T) {
	for _, at := range []int{0, 1, 2} {
		dir := t.TempDir()
		add(t, dir, "one")
		aside(t, dir)
		add(t, dir, "two")
		n := 0
		old, now, err := pair(dir, func(path string) (*reader, error) {
			r, err := open(path)
			if n == at {
				aside(t, dir)
				add(t, dir, "three")
			}
			n++
			return r, err
		})
		if err != nil {
			t.Fatal(err)
		}
		f := follower{old: old, now: now}
		defer f.close()
		var list []Event
		if err := f.drain(func(e Event) { list = append(list, e) }); err != nil {
			t.Fatal(err)
		}
		if got := texts(list); got != "two three" && (got != "one two" || at < 2) {
			t.Errorf("put aside after %d opened: %q", at+1, got)
		}
	}
}

// Files are put aside while the one who follows is busy.
func TestFollowWhileRotating(t *testing.T) {
	for n, want := range []string{"zero one", "zero one two", "zero one WARNING two three", "zero one WARNING three four"} {
		dir := t.TempDir()
		add(t, dir, "zero")
		ctx, stop := context.WithTimeout(context.Background(), time.Minute)
		var got []string
		err := Follow(ctx, dir, func(list []Event) error {
			for _, e := range list {
				if e.Kind == Warning {
					e.Text = "WARNING"
				}
				got = append(got, e.Text)
			}
			if len(got) == 1 {
				add(t, dir, "one")
				for i := range n {
					aside(t, dir)
					add(t, dir, []string{"two", "three", "four"}[i])
				}
			}
			if len(got) >= len(strings.Fields(want)) {
				stop()
			}
			return nil
		})
		stop()
		if text := strings.Join(got, " "); err != nil || text != want {
			t.Errorf("put aside %d times: %q, %v; want %q", n, text, err, want)
		}
	}
}

// A tenant that has a million allocations refused fills nothing.
func TestNote(t *testing.T) {
	dir := t.TempDir()
	w := NewWriter(dir, "c", "n")
	w.every = 200 * time.Millisecond
	w.Begin(Event{Kind: Start, Name: "web"})
	w.busy.Wait()
	begin := time.Now()
	for n := range 100000 {
		w.Note(Event{Kind: Denied, Text: fmt.Sprint(n)})
		if n == 0 {
			w.Note(Event{Kind: Killed, Text: "another kind does not wait"})
		}
	}
	took := time.Since(begin)
	time.Sleep(300 * time.Millisecond)
	w.Note(Event{Kind: Denied, Text: "more"})
	w.Note(Event{Kind: Denied, Text: "last"})
	w.Close()
	w.Note(Event{Kind: Denied, Text: "too late"})
	w.Close()
	sum := 0
	list := read(t, dir)
	for _, e := range list {
		if e.Container != "c" || e.Nonce != "n" || e.Name != "web" {
			t.Errorf("%+v", e)
		}
		if e.Kind == Denied {
			sum += max(e.Count, 1)
		}
	}
	if last := list[len(list)-1]; sum != 100002 || last.Text != "last" {
		t.Errorf("they stand for %d, want 100002; the last is %+v", sum, last)
	}
	if most := 6 + int(took/w.every); len(list) > most {
		t.Errorf("%d lines, want %d at most", len(list), most)
	}
	time.Sleep(300 * time.Millisecond) // timers of a closed one do nothing
	if n := len(read(t, dir)); n != len(list) {
		t.Errorf("%d events after Close, want %d", n, len(list))
	}
}

// A line that never gets written does not keep a guard from ending.
func TestCloseEnds(t *testing.T) {
	dir := t.TempDir()
	w := NewWriter(dir, "c", "n")
	hang := make(chan struct{})
	defer close(hang)
	w.busy.Go(func() { <-hang })
	closed := make(chan struct{})
	go func() {
		w.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(time.Minute):
		t.Fatal("Close waits for ever")
	}
}

// What is denied on one GPU does not hide what is on another, or on none.
func TestNoteByGPU(t *testing.T) {
	dir := t.TempDir()
	w := NewWriter(dir, "c", "n")
	for range 2 {
		w.Note(Event{Kind: Denied, GPU: &GPU{Index: 0, UUID: "GPU-a"}, Text: "a"})
		w.Note(Event{Kind: Denied, GPU: &GPU{Index: 1, UUID: "GPU-b"}, Text: "b"})
		w.Note(Event{Kind: Denied, Text: "none"})
		w.busy.Wait()
	}
	if got := strings.Fields(texts(read(t, dir))); len(got) != 3 {
		t.Errorf("told %v, want one of each GPU and of none", got)
	}
	w.Close()
	if got := strings.Fields(texts(read(t, dir))); len(got) != 6 || strings.Join(got[3:], " ") != "a b none" {
		t.Errorf("told %v, want the others in their order", got)
	}
}

// Texts are made for what is written, not for what is counted.
func TestNoteLater(t *testing.T) {
	dir := t.TempDir()
	w := NewWriter(dir, "c", "n")
	var made atomic.Int64
	for n := range 1000 {
		w.NoteLater(Event{Kind: Denied}, func() string {
			made.Add(1)
			return fmt.Sprint(n)
		})
	}
	w.Close()
	if got := texts(read(t, dir)); got != "0 999" || made.Load() != 2 {
		t.Errorf("told %q, %d texts made; want the first and the last", got, made.Load())
	}
}

// Who follows only the new is not handed what was there, also where that fills both files.
func TestFollowNew(t *testing.T) {
	dir := t.TempDir()
	add(t, dir, "older")
	aside(t, dir)
	add(t, dir, "old")
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	go func() { // it is not told when it has begun
		for ctx.Err() == nil {
			_ = Append(dir, Event{Kind: End, Text: "new"})
			time.Sleep(10 * time.Millisecond)
		}
	}()
	seen := false
	err := FollowNew(ctx, dir, func(list []Event) error {
		for _, e := range list {
			if e.Text != "new" {
				t.Errorf("%q was there before", e.Text)
			}
			seen = true
		}
		stop()
		return nil
	})
	if err != nil || !seen {
		t.Errorf("%v, seen %v", err, seen)
	}
}
