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

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
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
	t := &device.Table{Version: device.TableVersion, Driver: device.DriverNVIDIA, DriverVersion: "580.159.04", Config: config.Default().Settings}
	for i := range gpus {
		t.GPUs = append(t.GPUs, device.GPU{Index: i, UUID: uuid(i), Minor: i, BusID: fmt.Sprintf("0000:%02x:00.0", i+1), Name: "Tesla T4", Memory: 15109*quota.MiB + 4711,
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
	golden(t, "slices.json", Resources(tab, "node1", func(g device.GPU) bool { return g.Index != 0 }, places))
}

func TestResourcesOfMany(t *testing.T) {
	r := Resources(tableOf(300), "node1", nil, nil)
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
	if r := Resources(tableOf(1), "node1", func(device.GPU) bool { return false }, nil); len(r.Pools["node1"].Slices) != 1 {
		t.Errorf("no GPU: %+v", r)
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
		d := Resources(tab, "n", nil, nil).Pools["n"].Slices[0].Devices[0]
		if len(d.Name) > 63 || len(*d.Attributes["productName"].StringValue) > 64 {
			t.Errorf("%+v", d)
		}
		for name, capacity := range d.Capacity {
			p := capacity.RequestPolicy
			r := p.ValidRange
			if r.Min.Cmp(*r.Max) > 0 || r.Max.Cmp(capacity.Value) > 0 || p.Default.Cmp(*r.Min) < 0 || p.Default.Cmp(*r.Max) > 0 || capacity.Value.Sign() <= 0 {
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

func TestSemver(t *testing.T) {
	for in, want := range map[string]string{
		"580.159.04": "580.159.4", "550.54": "550.54.0", "999.88.77": "999.88.77", "0.0.0": "0.0.0", "535": "535.0.0",
		"": "", "1.2.3.4": "", "580.x": "", "580.-1.0": "", "99999999999.1.1": "", "1..2": "",
	} {
		if got := semver(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}
