// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/spec"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// installLimiter puts a file where the runtime looks for the preload library; the containers' program is static and never
// loads it.
func (n *node) installLimiter() {
	n.t.Helper()
	if err := os.WriteFile(filepath.Join(n.dir, "libcgpu.so"), []byte("limiter"), 0o755); err != nil {
		n.t.Fatal(err)
	}
}

// glibc makes a bundle's image look as if it had glibc.
func glibc(t *testing.T, bundle string) {
	t.Helper()
	loader := filepath.Join(bundle, "rootfs", loaders[runtime.GOARCH])
	err := os.MkdirAll(filepath.Dir(loader), 0o755)
	if err == nil {
		err = os.WriteFile(loader, nil, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// preloadMode sets a node to preload mode. With the NVIDIA driver the nodes still are those of the tests.
func (n *node) preloadMode(driver string) {
	n.t.Helper()
	if driver == device.DriverNVIDIA {
		if _, err := os.Stat("/proc/driver/nvidia"); err == nil {
			testenv.Skip(n.t, "on a GPU: the test's table would be stale")
		}
		key, err := device.ReadKey(driver, filepath.Join(n.dir, "cgpu.toml"), "", "")
		if err != nil {
			n.t.Fatal(err)
		}
		n.table.Key = key
	}
	n.table.Driver = driver
	n.table.Config.Enforcement = device.EnforcePreload
	n.table.Config.BaseTimeslice = 10 * time.Millisecond
	n.saveTable()
}

// noPages fails when files of a container are left.
func (n *node) noPages() {
	n.t.Helper()
	if left, _ := filepath.Glob(filepath.Join(n.runDir, "page", "*")); len(left) > 0 {
		n.t.Errorf("left behind: %v", left)
	}
}

// TestLimiterInContainer looks at the limiter's files from inside.
func TestLimiterInContainer(t *testing.T) {
	const (
		guarded = `LD_PRELOAD=/run/cgpu/libcgpu.so
/run/cgpu/libcgpu.so "limiter" read-only=true
/run/cgpu/vgpu "4096" read-only=true
`
		shared = `/etc/ld.so.preload "/run/cgpu/libcgpu.so\n" read-only=true
`
		none = "/etc/ld.so.preload none\n"
		off  = "LD_PRELOAD=\n/run/cgpu/libcgpu.so none\n/run/cgpu/vgpu \"4096\" read-only=true\n"
	)
	lowRuntimes(t, func(t *testing.T, n *node) {
		for i, test := range []struct {
			name, want string
			env        []string
			glibc      bool
			own        string
			missing    bool
		}{
			{name: "glibc", glibc: true, want: guarded + shared},
			{name: "no loader", want: guarded + none},
			{name: "own", glibc: true, own: "/a.so", want: guarded + "/etc/ld.so.preload \"/run/cgpu/libcgpu.so\\n/a.so\\n\" read-only=true\n"},
			{name: "own variable", env: []string{"LD_PRELOAD=/b.so"}, glibc: true,
				want: strings.Replace(guarded, ".so\n", ".so:/b.so\n", 1) + shared},
			{name: "off", env: []string{"CGPU_LIMITER=off"}, glibc: true, want: off + none},
			{name: "not installed", missing: true, glibc: true, want: off + none},
		} {
			t.Run(test.name, func(t *testing.T) {
				n.installLimiter()
				if test.missing {
					os.Remove(filepath.Join(n.dir, "libcgpu.so"))
				}
				bundle := n.bundle(append(test.env, ask), "", "see")
				if test.glibc {
					glibc(t, bundle)
				}
				if test.own != "" {
					os.Mkdir(filepath.Join(bundle, "rootfs/etc"), 0o755)
					os.WriteFile(filepath.Join(bundle, "rootfs/etc/ld.so.preload"), []byte(test.own), 0o644)
				}
				r := n.run("run", "--bundle", bundle, fmt.Sprintf("cgpu-test-see-%d-%d", os.Getpid(), i))
				if r.err != nil {
					t.Fatalf("%v\n%s\n%s", r.err, r.stderr, r.log)
				}
				if r.stdout != test.want {
					t.Errorf("got\n%s\nwant\n%s", r.stdout, test.want)
				}
				if s := readStarted(t, n.runDir); s.Config.Page != page.File(n.runDir, s.Config.Nonce) {
					t.Errorf("guard's page %q", s.Config.Page)
				}
			})
		}
		n.noPages()
	})
}

// TestLimiterLoads runs a program of this machine, with its glibc, in containers: the loader must load the library, also
// into a process that exec starts with an empty environment.
func TestLimiterLoads(t *testing.T) {
	lowRuntimes(t, func(t *testing.T, n *node) {
		library := filepath.Join(n.dir, "libcgpu.so")
		if out, err := exec.Command("cc", "-shared", "-nostdlib", "-o", library, "-xc", "/dev/null").CombinedOutput(); err != nil {
			testenv.Lacks(t, "no C compiler: %v %s", err, out)
		}
		out, err := exec.Command("ldd", "/bin/cat").Output()
		if err != nil || !strings.Contains(string(out), loaders[runtime.GOARCH]) {
			testenv.Lacks(t, "/bin/cat is not linked with glibc here")
		}
		bundle := n.bundle([]string{ask}, "", "sleep")
		for _, file := range append(strings.Fields(string(out)), "/bin/cat") {
			if !strings.HasPrefix(file, "/") {
				continue
			}
			to := filepath.Join(bundle, "rootfs", file)
			if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
				t.Fatal(err)
			}
			copyFile(t, file, to)
		}
		id := fmt.Sprintf("cgpu-test-loads-%d", os.Getpid())
		for _, args := range [][]string{{"create", "--bundle", bundle, id}, {"start", id}} {
			if r := n.run(args...); r.err != nil {
				t.Fatalf("%v: %v\n%s", args, r.err, r.stderr)
			}
		}
		defer n.run("delete", "--force", id)
		// In the last way only /etc/ld.so.preload names it.
		for _, way := range [][]string{
			{"exec", "--process", processOf(t, "", "/bin/cat", "/proc/self/maps"), id},
			{"exec", id, "/bin/cat", "/proc/self/maps"},
			{"exec", "--env", "LD_PRELOAD=", id, "/bin/cat", "/proc/self/maps"},
		} {
			r := n.run(way...)
			if r.err != nil || !strings.Contains(r.stdout, "libcgpu.so") || r.stderr != "" {
				t.Errorf("%v: %v\n%s\n%s", way, r.err, r.stdout, r.stderr)
			}
		}
	})
}

// TestPreloadMode follows a container without a guard.
func TestPreloadMode(t *testing.T) {
	lowRuntimes(t, func(t *testing.T, n *node) {
		n.installLimiter()
		n.preloadMode(device.DriverNVIDIA)
		os.Remove(filepath.Join(n.dir, "cgpu-guard"))
		id := fmt.Sprintf("cgpu-test-preload-%d", os.Getpid())
		bundle := n.bundle([]string{ask, "ALIYUN_COM_GPU_VISIBLE_DEVICES=1", "ALIYUN_COM_GPU_SCHD_WEIGHT=3"}, dockerProfile(t, ""), "see")
		glibc(t, bundle)
		if r := n.run("create", "--bundle", bundle, id); r.err != nil {
			t.Fatalf("%v\n%s\n%s", r.err, r.stderr, r.log)
		}
		records := n.records()
		if len(records) != 1 {
			t.Fatalf("ledger: %+v", records)
		}
		r := records[0]
		start, err := ledger.ProcStart(r.InitPID)
		if err != nil || !r.Preload || r.GuardPID != 0 || r.Socket != "" || r.Control != "" || r.InitStart != start ||
			r.Page != page.File(n.runDir, r.Nonce) {
			t.Errorf("record %+v, %v", r, err)
		}
		if _, err := os.Stat(filepath.Join(n.runDir, "guard.json")); !errors.Is(err, fs.ErrNotExist) {
			t.Error("a guard was started")
		}
		// Through the container, as crun's tests run in a mount namespace of their own.
		file := fmt.Sprintf("/proc/%d/root%s", r.InitPID, page.Path)
		p, err := page.Read(file)
		if err != nil {
			t.Fatal(err)
		}
		want := page.VGPU{Minor: 1, GPUID: 0x200, Weight: 3, Limit: uint64(6 * quota.GiB), TimesliceMicros: 30_000}
		h := p.Header()
		if h.Flags != page.FlagPreload|page.FlagManagedLimit|page.FlagNoHMM || h.Processes != page.MaxProcesses || h.VGPUs != 1 ||
			h.ControlDevice != unix.Mkdev(1, 3) || h.UVMDevice != unix.Mkdev(1, 3) || *p.VGPU(0) != want {
			t.Errorf("page %+v, %+v", *h, *p.VGPU(0))
		}
		if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o666 {
			t.Errorf("page: %v, %v", info, err)
		}
		var fs unix.Statfs_t
		if err := unix.Statfs(file, &fs); err != nil || fs.Type != unix.TMPFS_MAGIC || fs.Blocks*uint64(fs.Bsize) > 1<<20 ||
			fs.Flags&unix.ST_NOSUID == 0 {
			t.Errorf("page: on a file system %+v, %v", fs, err)
		}
		for _, name := range []string{spec.LimiterPath, "/etc/ld.so.preload"} {
			var of unix.Statfs_t
			if err := unix.Statfs(fmt.Sprintf("/proc/%d/root%s", r.InitPID, name), &of); err != nil || of.Fsid != fs.Fsid {
				t.Errorf("%s is shared with other containers: %+v, %v", name, of, err)
			}
		}
		if strings.Contains(string(n.given(bundle, id)), "listenerPath") {
			t.Error("the seccomp profile has a listener")
		}
		if r := n.run("start", id); r.err != nil {
			t.Fatalf("%v\n%s", r.err, r.stderr)
		}
		n.deletes(id)
		n.noPages()
	})
}

// TestPreloadModeInContainer looks from inside; the simulated driver has a guard, to which every GPU is whole.
func TestPreloadModeInContainer(t *testing.T) {
	n := newNode(t, "runc")
	n.installLimiter()
	for _, driver := range []string{device.DriverSim, device.DriverNVIDIA} {
		n.preloadMode(driver)
		bundle := n.bundle([]string{ask}, "", "see")
		glibc(t, bundle)
		r := n.run("run", "--bundle", bundle, fmt.Sprintf("cgpu-test-inside-%s-%d", driver, os.Getpid()))
		if r.err != nil {
			t.Fatalf("%s: %v\n%s\n%s", driver, r.err, r.stderr, r.log)
		}
		size := (unsafe.Sizeof(page.Header{}) + page.MaxVGPUs*unsafe.Sizeof(page.VGPU{}) +
			page.MaxProcesses*unsafe.Sizeof(page.Slot{}) + 4095) / 4096 * 4096
		want := fmt.Sprintf("LD_PRELOAD=/run/cgpu/libcgpu.so\n/run/cgpu/libcgpu.so \"limiter\" read-only=true\n/run/cgpu/vgpu \"%d\" "+
			"read-only=false\n"+
			"/etc/ld.so.preload \"/run/cgpu/libcgpu.so\\n\" read-only=true\n", size)
		if r.stdout != want {
			t.Errorf("%s: got\n%s\nwant\n%s", driver, r.stdout, want)
		}
		started := filepath.Join(n.runDir, "guard.json")
		if driver == device.DriverSim {
			s := readStarted(t, n.runDir)
			if len(s.Config.GPUs) != 1 || !s.Config.GPUs[0].Native || s.Config.GPUs[0].Limit != 0 || s.Config.Page != "" {
				t.Errorf("guard: %+v", s.Config)
			}
			os.Remove(started)
		} else if _, err := os.Stat(started); err == nil {
			t.Error("a guard was started")
		}
	}
}

// TestPreloadModeRefuses: what nothing would hold to its quota does not start.
func TestPreloadModeRefuses(t *testing.T) {
	n := newNode(t, "runc")
	n.preloadMode(device.DriverNVIDIA)
	for _, test := range []struct {
		name, want string
		env        []string
		installed  bool
		change     func(bundle string)
	}{
		{name: "not installed", want: "libcgpu.so is not installed"},
		{name: "off", installed: true, env: []string{"CGPU_LIMITER=off"}, want: "CGPU_LIMITER"},
		{name: "spill", installed: true, env: []string{"CGPU_MEM_SPILL=1"}, want: "CGPU_MEM_SPILL"},
		{name: "read-only run", installed: true, want: "/run is read-only", change: func(bundle string) {
			addMount(n.t, bundle, `{"destination":"/run","type":"bind","source":"/tmp","options":["bind","ro"]}`)
		}},
		{name: "own preload", installed: true, want: "/etc/ld.so.preload", change: func(bundle string) {
			addMount(n.t, bundle, `{"destination":"/etc/ld.so.preload","type":"bind","source":"/dev/null","options":["bind","ro"]}`)
		}},
	} {
		os.Remove(filepath.Join(n.dir, "libcgpu.so"))
		if test.installed {
			n.installLimiter()
		}
		bundle := n.bundle(append(test.env, ask), "", "true")
		if test.change != nil {
			test.change(bundle)
		}
		r := n.run("run", "--bundle", bundle, "cgpu-test-refused")
		if r.err == nil || !strings.Contains(r.stderr, test.want) || !strings.Contains(r.stderr, `"guard"`) ||
			strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%s: %v, %s", test.name, r.err, r.stderr)
		}
		if records := n.records(); len(records) != 0 {
			t.Errorf("%s: ledger: %+v", test.name, records)
		}
		n.noPages()
	}
}

func addMount(t testing.TB, bundle, mount string) {
	t.Helper()
	path := filepath.Join(bundle, "config.json")
	raw, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, []byte(strings.Replace(string(raw), `"mounts":[`, `"mounts":[`+mount+`,`, 1)), 0o640)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestModeChanges starts containers while the table that is there and the mode that is right differ.
func TestModeChanges(t *testing.T) {
	for _, test := range []struct {
		enforcement string
		preloads    bool
	}{{device.EnforceGuard, false}, {"", false}, {device.EnforcePreload, true}, {device.EnforceDriver, true}} {
		table := device.Table{Driver: device.DriverNVIDIA, Config: device.Config{Enforcement: test.enforcement}}
		if table.Guarded() == test.preloads {
			t.Errorf("%q: guarded %v", test.enforcement, !test.preloads)
		}
		dir := t.TempDir()
		if preloads(dir) {
			t.Error("no table, no guard")
		}
		text := fmt.Sprintf(`{"version":1,"driver":"nvidia","nodes":[{"config":{"enforcement":"preload"}}],"config":{"a":["}"],"enforcement":%q}}`, test.enforcement)
		if err := os.WriteFile(device.TableFile(dir), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := preloads(dir); got != test.preloads {
			t.Errorf("%q: %v", test.enforcement, got)
		}
		if err := os.WriteFile(device.TableFile(dir), []byte(strings.Replace(text, "nvidia", "sim", 1)), 0o644); err != nil {
			t.Fatal(err)
		}
		if preloads(dir) {
			t.Error("the simulated driver needs its guard")
		}
	}
}
