// SPDX-License-Identifier: Apache-2.0

package event

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Refusals beyond ten a minute are counted, and the count is told with the next minute's first.
func TestRefuse(t *testing.T) {
	dir := t.TempDir()
	at := time.Date(2026, 11, 21, 10, 0, 0, 0, time.UTC)
	tell := func(n int, at time.Time) {
		t.Helper()
		if err := refuse(dir, Event{Container: "c", Name: "ml/train/main", Text: fmt.Sprint(n)}, at); err != nil {
			t.Fatal(err)
		}
	}
	for n := range 35 {
		tell(n, at.Add(time.Duration(n)*time.Second))
	}
	if list := read(t, dir); len(list) != RefusedOfOne || list[9].Text != "9" || list[9].Name != "ml/train/main" || list[9].Kind != Refused {
		t.Fatalf("%+v", list)
	}
	tell(35, at.Add(time.Minute))
	tell(36, at.Add(time.Minute))
	list := read(t, dir)[RefusedOfOne:]
	if len(list) != 3 || list[0].Count != 25 || list[0].Container != "" || list[0].Kind != Refused || list[1].Text != "35" ||
		list[2].Text != "36" {
		t.Errorf("%+v", list)
	}
	// A burst after which nobody is refused is told by who looks, once, when its minute is over.
	later := at.Add(time.Hour)
	for n := range 12 {
		tell(n, later)
	}
	before := len(read(t, dir))
	for _, test := range []struct {
		after time.Duration
		lines int
	}{{30 * time.Second, 0}, {time.Minute, 1}, {2 * time.Minute, 1}} {
		if err := tellRefused(dir, later.Add(test.after)); err != nil {
			t.Fatal(err)
		}
		list := read(t, dir)[before:]
		if len(list) != test.lines || test.lines > 0 && (list[0].Count != 2 || list[0].Kind != Refused) {
			t.Errorf("after %v: %+v", test.after, list)
		}
	}
	if err := tellRefused(t.TempDir(), at); err != nil {
		t.Errorf("where nobody was refused: %v", err)
	}
	// A clock that was set back, and a file that is none, do not silence the node.
	tell(37, at.Add(-time.Hour))
	if err := os.WriteFile(filepath.Join(dir, refusedName), []byte(`{"of":[7,7,7],"since":`), 0o600); err != nil {
		t.Fatal(err)
	}
	tell(38, at)
	if list := read(t, dir); list[len(list)-1].Text != "38" || list[len(list)-2].Text != "37" {
		t.Errorf("%+v", list)
	}
}

// Many processes at once share one count.
func TestRefuseAtOnce(t *testing.T) {
	dir := t.TempDir()
	now := time.Now().UTC()
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			for deadline := time.Now().Add(time.Minute); ; { // on a busy machine others have the lock for longer than lockWait
				err := refuse(dir, Event{Container: "c"}, now)
				if err == nil {
					return
				}
				if !errors.Is(err, syscall.EWOULDBLOCK) || time.Now().After(deadline) {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if n := len(read(t, dir)); n != RefusedOfOne {
		t.Errorf("%d told, want %d", n, RefusedOfOne)
	}
	if err := refuse(filepath.Join(dir, "none"), Event{}, now); err == nil {
		t.Error("without a run directory")
	}
}

// One whose containers crash in a loop leaves others theirs, and all together are bounded.
func TestRefuseOfOthers(t *testing.T) {
	dir := t.TempDir()
	now := time.Date(2026, 11, 21, 10, 0, 0, 0, time.UTC)
	told := func(names ...string) (n int) {
		t.Helper()
		before := len(read(t, dir))
		for _, name := range names {
			if err := refuse(dir, Event{Container: "c", Name: name}, now); err != nil {
				t.Fatal(err)
			}
		}
		return len(read(t, dir)) - before
	}
	var loop []string
	for n := range 1000 {
		loop = append(loop, fmt.Sprintf("noisy/pod-%d/main", n))
	}
	if n := told(loop...); n != RefusedOfOne {
		t.Errorf("%d of one namespace are told, want %d", n, RefusedOfOne)
	}
	if n := told("quiet/web/main", "", "docker-name"); n != 3 {
		t.Errorf("%d of three others are told", n)
	}
	for n := range 100 {
		loop[n] = fmt.Sprintf("tenant-%d/web/main", n)
	}
	if n := told(loop[:100]...); n != RefusedAMinute-RefusedOfOne-3 {
		t.Errorf("%d of a hundred namespaces are told", n)
	}
	if text, err := os.ReadFile(filepath.Join(dir, refusedName)); err != nil || len(text) > 1024 {
		t.Errorf("the file has %d bytes, %v", len(text), err)
	}
}
