// SPDX-License-Identifier: Apache-2.0

package control

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// A guard that does not do it is waited for, and then named.
func TestPauseNotDone(t *testing.T) {
	n := nodetest.New(t)
	r := n.Reserve(ledger.Record{ID: "abc", VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}})
	lazy := nodetest.Status(r)
	lazy.VGPUs[0].Compute.TSGs = 1
	old := nodetest.Status(r)
	old.VGPUs[0].Compute = nil
	for want, line := range map[string]string{
		"on GPU 0 paused is false":                nodetest.StatusLine(t, lazy),
		"it does not schedule GPU " + nodetest.T4: nodetest.StatusLine(t, old),
		"i/o timeout":                        "",
		"another container's guard answered": nodetest.StatusLine(t, api.Status{ID: "x"}),
	} {
		os.Remove(r.Control)
		nodetest.FakeGuard(t, r.Control, line)
		got, err := WaitPaused(r, true, time.Now())
		if strings.Contains(want, "another") {
			if got != GuardGone {
				t.Errorf("%s: %v, %v", want, got, err)
			}
		} else if got != NotDone || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v", want, got, err)
		}
	}
}

// A page that names no GPU of this node tells nothing, and is told nothing.
func TestForeignPage(t *testing.T) {
	table := nodetest.Table(t)
	r := ledger.Record{ID: "a", Preload: true, Page: page.File(t.TempDir(), "n"),
		VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 5}}}}}
	if err := page.Create(r.Page, page.Header{Flags: page.FlagPreload}, []page.VGPU{{Minor: 77, Weight: 2}}); err != nil {
		t.Fatal(err)
	}
	if s, err := snapshot.PageStatus(table, r); err != nil || len(s.VGPUs) != 0 {
		t.Errorf("%+v, %v", s, err)
	}
	if err := updatePage(table, r, nil); err == nil || !strings.Contains(err.Error(), "GPU 0") {
		t.Errorf("updated: %v", err)
	}
	if p, err := page.Read(r.Page); err != nil || p.VGPU(0).Weight != 2 {
		t.Errorf("changed, %v", err)
	}
}
