package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares got with a file in testdata.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s differs (-want +got); go test ./cmd/cgpu -update writes it anew:\n%s", path, diff)
	}
}

// t4 and h200 are the GPUs of the table in testdata/node.json.
const (
	t4   = "GPU-00000000-0000-0000-0000-00000000000a"
	h200 = "GPU-10000000-0000-0000-0000-00000000000b"
)

func nodeTable(t *testing.T) *device.Table {
	t.Helper()
	tab, err := dryRun{table: "testdata/node.json"}.load()
	if err != nil {
		t.Fatal(err)
	}
	return tab
}

// fakeGuard answers on a control socket; with an empty line it never does.
func fakeGuard(t *testing.T, path, line string) {
	t.Helper()
	fakeGuardFunc(t, path, func() string { return line })
}

func fakeGuardFunc(t *testing.T, path string, answer func() string) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				text, err := bufio.NewReader(conn).ReadString('\n')
				var req api.Request
				if err != nil || json.Unmarshal([]byte(text), &req) != nil || req.Op != "status" {
					return
				}
				line := answer()
				if line == "" {
					time.Sleep(2 * api.Timeout)
				}
				conn.Write([]byte(line + "\n"))
			}()
		}
	}()
}

func statusLine(t *testing.T, s api.Status) string {
	t.Helper()
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// busyNode is a node with containers in every state.
func busyNode(t *testing.T) snapshot.View {
	t.Helper()
	dir, err := os.MkdirTemp("", "cgpu") // short: a socket's path has 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	record := func(n string, vgpus ...ledger.VGPU) ledger.Record {
		return ledger.Record{ID: strings.Repeat(n, 64), Nonce: strings.Repeat(n, 16), Created: time.Date(2026, 11, 21, 2, 0, 0, 0, time.UTC),
			VGPUs: vgpus, Control: filepath.Join(dir, n+".ctl"), GuardPID: 1000}
	}
	slice := func(uuid string, limit quota.Bytes) ledger.VGPU {
		return ledger.VGPU{UUID: uuid, Limit: limit, Weight: 1, Priority: quota.PriorityDefault}
	}
	both := record("a", slice(t4, 6043*quota.MiB), ledger.VGPU{UUID: h200, Limit: 64 * quota.GiB, Weight: 3, Percent: 50, Priority: quota.PriorityHigh})
	both.Name = "default/train-0/main\x1b[31m"
	starting := record("b", slice(t4, 1024*quota.MiB))
	starting.GuardPID = 0
	mixed := record("e", slice(t4, 512*quota.MiB))
	mixed.VGPUs[0].Priority, mixed.Paused = quota.PriorityBestEffort, true
	mixed.Native = []string{h200}
	records := []ledger.Record{both, starting, record("c", slice(t4, 2048*quota.MiB)), record("d", slice(t4, 256*quota.MiB)), mixed, record("f", slice(t4, quota.MiB))}

	fakeGuard(t, both.Control, statusLine(t, api.Status{
		ID: both.ID, Nonce: both.Nonce, GuardPID: 1001, InitPID: 2001, Listeners: 2,
		VGPUs: []api.VGPUStatus{
			{Index: 0, UUID: t4, Limit: 6043 * quota.MiB, Used: 512*quota.MiB + 1, Peak: 6000 * quota.MiB, Denied: 4, Compute: &api.ComputeStatus{
				Policy: sched.PolicyPreempt, Weight: 1, Priority: quota.PriorityDefault, TSGs: 3, Busy: 2, Slice: 5 * time.Millisecond, Ruled: true, Exact: true, Utilization: 333, Entitled: 500, Throttled: time.Minute,
				GPUTime: 1234567890, Waiting: 2 * time.Hour, Switches: 99, Preemptions: 98, Pauses: 0, Granted: time.Second}},
			{Index: 1, UUID: h200, Limit: 64 * quota.GiB, Used: 1024 * quota.MiB, Peak: 1024 * quota.MiB, Compute: &api.ComputeStatus{
				Policy: sched.PolicyWeight, Weight: 3, Percent: 50, Priority: quota.PriorityHigh, Cap: 500, TSGs: 1, Slice: 2048 * time.Microsecond, Pauses: 7}},
		},
		Processes: []api.ProcessStatus{
			{PID: 2001, NSPID: 1, Name: "sh", Clients: 0, Used: []quota.Bytes{0, 0}},
			{PID: 2002, NSPID: 7, Name: "py\x1b]0;\x07thon", Clients: 2, Used: []quota.Bytes{512 * quota.MiB, 1000 * quota.MiB}},
			{PID: 2003, NSPID: 8, Name: "worker", Clients: 1, Used: []quota.Bytes{1, 24 * quota.MiB}},
		},
		Calls: api.CallCounters{Trapped: 4321, Denied: 5},
	}))
	// c: nobody listens. d: a guard that hangs.
	fakeGuard(t, records[3].Control, "")
	fakeGuard(t, mixed.Control, statusLine(t, api.Status{
		ID: mixed.ID, Nonce: mixed.Nonce, GuardPID: 1005, InitPID: 2005,
		VGPUs: []api.VGPUStatus{{Index: 0, UUID: t4, Limit: 512 * quota.MiB, Compute: &api.ComputeStatus{
			Policy: sched.PolicyPreempt, Weight: 1, Priority: quota.PriorityBestEffort, Paused: true, TSGs: 1, Slice: 10 * time.Millisecond, Exact: true, Utilization: 660}}, {Index: 1, UUID: h200, Native: true, Used: 3 * quota.MiB}},
		Processes: []api.ProcessStatus{{PID: 2005, NSPID: 1, Name: "native", Used: []quota.Bytes{0, 3 * quota.MiB}}},
	}))
	// f: another container's guard on its socket.
	fakeGuard(t, records[5].Control, statusLine(t, api.Status{ID: both.ID, Nonce: both.Nonce, InitPID: 1}))
	gone := record("0", slice(t4, quota.MiB))
	records = append(records, gone)
	answers := snapshot.AskAll(nodeTable(t), records)
	for i := range answers { // the process ids are made up
		answers[i].Gone = records[i].ID == gone.ID
	}
	cards := map[string]sched.Card{h200: {Policy: sched.PolicyPreempt, MaxInst: 8, PrioRatio: 80}}
	return snapshot.Arrange(nodeTable(t), records, cards, answers)
}

func TestSMI(t *testing.T) {
	v := busyNode(t)
	for name, print := range map[string]func(*bytes.Buffer) error{
		"smi.txt":      func(b *bytes.Buffer) error { return printTable(b, v) },
		"smi-wide.txt": func(b *bytes.Buffer) error { return printWide(b, v) },
		"smi.json":     func(b *bytes.Buffer) error { return printJSON(b, v) },
	} {
		var b bytes.Buffer
		if err := print(&b); err != nil {
			t.Fatal(err)
		}
		golden(t, name, b.Bytes())
	}
}

// A terminal of 100 columns is enough, whatever things are called.
func TestSMIWidth(t *testing.T) {
	v := busyNode(t)
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
	if err := printTable(&b, snapshot.Arrange(nodeTable(t), nil, nil, nil)); err != nil {
		t.Fatal(err)
	}
	golden(t, "smi-empty.txt", b.Bytes())
}

func TestSMITimeout(t *testing.T) {
	start := time.Now()
	busyNode(t)
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
	_, err := look(t.TempDir())
	if !errors.Is(err, device.ErrMissing) || !strings.Contains(err.Error(), "cgpu refresh") {
		t.Errorf("got %v", err)
	}
}

func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{
		"python3":                           "python3",
		"\x1b[2J":                           "?[2J",
		"a\nb\tc":                           "a?b?c",
		"\u009b31m":                         "?31m",
		"\u202egnp.exe":                     "?gnp.exe",
		"\xff\xfe":                          "?",
		"\u2066a\u2069":                     "?a?",
		"\u200ea\u200fb\u061c":              "?a?b?",
		"w\u200beb\u200c\u200d\u2060\ufeff": "w?eb????",
		"a\u2028b\u00ad\U000e0041":          "a?b??",
		"web\u3164\u2800\u115f\ufe0f\u034f": "web?????", // no ink
		"größe":                             "größe",
	} {
		if got := printable(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func TestMiB(t *testing.T) {
	for in, want := range map[quota.Bytes]string{0: "0MiB", 1: "1MiB", quota.MiB: "1MiB", quota.MiB + 1: "2MiB"} {
		if got := mib(in); got != want {
			t.Errorf("%d: %s, want %s", in, got, want)
		}
	}
}
