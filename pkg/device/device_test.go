// SPDX-License-Identifier: Apache-2.0

package device

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// null is a character device that every machine has.
var null = Node{Path: "/dev/nvidiactl", HostPath: "/dev/null", Major: 1, Minor: 3, Bind: true}

func gpu(index int) GPU {
	n := string(rune('0' + index))
	return GPU{
		Index: index, Minor: index, Name: "Tesla T4", Memory: 15109 * quota.MiB,
		UUID:  "GPU-00000000-0000-0000-0000-00000000000" + n,
		BusID: "0000:0" + n + ":00.0",
		Node:  Node{Path: "/dev/nvidia" + n, HostPath: "/dev/zero", Major: 1, Minor: 5},
	}
}

func table() *Table {
	return &Table{
		Version: TableVersion, Driver: DriverNVIDIA, DriverVersion: "580.159.04",
		GPUs:      []GPU{gpu(0), gpu(1)},
		Nodes:     []Node{null},
		Mounts:    []Mount{{Host: "/usr/lib/libcuda.so.1", Container: "/usr/lib/libcuda.so.1", Options: []string{"ro", "rbind"}}},
		Links:     []Link{{Target: "libcuda.so.1", Path: "/usr/lib/libcuda.so"}},
		LibDirs:   []string{"/usr/lib"},
		Libraries: []Library{{Name: "libcuda.so.1", Path: "/usr/lib/libcuda.so.1", Flags: 0x303}},
		Env:       []string{"NVIDIA_CTK_LIBCUDA_DIR=/usr/lib"},
		Config: Config{Runtimes: []string{"runc"}, Overcommit: 1, MaxInst: 20, Placement: "binpack",
			ContextOverhead: 13 * quota.MiB, GuardStartTimeout: 10 * time.Second, Policy: sched.PolicyPreempt, PrioRatio: 99},
	}
}

func TestValidate(t *testing.T) {
	for _, tt := range []struct {
		name  string
		spoil func(*Table)
		want  string
	}{
		{"good", func(*Table) {}, ""},
		{"no GPU at all", func(t *Table) { t.GPUs = nil }, ""},
		{"eight-digit domain", func(t *Table) { t.GPUs[0].BusID = "00010000:3b:00.0" }, ""},
		{"other version", func(t *Table) { t.Version = 2 }, "version 2, want 1"},
		{"from before there were policies", func(t *Table) { t.Config.PrioRatio = 0 }, "config: prio-ratio 0"},
		{"driver", func(t *Table) { t.Driver = "amd" }, `driver "amd"`},
		{"same index", func(t *Table) { t.GPUs[1].Index = 0 }, "index 0 is not above"},
		{"descending index", func(t *Table) { t.GPUs[0].Index = 7 }, "index 1 is not above"},
		{"same uuid", func(t *Table) { t.GPUs[1].UUID = t.GPUs[0].UUID }, "occurs twice"},
		{"same minor", func(t *Table) { t.GPUs[1].Minor = 0 }, "minor 0 occurs twice"},
		{"same bus id", func(t *Table) { t.GPUs[1].BusID = t.GPUs[0].BusID }, "occurs twice"},
		{"same node", func(t *Table) { t.GPUs[1].Node.Path = "/dev/nvidia0" }, "occurs twice"},
		{"upper-case uuid", func(t *Table) { t.GPUs[0].UUID = "GPU-ABCDEF00-0000-0000-0000-000000000000" }, "uuid"},
		{"MIG uuid", func(t *Table) { t.GPUs[0].UUID = "MIG-00000000-0000-0000-0000-000000000000" }, "uuid"},
		{"upper-case bus id", func(t *Table) { t.GPUs[0].BusID = "0000:3B:00.0" }, "bus id"},
		{"no memory", func(t *Table) { t.GPUs[0].Memory = 0 }, "no memory"},
		{"relative node", func(t *Table) { t.Nodes[0].Path = "dev/nvidiactl" }, "absolute"},
		{"node on no host", func(t *Table) { t.Nodes[0].HostPath = "" }, "absolute"},
		{"climbing mount", func(t *Table) { t.Mounts[0].Container = "/usr/../etc" }, "absolute"},
		{"relative link", func(t *Table) { t.Links[0].Path = "libcuda.so" }, "absolute"},
		{"link to nothing", func(t *Table) { t.Links[0].Target = "" }, "target"},
		{"two lines in one folder", func(t *Table) { t.LibDirs[0] = "/a\n/b" }, "library folder"},
		{"library without a name", func(t *Table) { t.Libraries[0].Name = "" }, "a file name"},
		{"library's name with a folder", func(t *Table) { t.Libraries[0].Name = "../libcuda.so.1" }, "a file name"},
		{"relative library", func(t *Table) { t.Libraries[0].Path = "libcuda.so.1" }, "absolute"},
		{"nameless variable", func(t *Table) { t.Env[0] = "=x" }, "NAME=value"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tab := table()
			tt.spoil(tab)
			err := tab.Validate()
			if tt.want == "" {
				if err != nil {
					t.Fatalf("refused: %v", err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("got %v, want an error with %q", err, tt.want)
			}
		})
	}
}

func TestPart(t *testing.T) {
	for _, tt := range []struct {
		part        Part
		total, want quota.Bytes
	}{
		{Part{}, 16 * quota.GiB, 0},
		{Part{Bytes: quota.GiB}, 16 * quota.GiB, quota.GiB},
		{Part{Bytes: quota.GiB}, 0, quota.GiB},
		{Part{Percent: 50}, 16 * quota.GiB, 8 * quota.GiB},
		{Part{Percent: 50}, 0, 0},
		{Part{Percent: 10}, 99, 9},
		{Part{Percent: 100}, 1<<64 - 1, 1<<64 - 1},
	} {
		if got := tt.part.Of(tt.total); got != tt.want {
			t.Errorf("%+v of %d: %d, want %d", tt.part, tt.total, got, tt.want)
		}
	}
}

// host is a made-up kernel and configuration, and a run directory with a table that describes it.
type host struct {
	sources
	runDir, config, helper, library string
}

func newHost(t *testing.T) host {
	t.Helper()
	dir := t.TempDir()
	h := host{
		sources: sources{bootID: dir + "/boot_id", driverFile: dir + "/version", driverGPUs: dir + "/gpus"},
		runDir:  filepath.Join(dir, "run", "cgpu"), config: dir + "/cgpu.toml", helper: dir + "/cgpu-refresh", library: dir + "/libcuda.so.1",
	}
	for _, f := range []string{h.bootID, h.driverFile, h.helper, h.library} {
		write(t, f, "first\n")
	}
	if err := os.MkdirAll(h.driverGPUs+"/0000:01:00.0", 0o755); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h host) save(t *testing.T, tab *Table) {
	t.Helper()
	var err error
	if tab.Key, err = h.readKey(tab.Driver, h.config, h.helper, h.library); err != nil {
		t.Fatal(err)
	}
	if err := tab.Save(h.runDir); err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// What schedulers may give out is all but the headroom, and at least half of the GPU.
func TestPromised(t *testing.T) {
	for _, c := range []struct {
		overcommit     float64
		headroom       Part
		memory, wanted quota.Bytes
	}{
		{0, Part{}, 16 * quota.GiB, 16 * quota.GiB},
		{1, Part{Percent: 25}, 16 * quota.GiB, 12 * quota.GiB},
		{1, Part{Bytes: 3 * quota.GiB}, 16 * quota.GiB, 13 * quota.GiB},
		{1, Part{Bytes: 30 * quota.GiB}, 16 * quota.GiB, 8 * quota.GiB},
		{1.5, Part{Percent: 25}, 16 * quota.GiB, 20 * quota.GiB},
		{100, Part{}, 1 << 62, 1 << 62},
	} {
		if got := Promised(Config{Overcommit: c.overcommit, Headroom: c.headroom}, GPU{Memory: c.memory}); got != c.wanted {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

func TestSaveThenLoad(t *testing.T) {
	h := newHost(t)
	want := table()
	h.save(t, want)
	write(t, TableFile(h.runDir)+".tmp", "what a killed one has left")
	h.save(t, want)
	got, err := h.load(h.runDir, h.config)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("saved and loaded tables differ (-saved +loaded):\n%s", diff)
	}
	for path, want := range map[string]os.FileMode{h.runDir: 0o711, filepath.Dir(h.runDir): 0o755, TableFile(h.runDir): 0o644} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: mode %v (%v), want %v", path, info.Mode().Perm(), err, want)
		}
	}
	if names, err := readNames(h.runDir); err != nil || len(names) != 1 {
		t.Errorf("run directory holds %v (%v), want only node.json", names, err)
	}
}

func TestSaveRefusesBadTable(t *testing.T) {
	h := newHost(t)
	bad := table()
	bad.GPUs[1].UUID = bad.GPUs[0].UUID
	if err := bad.Save(h.runDir); err == nil {
		t.Error("saved a table with one UUID twice")
	}
	if _, err := os.Stat(TableFile(h.runDir)); err == nil {
		t.Error("a refused table left a file")
	}
}

func TestLoadStale(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*testing.T, host)
		want   string
	}{
		{"boot", func(t *testing.T, h host) { write(t, h.bootID, "second\n") }, "booted"},
		{"driver", func(t *testing.T, h host) { write(t, h.driverFile, "second") }, "version differs"},
		{"driver unloaded", func(t *testing.T, h host) { os.Remove(h.driverFile) }, "version differs"},
		{"GPU added", func(t *testing.T, h host) { os.Mkdir(h.driverGPUs+"/0000:02:00.0", 0o755) }, "0000:02:00.0"},
		{"library", func(t *testing.T, h host) { write(t, h.library, "a longer one") }, "libcuda.so.1 was changed"},
		{"configuration made", func(t *testing.T, h host) { write(t, h.config, "max_inst = 1") }, "cgpu.toml was changed"},
		{"helper upgraded", func(t *testing.T, h host) { write(t, h.helper, "a longer one") }, "cgpu-refresh was changed"},
		{"format", func(t *testing.T, h host) { write(t, TableFile(h.runDir), `{"version":99,"gpus":"?"}`) }, "format 99"},
		{"torn", func(t *testing.T, h host) { write(t, TableFile(h.runDir), `{"version":1,`) }, "not JSON"},
		{"invalid", func(t *testing.T, h host) { write(t, TableFile(h.runDir), `{"version":1,"driver":"x"}`) }, `driver "x"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := newHost(t)
			h.save(t, table())
			if _, err := h.load(h.runDir, h.config); err != nil {
				t.Fatalf("before the change: %v", err)
			}
			tt.change(t, h)
			_, err := h.load(h.runDir, h.config)
			if !errors.Is(err, ErrStale) || errors.Is(err, ErrMissing) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want ErrStale with %q", err, tt.want)
			}
		})
	}

	h := newHost(t)
	h.save(t, table())
	if tab, err := h.load(h.runDir, "/elsewhere.toml"); !errors.Is(err, ErrStale) || tab == nil {
		t.Errorf("other configuration file: got %v, %v, want the table and ErrStale", tab, err)
	}
	if _, err := h.load(t.TempDir(), h.config); !errors.Is(err, ErrMissing) || errors.Is(err, ErrStale) {
		t.Errorf("empty run directory: got %v, want ErrMissing", err)
	}
}

func TestLoadNodeChanged(t *testing.T) {
	for name, n := range map[string]Node{
		"gone":         {Path: "/dev/nvidiactl", HostPath: "/dev/cgpu-no-such-node"},
		"other number": {Path: "/dev/nvidiactl", HostPath: "/dev/null", Major: 195, Minor: 255},
		"regular file": {Path: "/dev/nvidiactl", HostPath: "/proc/version", Major: 1, Minor: 3},
	} {
		h := newHost(t)
		tab := table()
		tab.Nodes = []Node{n}
		h.save(t, tab)
		if _, err := h.load(h.runDir, h.config); !errors.Is(err, ErrStale) || !strings.Contains(err.Error(), n.HostPath) {
			t.Errorf("%s: got %v, want ErrStale naming %s", name, err, n.HostPath)
		}
	}
}

func TestLoadSimSocket(t *testing.T) {
	h := newHost(t)
	tab := table()
	tab.Driver = DriverSim
	h.save(t, tab)
	if _, err := h.load(h.runDir, h.config); !errors.Is(err, ErrStale) {
		t.Errorf("no simulated driver: got %v, want ErrStale", err)
	}
	l, err := net.Listen("unix", SimSocket(h.runDir))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := h.load(h.runDir, h.config); err != nil {
		t.Errorf("with the simulated driver: %v", err)
	}
}

func TestLoadUntrusted(t *testing.T) {
	h := newHost(t)
	h.save(t, table())
	if err := os.Chmod(TableFile(h.runDir), 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := h.load(h.runDir, h.config); err == nil || errors.Is(err, ErrStale) {
		t.Errorf("a table that everybody may write: got %v, want a refusal", err)
	}
	if err := os.Truncate(TableFile(h.runDir), maxTable+1); err != nil {
		t.Fatal(err)
	}
	os.Chmod(TableFile(h.runDir), 0o644)
	if _, err := h.load(h.runDir, h.config); err == nil || !strings.Contains(err.Error(), "bytes") {
		t.Errorf("a table too large: got %v, want a refusal", err)
	}
}

func TestDeviceNumbers(t *testing.T) {
	for _, tt := range []struct {
		dev          uint64
		major, minor uint32
	}{{0x0103, 1, 3}, {0xc3ff, 195, 255}, {0xfe01, 254, 1}, {0x10_0301, 3, 0x101}} {
		if Major(tt.dev) != tt.major || Minor(tt.dev) != tt.minor {
			t.Errorf("%#x: %d:%d, want %d:%d", tt.dev, Major(tt.dev), Minor(tt.dev), tt.major, tt.minor)
		}
	}
	var st syscall.Stat_t
	if err := syscall.Stat("/dev/null", &st); err != nil || Major(st.Rdev) != 1 || Minor(st.Rdev) != 3 {
		t.Errorf("/dev/null is %d:%d (%v), want 1:3", Major(st.Rdev), Minor(st.Rdev), err)
	}
}

func FuzzDecode(f *testing.F) {
	good, err := json.Marshal(table())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		tab, err := decode("node.json", text)
		if (err == nil) != (tab != nil) {
			t.Fatalf("table %v with error %v", tab, err)
		}
		if err == nil && tab.Validate() != nil {
			t.Fatal("decoded an invalid table")
		}
	})
}

func BenchmarkLoad(b *testing.B) {
	dir := b.TempDir()
	tab := table()
	tab.Driver = DriverNVIDIA
	var err error
	if tab.Key, err = ReadKey(tab.Driver, dir+"/none", "/proc/self/exe", ""); err != nil {
		b.Fatal(err)
	}
	if err := tab.Save(dir); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := kernel.load(dir, dir+"/none"); err != nil {
			b.Fatal(err)
		}
	}
}
