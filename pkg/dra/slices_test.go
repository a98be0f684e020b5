// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares v, written as JSON, with a file of testdata.
func golden(t *testing.T, name string, v any) {
	t.Helper()
	got, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	got = append(got, '\n')
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), string(got)); d != "" {
		t.Errorf("%s (go test ./pkg/dra -update writes it):\n%s", path, d)
	}
}

func uuid(i int) string { return fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i) }

// tableOf is a node with so many GPUs of 15109 MiB and some bytes.
func tableOf(gpus int) *device.Table {
	t := &device.Table{Version: device.TableVersion, Driver: device.DriverNVIDIA, DriverVersion: "580.159.04",
		Config: config.Default().Settings}
	for i := range gpus {
		t.GPUs = append(t.GPUs, device.GPU{Index: i, UUID: uuid(i), Minor: i, BusID: fmt.Sprintf("0000:%02x:00.0", i+1), Name: "Tesla T4",
			Memory:       15109*quota.MiB + 4711,
			Architecture: "Turing", ComputeCapability: "7.5"})
		if i > 1 {
			t.GPUs[i].NVLink = "nvlink2"
		}
	}
	return t
}

func sysfs() fstest.MapFS {
	fs := fstest.MapFS{}
	for i := range 2 {
		bus := fmt.Sprintf("0000:%02x:00.0", i+1)
		home := "devices/pci0000:00/0000:00:01.0/" + bus
		fs["bus/pci/devices/"+bus] = &fstest.MapFile{Data: []byte("../../../" + home), Mode: 0o777 | os.ModeSymlink}
		fs[home+"/numa_node"] = &fstest.MapFile{Data: fmt.Appendf(nil, "%d\n", i-1)}
	}
	return fs
}

func TestResources(t *testing.T) {
	tab := tableOf(3)
	places := Places(sysfs(), tab)
	if p := places["0000:01:00.0"]; p.PCIeRoot != "pci0000:00" || p.NUMANode != nil {
		t.Errorf("no NUMA: %+v", p)
	}
	if p := places["0000:02:00.0"]; p.PCIeRoot != "pci0000:00" || p.NUMANode == nil || *p.NUMANode != 0 {
		t.Errorf("NUMA node 0: %+v", p)
	}
	if p := places["0000:03:00.0"]; p != (Place{}) {
		t.Errorf("not in sysfs: %+v", p)
	}
	golden(t, "slices.json", Resources(tab, "node1", func(g device.GPU) bool { return g.Index != 0 }, places, nil))
}

func TestResourcesOfMany(t *testing.T) {
	r := Resources(tableOf(300), "node1", nil, nil, nil)
	var sizes []int
	names := map[string]bool{}
	for _, s := range r.Pools["node1"].Slices {
		sizes = append(sizes, len(s.Devices))
		for _, d := range s.Devices {
			names[d.Name] = true
		}
	}
	if !cmp.Equal(sizes, []int{128, 128, 44}) || len(names) != 300 {
		t.Errorf("slices of %v devices, %d names", sizes, len(names))
	}
	if r := Resources(tableOf(1), "node1", func(device.GPU) bool { return false }, nil, nil); len(r.Pools["node1"].Slices) != 1 {
		t.Errorf("no GPU: %+v", r)
	}
}

// TestHeadroom: what running pods may be raised into is in no capacity, whatever the policy.
func TestHeadroom(t *testing.T) {
	tab := tableOf(1)
	tab.GPUs[0].Memory = 16 * quota.GiB
	tab.Config.Headroom, tab.Config.HeadroomCores = device.Part{Percent: 25}, 20
	for _, policy := range []sched.Policy{sched.PolicyPreempt, sched.PolicyFixed, sched.PolicySoft, sched.PolicyFair, sched.PolicyNative} {
		for _, inst := range []int{1, 20} {
			tab.Config.Policy, tab.Config.MaxInst = policy, inst
			capacity := Resources(tab, "n", nil, nil, nil).Pools["n"].Slices[0].Devices[0].Capacity
			for name, most := range map[resourceapi.QualifiedName]int64{"memory": int64(12 * quota.GiB), "cores": 80} {
				c := capacity[name]
				if r := c.RequestPolicy; c.Value.Value() != most || r.ValidRange.Max.Value() > most || r.Default.Value() > r.ValidRange.Max.Value() {
					t.Errorf("%v, %d places, %s: %v of %v at most, %v without asking", policy, inst, name, r.ValidRange.Max, &c.Value, r.Default)
				}
			}
		}
	}
}

// TestAPIBounds are those of the API server (pkg/apis/resource/validation) that a table can come near.
func TestAPIBounds(t *testing.T) {
	tab := tableOf(1)
	tab.GPUs[0].Name = strings.Repeat("ü", 40)
	for _, c := range []struct {
		inst       int
		overcommit float64
		memory     quota.Bytes
	}{{20, 1, quota.GiB}, {1, 1, quota.MiB}, {0, 0, quota.GiB}, {1000, 100, 1 << 62}} {
		tab.Config.MaxInst, tab.Config.Overcommit, tab.GPUs[0].Memory = c.inst, c.overcommit, c.memory
		d := Resources(tab, "n", nil, nil, nil).Pools["n"].Slices[0].Devices[0]
		if len(d.Name) > 63 || len(*d.Attributes["productName"].StringValue) > 64 {
			t.Errorf("%+v", d)
		}
		for name, capacity := range d.Capacity {
			p := capacity.RequestPolicy
			r := p.ValidRange
			if r.Min.Cmp(*r.Max) > 0 || r.Max.Cmp(capacity.Value) > 0 || p.Default.Cmp(*r.Min) < 0 || p.Default.Cmp(*r.Max) > 0 ||
				capacity.Value.Sign() <= 0 {
				t.Errorf("%+v: %s: %+v", c, name, capacity)
			}
			if r.Step != nil {
				sum := r.Min.DeepCopy()
				sum.Add(*r.Step)
				if sum.Cmp(capacity.Value) > 0 {
					t.Errorf("%+v: %s: a step leads beyond the capacity", c, name)
				}
			}
		}
		if d.Capacity["memory"].RequestPolicy.ValidRange.Step != nil {
			t.Error("memory has a step, and the scheduler's rounding overflows")
		}
	}
}

// TestCores: the scheduler counts of a GPU's time what the ledger will grant under its policy, and of places what the GPU has.
func TestCores(t *testing.T) {
	for _, c := range []struct {
		policy  sched.Policy
		inst    int
		preload bool
		want    string // least, default, most; containers
	}{
		{sched.PolicyPreempt, 20, false, "0 0 100; 20"},
		{sched.PolicyWeight, 4, false, "0 0 100; 4"},
		{sched.PolicySoft, 20, false, "0 0 100; 20"},
		{sched.PolicyFair, 20, false, "0 0 5; 20"},
		{sched.PolicyFair, 3, false, "0 0 33; 3"},
		{sched.PolicyFair, 64, false, "0 0 1; 64"},
		{sched.PolicyFixed, 20, false, "1 5 100; 20"},
		{sched.PolicyFixed, 1, false, "1 100 100; 1"},
		{sched.PolicyFixed, 64, false, "1 1 100; 64"},
		{sched.PolicyNative, 20, false, "0 0 0; 20"},
		{sched.PolicyPreempt, 20, true, "0 0 0; 20"},
	} {
		tab := tableOf(2)
		if c.preload {
			tab.Config.Enforcement = device.EnforcePreload
		}
		card := sched.Card{Policy: c.policy, MaxInst: c.inst, PrioRatio: sched.DefaultPrioRatio}
		devices := Resources(tab, "n", nil, nil, map[string]sched.Card{uuid(0): card}).Pools["n"].Slices[0].Devices
		cores, containers := devices[0].Capacity["cores"], devices[0].Capacity["containers"]
		r := cores.RequestPolicy.ValidRange
		if got := fmt.Sprint(r.Min, cores.RequestPolicy.Default, r.Max); got+"; "+containers.Value.String() != c.want ||
			containers.RequestPolicy.ValidRange.Max.Cmp(containers.Value) != 0 {
			t.Errorf("%+v: %s; %s", c, got, &containers.Value)
		}
		// What it may ask for is what the ledger admits on an empty card, and what is more the ledger refuses.
		for percent := range 101 {
			within := percent >= int(r.Min.Value()) && percent <= int(r.Max.Value())
			if refused := card.Admit(nil, sched.Share{Weight: 1, Percent: percent}); !c.preload && percent > 0 && within != (refused == nil) {
				t.Errorf("%+v: %d: within %v, %v", c, percent, within, refused)
			}
		}
		// The other GPU has the node's.
		if other := devices[1].Capacity["containers"]; other.Value.Value() != int64(tab.Config.MaxInst) {
			t.Errorf("%+v: %+v", c, other)
		}
	}
	// As many claims as there are places fit, each with what it has without asking.
	card := sched.Card{Policy: sched.PolicyFixed, MaxInst: 20}
	var others []sched.Share
	for range 20 {
		s := sched.Share{Weight: 1, Percent: int(coresOf(card, device.Config{}).preset)}
		if err := card.Admit(others, s); err != nil {
			t.Fatal(err)
		}
		others = append(others, s)
	}
}

func TestSemver(t *testing.T) {
	for in, want := range map[string]string{
		"580.159.04": "580.159.4", "550.54": "550.54.0", "999.88.77": "999.88.77", "0.0.0": "0.0.0", "535": "",
		"": "", "1.2.3.4": "", "580.x": "", "580.-1.0": "", "99999999999.1.1": "", "1..2": "",
	} {
		if got := semver(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}
