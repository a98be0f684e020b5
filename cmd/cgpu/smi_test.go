package main

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/golden"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

func TestSMI(t *testing.T) {
	v := nodetest.Busy(t)
	for name, print := range map[string]func(*bytes.Buffer) error{
		"smi.txt":      func(b *bytes.Buffer) error { return printTable(b, v) },
		"smi-wide.txt": func(b *bytes.Buffer) error { return printWide(b, v) },
		"smi.json":     func(b *bytes.Buffer) error { return printJSON(b, v) },
	} {
		var b bytes.Buffer
		if err := print(&b); err != nil {
			t.Fatal(err)
		}
		golden.Compare(t, name, b.Bytes())
	}
}

// A terminal of 100 columns is enough, whatever things are called.
func TestSMIWidth(t *testing.T) {
	v := nodetest.Busy(t)
	v.GPUs[0].Name = strings.Repeat("GPU ", 30)
	v.GPUs[1].Policy, v.GPUs[1].Utilization = "weight-preempt", new(sched.Permille(999))
	long := &v.GPUs[0].VGPUs[0]
	long.Name, long.Limit, long.Used, long.Priority, long.State = strings.Repeat("ñ", 300), 143771*quota.MiB, 143771*quota.MiB, quota.PriorityBestEffort, snapshot.StateGuardDead
	long.Weight, long.Percent, long.Processes[0].Name = 64, 100, strings.Repeat("x", 300)
	var b bytes.Buffer
	if err := printTable(&b, v); err != nil {
		t.Fatal(err)
	}
	widest := 0
	for line := range strings.Lines(b.String()) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 100 {
			t.Errorf("%d columns: %s", n, line)
		} else {
			widest = max(widest, n)
		}
	}
	if widest != 100 || strings.Count(b.String(), "…") != 4 {
		t.Errorf("widest line has %d columns:\n%s", widest, b.String())
	}
	if !strings.Contains(b.String(), "ññññññ…") {
		t.Errorf("no room for a name:\n%s", b.String())
	}
}

func TestSMIEmpty(t *testing.T) {
	var b bytes.Buffer
	if err := printTable(&b, snapshot.Arrange(nodetest.Table(t), nil, nil, nil)); err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "smi-empty.txt", b.Bytes())
}

func TestSMITimeout(t *testing.T) {
	start := time.Now()
	nodetest.Busy(t)
	if took := time.Since(start); took > 4*api.Timeout {
		t.Errorf("one guard that hangs held smi up for %v", took)
	}
}

func TestEnded(t *testing.T) {
	self := os.Getpid()
	start, err := ledger.ProcStart(self)
	if err != nil {
		t.Fatal(err)
	}
	const none = 1 << 30 // above the largest process id
	for name, tt := range map[string]struct {
		r    ledger.Record
		want bool
	}{
		"guard lives":                  {ledger.Record{GuardPID: self, GuardStart: start}, false},
		"guard ended":                  {ledger.Record{GuardPID: none, GuardStart: 1}, true},
		"guard's number is another's":  {ledger.Record{GuardPID: self, GuardStart: start + 1}, true},
		"guard ended, container lives": {ledger.Record{GuardPID: none, InitPID: self, InitStart: start}, false},
		"both ended":                   {ledger.Record{GuardPID: none, InitPID: none}, true},
		"launcher lives":               {ledger.Record{LauncherPID: self, LauncherStart: start}, false},
		"launcher ended":               {ledger.Record{LauncherPID: none}, true},
	} {
		if got := snapshot.Ended(tt.r); got != tt.want {
			t.Errorf("%s: ended %v, want %v", name, got, tt.want)
		}
	}
}

func TestSMIWithoutTable(t *testing.T) {
	_, err := node.View(t.TempDir())
	if !errors.Is(err, device.ErrMissing) || !strings.Contains(err.Error(), "cgpu refresh") {
		t.Errorf("got %v", err)
	}
}

func TestMiB(t *testing.T) {
	for in, want := range map[quota.Bytes]string{0: "0MiB", 1: "1MiB", quota.MiB: "1MiB", quota.MiB + 1: "2MiB"} {
		if got := mib(in); got != want {
			t.Errorf("%d: %s, want %s", in, got, want)
		}
	}
}
