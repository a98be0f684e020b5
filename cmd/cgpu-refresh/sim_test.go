// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/mount"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sim"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// asLimiter makes the test's own program limit a cgroup: NVML can be loaded once in a process.
const asLimiter = "cgpu-limiter"

// TestMain lets the test's own program stand in for cgpu-sim.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "cgpu-sim" {
		if err := serveSim(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Args[0] == asLimiter {
		err := limit(os.Args[1], os.Args[2:])
		if len(os.Args) > 3 {
			err = limitCgroup(&device.Table{DriverRoot: os.Args[1], Config: device.Config{DriverLimits: true}}, os.Args[2], os.Args[3], os.Args[4:])
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// serveSim does what cmd/cgpu-sim does.
func serveSim(runDir string) error {
	f, err := os.OpenFile(runDir+"/sim.lock", os.O_CREATE|os.O_RDWR|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return err
	}
	fmt.Fprintln(f, os.Getpid())
	text, err := os.ReadFile(device.TableFile(runDir))
	if err != nil {
		return err
	}
	var t device.Table
	if err := json.Unmarshal(text, &t); err != nil {
		return err
	}
	c := sim.Config{DriverVersion: t.DriverVersion}
	for _, g := range t.GPUs {
		if g.Name == "broken" {
			return fmt.Errorf("first line\nno such card")
		}
		c.GPUs = append(c.GPUs, sim.GPU{Index: g.Index, Minor: g.Minor, UUID: g.UUID, BusID: g.BusID, Name: g.Name, Memory: g.Memory})
	}
	d, err := sim.New(c)
	if err != nil {
		return err
	}
	os.Remove(device.SimSocket(runDir))
	l, err := net.Listen("unix", device.SimSocket(runDir))
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return d.Serve(ctx, l)
}

// newNode is a private node with the simulated driver; its server is stopped with the test.
func newNode(t *testing.T, text string) refresh {
	t.Helper()
	dir := t.TempDir()
	r := refresh{runDir: dir + "/run", configFile: dir + "/cgpu.toml", helper: dir + "/bin/cgpu-refresh", simDir: dir + "/dev"}
	t.Setenv("CGPU_CONFIG", r.configFile) // device.Load compares it
	if err := os.Mkdir(dir+"/bin", 0o755); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(self, dir+"/bin/cgpu-sim"); err != nil {
		t.Fatal(err)
	}
	r.configure(t, text)
	if err := makeNodeAllowed(dir); err != nil {
		testenv.Lacks(t, "device nodes cannot be made here: %v", err)
	}
	t.Cleanup(func() {
		if err := (simServer{runDir: r.runDir}).stop(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func makeNodeAllowed(dir string) error {
	path := dir + "/try"
	if err := makeNode(path, 0o666, 1<<8|8); err != nil {
		return err
	}
	f, err := os.Open(path) // a file system mounted nodev
	if err != nil {
		return err
	}
	return f.Close()
}

func (r refresh) configure(t *testing.T, text string) {
	t.Helper()
	if err := os.WriteFile(r.configFile, []byte("driver = \"sim\"\n"+text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func (r refresh) load(t *testing.T) *device.Table {
	t.Helper()
	tab, err := device.Load(r.runDir)
	if err != nil {
		t.Fatalf("after a refresh: %v", err)
	}
	return tab
}

func (r refresh) simPID(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile(r.runDir + "/sim.lock")
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

func TestSimulatedNode(t *testing.T) {
	r := newNode(t, "max_inst = 3\n")
	if err := r.run(false); err != nil {
		t.Fatal(err)
	}
	tab := r.load(t)
	if len(tab.GPUs) != 1 || tab.GPUs[0].Name != "Tesla T4" || tab.GPUs[0].Memory != 15109*quota.MiB || tab.Config.MaxInst != 3 {
		t.Errorf("table %+v", tab)
	}
	if err := mount.Try(r.configFile); tab.HookMounts != (err == nil) {
		t.Errorf("a hook mounts files: %t; tried: %v", tab.HookMounts, err)
	}
	info, err := os.Stat(r.simDir + "/nvidiactl")
	if err != nil || info.Mode() != os.ModeDevice|os.ModeCharDevice|0o666 {
		t.Errorf("nvidiactl: %v, %v", info.Mode(), err)
	}

	// By this the tests' harness finds the server of a node that it ends.
	if environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", r.simPID(t))); err != nil ||
		!strings.Contains("\x00"+string(environ), "\x00CGPU_RUN_DIR="+r.runDir+"\x00") {
		t.Errorf("the server's environment is %q, %v", environ, err)
	}

	// Fresh: nothing is written.
	before, pid := stat(t, device.TableFile(r.runDir)), r.simPID(t)
	if err := r.run(false); err != nil {
		t.Fatal(err)
	}
	if stat(t, device.TableFile(r.runDir)).Ino != before.Ino {
		t.Error("a fresh table was written again")
	}

	// A killed server is started again; the nodes stay the same files, for guards know them by their inode.
	node := stat(t, r.simDir+"/nvidia0")
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for range 30000 {
		if !(simServer{runDir: r.runDir}).runs() {
			break
		}
		time.Sleep(2 * time.Millisecond)
	}
	if err := r.run(false); err != nil {
		t.Fatal(err)
	}
	r.load(t)
	if r.simPID(t) == pid || stat(t, r.simDir+"/nvidia0").Ino != node.Ino {
		t.Errorf("server %d → %d, node %d → %d", pid, r.simPID(t), node.Ino, stat(t, r.simDir+"/nvidia0").Ino)
	}
}

func stat(t *testing.T, path string) syscall.Stat_t {
	t.Helper()
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st
}

func TestSimulatedGPUsChange(t *testing.T) {
	r := newNode(t, "")
	if err := r.run(false); err != nil {
		t.Fatal(err)
	}
	pid := r.simPID(t)

	// Other settings leave the server alone.
	r.configure(t, "max_inst = 9\ndriver_root = \"/srv\"\n")
	if err := r.run(false); err != nil {
		t.Fatal(err)
	}
	if r.load(t).Config.MaxInst != 9 || r.load(t).DriverRoot != "/srv" || r.simPID(t) != pid {
		t.Errorf("max_inst %d, server %d → %d", r.load(t).Config.MaxInst, pid, r.simPID(t))
	}

	// With a vGPU reserved, the cards stay.
	gpu := r.load(t).GPUs[0]
	l := ledger.Open(r.runDir)
	self := os.Getpid()
	if _, err := l.Reserve(ledger.Request{
		Record: ledger.Record{ID: "c1", Nonce: "0123456789abcdef", Bundle: "/b", LauncherPID: self,
			VGPUs:  []ledger.VGPU{{UUID: gpu.UUID, Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 1}}}},
			Socket: r.runDir + "/g/0123456789abcdef.sock", Control: r.runDir + "/g/0123456789abcdef.ctl"},
		GPUs: []ledger.GPU{{Index: 0, UUID: gpu.UUID, Memory: gpu.Memory}}, Overcommit: 1, Card: r.load(t).Config.Card(),
	}); err != nil {
		t.Fatal(err)
	}
	two := "[[sim.gpus]]\nname = \"A\"\n[[sim.gpus]]\nname = \"B\"\n"
	r.configure(t, two)
	if err := r.run(false); err != nil {
		t.Fatal(err)
	}
	if tab := r.load(t); len(tab.GPUs) != 1 || tab.GPUs[0].Name != "Tesla T4" || r.simPID(t) != pid {
		t.Errorf("with a vGPU reserved: %+v, server %d → %d", tab.GPUs, pid, r.simPID(t))
	}

	// Without one, they are exchanged.
	if err := l.Release("0123456789abcdef"); err != nil {
		t.Fatal(err)
	}
	if err := r.run(true); err != nil {
		t.Fatal(err)
	}
	if tab := r.load(t); len(tab.GPUs) != 2 || tab.GPUs[1].Name != "B" || r.simPID(t) == pid {
		t.Errorf("without: %+v, server %d → %d", tab.GPUs, pid, r.simPID(t))
	}

	// The name alone is told by no server.
	pid = r.simPID(t)
	r.configure(t, strings.Replace(two, "B", "C", 1))
	if err := r.run(false); err != nil {
		t.Fatal(err)
	}
	if tab := r.load(t); tab.GPUs[1].Name != "C" || r.simPID(t) == pid {
		t.Errorf("renamed: %+v, server %d → %d", tab.GPUs, pid, r.simPID(t))
	}
}

func TestSimulatedServerFails(t *testing.T) {
	r := newNode(t, "[[sim.gpus]]\nname = \"broken\"\n")
	err := r.run(false)
	if err == nil || !strings.Contains(err.Error(), "no such card") || strings.Contains(err.Error(), "first line") {
		t.Errorf("got %v, want the last line of the server's log", err)
	}
	if _, err := device.Load(r.runDir); err == nil {
		t.Error("a table without a server counts as fresh")
	}
}

func TestBadConfiguration(t *testing.T) {
	r := newNode(t, "max_inst = 0\n")
	if err := r.run(false); err == nil || !strings.Contains(err.Error(), "max_inst = 0") {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(device.TableFile(r.runDir)); err == nil {
		t.Error("a bad configuration left a table")
	}
}

func TestTwoAtOnce(t *testing.T) {
	r := newNode(t, "")
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := r.run(false); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	r.load(t)
	text, err := os.ReadFile(r.runDir + "/log/sim.log")
	if err != nil || len(text) != 0 {
		t.Errorf("more than one server was started: %s (%v)", text, err)
	}
}

func TestLockTimesOut(t *testing.T) {
	path := t.TempDir() + "/lock"
	unlock, err := lock(path, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := lock(path, 20*time.Millisecond); err == nil {
		t.Error("two locks at once")
	}
	unlock()
	unlock, err = lock(path, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	unlock()
}

func TestMakeNodeReplaces(t *testing.T) {
	dir := t.TempDir()
	if err := makeNodeAllowed(dir); err != nil {
		testenv.Lacks(t, "device nodes cannot be made here: %v", err)
	}
	for name, spoil := range map[string]func(path string) error{
		"file":    func(p string) error { return os.WriteFile(p, []byte("x"), 0o666) },
		"link":    func(p string) error { return os.Symlink("/dev/null", p) },
		"null":    func(p string) error { return syscall.Mknod(p, syscall.S_IFCHR|0o666, 1<<8|3) },
		"private": func(p string) error { return syscall.Mknod(p, syscall.S_IFCHR|0o600, 1<<8|8) },
	} {
		path := filepath.Join(dir, name)
		if err := spoil(path); err != nil {
			t.Fatal(err)
		}
		if err := makeNode(path, 0o666, 1<<8|8); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		var st syscall.Stat_t
		if err := syscall.Lstat(path, &st); err != nil || st.Mode != syscall.S_IFCHR|0o666 || st.Rdev != 1<<8|8 {
			t.Errorf("%s: mode %o, device %#x, %v", name, st.Mode, st.Rdev, err)
		}
	}
	if err := os.Mkdir(dir+"/folder", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := makeNode(dir+"/folder", 0o666, 1<<8|8); err == nil {
		t.Error("replaced a folder")
	}
}

func TestSimGPUs(t *testing.T) {
	var c config.Sim
	for range 64 {
		c.GPUs = append(c.GPUs, config.SimGPU{Name: "T4", Memory: quota.GiB})
	}
	tab := device.Table{Version: device.TableVersion, Driver: device.DriverSim, Config: config.Default().Settings, GPUs: simGPUs(c)}
	for i := range tab.GPUs {
		path := fmt.Sprintf("/dev/nvidia%d", i)
		tab.GPUs[i].Node = device.Node{Path: path, HostPath: path}
	}
	if err := tab.Validate(); err != nil {
		t.Error(err)
	}
	// The UUIDs are in people's scripts.
	if got := simUUID(0); got != "GPU-fdafd00c-c238-51af-97ba-72b8ae867cf6" {
		t.Errorf("UUID of GPU 0 is now %s", got)
	}
}
