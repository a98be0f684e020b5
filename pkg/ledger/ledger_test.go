// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// open makes a ledger whose processes are the test's: pid 1 to 99 live, others are dead, 666 cannot be looked at.
func open(t testing.TB) *Ledger {
	l := Open(filepath.Join(t.TempDir(), "run"))
	l.status = func(pid int, start uint64) liveness {
		switch {
		case pid == 666:
			return unknown
		case pid < 100:
			return alive
		}
		return dead
	}
	return l
}

func request(id, nonce string, limit quota.Bytes) Request {
	return Request{Record: Record{ID: id, Nonce: nonce, VGPUs: slice("GPU-a", limit), LauncherPID: 1}, GPUs: twoGPUs, Card: preempt}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func reserve(t testing.TB, l *Ledger, req Request) Record {
	t.Helper()
	r, err := l.Reserve(req)
	must(t, err)
	return r
}

func ids(t testing.TB, l *Ledger) string {
	t.Helper()
	records, err := l.List()
	must(t, err)
	var out []string
	for _, r := range records {
		out = append(out, r.ID+"/"+r.Nonce)
	}
	return strings.Join(out, " ")
}

func TestReserveAndRelease(t *testing.T) {
	l := open(t)
	req := request("abc", "n1", 6*gib)
	req.Record.VGPUs[0].Weight = 0
	r := reserve(t, l, req)
	if r.Created.IsZero() || r.VGPUs[0].Weight != 1 || req.Record.VGPUs[0].Weight != 0 {
		t.Errorf("reserved %+v", r)
	}
	reserve(t, l, request("abd", "n2", 10*gib))
	_, err := l.Reserve(request("x", "n3", gib))
	var refusal *Refusal
	if !errors.As(err, &refusal) || refusal.Free != 0 || refusal.Asked != gib {
		t.Errorf("no room: %v", err)
	}
	if got, err := l.Get("n1"); err != nil || got.ID != "abc" || !got.Created.Equal(r.Created) {
		t.Errorf("get: %+v, %v", got, err)
	}
	if got, err := l.Find("abd"); err != nil || got.ID != "abd" {
		t.Errorf("find: %+v, %v", got, err)
	}
	if _, err := l.Find("ab"); err == nil || errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "may be abc or abd: give") {
		t.Errorf("find an ambiguous one: %v", err)
	}
	must(t, l.Update("n2", func(r *Record) error { r.Name = "abc"; return nil }))
	must(t, l.Update("n1", func(r *Record) error { r.Name = "web"; return nil }))
	for name, want := range map[string]string{"abc": "abc", "web": "abc"} {
		if got, err := l.Find(name); err != nil || got.ID != want {
			t.Errorf("find %q: %+v, %v", name, got, err)
		}
	}
	must(t, l.Update("n2", func(r *Record) error { r.Name = "web"; return nil }))
	if _, err := l.Find("web"); err == nil || errors.Is(err, ErrNotFound) ||
		!strings.Contains(err.Error(), "may be abc (web) or abd (web): give") {
		t.Errorf("find an ambiguous name: %v", err)
	}
	must(t, l.Update("n2", func(r *Record) error { r.Name = "ab"; return nil }))
	if _, err := l.Find("ab"); err == nil || !strings.Contains(err.Error(), "may be abc (web) or abd (ab): give") {
		t.Errorf("a name must not settle it: %v", err)
	}
	for _, none := range []string{"", "y", "we"} {
		if _, err := l.Find(none); !errors.Is(err, ErrNotFound) {
			t.Errorf("find %q: %v", none, err)
		}
	}
	must(t, l.Release("other"))
	if got := ids(t, l); got != "abc/n1 abd/n2" {
		t.Errorf("a release with another nonce left %s", got)
	}
	must(t, l.Release("n1"))
	must(t, l.Release("n1"))
	must(t, l.Release("n2"))
	must(t, l.Release("n2"))
	if got := ids(t, l); got != "" {
		t.Errorf("left %s", got)
	}
}

func TestNothingIsMadeByReaders(t *testing.T) {
	l := open(t)
	must(t, l.Release("n"))
	if _, err := l.GC(); err != nil {
		t.Error(err)
	}
	if done, err := l.Sweep(); err != nil || done != (Swept{}) {
		t.Error(done, err)
	}
	if err := l.Update("n", func(*Record) error { return nil }); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
	if r, err := l.List(); len(r) != 0 || err != nil {
		t.Error(r, err)
	}
	if _, err := os.Stat(l.dir); !errors.Is(err, fs.ErrNotExist) {
		t.Error("the run directory was made")
	}
}

func TestModes(t *testing.T) {
	old := syscall.Umask(0)
	defer syscall.Umask(old)
	l := open(t)
	reserve(t, l, request("a", "n", gib))
	for name, want := range map[string]fs.FileMode{"": 0o711, fileName: 0o600, lockName: 0o600} {
		info, err := os.Stat(filepath.Join(l.dir, name))
		must(t, err)
		if info.Mode().Perm() != want {
			t.Errorf("%q: mode %o, want %o", name, info.Mode().Perm(), want)
		}
	}
}

func TestRestart(t *testing.T) {
	l := open(t)
	first := request("a", "n1", 10*gib)
	first.Record.LauncherPID = 100
	reserve(t, l, first)
	// Its own old amount does not count, and the old guard's late release does not touch the new record.
	reserve(t, l, request("a", "n2", 16*gib))
	must(t, l.Release("n1"))
	if got := ids(t, l); got != "a/n2" {
		t.Errorf("left %s", got)
	}
	// A refused restart leaves the old record.
	reserve(t, l, func() Request { r := request("b", "n3", gib); r.Record.VGPUs = slice("GPU-b", gib); return r }())
	if _, err := l.Reserve(request("b", "n4", gib)); err == nil {
		t.Error("no room, and yet")
	}
	if got := ids(t, l); got != "a/n2 b/n3" {
		t.Errorf("left %s", got)
	}
}

func TestARunningContainerIsNotReplaced(t *testing.T) {
	for name, c := range map[string]struct {
		old     Record
		refused string
	}{
		"its program runs":         {Record{LauncherPID: 100, InitPID: 2}, "in use by process 2"},
		"cannot tell":              {Record{LauncherPID: 100, InitPID: 666}, "in use by process 666"},
		"program ended":            {Record{LauncherPID: 100, InitPID: 100, GuardPID: 3}, ""},
		"another launcher at work": {Record{LauncherPID: 2}, "being created by process 2"},
		"the same launcher":        {Record{LauncherPID: 1}, ""},
		"guard waits in vain":      {Record{LauncherPID: 100, GuardPID: 2}, ""},
	} {
		l := open(t)
		old := request("a", "n1", gib)
		old.Record.LauncherPID = 1
		reserve(t, l, old)
		must(t, l.Update("n1", func(r *Record) error {
			r.LauncherPID, r.InitPID, r.GuardPID = c.old.LauncherPID, c.old.InitPID, c.old.GuardPID
			return nil
		}))
		_, err := l.Reserve(request("a", "n2", gib))
		if c.refused == "" && err != nil || c.refused != "" && (err == nil || !strings.Contains(err.Error(), c.refused)) {
			t.Errorf("%s: got %v, want %q", name, err, c.refused)
		}
	}
}

// rooted is a request for a container of a low-level runtime's root.
func rooted(root, id, nonce string) Request {
	req := request(id, nonce, gib)
	req.Record.Root = root
	return req
}

// Low-level runtimes tell containers apart by root and ID. Where a root is not known, the ID alone counts.
func TestRoots(t *testing.T) {
	l := open(t)
	reserve(t, l, rooted("/run/a", "web", "n1"))
	reserve(t, l, rooted("/run/b", "web", "n2"))
	running := func(nonce string) {
		must(t, l.Update(nonce, func(r *Record) error { r.InitPID, r.LauncherPID, r.Root = 2, 100, "/run/x"; return nil }))
	}
	running("n1")
	for _, root := range []string{"/run/a", ""} {
		if _, err := l.Reserve(rooted(root, "web", "n3")); err == nil || !strings.Contains(err.Error(), "in use by process 2") {
			t.Errorf("root %q: %v", root, err)
		}
	}
	// A restart takes its own predecessor's place, and no other's.
	must(t, l.Update("n2", func(r *Record) error { r.LauncherPID = 100; return nil }))
	reserve(t, l, rooted("/run/b", "web", "n4"))
	if got := ids(t, l); got != "web/n1 web/n4" {
		t.Errorf("left %s", got)
	}
	if r, err := l.Get("n1"); err != nil || r.Root != "/run/a" {
		t.Errorf("the root was changed: %+v, %v", r, err)
	}
	must(t, l.Release("n1"))
	if got := ids(t, l); got != "web/n4" {
		t.Errorf("left %s", got)
	}
}

// A program that does not know roots writes the ledger without them. Until those containers have ended their IDs are theirs alone.
func TestRootsLost(t *testing.T) {
	l := open(t)
	reserve(t, l, rooted("/run/a", "web", "n1"))
	reserve(t, l, rooted("/run/b", "web", "n2"))
	must(t, l.change(func(f *file) error {
		f.Records[0].Root, f.Records[1].Root = "", ""
		f.Records[0].LauncherPID, f.Records[1].LauncherPID = 2, 2
		return nil
	}))
	if text, err := os.ReadFile(File(l.dir)); err != nil || strings.Contains(string(text), `"root"`) {
		t.Fatalf("%s, %v", text, err)
	}
	if _, err := l.Reserve(rooted("/run/c", "web", "n3")); err == nil || !strings.Contains(err.Error(), "being created by process 2") {
		t.Error(err)
	}
	must(t, l.Release("n2"))
	must(t, l.Update("n1", func(r *Record) error { r.LauncherPID = 100; return nil }))
	reserve(t, l, rooted("/run/c", "web", "n3"))
	if got := ids(t, l); got != "web/n3" {
		t.Errorf("left %s", got)
	}
}

// Who names a container that several are is told how to name each.
func TestAmbiguous(t *testing.T) {
	l := open(t)
	for _, root := range []string{"/run/a", "/run/b", "/run/c"} {
		reserve(t, l, rooted(root, "web", "n"+root[5:]))
	}
	must(t, l.change(func(f *file) error { f.Records[1].Root, f.Records[1].Bundle = "", "/var/b\n"; return nil }))
	const want = `may be na (root "/run/a") or nb (bundle "/var/b\n") or one of 1 more: give one of these`
	for _, typed := range []string{"web", "we"} {
		if _, err := l.Find(typed); err == nil || err.Error() != `container "`+typed+`": `+want {
			t.Errorf("%s: %v", typed, err)
		}
	}
	for _, nonce := range []string{"na", "nb", "nc"} {
		if r, err := l.Find(nonce); err != nil || r.Nonce != nonce {
			t.Errorf("%s: %+v, %v", nonce, r, err)
		}
	}
	// A nonce is whole or nothing, and a name is not taken for one.
	if _, err := l.Find("n"); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
	must(t, l.Update("na", func(r *Record) error { r.Name = "nb"; return nil }))
	if r, err := l.Find("nb"); err != nil || r.Nonce != "nb" {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestUpdate(t *testing.T) {
	l := open(t)
	reserve(t, l, request("a", "n", gib))
	must(t, l.Update("n", func(r *Record) error { r.GuardPID, r.ID, r.Nonce = 7, "z", "z"; return nil }))
	if r, err := l.Find("a"); err != nil || r.GuardPID != 7 || r.Nonce != "n" {
		t.Errorf("got %+v, %v", r, err)
	}
	stop := errors.New("stop")
	if err := l.Update("n", func(r *Record) error { r.GuardPID = 8; return stop }); !errors.Is(err, stop) {
		t.Error(err)
	}
	if r, _ := l.Find("a"); r.GuardPID != 7 {
		t.Error("a failed update was stored")
	}
	if err := l.Update("other", func(r *Record) error { return nil }); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
}

func TestGC(t *testing.T) {
	for name, c := range map[string]struct {
		r    Record
		gone bool
	}{
		"being created":                     {Record{LauncherPID: 1}, false},
		"creation died":                     {Record{LauncherPID: 100}, true},
		"guarded":                           {Record{LauncherPID: 100, GuardPID: 1}, false},
		"guard died before the container":   {Record{LauncherPID: 100, GuardPID: 100}, true},
		"guard died, container lives":       {Record{LauncherPID: 100, GuardPID: 100, InitPID: 1}, false},
		"both died":                         {Record{LauncherPID: 100, GuardPID: 100, InitPID: 100}, true},
		"container died, guard cleaning":    {Record{LauncherPID: 100, GuardPID: 1, InitPID: 100}, false},
		"guard cannot be looked at":         {Record{LauncherPID: 100, GuardPID: 666}, false},
		"program cannot be looked at":       {Record{LauncherPID: 100, GuardPID: 100, InitPID: 666}, false},
		"nobody known":                      {Record{}, false},
		"runc run: launcher lives, no more": {Record{LauncherPID: 1, GuardPID: 100, InitPID: 100}, true},

		"preload, being created":               {Record{Preload: true, LauncherPID: 1}, false},
		"preload, creation died":               {Record{Preload: true, LauncherPID: 100}, true},
		"preload, runs":                        {Record{Preload: true, LauncherPID: 100, InitPID: 1}, false},
		"preload, ended":                       {Record{Preload: true, LauncherPID: 100, InitPID: 100}, true},
		"preload, ended before runc run":       {Record{Preload: true, LauncherPID: 1, InitPID: 100}, true},
		"preload, cannot be looked at":         {Record{Preload: true, LauncherPID: 100, InitPID: 666}, false},
		"preload, the simulator's guard lives": {Record{Preload: true, LauncherPID: 100, GuardPID: 1, InitPID: 100}, false},
	} {
		l := open(t)
		reserve(t, l, request("keep", "k", gib))
		c.r.ID, c.r.Nonce, c.r.VGPUs = "a", "n", slice("GPU-a", 15*gib)
		reserve(t, l, Request{Record: c.r, GPUs: twoGPUs, Card: preempt})
		// Reserve itself drops the dead when it needs their room, and only then.
		_, err := l.Reserve(request("b", "b", 2*gib))
		if (err == nil) != c.gone {
			t.Errorf("%s: reserve beside it: %v", name, err)
		}
		must(t, l.Release("b"))
		if c.gone {
			reserve(t, l, Request{Record: c.r, GPUs: twoGPUs, Card: preempt})
		}
		removed, err := l.GC()
		if err != nil || (len(removed) == 1) != c.gone {
			t.Errorf("%s: removed %v, %v", name, removed, err)
		}
		if got := ids(t, l); (got == "keep/k") != c.gone {
			t.Errorf("%s: left %s", name, got)
		}
	}
}

func TestDamaged(t *testing.T) {
	for name, content := range map[string]string{"empty": "", "cut": `{"version":1,"rec`, "foreign": "hello",
		"newer": `{"version":2,"records":[]}`, "older": `{}`,
		"a card": `{"version":1,"records":[],"cards":{"GPU-a":{"policy":1,"maxInst":0,"prioRatio":99}}}`} {
		l := open(t)
		must(t, os.MkdirAll(l.dir, 0o700))
		path := filepath.Join(l.dir, fileName)
		must(t, os.WriteFile(path, []byte(content), 0o600))
		_, errReserve := l.Reserve(request("a", "n", gib))
		_, errList := l.List()
		_, errGC := l.GC()
		for _, err := range []error{errReserve, errList, errGC, l.Release("n")} {
			if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "then remove the file") ||
				strings.Contains(err.Error(), "\n") {
				t.Errorf("%s: %v", name, err)
			}
		}
		if _, err := l.Sweep(); err == nil { // what is nobody's cannot be told
			t.Errorf("%s: swept", name)
		}
		if data, _ := os.ReadFile(path); string(data) != content {
			t.Errorf("%s: the file was changed to %q", name, data)
		}
	}
}

func TestLockTimeout(t *testing.T) {
	l := open(t)
	reserve(t, l, request("a", "n", gib))
	held, err := l.lock()
	must(t, err)
	l.lockTimeout = 20 * time.Millisecond
	if err := l.Release("n"); err == nil || !strings.Contains(err.Error(), lockName) {
		t.Errorf("got %v", err)
	}
	if r, err := l.List(); len(r) != 1 || err != nil {
		t.Error("readers need no lock:", r, err)
	}
	held.release()
	l.lockTimeout = 10 * time.Second
	must(t, l.Release("n")) // the wait that was given up does not keep the lock
}

// A lock file that was removed while somebody waited for it must not let two in.
func TestLockFileRemoved(t *testing.T) {
	l := open(t)
	reserve(t, l, request("a", "n", gib))
	held, err := l.lock()
	must(t, err)
	waiter := make(chan *lock)
	go func() {
		k, err := l.lock()
		if err != nil {
			t.Error(err)
		}
		waiter <- k
	}()
	time.Sleep(50 * time.Millisecond)
	must(t, os.Remove(l.path(lockName)))
	other, err := l.lock() // makes a new file
	must(t, err)
	held.release()
	select {
	case <-waiter:
		t.Error("two hold the lock")
		return
	case <-time.After(50 * time.Millisecond):
	}
	other.release()
	(<-waiter).release()
}

func TestProcess(t *testing.T) {
	start, err := ProcStart(os.Getpid())
	if err != nil || start == 0 {
		t.Fatal(start, err)
	}
	if got := processStatus(os.Getpid(), start); got != alive {
		t.Errorf("myself: %v", got)
	}
	if got := processStatus(os.Getpid(), start+1); got != dead {
		t.Errorf("another of my number: %v", got)
	}
	for _, pid := range []int{0, -1, 1 << 30} {
		if _, err := ProcStart(pid); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("process %d: %v", pid, err)
		}
	}
	child := exec.Command("sleep", "60")
	must(t, child.Start())
	start, err = ProcStart(child.Process.Pid)
	must(t, err)
	if got := processStatus(child.Process.Pid, start); got != alive {
		t.Errorf("child: %v", got)
	}
	must(t, child.Process.Kill())
	for deadline := time.Now().Add(time.Minute); processStatus(child.Process.Pid, start) != dead; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a zombie counts as alive")
		}
	}
	_ = child.Wait()
	if got := processStatus(child.Process.Pid, start); got != dead {
		t.Errorf("after wait: %v", got)
	}
}

func TestParseStat(t *testing.T) {
	const rest = " 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 3 18 4242 20 21"
	for line, want := range map[string]stat{
		"7 (cat) S" + rest:             {'S', 3, 4242},
		"7 (a b) c) Z" + rest + "\n":   {'Z', 3, 4242},
		"7 () R 1 2 3 (x) R) D" + rest: {'D', 3, 4242},
		"7 (a\nb) T" + rest:            {'T', 3, 4242},
	} {
		if got, ok := parseStat([]byte(line)); !ok || got != want {
			t.Errorf("%q: got %+v, %v", line, got, ok)
		}
	}
	for _, line := range []string{"", "7", "7 (cat", "7 (cat)", "7 (cat) S 1 2", "7 (cat) S" + strings.Repeat(" x", 30)} {
		if _, ok := parseStat([]byte(line)); ok {
			t.Errorf("%q was read", line)
		}
	}
}
