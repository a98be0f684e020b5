package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/km"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// kmFile finds a file of the tree as it is now.
func (n node) kmFile(s *kmSource, path string) km.File {
	n.Helper()
	state, err := s.look()
	if err != nil {
		n.Fatal(err)
	}
	for _, f := range state.Files() {
		if f.Path == path {
			return f
		}
	}
	n.Fatalf("no file %s", path)
	return km.File{}
}

func TestKMOnce(t *testing.T) {
	n := newNode(t)
	full := "abcdef0123456789abcdef"
	r := n.reserve(ledger.Record{ID: full, VGPUs: []ledger.VGPU{{UUID: t4, Limit: 4 * quota.GiB}}})
	s := status(r)
	s.VGPUs[0].Used = quota.GiB
	s.Processes = []api.ProcessStatus{{PID: 4711, NSPID: 7, Name: "python", Used: []quota.Bytes{quota.GiB}}}
	fakeGuard(t, r.Control, statusLine(t, s))
	n.reserve(ledger.Record{ID: "silent", VGPUs: []ledger.VGPU{{UUID: h200, Limit: quota.GiB, Weight: 2}}})
	out := cgpu("km --once")
	for _, want := range []string{"0/abcdef012345/id:0\n", "0/abcdef012345/meminfo:Free: 3221225472\n0/abcdef012345/meminfo:PID: 4711 Mem: 1073741824\n",
		"0/abcdef012345/memsize:4294967296\n", "0/policy:1\n", "1/policy:2\n", "1/silent/weight:2\n", "1/free_weight:18\n", "version:0.0.0\n",
		"cgpu: km: 1/silent/meminfo: what container silent uses is not known: "} {
		if !strings.Contains(out, want) {
			t.Errorf("printed\n%s\nwithout %q", out, want)
		}
	}
}

// TestKMUnread: whoever reads a file a thousand times that cannot be read does not fill the administrator's journal.
func TestKMUnread(t *testing.T) {
	var out strings.Builder
	s := &kmSource{log: &out}
	for i := range 3000 {
		s.unread(km.File{Path: "0/a/meminfo"}, errors.New("its guard is gone"))
		s.unread(km.File{Path: "0/b/meminfo"}, errors.New("its guard is gone"))
		if i == 1000 {
			s.unread(km.File{Path: "0/a/meminfo"}, errors.New("something else"))
		}
	}
	if n := strings.Count(out.String(), "\n"); n != 4 {
		t.Errorf("%d lines: %.500s", n, out.String())
	}
	for i := range 10 * maxSaid {
		s.unread(km.File{Path: fmt.Sprint(i)}, errors.New("gone"))
	}
	if len(s.said) > maxSaid {
		t.Errorf("%d files are remembered", len(s.said))
	}
}

func TestKMUsage(t *testing.T) {
	newNode(t)
	for args, want := range map[string]string{
		"km a b":                  `error: km: "b": want one MOUNTPOINT`,
		"km relative":             `error: km: "relative": want an absolute path as MOUNTPOINT`,
		"km --once /x":            "error: km: --once mounts nothing",
		"km --once --allow-other": "error: km: --once mounts nothing",
		"km /dev/null":            "error: km: /dev/null: is no folder: name another",
		"km /proc/self":           "error: km: /proc/self: is no folder", // a link
		"km /proc":                "error: km: /proc: is not empty (",
	} {
		if out := cgpu(args); !strings.Contains(out, want) {
			t.Errorf("cgpu %s: printed %s, want %s", args, out, want)
		}
	}
}

func TestKMWrite(t *testing.T) {
	const full = "abcdef0123456789abcdef"
	preempt := sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 99}
	for _, tt := range []struct {
		file, text string
		said       string // in the log; empty: the write is good
		want       ledger.VGPU
		card       sched.Card
	}{
		{"0/abcdef012345/weight", "3\n", "", ledger.VGPU{UUID: t4, Limit: 4 * quota.GiB, Weight: 3}, preempt},
		{"0/abcdef012345/memsize", "6442450944\n", "", ledger.VGPU{UUID: t4, Limit: 6 * quota.GiB, Weight: 1}, preempt},
		{"0/abcdef012345/memsize", "3221225472\n", "", ledger.VGPU{UUID: t4, Limit: 3 * quota.GiB, Weight: 1}, preempt},
		{"0/policy", "3\n", "", ledger.VGPU{}, sched.Card{Policy: sched.PolicyFixed, MaxInst: 20, PrioRatio: 99}},
		{"0/max_inst", "8\n", "", ledger.VGPU{}, sched.Card{Policy: sched.PolicyPreempt, MaxInst: 8, PrioRatio: 99}},
		{"0/prio_ratio", "80\n", "", ledger.VGPU{}, sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 80}},

		{file: "0/abcdef012345/weight", text: "99\n", said: `cgpu: km: 0/abcdef012345/weight: "99": want a number from 1 to 64`},
		{file: "0/abcdef012345/memsize", text: "1073741824\n", said: "cgpu: km: 0/abcdef012345/memsize: 1073741824: container abcdef012345 uses 2048MiB: free some first"},
		{file: "0/abcdef012345/memsize", text: "12884901888\n", said: "asked for 12288MiB, but 11013MiB are free of 15109MiB"},
		{file: "1/abcdef012345/memsize", text: "1073741824\n", said: "", want: ledger.VGPU{UUID: h200, Limit: quota.GiB, Weight: 1}, card: preempt},
		{file: "0/max_inst", text: "1\n", said: "max-inst 1: 2 containers share it"},
		{file: "0/policy", text: "9", said: `"9": want a number from 0 to 5`},
		{file: "version", text: "1", said: "cgpu: km: version: it can be read only"},
	} {
		n := newNode(t)
		r := n.reserve(ledger.Record{ID: full, VGPUs: []ledger.VGPU{{UUID: t4, Limit: 4 * quota.GiB}, {UUID: h200, Limit: 4 * quota.GiB}}})
		n.reserve(ledger.Record{ID: "other", VGPUs: []ledger.VGPU{{UUID: t4, Limit: 4 * quota.GiB}}})
		s := status(r)
		s.VGPUs[0].Used = 2 * quota.GiB
		fakeGuard(t, r.Control, statusLine(t, s))
		var log strings.Builder
		source := &kmSource{runDir: n.dir, log: &log}
		err := source.write(n.kmFile(source, tt.file), []byte(tt.text))
		if (err == nil) != (tt.said == "") || !strings.Contains(log.String(), tt.said) || strings.Count(log.String(), "\n") > 1 {
			t.Errorf("%s %q: %v, said %q; want %q", tt.file, tt.text, err, log.String(), tt.said)
		}
		got, err := n.book.Find(full)
		if err != nil {
			t.Fatal(err)
		}
		for i, v := range got.VGPUs {
			want := r.VGPUs[i]
			if tt.want.UUID == v.UUID {
				want.Limit, want.Weight = tt.want.Limit, tt.want.Weight
			}
			if v != want {
				t.Errorf("%s %q: %+v, want %+v", tt.file, tt.text, v, want)
			}
		}
		cards, err := n.book.Cards()
		if err != nil {
			t.Fatal(err)
		}
		card, changed := cards[t4]
		if !changed {
			card = preempt
		}
		if tt.said == "" && card != tt.card || tt.said != "" && changed {
			t.Errorf("%s %q: card %+v, want %+v", tt.file, tt.text, card, tt.card)
		}
	}
}

// TestKMGone: who still has a container's file open changes nothing of the next container with its ID.
func TestKMGone(t *testing.T) {
	n := newNode(t)
	r := n.reserve(ledger.Record{ID: "web", VGPUs: []ledger.VGPU{{UUID: t4, Limit: quota.GiB}}})
	source := &kmSource{runDir: n.dir, log: new(strings.Builder)}
	f := n.kmFile(source, "0/web/weight")
	if err := n.book.Release(r.Nonce); err != nil {
		t.Fatal(err)
	}
	if err := source.write(f, []byte("3")); !errors.Is(err, km.ErrGone) {
		t.Errorf("ended: %v, want %v", err, km.ErrGone)
	}
	n.reserve(ledger.Record{ID: "web", Nonce: "later", VGPUs: []ledger.VGPU{{UUID: t4, Limit: quota.GiB}}})
	if err := source.write(f, []byte("5")); !errors.Is(err, km.ErrGone) {
		t.Errorf("restarted: %v, want %v", err, km.ErrGone)
	}
	if err := source.write(n.kmFile(source, "0/web/weight"), []byte("3")); err != nil {
		t.Error(err)
	}
	if got, err := n.book.Find("web"); err != nil || got.VGPUs[0].Weight != 3 {
		t.Errorf("%+v, %v", got, err)
	}
}

// TestKMPreload: without a guard the container's page has to learn of a change, and tells what is used.
func TestKMPreload(t *testing.T) {
	n := newNode(t)
	r := n.reserve(ledger.Record{ID: "friend", Preload: true, VGPUs: []ledger.VGPU{{UUID: t4, Limit: quota.GiB, Weight: 1}}})
	source := &kmSource{runDir: n.dir, log: os.Stderr}
	for file, text := range map[string]string{"0/friend/weight": "4", "0/friend/memsize": "2147483648"} {
		if err := source.write(n.kmFile(source, file), []byte(text)); err != nil {
			t.Error(err)
		}
	}
	p, err := page.Read(r.Page)
	if err != nil {
		t.Fatal(err)
	}
	if v := p.VGPU(0); v.Limit != uint64(2*quota.GiB) || v.Weight != 4 {
		t.Errorf("page has %+v", v)
	}
	if text, err := source.text(n.kmFile(source, "0/friend/meminfo")); err != nil || text != "Free: 2147483648\n" {
		t.Errorf("meminfo %q, %v", text, err)
	}
}

// TestKMTells: what is written leaves the events that cgpu set and cgpu policy leave.
func TestKMTells(t *testing.T) {
	n := newNode(t)
	n.reserve(ledger.Record{ID: "guarded", VGPUs: []ledger.VGPU{{UUID: t4, Limit: quota.GiB}}})
	n.reserve(dockered{name: "/web"}.make(t, ledger.Record{ID: "preload", Preload: true, VGPUs: []ledger.VGPU{{UUID: h200, Limit: quota.GiB}}}))
	source := &kmSource{runDir: n.dir, log: os.Stderr}
	for _, w := range [][2]string{{"1/policy", "2"}, {"1/policy", "2"}, {"1/max_inst", "8"}, {"0/guarded/weight", "2"}, {"1/preload/weight", "2"}, {"1/preload/memsize", "2147483648"}} {
		if err := source.write(n.kmFile(source, w[0]), []byte(w[1])); err != nil {
			t.Errorf("%s: %v", w, err)
		}
	}
	want := `T  policy     -             GPU 1: policy preempt → weight-preempt
T  policy     -             GPU 1: max-inst 20 → 8
T  set        preload       web: GPU 1: weight 1 → 2
T  set        preload       web: GPU 1: memory 1024MiB → 2048MiB
`
	if out := timed.ReplaceAllString(cgpu("events"), "T"); out != want {
		t.Errorf("printed\n%s\nwant\n%s", out, want)
	}
}

// TestKMUntil: a terminal that is closed ends it, unless it was started to stay.
func TestKMUntil(t *testing.T) {
	hangup := signal.Ignored(syscall.SIGHUP) // as under nohup, where it means nothing
	for sig, ignored := range map[syscall.Signal]bool{syscall.SIGHUP: hangup, syscall.SIGTERM: false, syscall.SIGWINCH: true} {
		ctx, stop := kmUntil(t.Context())
		// Caught here too, so that what is not caught there does not end the test.
		caught := make(chan os.Signal, 1)
		signal.Notify(caught, sig)
		if err := syscall.Kill(os.Getpid(), sig); err != nil {
			t.Fatal(err)
		}
		<-caught
		select {
		case <-ctx.Done():
			if ignored {
				t.Errorf("%v ends it", sig)
			}
		case <-time.After(200 * time.Millisecond):
			if !ignored {
				t.Errorf("%v does not end it", sig)
			}
		}
		signal.Stop(caught)
		stop()
	}
	signal.Ignore(syscall.SIGHUP)
	defer signal.Reset(syscall.SIGHUP)
	_, stop := kmUntil(t.Context())
	defer stop()
	if !signal.Ignored(syscall.SIGHUP) {
		t.Error("SIGHUP is not ignored any more under nohup")
	}
}

// TestKMInode: numbers that go-fuse and the kernel have for themselves are not given out.
func TestKMInode(t *testing.T) {
	seen := map[uint64]string{}
	for _, path := range []string{"version", "0", "0/policy", "0/web", "0/web/id", "1/web/id"} {
		for _, nonce := range []string{"", "a", "b"} {
			ino := inode(path, nonce)
			if ino < 2 || ino >= 1<<63 || seen[ino] != "" {
				t.Errorf("%s %s: %d, which %q has", path, nonce, ino, seen[ino])
			}
			seen[ino] = path + " " + nonce
		}
	}
}

// TestUnits: systemd takes the units that run cgpu.
func TestUnits(t *testing.T) {
	verify, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not installed")
	}
	for _, name := range []string{"cgpu-km.service", "cgpu-exporter.service", "cgpu-health.service"} {
		text, err := os.ReadFile("../../configs/" + name)
		if err != nil {
			t.Fatal(err)
		}
		// The program is not where the unit expects it, which verify would complain of.
		unit := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(unit, []byte(strings.ReplaceAll(string(text), "/usr/bin/cgpu", "/bin/true")), 0o644); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command(verify, "verify", "--man=no", unit).CombinedOutput()
		for line := range strings.Lines(string(out)) {
			if strings.Contains(line, name) {
				t.Errorf("%v: %s", err, line)
			}
		}
	}
}
