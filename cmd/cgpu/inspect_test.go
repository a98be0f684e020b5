// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/inspect"
	"github.com/opencgpu/cgpu/pkg/launch"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/schema"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

func inspected(t *testing.T, args string) (d inspect.Dossier) {
	t.Helper()
	out := cgpu("inspect " + args)
	if err := json.Unmarshal([]byte(out), &d); err != nil {
		t.Fatalf("inspect %s: %v: %s", args, err, out)
	}
	return d
}

func TestInspect(t *testing.T) {
	n := nodetest.New(t)
	r := n.Reserve(ledger.Record{ID: "abcdef0123456789", Name: "default/pod/main",
		VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}})
	nodetest.FakeGuard(t, r.Control, nodetest.StatusLine(t, nodetest.Status(r)))
	log := launch.LogFile(n.Dir, r)
	if err := os.MkdirAll(filepath.Dir(log), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(log, []byte(strings.Repeat("old\n", 100)+"level=WARN\x1b[2J msg=\"one\"\nhalf"), 0o600); err != nil {
		t.Fatal(err)
	}
	happen(n, event.Event{Kind: event.Start, Container: r.ID, Nonce: r.Nonce, Text: "mine"},
		event.Event{Kind: event.Start, Container: r.ID, Nonce: "before", Text: "an earlier one's"},
		event.Event{Kind: event.Refused, Container: r.ID, Text: "a try"}, event.Event{Kind: event.Start, Container: "other", Text: "another's"})
	d := inspected(t, "default/pod/main --log-lines 3")
	if d.ID != r.ID || d.Name != "default/pod/main" || d.State != snapshot.StateRunning || d.Guard == nil || len(d.Guard.VGPUs) != 1 ||
		d.Guard.VGPUs[0].UUID != nodetest.T4 || d.Page != nil || d.PageError != "" {
		t.Errorf("%+v", d)
	}
	if diff := cmp.Diff(schema.Log{Path: log, Lines: []string{"old", "level=WARN\x1b[2J msg=\"one\"", "half"}}, d.Log); diff != "" {
		t.Error(diff)
	}
	if len(d.Events) != 2 || d.Events[0].Text != "mine" || d.Events[1].Text != "a try" {
		t.Errorf("%+v", d.Events)
	}
	if strings.Contains(cgpu("inspect abc"), "\x1b") {
		t.Error("an escape sequence reaches the terminal")
	}
	if d := inspected(t, "abc --log-lines 0"); len(d.Log.Lines) != 0 {
		t.Errorf("%+v", d.Log)
	}
	// What cannot be had is told in its place.
	if err := os.Remove(r.Control); err != nil {
		t.Fatal(err)
	}
	if d := inspected(t, "abc"); d.Guard != nil || d.State != snapshot.StateGuardDead || !strings.Contains(d.GuardError, "no such file") ||
		len(d.Log.Lines) != logTail {
		t.Errorf("%+v", d)
	}
	for args, want := range map[string]string{
		"inspect":                      "error: inspect: want one CONTAINER; see cgpu inspect --help",
		"inspect a b":                  "error: inspect: want one CONTAINER",
		"inspect abc --log-lines -1":   "error: inspect: --log-lines -1: want 0 or more",
		"inspect nobody --log-lines 1": "no such container",
	} {
		if out := cgpu(args); !strings.Contains(out, want) {
			t.Errorf("%s: printed %s\nwant %s", args, out, want)
		}
	}
}

func TestInspectPreload(t *testing.T) {
	n := nodetest.New(t)
	r := n.Reserve(ledger.Record{ID: "preload", Preload: true,
		VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 2}}}}})
	nodetest.Occupy(t, r, 3, page.Slot{Owner: 7, Used: [page.MaxVGPUs]uint64{5 * 1 << 20}})
	d := inspected(t, "preload")
	want := &schema.Page{Path: r.Page, Flags: []string{"preload"},
		VGPUs: []schema.PageVGPU{{Weight: 2, Limit: quota.GiB, Used: 5 * quota.MiB, Timeslice: 0.02, Processes: 1}}}
	if diff := cmp.Diff(want, d.Page); diff != "" {
		t.Error(diff)
	}
	if err := os.Remove(r.Page); err != nil {
		t.Fatal(err)
	}
	if d := inspected(t, "preload"); d.Page != nil || d.PageError == "" || d.State != snapshot.StateNoPage {
		t.Errorf("%+v", d)
	}
}
