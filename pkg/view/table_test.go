// SPDX-License-Identifier: Apache-2.0

package view

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/opencgpu/cgpu/pkg/golden"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/schema"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// What is used outside cgpu has a column where it is much.
func TestSMIOutside(t *testing.T) {
	v := nodetest.Busy(t)
	v.GPUs[0].Outside = new(quota.Bytes(3*quota.GiB - 1))
	var b bytes.Buffer
	if err := PrintTable(&b, v); err != nil {
		t.Fatal(err)
	}
	text, ok := boxed(v, 120, true, false)
	if !ok {
		t.Fatal("does not fit")
	}
	b.WriteString(text)
	gpus, _, _ := strings.Cut(b.String(), "\nCONTAINER")
	box, _, _ := strings.Cut(text, "\n\n")
	golden.Compare(t, "smi-outside.txt", []byte(gpus+"\n"+box+"\n"))
	v.GPUs[0].Outside = new(quota.Bytes(200 * quota.MiB))
	b.Reset()
	if err := PrintTable(&b, v); err != nil || strings.Contains(b.String(), "OUTSIDE") {
		t.Errorf("%v\n%s", err, b.String())
	}
}

// A node with spill, managed memory and containers in preload mode, in the states that those can have.
func TestSMISpill(t *testing.T) {
	n := nodetest.New(t)
	spilling := n.Reserve(ledger.Record{ID: "spilling", VGPUs: []ledger.VGPU{{UUID: nodetest.T4,
		Slice: quota.Slice{Limit: quota.GiB, Spill: 2 * quota.GiB}},
		{UUID: nodetest.H200, Slice: quota.Slice{Limit: quota.GiB}}}})
	n.Reserve(ledger.Record{ID: "mute", VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB, Spill: quota.GiB}}}})
	preload := n.Reserve(ledger.Record{ID: "preload", Name: "web", Preload: true, VGPUs: []ledger.VGPU{{UUID: nodetest.T4,
		Slice: quota.Slice{Limit: quota.GiB}}, {UUID: nodetest.H200, Slice: quota.Slice{Limit: quota.GiB}}}})
	nodetest.Occupy(t, preload, 0, page.Slot{Owner: 7, Used: [page.MaxVGPUs]uint64{1 << 29, 3 << 20}, Managed: 1 << 20})
	nodetest.Occupy(t, preload, 511, page.Slot{Owner: 8, Used: [page.MaxVGPUs]uint64{1 << 20, 1 << 62}})
	broken := n.Reserve(ledger.Record{ID: "broken", Preload: true, VGPUs: []ledger.VGPU{{UUID: nodetest.T4,
		Slice: quota.Slice{Limit: quota.GiB}}}})
	young := n.Reserve(ledger.Record{ID: "young", Preload: true, VGPUs: []ledger.VGPU{{UUID: nodetest.T4,
		Slice: quota.Slice{Limit: quota.GiB}}}})
	gone := n.Reserve(ledger.Record{ID: "gone", Preload: true, VGPUs: []ledger.VGPU{{UUID: nodetest.T4,
		Slice: quota.Slice{Limit: quota.GiB}}}})
	if err := os.Truncate(broken.Page, 10); err != nil {
		t.Fatal(err)
	}
	for nonce, pid := range map[string]int{young.Nonce: 0, gone.Nonce: 1 << 30} {
		if err := n.Book.Update(nonce, func(r *ledger.Record) error { r.InitPID = pid; return nil }); err != nil {
			t.Fatal(err)
		}
	}
	s := nodetest.Status(spilling)
	s.VGPUs[0].Used, s.VGPUs[0].Managed, s.VGPUs[0].Spilled = quota.GiB, 256*quota.MiB, 768*quota.MiB
	s.GuardPID, s.InitPID = 1001, 2001
	nodetest.FakeGuard(t, spilling.Control, nodetest.StatusLine(t, s))
	v, err := node.View(n.Dir)
	if err != nil {
		t.Fatal(err)
	}
	for i := range v.GPUs {
		for j := range v.GPUs[i].VGPUs { // what differs with each run
			x := &v.GPUs[i].VGPUs[j]
			x.GuardPID, x.InitPID = min(x.GuardPID, 1), min(x.InitPID, 1)
		}
	}
	for name, print := range map[string]func(*bytes.Buffer) error{
		"smi-spill.txt":      func(b *bytes.Buffer) error { return PrintTable(b, v) },
		"smi-spill-wide.txt": func(b *bytes.Buffer) error { return PrintWide(b, v) },
	} {
		var b bytes.Buffer
		if err := print(&b); err != nil {
			t.Fatal(err)
		}
		golden.Compare(t, name, b.Bytes())
	}
	var b bytes.Buffer
	if err := PrintJSON(&b, v); err != nil {
		t.Fatal(err)
	}
	var got schema.Node
	if err := json.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	first, third := got.GPUs[0].VGPUs[0], got.GPUs[0].VGPUs[2]
	if first.Enforcement != "guard" || first.Used != quota.GiB || first.Managed != 256*quota.MiB || first.Spill != 2*quota.GiB ||
		first.Spilled != 768*quota.MiB {
		t.Errorf("%+v", first)
	}
	if third.Enforcement != "preload" || third.Used != 513*quota.MiB || third.Managed != quota.MiB || third.Spill != 0 {
		t.Errorf("%+v", third)
	}
}

func TestSMI(t *testing.T) {
	v := nodetest.Busy(t)
	for name, print := range map[string]func(*bytes.Buffer) error{
		"smi.txt":      func(b *bytes.Buffer) error { return PrintTable(b, v) },
		"smi-wide.txt": func(b *bytes.Buffer) error { return PrintWide(b, v) },
		"smi.json":     func(b *bytes.Buffer) error { return PrintJSON(b, v) },
	} {
		var b bytes.Buffer
		if err := print(&b); err != nil {
			t.Fatal(err)
		}
		golden.Compare(t, name, b.Bytes())
	}
}

// TestSMIDomains: where there are trust domains a column says who is in which.
func TestSMIDomains(t *testing.T) {
	v := nodetest.Busy(t)
	x := v.GPUs[0].VGPUs
	x[0].Domain, x[0].DomainServer = "prod.team", true
	x[1].Domain, x[1].Threads = "prod.team", 30
	box, ok := boxed(v, 160, true, false)
	if !ok {
		t.Error("no box in 160 columns")
	}
	for name, print := range map[string]func(*bytes.Buffer) error{
		"smi-domain.txt":     func(b *bytes.Buffer) error { return PrintTable(b, v) },
		"smi-domain-box.txt": func(b *bytes.Buffer) error { b.WriteString(box); return nil },
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
	long.Name, long.Limit, long.Used, long.Priority, long.State = strings.Repeat("ñ", 300), 143771*quota.MiB, 143771*quota.MiB,
		quota.PriorityBestEffort, snapshot.StateGuardDead
	long.Weight, long.Percent, long.Processes[0].Name = 64, 100, strings.Repeat("x", 300)
	var b bytes.Buffer
	if err := PrintTable(&b, v); err != nil {
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
	if err := PrintTable(&b, snapshot.Arrange(nodetest.Table(t), nil, nil, nil)); err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "smi-empty.txt", b.Bytes())
}

func TestMiB(t *testing.T) {
	for in, want := range map[quota.Bytes]string{0: "0MiB", 1: "1MiB", quota.MiB: "1MiB", quota.MiB + 1: "2MiB"} {
		if got := MiB(in); got != want {
			t.Errorf("%d: %s, want %s", in, got, want)
		}
	}
}
