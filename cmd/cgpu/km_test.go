// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

func TestKMOnce(t *testing.T) {
	n := nodetest.New(t)
	full := "abcdef0123456789abcdef"
	r := n.Reserve(ledger.Record{ID: full, VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: 4 * quota.GiB}}}})
	s := nodetest.Status(r)
	s.VGPUs[0].Used = quota.GiB
	s.Processes = []api.ProcessStatus{{PID: 4711, NSPID: 7, Name: "python", Used: []quota.Bytes{quota.GiB}}}
	nodetest.FakeGuard(t, r.Control, nodetest.StatusLine(t, s))
	n.Reserve(ledger.Record{ID: "silent", VGPUs: []ledger.VGPU{{UUID: nodetest.H200,
		Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 2}}}}})
	out := cgpu("km --once")
	for _, want := range []string{"0/abcdef012345/id:0\n",
		"0/abcdef012345/meminfo:Free: 3221225472\n0/abcdef012345/meminfo:PID: 4711 Mem: 1073741824\n",
		"0/abcdef012345/memsize:4294967296\n", "0/policy:1\n", "1/policy:2\n", "1/silent/weight:2\n", "1/free_weight:18\n", "version:0.0.0\n",
		"cgpu: km: 1/silent/meminfo: what container silent uses is not known: "} {
		if !strings.Contains(out, want) {
			t.Errorf("printed\n%s\nwithout %q", out, want)
		}
	}
	want := `"path": "0/abcdef012345/meminfo",` + "\n" + `    "text": "Free: 3221225472\nPID: 4711 Mem: 1073741824\n"`
	if out := cgpu("km --once -o json"); !strings.Contains(out, want) || strings.Contains(out, `"1/silent/meminfo"`) {
		t.Errorf("printed\n%s\nwithout %s, or with what is not known", out, want)
	}
}

func TestKMUsage(t *testing.T) {
	nodetest.New(t)
	for args, want := range map[string]string{
		"km a b":                  `error: km: "b": want one MOUNTPOINT`,
		"km relative":             `error: km: "relative": want an absolute path as MOUNTPOINT`,
		"km --once /x":            "error: km: --once mounts nothing",
		"km --once --allow-other": "error: km: --once mounts nothing",
		"km -o json":              "error: km: -o json: only with --once",
		"km /dev/null":            "error: km: /dev/null: is no folder: name another",
		"km /proc/self":           "error: km: /proc/self: is no folder", // a link
		"km /proc":                "error: km: /proc: is not empty (",
	} {
		if out := cgpu(args); !strings.Contains(out, want) {
			t.Errorf("cgpu %s: printed %s, want %s", args, out, want)
		}
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
		patience := time.Minute
		if ignored {
			patience = 200 * time.Millisecond
		}
		select {
		case <-ctx.Done():
			if ignored {
				t.Errorf("%v ends it", sig)
			}
		case <-time.After(patience):
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

// TestUnits: systemd takes the units that run cgpu.
func TestUnits(t *testing.T) {
	verify := testenv.NeedsProgram(t, "systemd-analyze")
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
