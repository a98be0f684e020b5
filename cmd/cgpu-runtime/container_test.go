// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/health"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// node is a private machine with the simulated driver: a folder with our programs and a run directory.
type node struct {
	t                testing.TB
	dir, runDir, low string
	table            device.Table
}

// newNode needs root, because containers do. low is runc or crun.
func newNode(t testing.TB, low string) *node {
	t.Helper()
	testenv.NeedsRoot(t, "containers")
	path := testenv.NeedsProgram(t, low)
	n := &node{t: t, dir: t.TempDir(), low: path}
	// A short path, for a socket's has at most 107 bytes.
	var err error
	if n.runDir, err = os.MkdirTemp("", "cgpu"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(n.runDir) })
	for _, program := range []string{".", "../cgpu-hook", "testdata/sweep"} {
		build(t, n.dir, program)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Link(self, filepath.Join(n.dir, "cgpu-guard")); err != nil {
		copyFile(t, self, filepath.Join(n.dir, "cgpu-guard"))
	}
	n.makeTable()
	return n
}

func copyFile(t testing.TB, from, to string) {
	t.Helper()
	text, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, text, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func (n *node) makeTable() {
	n.t.Helper()
	make := func(name string) device.Node {
		path := filepath.Join(n.runDir, name)
		if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
			testenv.Lacks(n.t, "cannot make device nodes: %v", err)
		}
		return device.Node{Path: "/dev/" + name, HostPath: path, Major: 1, Minor: 3, Bind: true}
	}
	config := filepath.Join(n.dir, "cgpu.toml")
	key, err := device.ReadKey(device.DriverSim, config, "", "")
	if err != nil {
		n.t.Fatal(err)
	}
	n.table = device.Table{
		Version: device.TableVersion, Driver: device.DriverSim, DriverVersion: "580.159.04", Key: key,
		Nodes: []device.Node{make("nvidiactl"), make("nvidia-uvm")},
		Config: device.Config{Runtimes: []string{n.low}, Overcommit: 1, MaxInst: 20, Placement: "binpack", GuardStartTimeout: 30 * time.Second,
			Policy: sched.PolicyPreempt, PrioRatio: sched.DefaultPrioRatio},
	}
	for i := range 2 {
		n.table.GPUs = append(n.table.GPUs, device.GPU{
			Index: i, Minor: i, UUID: fmt.Sprintf("GPU-%d0000000-0000-0000-0000-000000000000", i), BusID: fmt.Sprintf("0000:0%d:00.0", i+1),
			Name: "Tesla T4", Memory: 15109 * quota.MiB, Node: make("nvidia" + strconv.Itoa(i)),
		})
	}
	n.saveTable()
	// Load asks whether the simulated driver answers.
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrUnix{Name: device.SimSocket(n.runDir)})
	}
	if err == nil {
		err = unix.Listen(fd, 128)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { unix.Close(fd) })
}

func (n *node) saveTable() {
	n.t.Helper()
	if err := n.table.Save(n.runDir); err != nil {
		n.t.Fatal(err)
	}
}

// bundle makes a container that runs sweep with args.
func (n *node) bundle(env []string, seccomp string, args ...string) string {
	n.t.Helper()
	dir := n.t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "rootfs"), 0o755); err != nil {
		n.t.Fatal(err)
	}
	copyFile(n.t, filepath.Join(n.dir, "sweep"), filepath.Join(dir, "rootfs", "sweep"))
	type object = map[string]any
	linux := object{
		"namespaces": []object{{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}},
		"resources":  object{"devices": []object{{"allow": false, "access": "rwm"}}},
	}
	if seccomp != "" {
		linux["seccomp"] = json.RawMessage(seccomp)
	}
	config, err := json.Marshal(object{
		"ociVersion": "1.0.2", "linux": linux,
		"root":    object{"path": "rootfs"},
		"process": object{"cwd": "/", "args": append([]string{"/sweep"}, args...), "env": env, "user": object{"uid": 0, "gid": 0}},
		"mounts": []object{
			{"destination": "/proc", "type": "proc", "source": "proc"},
			{"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": []string{"nosuid", "mode=755"}},
		},
	})
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "config.json"), config, 0o640)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return dir
}

// result of one call of cgpu-runtime.
type result struct {
	stdout, stderr, log string
	err                 error
}

// run calls cgpu-runtime as an engine does.
func (n *node) run(args ...string) result {
	n.t.Helper()
	return n.runIn("state", args...)
}

// runIn is run for an engine that keeps state elsewhere.
func (n *node) runIn(root string, args ...string) result {
	n.t.Helper()
	log := filepath.Join(n.t.TempDir(), "log.json")
	command := []string{filepath.Join(n.dir, "cgpu-runtime"), "--root", filepath.Join(n.dir, root), "--log", log, "--log-format", "json"}
	if filepath.Base(n.low) == "crun" {
		// crun refuses cgroup v1 with controllers in a v2 mount beside it, as some machines have it: hide the latter.
		command = append([]string{"unshare", "--mount", "sh", "-c", `umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"`, "sh"}, command...)
	}
	cmd := exec.Command(command[0], append(command[1:], args...)...)
	cmd.Env = []string{"PATH=/usr/bin:/bin", "CGPU_RUN_DIR=" + n.runDir, "CGPU_CONFIG=" + filepath.Join(n.dir, "cgpu.toml")}
	// Files, not pipes: after create the container holds them.
	out := filepath.Join(filepath.Dir(log), "stdout")
	stdout, err := os.Create(out)
	if err != nil {
		n.t.Fatal(err)
	}
	defer stdout.Close()
	stderr, err := os.Create(out + ".err")
	if err != nil {
		n.t.Fatal(err)
	}
	defer stderr.Close()
	cmd.Stdout, cmd.Stderr = stdout, stderr
	r := result{err: cmd.Run()}
	for file, text := range map[string]*string{log: &r.log, out: &r.stdout, out + ".err": &r.stderr} {
		b, _ := os.ReadFile(file)
		*text = string(b)
	}
	return r
}

// given is the config.json that the low-level runtime gets for a bundle.
func (n *node) given(bundle, id string) []byte {
	n.t.Helper()
	for _, r := range n.records() {
		if r.ID == id {
			bundle = page.Bundle(n.runDir, r.Nonce)
		}
	}
	text, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		n.t.Error(err)
	}
	return text
}

func (n *node) records() []ledger.Record {
	n.t.Helper()
	records, err := ledger.Open(n.runDir).List()
	if err != nil {
		n.t.Fatal(err)
	}
	return records
}

// deletes deletes a container, which may take a moment to die, and sees that it holds nothing any more.
func (n *node) deletes(id string) {
	n.t.Helper()
	for range 3000 {
		if r := n.run("delete", id); r.err == nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if records := n.records(); len(records) != 0 {
		n.t.Errorf("after delete: %+v", records)
	}
}

// lowRuntimes runs f with each low-level runtime that is installed.
func lowRuntimes(t *testing.T, f func(t *testing.T, n *node)) {
	for _, low := range []string{"runc", "crun"} {
		t.Run(low, func(t *testing.T) { f(t, newNode(t, low)) })
	}
}

const ask = "ALIYUN_COM_GPU_MEM_CONTAINER=6"

// dockerProfile is Docker's default seccomp profile as recorded, with ioctl where allow says.
func dockerProfile(t *testing.T, ioctl string) string {
	t.Helper()
	raw, err := os.ReadFile("../../pkg/spec/testdata/docker20-plain.json")
	if err != nil {
		t.Fatal(err)
	}
	var config struct {
		Linux struct{ Seccomp map[string]any }
	}
	if err := json.Unmarshal(raw, &config); err != nil {
		t.Fatal(err)
	}
	if ioctl != "" {
		var rule any
		if err := json.Unmarshal([]byte(ioctl), &rule); err != nil {
			t.Fatal(err)
		}
		rules := config.Linux.Seccomp["syscalls"].([]any)
		names := rules[0].(map[string]any)["names"].([]any)
		rules[0].(map[string]any)["names"] = slices.DeleteFunc(names, func(n any) bool { return n == "ioctl" })
		config.Linux.Seccomp["syscalls"] = append(rules, rule)
	}
	text, err := json.Marshal(config.Linux.Seccomp)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestNotifiedSet starts containers with rewritten profiles and holds every call of sweep to what the profile says.
func TestNotifiedSet(t *testing.T) {
	trapped := func(number uint64) bool { return rm.Trapped(uint32(number)) }
	all := func(fd, number uint64) bool { return true }
	profiles := []struct {
		name, seccomp string
		permits       func(fd, number uint64) bool
	}{
		{"none", "", all},
		{"docker", dockerProfile(t, ""), all},
		{
			"by descriptor",
			dockerProfile(t, `{"names":["ioctl"],"action":"SCMP_ACT_ALLOW","args":[{"index":0,"value":2000,"op":"SCMP_CMP_LT"}]}`),
			func(fd, _ uint64) bool { return fd < 2000 },
		},
		{
			"masked",
			dockerProfile(t,
				`{"names":["ioctl"],"action":"SCMP_ACT_ALLOW","args":[{"index":1,"value":65280,"valueTwo":17920,"op":"SCMP_CMP_MASKED_EQ"}]}`),
			func(_, number uint64) bool { return number&0xff00 == 0x4600 },
		},
		{
			"deny list",
			`{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_X86_64","SCMP_ARCH_X86","SCMP_ARCH_X32"],"syscalls":[{"names":["ioctl"],"action":"SCMP_ACT_ERRNO","errnoRet":1,"args":[{"index":1,"value":21522,"op":"SCMP_CMP_EQ"}]}]}`,
			func(_, number uint64) bool { return number != 0x5412 },
		},
	}
	lowRuntimes(t, func(t *testing.T, n *node) {
		for i, p := range profiles {
			t.Run(p.name, func(t *testing.T) {
				id := fmt.Sprintf("cgpu-test-%d-%d", os.Getpid(), i)
				r := n.run("run", "--bundle", n.bundle([]string{ask}, p.seccomp), id)
				if r.err != nil {
					t.Fatalf("%v\n%s\n%s", r.err, r.stderr, r.log)
				}
				calls, wrong, notified := 0, 0, 0
				for line := range strings.Lines(r.stdout) {
					var abi string
					var fd, number uint64
					var got unix.Errno
					if _, err := fmt.Sscanf(line, "%s %d %x %d", &abi, &fd, &number, &got); err != nil {
						t.Fatal(line, err)
					}
					want := []unix.Errno{unix.EBADF}
					switch {
					case !p.permits(fd, number):
						want = []unix.Errno{unix.EPERM}
					case trapped(number):
						want = []unix.Errno{unix.EDOM}
					case abi == "x32":
						want = []unix.Errno{unix.EBADF, unix.ENOSYS} // a kernel without x32
					}
					calls++
					if got == unix.EDOM {
						notified++
					}
					if !slices.Contains(want, got) {
						if wrong++; wrong < 10 {
							t.Errorf("%s ioctl(%d, %#x): %v, want %v", abi, fd, number, got, want)
						}
					}
				}
				if calls != 2*5*256*2 {
					t.Errorf("%d calls, stderr %s", calls, r.stderr)
				}
				t.Logf("%d calls, %d notified, %d wrong", calls, notified, wrong)
			})
		}
	})
}

// TestLifeOfContainer follows a container from create to delete.
func TestLifeOfContainer(t *testing.T) {
	lowRuntimes(t, func(t *testing.T, n *node) {
		id := fmt.Sprintf("create-%d", os.Getpid())
		bundle := n.bundle([]string{ask, "ALIYUN_COM_GPU_MEM_DEV=15", "ALIYUN_COM_GPU_VISIBLE_DEVICES=1"}, "", "true")
		if err := os.Chmod(bundle, 0o750); err != nil {
			t.Fatal(err)
		}
		if r := n.run("create", "--bundle", bundle, id); r.err != nil {
			t.Fatalf("%v\n%s\n%s", r.err, r.stderr, r.log)
		}
		records := n.records()
		if len(records) != 1 || records[0].ID != id || records[0].Bundle != bundle || len(records[0].VGPUs) != 1 ||
			records[0].VGPUs[0].Limit != 6043*quota.MiB {
			t.Fatalf("ledger: %+v", records)
		}
		s := readStarted(t, n.runDir)
		if records[0].GuardPID != s.PID || records[0].GuardStart == 0 {
			t.Errorf("the record has guard %d, the guard is %d", records[0].GuardPID, s.PID)
		}
		if !s.Leader || s.Cwd != "/" || len(s.Config.GPUs) != 1 || s.Config.GPUs[0].Index != 1 || s.Config.GPUs[0].Limit != 6043*quota.MiB ||
			s.Config.ControlNode.Path != "/dev/nvidiactl" {
			t.Errorf("guard: %+v", s)
		}
		for _, fd := range s.FDs {
			number, target, _ := strings.Cut(fd, "=")
			if (number == "1" || number == "2") && target != "/dev/null" {
				t.Errorf("guard has %s", fd)
			}
		}
		for _, args := range [][]string{{"state", id}, {"start", id}} {
			if r := n.run(args...); r.err != nil {
				t.Fatalf("%v: %v\n%s", args, r.err, r.stderr)
			}
		}
		// The container has ended, or is about to. Hooks may look into its bundle for as long as it is not deleted.
		ours := page.Bundle(n.runDir, records[0].Nonce)
		if info, err := os.Stat(ours); err != nil || info.Mode().Perm() != 0o750 {
			t.Errorf("the bundle: %v, %v", info, err)
		}
		// A guard that lives releases the reservation itself; the stub does not, and the hook does it for a dead one.
		if err := unix.Kill(s.PID, unix.SIGKILL); err != nil && err != unix.ESRCH {
			t.Error(err)
		}
		if err := page.Remove(n.runDir, records[0].Nonce); err != nil { // as a guard does at the end
			t.Error(err)
		}
		if info, err := os.Stat(filepath.Join(ours, "config.json")); err != nil || info.Mode().Perm() != 0o640 {
			t.Errorf("the bundle's config.json: %v, %v", info, err)
		}
		n.deletes(id)
		waitGone(t, filepath.Dir(ours))
		info, err := os.Stat(filepath.Join(bundle, "config.json"))
		if err != nil || info.Mode().Perm() != 0o640 {
			t.Errorf("config.json: %v, %v", info.Mode(), err)
		}
		if left, _ := filepath.Glob(filepath.Join(bundle, "config.json?*")); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
}

// TestRuntimesChange changes cgpu.toml's runtimes under a container that lives, with a quota and without.
func TestRuntimesChange(t *testing.T) {
	lowRuntimes(t, func(t *testing.T, n *node) {
		for name, env := range map[string][]string{"quota": {ask}, "none": nil} {
			id := fmt.Sprintf("cgpu-test-%s-%d", name, os.Getpid())
			if r := n.run("create", "--bundle", n.bundle(env, "", "true"), id); r.err != nil {
				t.Fatalf("%v\n%s\n%s", r.err, r.stderr, r.log)
			}
			other := map[string]string{"runc": "crun", "crun": "runc"}[filepath.Base(n.low)]
			n.table.Config.Runtimes = []string{other, n.low}
			n.saveTable()
			for _, args := range [][]string{{"state", id}, {"start", id}, {"delete", "--force", id}} {
				if r := n.run(args...); r.err != nil {
					t.Errorf("%s: %v: %v\n%s", name, args, r.err, r.stderr)
				}
			}
			n.table.Config.Runtimes = []string{n.low}
			n.saveTable()
		}
	})
}

// TestRefuses tries requests and faults for which there must be no container, no reservation, no guard, and an error
// that the engine shows.
func TestRefuses(t *testing.T) {
	n := newNode(t, "runc")
	for _, test := range []struct {
		name string
		env  []string
		mode string
		want string
	}{
		{"bad value", []string{"ALIYUN_COM_GPU_MEM_CONTAINER=7x"}, "", `ALIYUN_COM_GPU_MEM_CONTAINER="7x"`},
		{"too much", []string{"ALIYUN_COM_GPU_MEM_CONTAINER=600"}, "", "more than the GPU's 15109MiB"},
		{"unknown GPU", []string{ask, "ALIYUN_COM_GPU_VISIBLE_DEVICES=7"}, "", `there is no GPU "7"`},
		{"guard dies", []string{ask}, "die", "ended before it was ready"},
		{"guard refuses", []string{ask}, "refuse", "stub: no"},
		{"guard hangs", []string{ask}, "hang", "not ready after"},
	} {
		t.Run(test.name, func(t *testing.T) {
			mode := filepath.Join(n.runDir, "guard-mode")
			os.WriteFile(mode, []byte(test.mode), 0o644)
			defer os.Remove(mode)
			n.table.Config.GuardStartTimeout = 30 * time.Second // a busy machine
			if test.mode == "hang" {
				n.table.Config.GuardStartTimeout = 300 * time.Millisecond
			}
			n.saveTable()
			bundle := n.bundle(test.env, "", "true")
			before, _ := os.ReadFile(filepath.Join(bundle, "config.json"))
			before = bytes.Replace(before, []byte("{"),
				[]byte(`{"annotations":{"io.kubernetes.cri.sandbox-namespace":"ml","io.kubernetes.cri.sandbox-name":"train","io.kubernetes.cri.container-name":"main"},`), 1)
			if err := os.WriteFile(filepath.Join(bundle, "config.json"), before, 0o640); err != nil {
				t.Fatal(err)
			}
			r := n.run("run", "--bundle", bundle, "cgpu-test-refused")
			var exit *exec.ExitError
			if !errors.As(r.err, &exit) || exit.ExitCode() != 1 {
				t.Errorf("exit: %v", r.err)
			}
			var line struct{ Level, Msg, Time string }
			if err := json.Unmarshal([]byte(r.log), &line); err != nil || line.Level != "error" || line.Time == "" ||
				!strings.Contains(line.Msg, test.want) {
				t.Errorf("log: %s (%v), want %q", r.log, err, test.want)
			}
			if !strings.Contains(r.stderr, test.want) || strings.Count(r.stderr, "\n") != 1 {
				t.Errorf("stderr: %s", r.stderr)
			}
			if records := n.records(); len(records) != 0 {
				t.Errorf("ledger: %+v", records)
			}
			if after, _ := os.ReadFile(filepath.Join(bundle, "config.json")); !bytes.Equal(before, after) {
				t.Error("config.json was changed")
			}
			events, err := event.Read(n.runDir)
			if err != nil || len(events) == 0 {
				t.Fatalf("events: %v, %v", events, err)
			}
			if e := events[len(events)-1]; e.Kind != event.Refused || e.Container != "cgpu-test-refused" || e.Name != "ml/train/main" ||
				!strings.Contains(e.Text, test.want) {
				t.Errorf("event: %+v", e)
			}
		})
	}
}

// TestPassThrough starts containers that are not ours on a node where nothing of ours works.
func TestPassThrough(t *testing.T) {
	n := newNode(t, "runc") // the default when there is no node table
	os.RemoveAll(n.runDir)
	os.WriteFile(n.runDir, nil, 0o644)
	os.Remove(filepath.Join(n.dir, "cgpu-guard"))
	os.WriteFile(filepath.Join(n.dir, "cgpu.toml"), []byte("broken ["), 0o644)
	for _, env := range [][]string{
		{"A=b"},
		{ask, "CGPU_DISABLE=true"},
		{"ALIYUN_COM_GPU_VISIBLE_DEVICES=0"},
		{"IMAGE=registry/cgpu.io/x"},
	} {
		bundle := n.bundle(env, "", "true")
		before, _ := os.ReadFile(filepath.Join(bundle, "config.json"))
		if r := n.run("run", "--bundle", bundle, "create"); r.err != nil {
			t.Errorf("%v: %v\n%s", env, r.err, r.stderr)
		}
		if after, _ := os.ReadFile(filepath.Join(bundle, "config.json")); !bytes.Equal(before, after) {
			t.Errorf("%v: config.json was changed", env)
		}
	}
	// What runc reads and we do not.
	for name, odd := range map[string]func(config string) string{
		"trailing": func(config string) string { return config + "}" },
		"twice":    func(config string) string { return `{"process":{},"hostname":"a",` + config[1:] },
		"huge":     func(config string) string { return `{"x":"` + strings.Repeat("x", 17<<20) + `",` + config[1:] },
	} {
		for _, asks := range []bool{false, true} {
			env := "DOC=" + ask
			if asks {
				env = ask
			}
			bundle := n.bundle([]string{env}, "", "true")
			file := filepath.Join(bundle, "config.json")
			text, _ := os.ReadFile(file)
			if err := os.WriteFile(file, []byte(odd(string(text))), 0o640); err != nil {
				t.Fatal(err)
			}
			if r := n.run("run", "--bundle", bundle, "create"); (r.err == nil) == asks {
				t.Errorf("%s, asks %v: %v\n%s", name, asks, r.err, r.stderr)
			}
		}
	}
	if r := n.run("run", "--bundle", n.bundle([]string{ask}, "", "true"), "create"); r.err == nil {
		t.Error("a container with a quota started on a broken node")
	}
}

// TestCapitals: crun knows config.json's members by their very names, runc in any case; the quota holds in both.
func TestCapitals(t *testing.T) {
	lowRuntimes(t, func(t *testing.T, n *node) {
		bundle := n.bundle([]string{ask}, "", "true")
		file := filepath.Join(bundle, "config.json")
		text, _ := os.ReadFile(file)
		text = bytes.Replace(bytes.Replace(text, []byte(`"env"`), []byte(`"Env"`), 1), []byte(`"linux"`), []byte(`"LINUX"`), 1)
		if err := os.WriteFile(file, text, 0o640); err != nil {
			t.Fatal(err)
		}
		id := fmt.Sprintf("cgpu-test-capitals-%d", os.Getpid())
		defer n.remove(id)
		command := []string{"run", id, "--bundle", bundle} // each in a way that only it reads
		if filepath.Base(n.low) == "crun" {
			command = []string{"run", "--bund", bundle, id}
		}
		if r := n.run(command...); r.err != nil {
			t.Fatal(r.err, r.log)
		}
		if _, err := os.Stat(filepath.Join(n.runDir, "state.json")); err != nil {
			t.Error("no guard got the container's calls: ", err)
		}
	})
}

// TestTwice: a bundle is the caller's. It can be run again, by others at the same time, and need not be writable.
func TestTwice(t *testing.T) {
	lowRuntimes(t, func(t *testing.T, n *node) {
		bundle := n.bundle([]string{ask}, "", "true")
		file := filepath.Join(bundle, "config.json")
		text, _ := os.ReadFile(file)
		if err := os.Mkdir(filepath.Join(bundle, "data"), 0o755); err != nil {
			t.Fatal(err)
		}
		// A relative mount is the bundle's, wherever the runtime reads of it.
		text = bytes.Replace(text, []byte(`"mounts":[`),
			[]byte(`"mounts":[{"destination":"/data","type":"bind","source":"data","options":["bind"]},`), 1)
		if err := os.WriteFile(file, text, 0o640); err != nil {
			t.Fatal(err)
		}
		for _, kind := range []string{"rw", "rw", "ro"} {
			if kind == "ro" {
				if err := unix.Mount(bundle, bundle, "", unix.MS_BIND, ""); err != nil {
					t.Fatal(err)
				}
				defer unix.Unmount(bundle, unix.MNT_DETACH)
				if err := unix.Mount("", bundle, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
					t.Fatal(err)
				}
			}
			ids := []string{fmt.Sprintf("cgpu-test-twice-%d-a", os.Getpid()), fmt.Sprintf("cgpu-test-twice-%d-b", os.Getpid())}
			for _, id := range ids {
				defer n.remove(id)
				if r := n.run("create", "--bundle", bundle, id); r.err != nil {
					t.Fatal(kind, r.err, r.log)
				}
			}
			if len(n.records()) != 2 {
				t.Errorf("%s: %d records", kind, len(n.records()))
			}
			for _, id := range ids {
				n.remove(id)
			}
			if after, _ := os.ReadFile(file); !bytes.Equal(after, text) {
				t.Errorf("%s: config.json was changed", kind)
			}
		}
		waitGone(t, filepath.Join(n.runDir, "bundle"))
	})
}

// TestSameID: two engines, or two namespaces of containerd, each have a container of one ID. Each keeps its own share, whatever becomes
// of the other one; a second one of the same engine is refused.
func TestSameID(t *testing.T) {
	lowRuntimes(t, func(t *testing.T, n *node) {
		n.installLimiter()
		for _, order := range [][]string{{"first", "second"}, {"second", "first"}} {
			id := fmt.Sprintf("cgpu-test-same-%d", os.Getpid())
			for root, env := range map[string]string{"first": "A=b", "second": "CGPU_LIMITER=off"} {
				defer n.runIn(root, "delete", "--force", id)
				n.starts(root, n.bundle([]string{ask, env}, "", "sleep"), id)
			}
			lives := func(root string) {
				t.Helper()
				want := map[string]string{"first": "LD_PRELOAD=/run/cgpu/libcgpu.so:/mine.so", "second": "LD_PRELOAD=/mine.so"}[root]
				r := n.runIn(root, "exec", "--process", process(t, `"LD_PRELOAD=/mine.so"`), id)
				if first, _, _ := strings.Cut(r.stdout, "\n"); r.err != nil || first != want {
					t.Errorf("exec in %s: %v, %s, want %s\n%s", root, r.err, first, want, r.stderr)
				}
				if r := n.runIn(root, "create", "--bundle", n.bundle([]string{ask}, ""), id); r.err == nil ||
					!strings.Contains(r.log, "is in use by process") {
					t.Errorf("twice in %s: %v\n%s", root, r.err, r.log)
				}
				if r := n.recordIn(root); r.ID != id {
					t.Errorf("%s: %+v", root, r)
				}
			}
			lives("first")
			lives("second")
			// The guards are killed: the hook of each container gives back what is its own, and so does gc.
			n.killGuard(n.recordIn(order[0]))
			if r := n.runIn(order[0], "delete", "--force", id); r.err != nil || len(n.records()) != 1 {
				t.Errorf("%v: %d records\n%s", r.err, len(n.records()), r.stderr)
			}
			lives(order[1])
			n.killGuard(n.recordIn(order[1]))
			if gone, err := ledger.Open(n.runDir).GC(); err != nil || len(gone) != 0 {
				t.Errorf("gc of one that lives: %v, %v", gone, err)
			}
			if r := n.runIn(order[1], "kill", id, "KILL"); r.err != nil {
				t.Error(r.err, r.stderr)
			}
			for end := time.Now().Add(time.Minute); len(n.records()) > 0; time.Sleep(20 * time.Millisecond) {
				if _, err := ledger.Open(n.runDir).GC(); err != nil || time.Now().After(end) {
					t.Fatal(err, n.records())
				}
			}
			if r := n.runIn(order[1], "delete", "--force", id); r.err != nil {
				t.Error(r.err, r.stderr)
			}
		}
	})
}

// TestRecordedRoot: a record has the folder of the low-level runtime's state, also where the engine leaves it to that.
func TestRecordedRoot(t *testing.T) {
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_RUNTIME_DIR", "/run/user/0") // crun looks at it as root, too
	lowRuntimes(t, func(t *testing.T, n *node) {
		for options, want := range map[string]string{
			"":                map[string]string{"runc": "/run/runc", "crun": "/run/user/0/crun"}[filepath.Base(n.low)],
			"--root /run/a/":  "/run/a",
			"--root=state":    filepath.Join(here, "state"),
			"--root /run/./a": "/run/a",
		} {
			root, err := recordedRoot(parse(strings.Fields(options+" create c1"), likeRunc), n.runDir)
			if err != nil || root != want {
				t.Errorf("%s: %+v, %v, want %s", options, root, err, want)
			}
		}
	})
}

// starts creates and starts a container with a cgroup of its own, and notes its first process as a guard does.
func (n *node) starts(root, bundle, id string) {
	n.t.Helper()
	file := filepath.Join(bundle, "config.json")
	text, err := os.ReadFile(file)
	if err == nil {
		group := fmt.Sprintf(`"linux":{"cgroupsPath":"/%s-%s",`, id, root)
		err = os.WriteFile(file, bytes.Replace(text, []byte(`"linux":{`), []byte(group), 1), 0o640)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	for _, args := range [][]string{{"create", "--bundle", bundle, id}, {"start", id}} {
		if r := n.runIn(root, args...); r.err != nil {
			n.t.Fatalf("%s: %v: %v\n%s\n%s", root, args, r.err, r.stderr, r.log)
		}
	}
	var state struct{ PID int }
	if err := json.Unmarshal([]byte(n.runIn(root, "state", id).stdout), &state); err != nil {
		n.t.Fatal(err)
	}
	err = ledger.Open(n.runDir).Update(n.recordIn(root).Nonce, func(r *ledger.Record) (err error) {
		r.InitPID = state.PID
		r.InitStart, err = ledger.ProcStart(state.PID)
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
}

// recordIn is the record of the one container that an engine has.
func (n *node) recordIn(root string) (found ledger.Record) {
	n.t.Helper()
	for _, r := range n.records() {
		if r.Root == filepath.Join(n.dir, root) {
			found = r
		}
	}
	return found
}

// killGuard kills a container's guard and waits for its end.
func (n *node) killGuard(r ledger.Record) {
	n.t.Helper()
	_ = unix.Kill(r.GuardPID, unix.SIGKILL) // the stub may have ended
	for range 6000 {
		if !r.GuardLives() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	n.t.Errorf("the guard of %s lives", r.Root)
}

// waitGone waits until a folder is empty; a guard removes what is its container's a moment after it.
func waitGone(t *testing.T, dir string) {
	t.Helper()
	for range 3000 {
		if left, _ := os.ReadDir(dir); len(left) == 0 {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	left, _ := os.ReadDir(dir)
	t.Errorf("left behind: %v", left)
}

// TestLongStrings: what a tenant writes into annotations is cut before it gets into the ledger, and an ID that is too long is refused.
func TestLongStrings(t *testing.T) {
	n := newNode(t, "runc")
	bundle := n.podBundle("container", []string{ask}, map[string]string{"io.kubernetes.cri.container-name": strings.Repeat("\x01", 1<<16)})
	// Words that do nothing are told.
	typo := fmt.Sprintf("cgpu-test-typo-%d", os.Getpid())
	defer n.remove(typo)
	if r := n.run("create", "--bundle", n.bundle([]string{ask, "ALIYUN_COM_GPU_WEIGHT=3"}, "", "true"), typo); r.err != nil {
		t.Fatal(r.err, r.log)
	}
	// Also of a container that would have a vGPU but for a mistake in the name.
	missed := fmt.Sprintf("cgpu-test-missed-%d", os.Getpid())
	defer n.remove(missed)
	if r := n.run("create", "--bundle", n.bundle([]string{"cgpu_mem=6", "CGPU_WEIGHT=3"}, "", "true"), missed); r.err != nil {
		t.Fatal(r.err, r.log)
	}
	n.remove(missed)
	events, err := event.Read(n.runDir)
	for id, words := range map[string]string{typo: "ALIYUN_COM_GPU_WEIGHT",
		missed: "no vGPU asked for: cgpu_mem, a name that cgpu does not know; CGPU_WEIGHT, without"} {
		if err != nil || !slices.ContainsFunc(events, func(e event.Event) bool {
			return e.Kind == event.Warning && e.Container == id && strings.Contains(e.Text, words)
		}) {
			t.Errorf("%s: events: %+v, %v", id, events, err)
		}
	}
	n.remove(typo)
	id := fmt.Sprintf("cgpu-test-long-%d", os.Getpid())
	defer n.remove(id)
	if r := n.run("create", "--bundle", bundle, id); r.err != nil {
		t.Fatal(r.err, r.log)
	}
	list := n.records()
	if len(list) != 1 || list[0].Name != ledger.DisplayName("ml/train/"+strings.Repeat("\x01", 300)) {
		t.Errorf("%d records: %.300v", len(list), list)
	}
	if info, err := os.Stat(ledger.File(n.runDir)); err != nil || info.Size() > 4096 {
		t.Errorf("the ledger has %d bytes, %v", info.Size(), err)
	}
	if r := n.run("create", "--bundle", n.bundle([]string{ask}, ""), strings.Repeat("x", ledger.MaxText+1)); r.err == nil ||
		!strings.Contains(r.log, "ledger: the container's ID") {
		t.Error(r.err, r.log)
	}
	if list := n.records(); len(list) != 1 {
		t.Errorf("%d records", len(list))
	}
}

// TestUnhealthyGPU: a container that names no GPU goes to a healthy one, or is refused; one that names the GPU is started, with a warning.
func TestUnhealthyGPU(t *testing.T) {
	n := newNode(t, "runc")
	sick := func(gpus ...int) {
		t.Helper()
		all := map[string]device.Hardware{}
		for i, g := range n.table.GPUs {
			all[g.UUID] = device.Hardware{Lost: slices.Contains(gpus, i)}
		}
		if _, _, err := health.Change(n.runDir, func(s health.State) health.State {
			return s.Step(&n.table, health.Seen{Hardware: all}, time.Now())
		}); err != nil {
			t.Fatal(err)
		}
	}
	start := func(name string, env ...string) (id string, r result) {
		t.Helper()
		id = fmt.Sprintf("cgpu-test-%s-%d", name, os.Getpid())
		t.Cleanup(func() { n.remove(id) })
		return id, n.run("create", "--bundle", n.bundle(append([]string{ask}, env...), "", "true"), id)
	}
	sick(0)
	if id, r := start("placed"); r.err != nil {
		t.Fatal(r.err, r.log)
	} else if list := n.records(); len(list) != 1 || list[0].VGPUs[0].UUID != n.table.GPUs[1].UUID {
		t.Errorf("%s is placed: %+v", id, list)
	}
	if id, r := start("named", "ALIYUN_COM_GPU_VISIBLE_DEVICES=0"); r.err != nil {
		t.Error(r.err, r.log)
	} else if events, err := event.Read(n.runDir); err != nil || len(events) != 1 || events[0].Kind != event.Warning ||
		events[0].Container != id ||
		events[0].GPU.Index != 0 || !strings.Contains(events[0].Text, "cannot reach") {
		t.Errorf("events: %v, %+v", err, events)
	}
	sick(0, 1)
	if _, r := start("nowhere"); r.err == nil || !strings.Contains(r.log, "unhealthy: the driver cannot reach the GPU") {
		t.Errorf("no GPU is healthy: %v %s", r.err, r.log)
	}
}

// TestUnread: who cannot read config.json, of descriptors say, does not know that a container asks for nothing.
func TestUnread(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "config.json")
	if _, err := create(&call{command: "create", id: "x", bundle: dir, config: file}, dir); err != nil {
		t.Errorf("no config.json, of which runc tells: %v", err)
	}
	if err := os.Symlink(file, file); err != nil {
		t.Fatal(err)
	}
	if _, err := create(&call{command: "create", id: "x", bundle: dir, config: file}, dir); err == nil {
		t.Error("the low-level runtime would start a container whose config.json cgpu has not read")
	}
}
