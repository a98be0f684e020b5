package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// node is a run directory with the GPUs of testdata/node.json, whose nodes are /dev/null.
type node struct {
	*testing.T
	dir  string
	book *ledger.Ledger
}

func newNode(t *testing.T) node {
	t.Helper()
	dir, err := os.MkdirTemp("", "cgpu") // short: a socket's path has 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	toml := filepath.Join(dir, "cgpu.toml")
	t.Setenv("CGPU_RUN_DIR", dir)
	t.Setenv("CGPU_CONFIG", toml)
	table := nodeTable(t)
	table.Config = config.Default().Settings
	table.HostMemory = 2 * maxSpill
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
	return node{t, dir, ledger.Open(dir)}
}

// maxSpill is half of the node's memory.
const maxSpill = 8 * quota.GiB

// reserve makes a container's reservation; its guard and its program are this test. In preload mode it has a page instead
// of a guard.
func (n node) reserve(r ledger.Record) ledger.Record {
	n.Helper()
	if r.Nonce == "" {
		r.Nonce = "n-" + r.ID
	}
	r.GuardPID, r.InitPID, r.LauncherPID = os.Getpid(), os.Getpid(), os.Getpid()
	r.Control = filepath.Join(n.dir, r.Nonce+".ctl")
	if r.Preload {
		r.GuardPID, r.Control, r.Page = 0, "", page.File(n.dir, r.Nonce)
	}
	for i := range r.VGPUs {
		r.VGPUs[i].Priority = quota.PriorityDefault
	}
	table := nodeTable(n.T)
	got, err := n.book.Reserve(ledger.Request{Record: r, GPUs: gpusOf(table), Card: table.Config.Card(), MaxSpill: maxSpill})
	if err != nil {
		n.Fatal(err)
	}
	if r.Preload {
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
				vgpus = append(vgpus, page.VGPU{Minor: uint32(g.Minor), Weight: uint32(v.Weight), Limit: uint64(v.Limit), TimesliceMicros: 10000 * uint64(v.Weight)})
			}
		}
	}
	if err := page.Create(r.Page, page.Header{Flags: page.FlagPreload}, vgpus); err != nil {
		t.Fatal(err)
	}
}

// occupy is what a process of a container in preload mode writes into a slot of the page.
func occupy(t *testing.T, r ledger.Record, slot int, s page.Slot) {
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

// status is what an idle guard of the container says.
func status(r ledger.Record) api.Status {
	s := api.Status{ID: r.ID, Nonce: r.Nonce, GuardPID: r.GuardPID, InitPID: r.InitPID}
	for _, v := range r.VGPUs {
		s.VGPUs = append(s.VGPUs, api.VGPUStatus{Index: map[string]int{t4: 0, h200: 1}[v.UUID], UUID: v.UUID, Limit: v.Limit, Compute: &api.ComputeStatus{}})
	}
	return s
}

// cgpu runs a command line and returns what it printed, with the error behind.
func cgpu(args string) string {
	var out bytes.Buffer
	a := app()
	a.Writer, a.ErrWriter = &out, &out
	if err := run(a, append([]string{"cgpu"}, strings.Fields(args)...)); err != nil {
		out.WriteString("error: " + err.Error() + "\n")
	}
	return out.String()
}

func TestFindGPU(t *testing.T) {
	table := nodeTable(t)
	for name, want := range map[string]int{"0": 0, "1": 1, t4: 0, strings.ToUpper(h200): 1, "GPU-1": 1, "gpu-0000": 0} {
		if g, err := findGPU(table, name); err != nil || g.Index != want {
			t.Errorf("%q: GPU %d, %v", name, g.Index, err)
		}
	}
	for _, name := range []string{"", "2", "-1", "GPU-", "G", "1000", h200 + "0", "all"} {
		if g, err := findGPU(table, name); err == nil || !strings.Contains(err.Error(), "there is none") {
			t.Errorf("%q: GPU %d, %v", name, g.Index, err)
		}
	}
	table.GPUs[0].UUID = "GPU-10000000-0000-0000-0000-00000000000a"
	if g, err := findGPU(table, "GPU-1"); err == nil || !strings.Contains(err.Error(), "more than one UUID") {
		t.Errorf("ambiguous: GPU %d, %v", g.Index, err)
	}
}
