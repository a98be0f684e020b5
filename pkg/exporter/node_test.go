// SPDX-License-Identifier: Apache-2.0

package exporter

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/tally"
)

const (
	gpu0 = "GPU-00000000-0000-0000-0000-00000000000a"
	gpu1 = "GPU-10000000-0000-0000-0000-00000000000b"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// node is a run directory with guards that this test plays.
type node struct {
	t       testing.TB
	dir     string
	table   device.Table
	records []ledger.Record
	asked   atomic.Int64 // times that a guard was
}

func newNode(t testing.TB) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "cgpu") // short: a socket's path has 107 bytes at most
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	table := device.Table{Version: device.TableVersion, Driver: device.DriverSim, DriverVersion: "580.159.04",
		Config: device.Config{MaxInst: 20, Policy: sched.PolicyPreempt, PrioRatio: 90}}
	for i, uuid := range []string{gpu0, gpu1} {
		table.GPUs = append(table.GPUs, device.GPU{Index: i, UUID: uuid, Minor: i, BusID: fmt.Sprintf("0000:0%d:00.0", i), Name: "Tesla T4",
			Memory: 16 * quota.GiB,
			Node:   device.Node{Path: fmt.Sprintf("/dev/nvidia%d", i), HostPath: fmt.Sprintf("/dev/nvidia%d", i)}})
	}
	must(t, table.Save(dir))
	n := &node{t: t, dir: dir, table: table}
	n.write()
	return n
}

// write writes the ledger.
func (n *node) write() {
	n.t.Helper()
	b, err := json.Marshal(map[string]any{"version": 1, "records": n.records})
	must(n.t, err)
	must(n.t, os.WriteFile(filepath.Join(n.dir, "ledger.json"), b, 0o600))
}

// container adds one of an ID with a vGPU on each GPU, and a guard that has counted.
func (n *node) container(id, name string, uuids ...string) *tally.File {
	n.t.Helper()
	nonce := fmt.Sprintf("%016x", len(n.records)+1)
	r := ledger.Record{ID: id, Nonce: nonce, Name: name, Created: time.Unix(int64(len(n.records)), 0),
		Control: filepath.Join(n.dir, nonce+".ctl"), GuardPID: os.Getpid()}
	s := api.Status{ID: id, Nonce: nonce, GuardPID: os.Getpid(), InitPID: os.Getpid()}
	for i, uuid := range uuids {
		r.VGPUs = append(r.VGPUs, ledger.VGPU{UUID: uuid,
			Slice: quota.Slice{Limit: 4 * quota.GiB, Share: quota.Share{Weight: 1, Priority: quota.PriorityDefault}}})
		s.VGPUs = append(s.VGPUs, api.VGPUStatus{Index: i, UUID: uuid, Limit: 4 * quota.GiB, Used: 3 * quota.GiB, Peak: 4 * quota.GiB,
			Managed: quota.GiB, Spilled: quota.MiB})
	}
	n.records = append(n.records, r)
	n.write()
	n.serve(r.Control, s)
	f, err := tally.Create(n.dir, nonce, uuids)
	must(n.t, err)
	n.t.Cleanup(f.Release)
	f.Calls.Store(1000)
	for i := range uuids {
		f.On(i).Exact.Store(1)
		f.On(i).Time.Store(uint64(1500 * time.Millisecond))
		f.On(i).Denied.Store(2)
		f.Waits(i).Waiting.Store(uint64(2500 * time.Millisecond))
		f.Waits(i).Throttled.Store(uint64(250 * time.Millisecond))
		f.Waits(i).Entitled.Store(uint64(2 * time.Second))
	}
	return f
}

// serve answers as a guard does.
func (n *node) serve(path string, s api.Status) {
	n.t.Helper()
	line, err := json.Marshal(s)
	must(n.t, err)
	l, err := net.Listen("unix", path)
	must(n.t, err)
	n.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			n.asked.Add(1)
			if _, err := bufio.NewReader(conn).ReadString('\n'); err == nil {
				_, _ = conn.Write(append(line, '\n'))
			}
			conn.Close()
		}
	}()
}

// id is one as engines make them, but for its digits.
func id(i int) string { return fmt.Sprintf("%012x%052x", i, i) }

// scrape is what the exporter says.
func scrape(t testing.TB, c *Exporter) string {
	t.Helper()
	var b strings.Builder
	must(t, c.Text(&b))
	return b.String()
}
