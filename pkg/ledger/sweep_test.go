// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/page"
)

// left lists a folder of the run directory.
func left(t *testing.T, l *Ledger, folder string) []string {
	t.Helper()
	entries, err := os.ReadDir(l.path(folder))
	must(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestSweep(t *testing.T) {
	l := open(t)
	const a, b, c = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbb0", "cccccccccccccccc"
	reserve(t, l, request("a", a, gib))
	past := time.Now().Add(-time.Hour)
	for _, folder := range []struct {
		name string
		old  map[string]bool
		left string
		done Swept
	}{
		{socketsName, map[string]bool{a + ".sock": true, a + ".ctl": true, b + ".sock": true, b + ".ctl": true, c + ".sock": false, b: true,
			"notes.ctl": true, b + ".pause": true},
			a + ".ctl " + a + ".sock " + b + " " + b + ".pause " + c + ".sock notes.ctl", Swept{Sockets: 2}},
		{pagesName, map[string]bool{a: true, b: true, c: false, b + ".sock": true, "notes": true, "0000": true},
			"0000 " + a + " " + b + ".sock " + c + " notes", Swept{Pages: 1}},
	} {
		dir := l.path(folder.name)
		must(t, os.Mkdir(dir, 0o711))
		for name, old := range folder.old {
			path := filepath.Join(dir, name)
			must(t, os.WriteFile(path, nil, 0o600))
			if old {
				must(t, os.Chtimes(path, past, past))
			}
		}
		if done, err := l.Sweep(); err != nil || done != folder.done {
			t.Errorf("%s: %+v, %v", folder.name, done, err)
		}
		if got := strings.Join(left(t, l, folder.name), " "); got != folder.left {
			t.Errorf("%s: left %s, want %s", folder.name, got, folder.left)
		}
	}
}

// TestSweepStubborn: what cannot be removed is told, and does not keep the others.
func TestSweepStubborn(t *testing.T) {
	l := open(t)
	reserve(t, l, request("a", "aaaaaaaaaaaaaaaa", gib))
	past := time.Now().Add(-time.Hour)
	for _, nonce := range []string{"0000000000000000", "1111111111111111"} {
		dir := filepath.Join(l.path(pagesName), nonce)
		must(t, os.MkdirAll(dir, 0o711))
		if nonce[0] == '0' {
			must(t, os.WriteFile(filepath.Join(dir, "notes"), nil, 0o600))
		}
		must(t, os.Chtimes(dir, past, past))
	}
	if done, err := l.Sweep(); err == nil || done != (Swept{Pages: 1}) {
		t.Errorf("%+v, %v", done, err)
	}
}

// TestSweepLogs: a pod that is tried again for ever leaves so many logs and no more; those of living containers stay, however old, and
// what is no guard's log is not touched.
func TestSweepLogs(t *testing.T) {
	l := open(t)
	const living = "aaaaaaaaaaaaaaaa"
	reserve(t, l, request("a", living, gib))
	must(t, os.Mkdir(l.path(logsName), 0o700))
	begin := time.Now().Add(-time.Hour)
	write := func(name string, after int) {
		path := filepath.Join(l.path(logsName), name)
		must(t, os.WriteFile(path, []byte("x"), 0o600))
		must(t, os.Chtimes(path, begin, begin.Add(time.Duration(after)*time.Second)))
	}
	want := []string{"a-" + living + ".log", "doctor-self.log", "sim.log"}
	for _, name := range want {
		write(name, 0)
	}
	const more = 200
	for i := range keptLogs + more {
		name := fmt.Sprintf("pod-%d-%016x.log", i%7, i)
		write(name, 1+i)
		if i >= more {
			want = append(want, name)
		}
	}
	if done, err := l.Sweep(); err != nil || done != (Swept{Logs: more}) {
		t.Errorf("%+v, %v", done, err)
	}
	slices.Sort(want)
	if got := left(t, l, logsName); !slices.Equal(got, want) {
		t.Errorf("left %v, want %v", got, want)
	}
	if done, err := l.Sweep(); err != nil || done != (Swept{}) {
		t.Errorf("again: %+v, %v", done, err)
	}
}

// TestSweepWithoutLedger: whoever removes the ledger does not take the sockets of running containers with it.
func TestSweepWithoutLedger(t *testing.T) {
	l := open(t)
	reserve(t, l, request("a", "aaaaaaaaaaaaaaaa", gib))
	must(t, os.Mkdir(l.path(socketsName), 0o711))
	path := filepath.Join(l.path(socketsName), "aaaaaaaaaaaaaaaa.sock")
	must(t, os.WriteFile(path, nil, 0o600))
	past := time.Now().Add(-time.Hour)
	must(t, os.Chtimes(path, past, past))
	must(t, os.Remove(l.path(fileName)))
	if done, err := l.Sweep(); err != nil || done != (Swept{}) {
		t.Errorf("%+v, %v", done, err)
	}
}

// TestSweepBundles: what killed runtimes leave is bounded; a container that lives, or has ended not long ago, keeps its bundle.
func TestSweepBundles(t *testing.T) {
	l := open(t)
	const living = "aaaaaaaaaaaaaaaa"
	reserve(t, l, request("a", living, gib))
	begin := time.Now().Add(-time.Hour)
	make := func(nonce string, changed time.Time) {
		dir := page.Bundle(l.dir, nonce)
		must(t, os.MkdirAll(dir, 0o700))
		must(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte("{}"), 0o600))
		must(t, os.Chtimes(dir, changed, changed))
	}
	make(living, begin)
	want := []string{living}
	const more = 100
	for i := range keptBundles + more {
		nonce := fmt.Sprintf("%016x", i)
		make(nonce, begin.Add(time.Duration(i)*time.Second))
		if i >= more {
			want = append(want, nonce)
		}
	}
	slices.Sort(want)
	for _, done := range []Swept{{Bundles: more}, {}} {
		if got, err := l.Sweep(); err != nil || got != done {
			t.Errorf("%+v, %v, want %+v", got, err, done)
		}
		if got := left(t, l, bundlesName); !slices.Equal(got, want) {
			t.Errorf("left %v, want %v", got, want)
		}
	}
}

// TestGCTakesPages: a page that is not old enough for Sweep goes with its record.
func TestGCTakesPages(t *testing.T) {
	l := open(t)
	dead := request("a", "aaaaaaaaaaaaaaaa", gib)
	dead.Record.LauncherPID, dead.Record.LauncherStart = 1<<29, 1
	reserve(t, l, dead)
	must(t, page.Create(page.File(l.dir, dead.Record.Nonce), page.Header{}, nil))
	if removed, err := l.GC(); err != nil || len(removed) != 1 {
		t.Fatal(removed, err)
	}
	if got := left(t, l, pagesName); len(got) > 0 {
		t.Errorf("left %v", got)
	}
}
