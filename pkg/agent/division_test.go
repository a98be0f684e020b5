// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

func selection(t *testing.T, words ...string) Selection {
	t.Helper()
	s, err := ParseSelection(words)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// numbered are GPUs as the driver numbers them.
func numbered(uuids ...string) (gpus []device.GPU) {
	for i, uuid := range uuids {
		gpus = append(gpus, device.GPU{Index: i, UUID: uuid, Memory: 16 * quota.GiB})
	}
	return gpus
}

// A GPU stays with its front end when the driver numbers GPUs anew, also for the next agent and after a boot.
func TestDivisionStays(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "gpus.json")
	lists := map[string]Selection{FrontDRA: selection(t, "0", "1"), FrontPlugin: selection(t, "2", "3")}
	owners := func(lists map[string]Selection, uuids ...string) string {
		t.Helper()
		d := NewDivision(file, dir, lists) // as after a restart
		if err := d.Resolve(numbered(uuids...)); err != nil {
			t.Fatal(err)
		}
		has := ""
		for _, name := range []string{FrontDRA, FrontPlugin} {
			mine, others := d.Of(name)
			f := FrontEnd{Mine: mine, Others: others}
			for _, g := range numbered(uuids...) {
				if f.has(g) {
					has += " " + g.UUID
				}
			}
			has += ";"
		}
		return has
	}
	all := []string{"GPU-a", "GPU-b", "GPU-c", "GPU-d"}
	for i, step := range []struct {
		uuids []string
		want  string
	}{
		{all, " GPU-a GPU-b; GPU-c GPU-d;"},
		{all[1:], " GPU-b; GPU-c GPU-d;"}, // GPU-c has index 1 now
		{[]string{"GPU-d", "GPU-b", "GPU-a", "GPU-c"}, " GPU-b GPU-a; GPU-d GPU-c;"},
		{[]string{"GPU-new", "GPU-b", "GPU-c", "GPU-d"}, " GPU-new GPU-b; GPU-c GPU-d;"},
		{all, " GPU-a GPU-b; GPU-c GPU-d;"},
	} {
		if got := owners(lists, step.uuids...); got != step.want {
			t.Errorf("step %d: %q, want %q", i, got, step.want)
		}
	}
	// Other lists are the administrator's word, but for what a container holds.
	_, err := ledger.Open(dir).Reserve(ledger.Request{Record: ledger.Record{ID: "c1", Nonce: "n", LauncherPID: os.Getpid(),
		VGPUs: []ledger.VGPU{{UUID: "GPU-b", Slice: quota.Slice{Limit: quota.GiB,
			Share: quota.Share{Weight: 1, Priority: quota.PriorityDefault}}}},
		Allocated: []ledger.Allocation{{ID: "claim/1", UUID: "GPU-b"}}}, GPUs: []ledger.GPU{{UUID: "GPU-b", Memory: 16 * quota.GiB}},
		Overcommit: 1, Card: sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 80}})
	if err != nil {
		t.Fatal(err)
	}
	other := map[string]Selection{FrontDRA: selection(t, "2", "3"), FrontPlugin: selection(t, "0", "1")}
	for range 2 {
		if got, want := owners(other, all...), " GPU-b GPU-c GPU-d; GPU-a;"; got != want {
			t.Errorf("other lists, one held: %q, want %q", got, want)
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if got, want := owners(other, all...), " GPU-b GPU-c GPU-d; GPU-a;"; got != want {
		t.Errorf("the first lists, one held: %q, want %q", got, want)
	}
	if err := ledger.Open(dir).Release("n"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if got, want := owners(other, all...), " GPU-c GPU-d; GPU-a GPU-b;"; got != want {
			t.Errorf("other lists: %q, want %q", got, want)
		}
	}
	// In both lists: nobody's.
	both := map[string]Selection{FrontDRA: selection(t, "0", "GPU-b"), FrontPlugin: selection(t, "1", "2")}
	if got, want := owners(both, all...), " GPU-a; GPU-c;"; got != want {
		t.Errorf("in both lists: %q, want %q", got, want)
	}
}

// What cannot be read or kept is no division: GPUs would be another front end's after the next start.
func TestDivisionFails(t *testing.T) {
	dir := t.TempDir()
	lists := map[string]Selection{FrontDRA: selection(t, "0"), FrontPlugin: selection(t, "1")}
	none := func(d *Division, want string) {
		t.Helper()
		if err := d.Resolve(numbered("GPU-a", "GPU-b")); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		if mine, _ := d.Of(FrontDRA); mine(device.GPU{UUID: "GPU-a"}) {
			t.Error("has a GPU")
		}
	}
	file := filepath.Join(dir, "gpus.json")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	none(NewDivision(filepath.Join(file, "gpus.json"), dir, lists), "directory")
	if err := os.WriteFile(file, []byte(`{"owners":`), 0o600); err != nil {
		t.Fatal(err)
	}
	none(NewDivision(file, dir, lists), "remove it")
	// The agent goes on when it is mended.
	d := NewDivision(file, dir, lists)
	a := &agent{Options: Options{RunDir: dir, Division: d, Log: silent}}
	table := tableOf("", numbered("GPU-a", "GPU-b")...)
	if a.divide(table, true) == nil || a.divide(table, false) == nil {
		t.Error("divided")
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := a.divide(table, false); err != nil {
		t.Error(err)
	}
	if owners := *d.owners.Load(); !maps.Equal(owners, map[string]string{"GPU-a": FrontDRA, "GPU-b": FrontPlugin}) {
		t.Errorf("%v", owners)
	}
}
