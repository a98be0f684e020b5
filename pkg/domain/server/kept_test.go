// SPDX-License-Identifier: Apache-2.0

package server

import (
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// TestKept: what was set of a domain's server its successor has, before what cgpu.toml says, and no other.
func TestKept(t *testing.T) {
	runDir := t.TempDir()
	table := &device.Table{Config: device.Config{Domains: []device.Domain{{Name: "a", Weight: 3}, {Name: "b", Percent: 50}}}}
	server := func(name string) ledger.Record {
		return ledger.Record{Domain: name, DomainServer: true, VGPUs: []ledger.VGPU{{UUID: "GPU-1"}}}
	}
	want := func(uuid, name string, memory quota.Bytes, weight, percent int, paused bool) {
		t.Helper()
		d := Domain{runDir, uuid, name}
		k, err := d.kept()
		if err != nil {
			t.Fatal(err)
		}
		q := d.quota(table, k)
		if q.Memory.Fixed != memory || q.Weight != weight || q.Percent != percent || k.Paused != paused || !q.DomainServer || q.Domain != name {
			t.Errorf("%s on %s: %+v, paused %v", name, uuid, q, k.Paused)
		}
	}
	want("GPU-1", "a", Memory, 3, 0, false)
	want("GPU-1", "ns.b", Memory, 0, 50, false)
	yes, no, weight, percent, limit := true, false, 7, 0, quota.GiB
	for _, c := range []struct {
		r      ledger.Record
		change ledger.ChangeRequest
	}{
		{server("a"), ledger.ChangeRequest{Paused: &yes}},
		{server("a"), ledger.ChangeRequest{Settings: ledger.Settings{Weight: &weight}}},
		{server("ns.b"), ledger.ChangeRequest{Settings: ledger.Settings{Percent: &percent, Limit: &limit}}},
		{ledger.Record{Domain: "a", VGPUs: server("a").VGPUs}, ledger.ChangeRequest{Paused: &no}}, // a member
		{ledger.Record{VGPUs: server("a").VGPUs}, ledger.ChangeRequest{Paused: &no}},
	} {
		if err := Keep(runDir, c.r, c.change); err != nil {
			t.Fatal(err)
		}
	}
	want("GPU-1", "a", Memory, 7, 0, true)
	want("GPU-2", "a", Memory, 3, 0, false)
	want("GPU-1", "ns.b", quota.GiB, 0, 0, false)
	want("GPU-1", "b", Memory, 0, 50, false)
	if err := Keep(runDir, server("a"), ledger.ChangeRequest{Paused: &no}); err != nil {
		t.Fatal(err)
	}
	want("GPU-1", "a", Memory, 7, 0, false)

	if err := os.WriteFile(Domain{runDir, "GPU-1", "a"}.keptFile(), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := (Domain{runDir, "GPU-1", "a"}).kept(); err == nil || !strings.Contains(err.Error(), "remove ") {
		t.Errorf("a file that is broken: %v", err)
	}
}

// TestKeptAtOnce: two commands change what each sets.
func TestKeptAtOnce(t *testing.T) {
	runDir, r := t.TempDir(), ledger.Record{Domain: "a", DomainServer: true, VGPUs: []ledger.VGPU{{UUID: "GPU-1"}}}
	yes, weight := true, 7
	var all sync.WaitGroup
	for range 20 {
		for _, change := range []ledger.ChangeRequest{{Paused: &yes}, {Settings: ledger.Settings{Weight: &weight}}} {
			all.Go(func() {
				if err := Keep(runDir, r, change); err != nil {
					t.Error(err)
				}
			})
		}
	}
	all.Wait()
	if k, err := (Domain{runDir, "GPU-1", "a"}).kept(); err != nil || !k.Paused || k.Weight == nil || *k.Weight != 7 {
		t.Errorf("%+v, %v", k, err)
	}
}
