// SPDX-License-Identifier: Apache-2.0

//go:build integration && amd64

package faults

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/hostrun"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/peerpage"
	"github.com/opencgpu/cgpu/pkg/sim"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// patience bounds every wait: the machine may be slow and busy.
const patience = 2 * time.Minute

// Whose GPU is which: the arbiters of the second are a tenant's own.
const (
	onFirst  = "CGPU_GPUS=0"
	onSecond = "CGPU_GPUS=1"
)

const fourGiB = "CGPU_MEM=4GiB"

// node is a private node without engines: a run dir, the simulated driver, runc, and a neighbour who works all the time.
type node struct {
	dir, runDir, bin string
	env              []string
	wantFiles        map[string]bool // of the run dir, when only the neighbour is there
	wantDriver       books
	neighbour        ledger.Record
	slowest          slowest
}

// books are what the simulated driver has given out, and the peer pages have noted.
type books struct {
	Files, Clients, Exports int
	Used                    uint64
	Groups, Guards          int
}

func newNode(t testing.TB, config ...string) *node {
	t.Helper()
	bin := os.Getenv("CGPU_BIN")
	testenv.NeedsRoot(t, "a container's start")
	if bin == "" {
		testenv.Lacks(t, "CGPU_BIN is not set: make integration")
	}
	dir, err := os.MkdirTemp("/tmp", "cgpu-faults.") // a socket's path has at most 107 bytes
	must(t, err)
	n := &node{dir: dir, runDir: filepath.Join(dir, "run"), bin: bin}
	t.Cleanup(func() { n.down(t) })
	must(t, os.Mkdir(n.runDir, 0o755))
	must(t, unix.Mount("tmpfs", n.runDir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755,size=64m")) // as /run is
	n.env = []string{"CGPU_RUN_DIR=" + n.runDir, "CGPU_CONFIG=" + filepath.Join(dir, "cgpu.toml"), "PATH=" + os.Getenv("PATH"),
		"GORACE=" + os.Getenv("GORACE")} // log_path=FILE, for programs that are built with -race
	low, err := exec.LookPath(cmp.Or(os.Getenv("CGPU_FAULTS_RUNTIME"), "runc"))
	must(t, err)
	lines := append([]string{`driver = "sim"`, fmt.Sprintf("runtimes = [%q]", low), `guard_start_timeout = "30s"`}, config...)
	lines = append(lines, "[sim]", `driver_version = "580.159.04"`, "[[sim.gpus]]", `name = "Tesla T4"`, `memory = "15109MiB"`,
		"[[sim.gpus]]", `name = "NVIDIA A10"`, `memory = "23028MiB"`)
	must(t, os.WriteFile(filepath.Join(dir, "cgpu.toml"), []byte(strings.Join(lines, "\n")+"\n"), 0o600))
	for _, folder := range []string{"bin", "dev", "etc", "proc", "usr"} {
		must(t, os.MkdirAll(filepath.Join(dir, "rootfs", folder), 0o755))
	}
	for _, program := range []string{"cgpu-probe", "busybox"} {
		from := filepath.Join(bin, program)
		if program == "busybox" {
			from, err = exec.LookPath(program)
			must(t, err)
		}
		text, err := os.ReadFile(from)
		must(t, err)
		must(t, os.WriteFile(filepath.Join(dir, "rootfs", "bin", program), text, 0o755))
	}
	must(t, n.cgpu("refresh"))
	n.bundle(t, "neighbour", "cgpu-probe work --for 24h --windows 200ms & "+
		"while :; do cgpu-probe alloc 1MiB >/dev/null && echo allocated; busybox sleep 0.3; done", fourGiB, onFirst)
	must(t, n.runtime("create", "--bundle", n.path("neighbour"), n.id("neighbour")))
	must(t, n.runtime("start", n.id("neighbour")))
	must(t, n.eventually(n.neighbourWorks))
	n.neighbour = n.records()[0]
	must(t, n.observe())
	return n
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (n *node) path(name string) string { return filepath.Join(n.dir, name) }

// id names a container; cgroups are the machine's.
func (n *node) id(name string) string { return filepath.Base(n.dir) + "-" + name }

// bundle makes the bundle of a container that runs a script.
func (n *node) bundle(t testing.TB, name, script string, env ...string) {
	t.Helper()
	type object = map[string]any
	config, err := json.Marshal(object{
		"ociVersion": "1.0.2",
		"linux": object{
			"namespaces": []object{{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}},
			"resources":  object{"devices": []object{{"allow": false, "access": "rwm"}}},
		},
		"root": object{"path": n.path("rootfs")},
		"process": object{"cwd": "/", "args": []string{"/bin/busybox", "sh", "-c", script}, "user": object{"uid": 0, "gid": 0},
			"env": append([]string{"PATH=/bin"}, env...)},
		"mounts": []object{
			{"destination": "/proc", "type": "proc", "source": "proc"},
			{"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": []string{"nosuid", "mode=755"}},
		},
	})
	must(t, err)
	must(t, os.MkdirAll(n.path(name), 0o755))
	must(t, os.WriteFile(filepath.Join(n.path(name), "config.json"), config, 0o600))
}

// runtime calls cgpu-runtime as an engine does.
func (n *node) runtime(args ...string) error {
	return n.do(append([]string{filepath.Join(n.bin, "cgpu-runtime"), "--root", n.path("state")}, args...)...)
}

func (n *node) cgpu(args ...string) error {
	return n.do(append([]string{filepath.Join(n.bin, "cgpu")}, args...)...)
}

// do runs a command that nothing happens to.
func (n *node) do(args ...string) error {
	r := new(watch).run(patience, n.env, n.path("stdout-"+filepath.Base(args[len(args)-1])), args...)
	if r.code != 0 {
		return fmt.Errorf("%v", r)
	}
	return nil
}

// eventually waits until check has no complaint, and returns its last.
func (n *node) eventually(check func() error) error {
	var last error
	for begin := time.Now(); ; time.Sleep(30 * time.Millisecond) {
		err := check()
		if waited := time.Since(begin); err == nil && waited > n.slowest.waited {
			n.slowest = slowest{waited.Round(time.Millisecond), last}
		}
		if err == nil || time.Since(begin) > patience {
			return err
		}
		last = err
	}
}

// slowest is what was waited for longest.
type slowest struct {
	waited time.Duration
	what   error
}

// neighbourWorks: since this was called its channels have computed, and its guard has answered.
func (n *node) neighbourWorks() error {
	text, err := os.ReadFile(n.path("stdout-" + n.id("neighbour")))
	if err != nil {
		return err
	}
	begin := len(text)
	return n.eventually(func() error {
		text, err := os.ReadFile(n.path("stdout-" + n.id("neighbour")))
		if err != nil {
			return err
		}
		works := false
		for line := range bytes.Lines(text[begin:]) {
			works = works || bytes.Contains(line, []byte(" kernels=")) && !bytes.Contains(line, []byte(" kernels=0 "))
		}
		if !works || !bytes.Contains(text[begin:], []byte("\nallocated\n")) {
			return fmt.Errorf("the neighbour does not work: %s", text[max(begin, len(text)-200):])
		}
		return nil
	})
}

// observe notes how the node is when only the neighbour is there, and works.
func (n *node) observe() error {
	if err := n.eventually(func() error {
		if r := n.records(); len(r) != 1 {
			return fmt.Errorf("ledger: %+v", r)
		}
		return n.cgpu("gc")
	}); err != nil {
		return err
	}
	// The most of some moments: the neighbour's programs come and go.
	for begin := time.Now(); time.Since(begin) < time.Second; time.Sleep(10 * time.Millisecond) {
		b, err := n.books()
		if err != nil {
			return err
		}
		w := &n.wantDriver
		w.Files, w.Clients, w.Exports = max(w.Files, b.Files), max(w.Clients, b.Clients), max(w.Exports, b.Exports)
		w.Used, w.Groups, w.Guards = max(w.Used, b.Used), max(w.Groups, b.Groups), max(w.Guards, b.Guards)
	}
	n.wantFiles = n.files()
	return nil
}

func (n *node) records() []ledger.Record {
	list, err := ledger.Open(n.runDir).List()
	if err != nil {
		return []ledger.Record{{ID: err.Error()}}
	}
	return list
}

func (n *node) books() (b books, err error) {
	c, err := sim.Dial(filepath.Join(n.runDir, "sim.sock"), nil)
	if err != nil {
		return b, err
	}
	defer c.Close()
	s, err := c.Snapshot()
	if err != nil {
		return b, err
	}
	b = books{Files: s.Files, Clients: s.Clients, Exports: s.Exports}
	for _, g := range s.GPUs {
		p, err := peerpage.Open(n.runDir, g.UUID)
		if err != nil {
			return b, err
		}
		b.Used, b.Groups, b.Guards = b.Used+uint64(g.Used), b.Groups+len(g.TSGs), b.Guards+p.Living()
		p.Close()
	}
	return b, nil
}

// files are those in the run dir, but for logs and bundles, of which there is a bounded number by design.
func (n *node) files() map[string]bool {
	found := map[string]bool{}
	_ = filepath.WalkDir(n.runDir, func(path string, e fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(n.runDir, path)
		if rel == "log" || rel == "bundle" {
			return filepath.SkipDir
		}
		found[rel] = true
		return nil
	})
	return found
}

// process is one that has something of the run dir open or in its environment.
type process struct {
	pid, parent int
	name        string
}

func (n *node) processes() (list []process) {
	folders, _ := filepath.Glob("/proc/[0-9]*")
	for _, folder := range folders {
		p := process{}
		p.pid, _ = strconv.Atoi(filepath.Base(folder))
		line, err := os.ReadFile(folder + "/cmdline")
		if err != nil || len(line) == 0 || p.pid == os.Getpid() {
			continue // a kernel thread, or a zombie
		}
		argv, _, _ := bytes.Cut(line, []byte{0})
		p.name = filepath.Base(string(argv))
		env, _ := os.ReadFile(folder + "/environ")
		ours := bytes.Contains(env, []byte(n.env[0]+"\x00"))
		fds, _ := os.ReadDir(folder + "/fd")
		for _, fd := range fds {
			target, _ := os.Readlink(folder + "/fd/" + fd.Name())
			ours = ours || strings.HasPrefix(target, n.runDir+"/")
		}
		if !ours {
			continue
		}
		stat, _ := os.ReadFile(folder + "/stat")
		if fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:]); len(fields) > 1 {
			p.parent, _ = strconv.Atoi(string(fields[1]))
		}
		list = append(list, p)
	}
	return list
}

// quiet says what of one container is left, when it should be gone.
func (n *node) quiet() error {
	if err := n.gc(); err != nil {
		return err
	}
	if r := n.records(); len(r) != 1 || r[0].ID != n.id("neighbour") {
		return fmt.Errorf("ledger: %+v", r)
	}
	for _, p := range n.processes() {
		if p.pid != n.neighbour.GuardPID && p.parent != n.neighbour.GuardPID && p.name != "cgpu-sim" && p.name != "cgpu-arbiter" {
			return fmt.Errorf("process %d is left: %s", p.pid, p.name)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, " "+n.runDir+"/") && !strings.Contains(line, n.neighbour.Nonce) {
			return fmt.Errorf("a mount is left: %s", line)
		}
	}
	for _, of := range []string{n.id("tenant*"), "*/" + n.id("tenant*")} {
		if left, _ := filepath.Glob(filepath.Join("/sys/fs/cgroup", of)); len(left) > 0 {
			return fmt.Errorf("a cgroup is left: %s", left[0])
		}
	}
	for dir, nonce := range hostrun.Cgroups() {
		if n.ran(nonce) {
			return fmt.Errorf("a cgroup is left: %s", dir)
		}
	}
	b, err := n.books()
	if err != nil {
		return err
	}
	w := n.wantDriver
	if b.Files > w.Files || b.Clients > w.Clients || b.Exports > w.Exports || b.Used > w.Used || b.Groups > w.Groups || b.Guards > w.Guards {
		return fmt.Errorf("driver and page have %+v, want %+v at most", b, w)
	}
	return nil
}

// ran says whether a run was this node's.
func (n *node) ran(nonce string) bool {
	_, err := os.Stat(page.Bundle(n.runDir, nonce))
	logs, _ := filepath.Glob(filepath.Join(n.runDir, "log", "*"+nonce+".log"))
	return err == nil || len(logs) > 0
}

// gc gives all that is left the age at which cgpu gc takes it.
func (n *node) gc() error {
	old := time.Now().Add(-time.Hour)
	for file := range n.files() {
		if parts := strings.Split(file, "/"); len(parts) == 2 && (parts[0] == "g" || parts[0] == "page") && !n.keeps(file) {
			_ = os.Chtimes(filepath.Join(n.runDir, file), old, old)
		}
	}
	return n.cgpu("gc")
}

// clean says what is left on disk after another container came and went.
func (n *node) clean() error {
	if err := n.gc(); err != nil {
		return err
	}
	now := n.files()
	maps.DeleteFunc(now, func(file string, _ bool) bool { return n.keeps(file) })
	if len(now) > 0 {
		return fmt.Errorf("files are left: %v", slices.Sorted(maps.Keys(now)))
	}
	for folder, most := range map[string]int{"bundle": 66, "log": 72} {
		if entries, _ := os.ReadDir(filepath.Join(n.runDir, folder)); len(entries) > most {
			return fmt.Errorf("%d files in %s", len(entries), folder)
		}
	}
	left, _ := filepath.Glob(filepath.Join(n.dir, "*", "config.json?*"))
	if len(left) > 0 {
		return fmt.Errorf("in the bundle: %v", left)
	}
	return nil
}

// keeps says whether a file of the run dir is the neighbour's, or one that a node has or comes to have.
func (n *node) keeps(file string) bool {
	lock, _ := filepath.Match("board/GPU-*.*", file) // of a GPU that was not used before
	return lock || n.wantFiles[file] || strings.Contains(file, n.neighbour.Nonce) || strings.HasPrefix(file, "events.") ||
		file == "counters/total.json"
}

// down ends all processes of the node and takes it away.
func (n *node) down(t testing.TB) {
	containers, _ := os.ReadDir(n.path("state")) // also those of a test that failed: their loops would go on for ever
	for _, c := range containers {
		_ = n.runtime("delete", "--force", c.Name())
	}
	err := n.eventually(func() error {
		for _, signal := range []unix.Signal{unix.SIGTERM, unix.SIGKILL} {
			left := n.processes()
			if len(left) == 0 {
				return nil
			}
			for _, p := range left {
				_ = unix.Kill(p.pid, signal)
			}
			time.Sleep(100 * time.Millisecond)
		}
		return fmt.Errorf("processes are left: %+v", n.processes())
	})
	if err != nil {
		t.Error(err)
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if at := strings.Fields(line)[4]; strings.HasPrefix(at, n.dir+"/") {
			if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
				t.Fatalf("%s stays, since it is still mounted: %v", at, err) // below it may be the machine's own files
			}
		}
	}
	if err := os.RemoveAll(n.dir); err != nil {
		t.Error(err)
	}
}
