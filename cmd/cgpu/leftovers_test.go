// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/gc"
	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/guard"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sim"
)

// simNode is a node whose simulated driver has a context that computes nothing.
type simNode struct {
	nodetest.Node
	driver          *sim.Driver
	session         *sim.Session
	file            sim.FileID
	socket          string
	client, channel uint32
}

func newSimNode(t *testing.T) *simNode {
	n := &simNode{Node: nodetest.New(t)}
	if err := os.MkdirAll(filepath.Join(n.Dir, "g"), 0o700); err != nil {
		t.Fatal(err)
	}
	n.socket = filepath.Join(n.Dir, "sim.sock")
	var err error
	n.driver, err = sim.New(sim.Config{DriverVersion: "580.159.04",
		GPUs: []sim.GPU{{UUID: nodetest.T4, BusID: "0000:01:00.0", Memory: quota.GiB}}})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", n.socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error)
	go func() { served <- n.driver.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	n.session = n.driver.Session([]int{0})
	if n.file, err = n.session.OpenFile(sim.Control, 0); err != nil {
		t.Fatal(err)
	}
	n.client = n.alloc(0, 0x41, make([]byte, 4))
	dev := n.alloc(n.client, 0x80, make([]byte, 56))
	group := make([]byte, 20)
	rm.PutU32(group, rm.TSGEngineType, rm.ChannelEngineTypeGR)
	n.channel = n.alloc(n.alloc(dev, 0xa06c, group), 0xc86f, make([]byte, 368))
	return n
}

func (n *simNode) call(nr uint32, outer []byte, pointer int, params []byte, status int) {
	n.Helper()
	call := rm.Call{Cmd: 3<<30 | uint32(len(outer))<<16 | 'F'<<8 | nr, Outer: outer, Blocks: []rm.Block{{In: -1, Off: pointer, Data: params}}}
	if e := n.session.Ioctl(n.file, 1, 1, &call); e != 0 || rm.U32(outer, status) != rm.StatusOK {
		n.Fatalf("escape %#x: %v, %s", nr, e, rm.StatusName(rm.U32(outer, status)))
	}
}

func (n *simNode) alloc(parent, class uint32, params []byte) uint32 {
	n.Helper()
	outer := make([]byte, 48)
	rm.PutU32(outer, rm.AllocRoot, n.client)
	rm.PutU32(outer, rm.AllocParent, parent)
	rm.PutU32(outer, rm.AllocClass, class)
	n.call(rm.EscAlloc, outer, rm.AllocParams, params, 40)
	return rm.U32(outer, rm.AllocObject)
}

// pause does what a guard does before it is killed.
func (n *simNode) pause(r ledger.Record, busID string) {
	n.Helper()
	dev := n.alloc(n.client, 0x80, make([]byte, 56))
	p := make([]byte, 536)
	p[0] = 1
	rm.PutU32(p, 4, 1)
	rm.PutU32(p, 24, n.client)
	rm.PutU32(p, 280, n.channel)
	outer := make([]byte, rm.ControlSize)
	rm.PutU32(outer, rm.ControlClient, n.client)
	rm.PutU32(outer, rm.ControlObject, n.alloc(dev, 0x2080, make([]byte, 4)))
	rm.PutU32(outer, rm.ControlCmd, 0x2080110b)
	rm.PutU32(outer, rm.ControlParamsSize, uint32(len(p)))
	n.call(rm.EscControl, outer, rm.ControlParams, p, rm.ControlStatus)
	if !n.paused() {
		n.Fatal("not paused")
	}
	null := device.Node{HostPath: "/dev/null"}
	cfg := guard.Config{Driver: device.DriverSim, DriverVersion: "580.159.04", SimSocket: n.socket, ControlNode: null, UVMNode: null,
		GPUs: []guard.GPU{{GPU: device.GPU{UUID: nodetest.T4, BusID: busID, Node: null}}}}
	n.note(r, cfg, n.client, n.channel)
}

// note writes the file that gpusched.ResumeLeftovers reads (pkg/gpusched/rescue.go).
func (n *simNode) note(r ledger.Record, cfg guard.Config, client, channel uint32) {
	n.Helper()
	said, err := json.Marshal(cfg)
	if err != nil {
		n.Fatal(err)
	}
	const header, entries, entry = 16 << 10, 4, 12
	text := make([]byte, header+8+entry*entries)
	rm.PutU32(text, 0, uint32(len(said)))
	rm.PutU32(text, 4, entries)
	copy(text[8:], said)
	rm.PutU32(text, header, 1)
	rm.PutU32(text, header+8, client)
	rm.PutU32(text, header+12, channel)
	rm.PutU32(text, header+16, uint32(os.Getpid())) // whose channel it is: one that lives
	if err := os.WriteFile(gpusched.LeftoversFile(r.Socket), text, 0o600); err != nil {
		n.Fatal(err)
	}
}

func (n *simNode) paused() bool { return n.driver.Snapshot().GPUs[0].TSGs[0].Disabled == 1 }

func (n *simNode) noted(r ledger.Record) bool {
	_, err := os.Stat(gpusched.LeftoversFile(r.Socket))
	return err == nil
}

func TestResumeWithoutGuard(t *testing.T) {
	n := newSimNode(t)
	r := n.Reserve(ledger.Record{ID: "dead", Name: "web", Socket: filepath.Join(n.Dir, "g", "n.sock"),
		VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.MiB}}}})
	n.pause(r, "0000:01:00.0")
	if out := cgpu("resume web"); !strings.HasPrefix(out, "dead (web): resumed 1 channel; its guard is gone") || n.paused() || n.noted(r) {
		t.Errorf("printed %s; paused %v, still noted %v", out, n.paused(), n.noted(r))
	}
	if out := cgpu("resume web"); !strings.Contains(out, "nothing of it is paused") {
		t.Errorf("printed %s", out)
	}
	n.pause(r, "0000:77:00.0") // no such GPU: it cannot be asked to resume
	if out := cgpu("resume web"); !strings.HasPrefix(out,
		"error: resume: container dead (web): its guard is gone, and what it had paused stays paused (") || !n.noted(r) {
		t.Errorf("printed %s; noted %v", out, n.noted(r))
	}
}

func TestGCLeftovers(t *testing.T) {
	n := newSimNode(t)
	r := n.Reserve(ledger.Record{ID: "dead", Name: "web", Socket: filepath.Join(n.Dir, "g", "n.sock"),
		VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.MiB}}}})
	n.pause(r, "0000:01:00.0")
	// While the guard lives it is not gc's business.
	l, err := net.Listen("unix", filepath.Join(n.Dir, "g", "n.ctl"))
	if err != nil {
		t.Fatal(err)
	}
	if out := cgpu("gc"); out != "nothing to remove\n" || !n.paused() || !n.noted(r) {
		t.Errorf("a guard that lives: printed %s; paused %v, noted %v", out, n.paused(), n.noted(r))
	}
	l.Close()
	if out := cgpu("gc"); out != "resumed 1 channel, which a guard that is gone had paused: dead (web)\n" || n.paused() || n.noted(r) {
		t.Errorf("printed %s; paused %v, noted %v", out, n.paused(), n.noted(r))
	}
	// A container that lives is not forgotten when its channels cannot be resumed, one that is gone is.
	n.pause(r, "0000:77:00.0") // no such GPU: it cannot be asked to resume
	if out := cgpu("gc"); !strings.HasPrefix(out, "error: resume what the guard of container dead (web) had paused: ") || !n.noted(r) {
		t.Errorf("printed %s; noted %v", out, n.noted(r))
	}
	if err := n.Book.Release(r.Nonce); err != nil {
		t.Fatal(err)
	}
	var done gc.Done
	n.pause(r, "0000:01:00.0")
	fromJSON(t, "gc -o json", &done)
	if want := (gc.Leftover{Channels: 1}); len(done.Paused) != 1 || done.Paused[0] != want || n.paused() {
		t.Errorf("%+v", done)
	}
	n.pause(r, "0000:77:00.0")
	if out := cgpu("gc"); out != "removed the note of what was paused of a container that is gone\n" || n.noted(r) {
		t.Errorf("printed %s; noted %v", out, n.noted(r))
	}
	if out := cgpu("gc"); out != "nothing to remove\n" {
		t.Errorf("printed %s", out)
	}
}

// TestGCFiles: what killed guards and refused containers have left is counted by kind.
func TestGCFiles(t *testing.T) {
	n := nodetest.New(t)
	n.Reserve(ledger.Record{ID: "lives", VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.MiB}}}})
	past := time.Now().Add(-time.Hour)
	for i := range 70 {
		for _, name := range []string{"g/%016x.sock", "g/%016x.ctl", "page/%016x", "log/pod-%016x.log"} {
			path := filepath.Join(n.Dir, fmt.Sprintf(name, i))
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chtimes(path, past, past.Add(time.Duration(i)*time.Second)); err != nil {
				t.Fatal(err)
			}
		}
	}
	var done gc.Done
	fromJSON(t, "gc -o json", &done)
	if !reflect.DeepEqual(done, gc.Done{Removed: []gc.Removed{}, Paused: []gc.Leftover{}, Sockets: 140, Pages: 70, Logs: 6}) {
		t.Errorf("%+v", done)
	}
	var text strings.Builder
	if err := done.Print(&text); err != nil || text.String() != "removed of containers that are gone: 140 sockets, 70 pages, 6 logs\n" {
		t.Errorf("printed %s, %v", text.String(), err)
	}
	if out := cgpu("gc"); out != "nothing to remove\n" {
		t.Errorf("again: printed %s", out)
	}
}
