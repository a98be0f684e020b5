// SPDX-License-Identifier: Apache-2.0

package nvmlclient

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// limiterOf is one whose files are below a folder, on a machine with cgroup v2 if it has the file that this makes there. Process 7 and
// this one are in the cgroups that are given.
func limiterOf(t *testing.T, of7, own string) limiter {
	t.Helper()
	dir := t.TempDir()
	l := limiter{proc: filepath.Join(dir, "proc"), root: filepath.Join(dir, "cgroup"), start: func(int) (uint64, error) { return 99, nil },
		patience: time.Minute}
	write(t, filepath.Join(l.proc, "7/cgroup"), of7)
	write(t, filepath.Join(l.proc, "self/cgroup"), own)
	write(t, filepath.Join(l.root, "cgroup.controllers"), "cpu memory\n")
	return l
}

// TestCgroup: only one that is the container's own is limited.
func TestCgroup(t *testing.T) {
	const own = "0::/system.slice/docker.service\n"
	for name, tt := range map[string]struct {
		cgroup string // of process 7
		v1     bool
		path   string
		err    string
	}{
		"its own":        {cgroup: "0::/a.slice/x.scope\n", path: "/a.slice/x.scope"},
		"beside v1":      {cgroup: "4:memory:/docker/x\n0::/docker/x\n", path: "/docker/x"},
		"v1":             {cgroup: "4:memory:/docker/x\n0::/docker/x\n", v1: true, err: "cgroups of v2 only"},
		"none of v2":     {cgroup: "4:memory:/docker/x\n", err: "process 7 is in no cgroup of v2"},
		"the engine's":   {cgroup: own, err: "process 7 has no cgroup of its own"},
		"the root":       {cgroup: "0::/\n", err: "no cgroup of its own"},
		"another's view": {cgroup: "0::/../x\n", err: "no cgroup of its own"},
	} {
		l := limiterOf(t, tt.cgroup, own)
		if tt.v1 {
			_ = os.Remove(filepath.Join(l.root, "cgroup.controllers"))
		}
		if path, err := l.cgroup(7); path != tt.path || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s: %q, %v, want %q %q", name, path, err, tt.path, tt.err)
		}
	}
}

// TestLimit: the driver is told the limits of the cgroup that was limited at the start, also where the first process has moved itself into
// one below, and nothing where that is not known for sure.
func TestLimit(t *testing.T) {
	const args = "-limit /a.slice/x.scope GPU-a=1073741824 GPU-b=2147483648"
	vgpus := []ledger.VGPU{{UUID: "GPU-a", Slice: quota.Slice{Limit: quota.GiB}}, {UUID: "GPU-b", Slice: quota.Slice{Limit: 2 * quota.GiB}}}
	for name, tt := range map[string]struct {
		now, limited string
		start        uint64
		vgpus        []ledger.VGPU
		args         string // below the root of cgroups
		err          string
	}{
		"its own":    {now: "/a.slice/x.scope", limited: "/a.slice/x.scope", vgpus: vgpus, args: args},
		"systemd":    {now: "/a.slice/x.scope/init.scope", limited: "/a.slice/x.scope", vgpus: vgpus, args: args},
		"whole GPUs": {now: "/a.slice/x.scope"},
		"unknown":    {now: "/a.slice/x.scope", vgpus: vgpus, err: "does not say which cgroup"},
		"moved":      {now: "/b.slice", limited: "/a.slice/x.scope", vgpus: vgpus, err: `is in cgroup "/b.slice", and not in "/a.slice/x.scope"`},
		"a sibling":  {now: "/a.slice/x.scope2", limited: "/a.slice/x.scope", vgpus: vgpus, err: "is in cgroup"},
		"another by now": {now: "/a.slice/x.scope", limited: "/a.slice/x.scope", start: 1, vgpus: vgpus,
			err: "first process, 7, is gone"},
	} {
		var told []string
		l := limiterOf(t, "0::"+tt.now+"\n", "0::/\n")
		l.run = func(args []string) error { told = slices.Clone(args); return nil }
		l.record = func() (ledger.Record, error) {
			return ledger.Record{InitPID: 7, InitStart: 99 - tt.start, VGPUs: tt.vgpus, LimitedCgroup: tt.limited}, nil
		}
		err := l.limit()
		if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s: %v, want %q", name, err, tt.err)
		}
		if got := strings.ReplaceAll(strings.Join(told, " "), l.root, ""); got != tt.args {
			t.Errorf("%s: cgpu-refresh %s, want %s", name, got, tt.args)
		}
	}
}

// TestLimitChanged: the last limit that is set is that of the ledger, whoever changed it while the driver was asked.
func TestLimitChanged(t *testing.T) {
	l := limiterOf(t, "0::/x\n", "0::/\n")
	r := ledger.Record{InitPID: 7, InitStart: 99, LimitedCgroup: "/x", VGPUs: []ledger.VGPU{{UUID: "GPU-a", Slice: quota.Slice{Limit: 8}}}}
	l.record = func() (ledger.Record, error) {
		r.VGPUs = slices.Clone(r.VGPUs)
		return r, nil
	}
	changes := []quota.Bytes{6}
	var driver string
	l.run = func(args []string) error {
		if len(changes) > 0 { // another's, which the driver has before this one
			r.VGPUs[0].Limit, changes = changes[0], changes[1:]
		}
		r.VGPUs[0].Weight++ // which is nothing to the driver
		driver = args[2]
		return nil
	}
	if err := l.limit(); err != nil || driver != "GPU-a=6" {
		t.Errorf("the driver has %s, %v", driver, err)
	}
	for n := range 100 {
		changes = append(changes, quota.Bytes(10+n))
	}
	if err := l.limit(); err == nil || !strings.Contains(err.Error(), "changed again") || len(changes) < 90 {
		t.Errorf("without end: %v, %d left", err, len(changes))
	}
	l.record = func() (ledger.Record, error) { return ledger.Record{}, ledger.ErrNotFound }
	if err := l.limit(); !errors.Is(err, ledger.ErrNotFound) {
		t.Errorf("a container that is gone: %v", err)
	}
}

// TestTighten: the driver has a lower limit before the ledger promises the rest to others, and a higher one never.
func TestTighten(t *testing.T) {
	vgpus := []ledger.VGPU{{UUID: "GPU-a", Slice: quota.Slice{Limit: 8}}, {UUID: "GPU-b", Slice: quota.Slice{Limit: 4}}}
	for name, tt := range map[string]struct {
		only  string
		limit quota.Bytes
		want  string
	}{
		"lower":         {"", 3, "GPU-a=3 GPU-b=3"},
		"lower for one": {"", 6, "GPU-a=6"},
		"of one":        {"GPU-b", 3, "GPU-b=3"},
		"as it is":      {"GPU-b", 4, ""},
		"higher":        {"", 9, ""},
	} {
		var told []string
		l := limiterOf(t, "0::/x\n", "0::/\n")
		l.run = func(args []string) error { told = args[2:]; return nil }
		r := ledger.Record{InitPID: 7, InitStart: 99, LimitedCgroup: "/x", VGPUs: vgpus}
		err := l.tighten(r, func(uuid string) bool { return tt.only == "" || tt.only == uuid }, tt.limit)
		if got := strings.Join(told, " "); err != nil || got != tt.want {
			t.Errorf("%s: %s, %v, want %s", name, got, err, tt.want)
		}
	}
}

// TestLimitHangs: nobody waits for ever for a driver that hangs, whose process cannot even be killed.
func TestLimitHangs(t *testing.T) {
	l := limiterOf(t, "0::/x\n", "0::/\n")
	never := make(chan struct{})
	defer close(never)
	l.run, l.patience = func([]string) error { <-never; return nil }, time.Millisecond
	l.record = func() (ledger.Record, error) {
		return ledger.Record{InitPID: 7, InitStart: 99, LimitedCgroup: "/x", VGPUs: []ledger.VGPU{{UUID: "GPU-a",
			Slice: quota.Slice{Limit: 8}}}}, nil
	}
	if err := l.limit(); err == nil || !strings.Contains(err.Error(), "does not answer") {
		t.Error(err)
	}
}

// TestLimitRefused: what cgpu-refresh says is what the engine shows.
func TestLimitRefused(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	helper := filepath.Join(filepath.Dir(self), "cgpu-refresh") // where device.Program looks
	if err := runRefresh(nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without cgpu-refresh: %v", err)
	}
	t.Cleanup(func() { _ = os.Remove(helper) })
	for script, want := range map[string]string{
		"echo cgpu-refresh: driver 580.142 has no $2 >&2; exit 1": "the driver's memory limits: driver 580.142 has no b",
		"exit 3":             "the driver's memory limits: exit status 3",
		"echo a warning >&2": "",
	} {
		write(t, helper, "#!/bin/sh\n"+script+"\n")
		if err := os.Chmod(helper, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := runRefresh([]string{"a", "b"}); (err == nil) != (want == "") || err != nil && err.Error() != want {
			t.Errorf("%s: %v, want %q", script, err, want)
		}
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
