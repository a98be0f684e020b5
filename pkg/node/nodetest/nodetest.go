// SPDX-License-Identifier: Apache-2.0

// Package nodetest is a node for tests: a run directory with a table of two GPUs, reservations, and guards that answer what a test
// tells them to.
package nodetest

import (
	"bufio"
	_ "embed"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// Node is a run directory with the GPUs of node.json, whose nodes are /dev/null.
type Node struct {
	*testing.T
	Dir  string
	Book *ledger.Ledger
}

// New makes one.
func New(t *testing.T) Node {
	t.Helper()
	dir, err := os.MkdirTemp("", "cgpu") // short: a socket's path has 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	toml := filepath.Join(dir, "cgpu.toml")
	t.Setenv("CGPU_RUN_DIR", dir)
	t.Setenv("CGPU_CONFIG", toml)
	table := Table(t)
	table.Config = config.Default().Settings
	table.HostMemory = 2 * MaxSpill
	if table.Key, err = device.ReadKey(table.Driver, toml, "", ""); err != nil {
		t.Fatal(err)
	}
	null := func(n *device.Node) { n.HostPath, n.Major, n.Minor = "/dev/null", 1, 3 }
	for i := range table.Nodes {
		null(&table.Nodes[i])
	}
	for i := range table.GPUs {
		null(&table.GPUs[i].Node)
	}
	if err := table.Save(dir); err != nil {
		t.Fatal(err)
	}
	return Node{t, dir, ledger.Open(dir)}
}

// MaxSpill is half of the node's memory.
const MaxSpill = 8 * quota.GiB

// Reserve makes a container's reservation; its guard and its program are this test. In preload mode it has a page instead
// of a guard.
func (n Node) Reserve(r ledger.Record) ledger.Record {
	n.Helper()
	if r.Nonce == "" {
		r.Nonce = "n-" + r.ID
	}
	r.GuardPID, r.InitPID, r.LauncherPID = os.Getpid(), os.Getpid(), os.Getpid()
	r.Control = filepath.Join(n.Dir, r.Nonce+".ctl")
	if r.Preload {
		r.GuardPID, r.Control = 0, ""
		if !r.DriverOnly {
			r.Page = page.File(n.Dir, r.Nonce)
		}
	}
	for i := range r.VGPUs {
		r.VGPUs[i].Priority = quota.PriorityDefault
	}
	table := Table(n.T)
	var gpus []ledger.GPU
	for _, g := range table.GPUs {
		gpus = append(gpus, ledger.GPU{UUID: g.UUID, Index: g.Index, Memory: g.Memory})
	}
	got, err := n.Book.Reserve(ledger.Request{Record: r, GPUs: gpus, Card: table.Config.Card(), MaxSpill: MaxSpill})
	if err != nil {
		n.Fatal(err)
	}
	if r.Page != "" {
		makePage(n.T, table, got)
	}
	return got
}

// makePage makes the vGPU page of a container in preload mode, as cgpu-runtime does.
func makePage(t *testing.T, table *device.Table, r ledger.Record) {
	t.Helper()
	var vgpus []page.VGPU
	for _, g := range table.GPUs {
		for _, v := range r.VGPUs {
			if v.UUID == g.UUID {
				vgpus = append(vgpus, page.VGPU{Minor: uint32(g.Minor), Weight: uint32(v.Weight), Limit: uint64(v.Limit),
					TimesliceMicros: 10000 * uint64(v.Weight)})
			}
		}
	}
	if err := page.Create(r.Page, page.Header{Flags: page.FlagPreload}, vgpus); err != nil {
		t.Fatal(err)
	}
}

// Occupy is what a process of a container in preload mode writes into a slot of the page.
func Occupy(t *testing.T, r ledger.Record, slot int, s page.Slot) {
	t.Helper()
	p, err := page.Read(r.Page)
	if err != nil {
		t.Fatal(err)
	}
	*p.Slot(slot) = s
	f, err := os.OpenFile(r.Page, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	offset := unsafe.Sizeof(page.Header{}) + page.MaxVGPUs*unsafe.Sizeof(page.VGPU{}) + uintptr(slot)*unsafe.Sizeof(s)
	if _, err := f.WriteAt((*[unsafe.Sizeof(s)]byte)(unsafe.Pointer(&s))[:], int64(offset)); err != nil {
		t.Fatal(err)
	}
}

// Status is what an idle guard of the container says.
func Status(r ledger.Record) api.Status {
	s := api.Status{ID: r.ID, Nonce: r.Nonce, GuardPID: r.GuardPID, InitPID: r.InitPID}
	for _, v := range r.VGPUs {
		s.VGPUs = append(s.VGPUs, api.VGPUStatus{Index: map[string]int{T4: 0, H200: 1}[v.UUID], UUID: v.UUID, Limit: v.Limit,
			Compute: &api.ComputeStatus{}})
	}
	return s
}

// T4 and H200 are the GPUs of the node.
const (
	T4   = "GPU-00000000-0000-0000-0000-00000000000a"
	H200 = "GPU-10000000-0000-0000-0000-00000000000b"
)

//go:embed node.json
var text []byte

// Table is the node's.
func Table(t *testing.T) *device.Table {
	t.Helper()
	table := new(device.Table)
	if err := json.Unmarshal(text, table); err != nil {
		t.Fatal(err)
	}
	if err := table.Validate(); err != nil {
		t.Fatal(err)
	}
	return table
}

// FakeGuard answers on a control socket; with an empty line it never does.
func FakeGuard(t *testing.T, path, line string) {
	t.Helper()
	FakeGuardFunc(t, path, func() string { return line })
}

// FakeGuardFunc is FakeGuard whose answer may change.
func FakeGuardFunc(t *testing.T, path string, answer func() string) {
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
					<-t.Context().Done()
				}
				conn.Write([]byte(line + "\n"))
			}()
		}
	}()
}

// StatusLine is what a guard answers.
func StatusLine(t *testing.T, s api.Status) string {
	t.Helper()
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Busy is a node with containers in every state.
func Busy(t *testing.T) snapshot.View {
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
		return ledger.VGPU{UUID: uuid, Slice: quota.Slice{Limit: limit, Share: quota.Share{Weight: 1, Priority: quota.PriorityDefault}}}
	}
	both := record("a", slice(T4, 6043*quota.MiB), ledger.VGPU{UUID: H200, Slice: quota.Slice{Limit: 64 * quota.GiB,
		Share: quota.Share{Weight: 3, Percent: 50, Priority: quota.PriorityHigh}}})
	both.Name = "default/train-0/main\x1b[31m"
	starting := record("b", slice(T4, 1024*quota.MiB))
	starting.GuardPID = 0
	mixed := record("e", slice(T4, 512*quota.MiB))
	mixed.VGPUs[0].Priority, mixed.Paused = quota.PriorityBestEffort, true
	mixed.Native = []string{H200}
	records := []ledger.Record{both, starting, record("c", slice(T4, 2048*quota.MiB)), record("d", slice(T4, 256*quota.MiB)), mixed,
		record("f", slice(T4, quota.MiB))}

	FakeGuard(t, both.Control, StatusLine(t, api.Status{
		ID: both.ID, Nonce: both.Nonce, GuardPID: 1001, InitPID: 2001, Listeners: 2,
		VGPUs: []api.VGPUStatus{
			{Index: 0, UUID: T4, Limit: 6043 * quota.MiB, Used: 512*quota.MiB + 1, Peak: 6000 * quota.MiB, Denied: 4, Compute: &api.ComputeStatus{
				Policy: sched.PolicyPreempt, Share: quota.Share{Weight: 1, Priority: quota.PriorityDefault},
				TSGs: 3, Busy: 2, Slice: 5 * time.Millisecond, Ruled: true,
				Exact: true, Utilization: 333, Entitled: 500, Throttled: time.Minute,
				GPUTime: 1234567890, Waiting: 2 * time.Hour, Switches: 99, Preemptions: 98, Pauses: 0, Granted: time.Second}},
			{Index: 1, UUID: H200, Limit: 64 * quota.GiB, Used: 1024 * quota.MiB, Peak: 1024 * quota.MiB, Compute: &api.ComputeStatus{
				Policy: sched.PolicyWeight, Share: quota.Share{Weight: 3, Percent: 50, Priority: quota.PriorityHigh}, Cap: 500,
				TSGs: 1, Slice: 2048 * time.Microsecond,
				Pauses: 7}},
		},
		Processes: []api.ProcessStatus{
			{PID: 2001, NSPID: 1, Name: "sh", Clients: 0, Used: []quota.Bytes{0, 0}},
			{PID: 2002, NSPID: 7, Name: "py\x1b]0;\x07thon", Clients: 2, Used: []quota.Bytes{512 * quota.MiB, 1000 * quota.MiB}},
			{PID: 2003, NSPID: 8, Name: "worker", Clients: 1, Used: []quota.Bytes{1, 24 * quota.MiB}},
		},
		Calls: api.CallCounters{Trapped: 4321, Denied: 5},
	}))
	// c: nobody listens. d: a guard that hangs.
	FakeGuard(t, records[3].Control, "")
	FakeGuard(t, mixed.Control, StatusLine(t, api.Status{
		ID: mixed.ID, Nonce: mixed.Nonce, GuardPID: 1005, InitPID: 2005,
		VGPUs: []api.VGPUStatus{{Index: 0, UUID: T4, Limit: 512 * quota.MiB, Compute: &api.ComputeStatus{
			Policy: sched.PolicyPreempt, Share: quota.Share{Weight: 1, Priority: quota.PriorityBestEffort}, Paused: true,
			TSGs: 1, Slice: 10 * time.Millisecond,
			Exact: true, Utilization: 660}}, {Index: 1, UUID: H200, Native: true, Used: 3 * quota.MiB}},
		Processes: []api.ProcessStatus{{PID: 2005, NSPID: 1, Name: "native", Used: []quota.Bytes{0, 3 * quota.MiB}}},
	}))
	// f: another container's guard on its socket.
	FakeGuard(t, records[5].Control, StatusLine(t, api.Status{ID: both.ID, Nonce: both.Nonce, InitPID: 1}))
	gone := record("0", slice(T4, quota.MiB))
	records = append(records, gone)
	answers := snapshot.AskAll(Table(t), records)
	for i := range answers { // the process ids are made up
		answers[i].Gone = records[i].ID == gone.ID
	}
	cards := map[string]sched.Card{H200: {Policy: sched.PolicyPreempt, MaxInst: 8, PrioRatio: 80}}
	return snapshot.Arrange(Table(t), records, cards, answers)
}

// Docker makes the bundle of a record and what Docker keeps of it, in a folder of its own.
type Docker struct {
	Mounts      []map[string]string // nil: /etc/hostname from the right place
	Bundle      string              // config.json; "": as made from mounts
	Name, About string              // in config.v2.json, and the ID there ("": the record's)
}

func (d Docker) Make(t *testing.T, r ledger.Record) ledger.Record {
	t.Helper()
	dir := t.TempDir()
	r.Bundle = filepath.Join(dir, "bundle")
	own := filepath.Join(dir, "containers", r.ID)
	if d.Mounts == nil {
		d.Mounts = []map[string]string{{"destination": "/proc", "source": "proc"}, {"destination": "/etc/hostname", "source": "OWN/hostname"}}
	}
	for _, m := range d.Mounts {
		m["source"] = strings.ReplaceAll(m["source"], "OWN", own)
	}
	if d.About == "" {
		d.About = r.ID
	}
	if d.Bundle == "" {
		d.Bundle = encode(t, map[string]any{"mounts": d.Mounts})
	}
	for path, text := range map[string]string{
		filepath.Join(r.Bundle, "config.json"): d.Bundle,
		filepath.Join(own, "config.v2.json"): encode(t, map[string]any{"ID": d.About, "Name": d.Name,
			"Config": map[string]any{"Env": []string{"A=b"}}}),
		filepath.Join(dir, "other/x/config.any"): "",
	} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func encode(t *testing.T, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// nameOf is what a record's engine calls it.
