package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard"
	"github.com/opencgpu/cgpu/pkg/ledger"
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

// reserve makes a container's reservation; its guard and its program are this test.
func (n node) reserve(r ledger.Record) ledger.Record {
	n.Helper()
	r.Nonce, r.GuardPID, r.InitPID, r.LauncherPID = "n", os.Getpid(), os.Getpid(), os.Getpid()
	r.Control = filepath.Join(n.dir, r.ID+".ctl")
	for i := range r.VGPUs {
		r.VGPUs[i].Priority = quota.PriorityDefault
	}
	table := nodeTable(n.T)
	got, err := n.book.Reserve(ledger.Request{Record: r, GPUs: gpusOf(table), Card: table.Config.Card()})
	if err != nil {
		n.Fatal(err)
	}
	return got
}

// status is what an idle guard of the container says.
func status(r ledger.Record) guard.Status {
	s := guard.Status{ID: r.ID, Nonce: r.Nonce, GuardPID: r.GuardPID, InitPID: r.InitPID}
	for _, v := range r.VGPUs {
		s.VGPUs = append(s.VGPUs, guard.VGPUStatus{Index: map[string]int{t4: 0, h200: 1}[v.UUID], UUID: v.UUID, Limit: v.Limit, Compute: &guard.ComputeStatus{}})
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
