// SPDX-License-Identifier: Apache-2.0

package hostinstall

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/testenv"
)

// job is what a process of the test's own does in the root of a node that is made up: it changes its root, so it is used once.
type job struct {
	Root, Source, Engine string
	Uninstall            bool
	DieAt                int  // the step at which it is killed; 0: none
	Restarts             bool // the engine is restarted when it is asked to
	Systemd              bool // by systemctl, of which the node has one (systemd)
	NoTable              bool // cgpu-refresh fails
	OnlyRemove           bool // the last step of an uninstall
	Dir                  string
	At, Meanwhile        string // at the first step of this name others do something: "restart" the engine, or "change" its configuration
}

const jobVariable = "CGPU_HOSTINSTALL_JOB"

func TestMain(m *testing.M) {
	text, ok := os.LookupEnv(jobVariable)
	if !ok {
		os.Exit(m.Run())
	}
	var j job
	err := json.Unmarshal([]byte(text), &j)
	if err == nil {
		err = j.run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func (j job) run() error {
	o := Order{Root: j.Root, Dir: cmp.Or(j.Dir, DefaultDir), Engine: j.Engine}
	o.Verb, o.Name, o.Pods, o.Restart = "install", "cgpu", "allocated", j.Restarts
	i, err := New(o, os.Stdout)
	if err != nil {
		return err
	}
	i.Source, i.poll = j.Source, time.Millisecond
	i.refresh = func(_ context.Context, program string) ([]byte, error) { return os.ReadFile(program) }
	if j.NoTable {
		i.refresh = func(context.Context, string) ([]byte, error) { return nil, errors.New("no driver") }
	}
	steps := 0
	i.step = func(what string) {
		if steps++; steps == j.DieAt {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		if what == "restarted" && j.Restarts && !j.Systemd {
			restart("")
		}
		if what == j.At {
			j.At = ""
			j.meanwhile(i)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()
	if j.OnlyRemove {
		e, err := i.onHost()
		if err != nil {
			return err
		}
		return i.remove(ctx, e)
	}
	if j.Uninstall {
		i.Verb = "uninstall"
		return i.Uninstall(ctx)
	}
	return i.Install(ctx)
}

// meanwhile is what others do.
func (j job) meanwhile(i *Installer) {
	if j.Meanwhile == "restart" {
		restart("")
		return
	}
	other := pending{Installer: i, engine: engine{socket: sockets["containerd"]}}
	if err := other.note(); err != nil {
		panic(err)
	}
}

// restart makes containerd's socket anew, as containerd does. The old one is there until then: two that are made in one tick of the
// clock could have one number otherwise.
func restart(root string) {
	path := filepath.Join(root, sockets["containerd"])
	_ = os.WriteFile(path+".new", nil, 0o600)
	_ = os.Rename(path+".new", path)
}

func (j job) command(t *testing.T) *exec.Cmd {
	t.Helper()
	text, err := json.Marshal(j)
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0", jobVariable+"="+string(text)) // with -race each would wait for a second
	return c
}

// do runs a job to its end, or to its death, of which it tells.
func (j job) do(t *testing.T) (out string, killed bool, err error) {
	t.Helper()
	text, err := j.command(t).CombinedOutput()
	var e *exec.ExitError
	killed = errors.As(err, &e) && e.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL
	return string(text), killed, err
}

func (j job) must(t *testing.T) string {
	t.Helper()
	out, _, err := j.do(t)
	if err != nil {
		t.Fatalf("%+v: %v\n%s", j, err, out)
	}
	return out
}

const administrators = "version = 3\n# by hand\n[plugins.'io.containerd.cri.v1.runtime']\nenable_selinux = true\n"

// node makes the root of a node with containerd.
func node(t *testing.T) string {
	t.Helper()
	testenv.NeedsRoot(t, "changes its root")
	root := t.TempDir()
	for file, text := range map[string]string{"etc/containerd/config.toml": administrators,
		"etc/cgpu/cgpu.toml": "driver = \"sim\" # by hand\n", sockets["containerd"]: "", "opt/other": ""} {
		put(t, filepath.Join(root, file), text)
	}
	return root
}

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
}

// image makes the programs of a version.
func image(t *testing.T, version string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range required {
		put(t, filepath.Join(dir, name), version+" "+name)
	}
	put(t, filepath.Join(dir, "etc/passwd"), "not a part of it")
	return dir
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// listing is every file of a root with its content. Times are not in it.
func listing(t *testing.T, root string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name() == "installer.lock" { // a lock that is removed is another one for who waits
			return err
		}
		name := strings.TrimPrefix(path, root)
		if before, _, ok := strings.Cut(name, ".cgpu-backup-"); ok {
			name = before + " backup"
		}
		if target, err := os.Readlink(path); err == nil {
			fmt.Fprintf(&b, "%s -> %s\n", name, target)
			return nil
		}
		text, err := os.ReadFile(path)
		fmt.Fprintf(&b, "%s: %q\n", name, text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// sound is what holds at every moment: a version is whole, what engines call is there when their configuration names it, and then
// pods have what was allocated to them and nothing else.
func sound(t *testing.T, root string) {
	t.Helper()
	dir := filepath.Join(root, DefaultDir)
	entries, _ := os.ReadDir(filepath.Join(dir, "versions"))
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), unfinished) {
			continue
		}
		path := filepath.Join(dir, "versions", e.Name())
		if v, err := readTree(os.DirFS(path), path); err != nil || v.name != e.Name() {
			t.Errorf("version %s: is %s, %v", e.Name(), v.name, err)
		}
	}
	current := filepath.Join(dir, "current")
	target, err := os.Readlink(current)
	if err == nil {
		if _, err := readTree(os.DirFS(current), current); err != nil {
			t.Errorf("current: %v", err)
		}
		if _, err := os.Stat(filepath.Join(root, stateDir(), "used", filepath.Base(target))); err != nil {
			t.Errorf("current is not noted as used: %v", err)
		}
	}
	config := read(t, filepath.Join(root, "etc/containerd/config.toml"))
	if !strings.HasPrefix(config, administrators) {
		t.Errorf("the administrator's configuration: %s", config)
	}
	if strings.Contains(config, "cgpu-runtime") {
		if err != nil {
			t.Errorf("containerd has the runtime, which is not there: %v", err)
		}
		if toml := read(t, filepath.Join(root, "etc/cgpu/cgpu.toml")); !strings.Contains(toml, `pods = "allocated"`) {
			t.Errorf("containerd has the runtime, and pods take what they want: %s", toml)
		}
	}
}

// An installer is killed at each of its steps. Nothing is half there then, and the next one makes of it what one that was not
// killed would have made.
func TestKilled(t *testing.T) {
	one, two := image(t, "one"), image(t, "two")
	for name, c := range map[string]struct {
		before []job
		killed job
	}{
		"install":   {nil, job{Source: one}},
		"upgrade":   {[]job{{Source: one}}, job{Source: two}},
		"uninstall": {[]job{{Source: one}}, job{Source: one, Uninstall: true}},
	} {
		t.Run(name, func(t *testing.T) {
			whole := func(dieAt int) (root string, killed bool) {
				root = node(t)
				for _, j := range append(c.before, c.killed) {
					j.Root, j.Engine, j.Restarts = root, "auto", true
					if j.Source == c.killed.Source && j.Uninstall == c.killed.Uninstall && dieAt > 0 {
						j.DieAt = dieAt
						var out string
						var err error
						if out, killed, err = j.do(t); err != nil && !killed {
							t.Fatalf("%v\n%s", err, out)
						}
						sound(t, root)
						j.DieAt = 0
					}
					j.must(t)
					sound(t, root)
				}
				return root, killed
			}
			root, _ := whole(0)
			want := listing(t, root)
			restart(root)
			n := 1
			for ; ; n++ {
				root, killed := whole(n)
				if !killed {
					break
				}
				if got := listing(t, root); got != want {
					t.Errorf("killed at step %d:\n%s\nwant\n%s", n, got, want)
				}
			}
			if n < 5 {
				t.Errorf("%d steps", n)
			}
		})
	}
}

// TestLife: what is there after an install, a second one, an upgrade, a reboot, and an uninstall.
func TestLife(t *testing.T) {
	one, two, root := image(t, "one"), image(t, "two"), node(t)
	pristine := listing(t, root)
	install := job{Root: root, Source: one, Engine: "auto", Restarts: true}
	if out := install.must(t); !strings.Contains(out, "next: ") {
		t.Errorf("it does not say what to restart:\n%s", out)
	}
	sound(t, root)
	config := read(t, filepath.Join(root, "etc/containerd/config.toml"))
	if !strings.Contains(config, `"/opt/cgpu/current/bin/cgpu-runtime"`) {
		t.Errorf("configuration: %s", config)
	}
	guard := filepath.Join(root, DefaultDir, "current/bin/cgpu-guard")
	running, err := os.Open(guard) // a guard that runs
	if err != nil {
		t.Fatal(err)
	}
	defer running.Close()
	versions := func() int { list, _ := os.ReadDir(filepath.Join(root, DefaultDir, "versions")); return len(list) }

	install.Restarts = false // nothing changes, so nobody waits for a restart
	if out := install.must(t); !strings.Contains(out, "nothing to change") {
		t.Errorf("a second install:\n%s", out)
	}
	install.Source = two
	install.must(t)
	if text, _ := io.ReadAll(running); string(text) != "one bin/cgpu-guard" || read(t, guard) != "two bin/cgpu-guard" || versions() != 2 {
		t.Errorf("the guard that runs has %q, new ones %q; %d versions", text, read(t, guard), versions())
	}
	// No container outlives a boot. Those that started before the installer have the version of before.
	for _, c := range []struct {
		image string
		want  int
	}{{two, 1}, {one, 2}, {one, 1}} {
		if err := os.RemoveAll(filepath.Join(root, "run/cgpu")); err != nil {
			t.Fatal(err)
		}
		install.Source = c.image
		install.must(t)
		sound(t, root)
		if versions() != c.want {
			t.Errorf("%d versions after a reboot, want %d", versions(), c.want)
		}
	}
	install.Uninstall, install.Restarts = true, true
	install.must(t)
	if got := listing(t, root); got != pristine {
		t.Errorf("after uninstall:\n%s\nwant\n%s", got, pristine)
	}
}

// TestWaits: without leave to restart, install ends when somebody else has restarted the engine, and uninstall when nothing runs that
// needs the programs.
func TestWaits(t *testing.T) {
	root := node(t)
	j := job{Root: root, Source: image(t, "one"), Engine: "containerd"}
	j.waits(t, "waits until /run/containerd/containerd.sock is a new one", func() { restart(root) })
	tasks := filepath.Join(root, "run/containerd/io.containerd.runtime.v2.task/k8s.io")
	put(t, filepath.Join(tasks, "a/runtime"), "/opt/cgpu/current/bin/cgpu-runtime")
	put(t, filepath.Join(tasks, "b/runtime"), "/opt/cgpu-other/bin/cgpu-runtime")
	monitor := filepath.Join(root, "proc/4711")
	put(t, filepath.Join(monitor, "cmdline"), "/usr/bin/conmon\x00-r\x00/opt/cgpu/current/bin/cgpu-runtime\x00")
	put(t, filepath.Join(monitor, "status"), rootsStatus)
	for link, to := range map[string]string{"4711/exe": "/usr/bin/conmon (deleted)", "4711/root": "/"} {
		if err := os.Symlink(to, filepath.Join(root, "proc", link)); err != nil {
			t.Fatal(err)
		}
	}
	j.Uninstall, j.Restarts = true, true
	j.waits(t, "waits for the end of what runs by programs of /opt/cgpu: container a, process 4711 (conmon)\n", func() {
		sound(t, root)
		for _, gone := range []string{filepath.Join(tasks, "a"), monitor} {
			if err := os.RemoveAll(gone); err != nil {
				t.Error(err)
			}
		}
	})
	if _, err := os.Lstat(filepath.Join(root, DefaultDir, "current")); err == nil {
		t.Error("uninstall left what engines call")
	}
}

const rootsStatus = "Name:\tconmon\nUid:\t0\t0\t0\t0\n"

// waits starts a job, and does something when it says that it waits for that.
func (j job) waits(t *testing.T, for_ string, then func()) {
	t.Helper()
	c, said := j.says(t, for_)
	then()
	if err := c.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, said.String())
	}
}

// says starts a job, and returns when it says that.
func (j job) says(t *testing.T, for_ string) (c *exec.Cmd, said *lines) {
	t.Helper()
	c, said = j.command(t), &lines{}
	c.Stdout, c.Stderr = said, said
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	said.await(t, c, for_)
	return c, said
}

// lines is not a bytes.Buffer, whose ReadFrom would be called without the lock.
type lines struct {
	sync.Mutex
	buffer bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) { l.Lock(); defer l.Unlock(); return l.buffer.Write(p) }
func (l *lines) String() string              { l.Lock(); defer l.Unlock(); return l.buffer.String() }

func (l *lines) await(t *testing.T, c *exec.Cmd, text string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !strings.Contains(l.String(), text); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			_ = c.Process.Kill()
			t.Fatalf("it does not say %q:\n%s", text, l.String())
		}
	}
}

// TestTwo: the pods of two versions install at the same moment.
func TestTwo(t *testing.T) {
	root := node(t)
	var wait sync.WaitGroup
	for range 5 {
		for _, version := range []string{"one", "two"} {
			j := job{Root: root, Source: image(t, version), Engine: "auto", Restarts: true}
			wait.Go(func() {
				if out, _, err := j.do(t); err != nil {
					t.Errorf("%v\n%s", err, out)
				}
			})
		}
		wait.Wait()
		sound(t, root)
	}
	if _, err := os.Stat(filepath.Join(root, stateDir(), "pending")); err == nil {
		t.Error("a restart is pending")
	}
}

// TestRefused: what is not as an installer needs it is said, and nothing is configured.
func TestRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(root, source string)
		engine string
		want   string
	}{
		"a package": {func(root, _ string) { put(t, root+"/usr/bin/cgpu-runtime", "") }, "auto",
			"/usr/bin/cgpu-runtime: cgpu is on this node already"},
		"two engines": {func(root, _ string) { put(t, root+sockets["crio"], "") }, "auto",
			"auto: this node has containerd and crio: name the one"},
		"no engine": {func(root, _ string) { _ = os.Remove(root + sockets["containerd"]) }, "auto",
			"auto: no containerd, k3s, rke2 or crio runs"},
		"no socket": {func(root, _ string) { _ = os.Remove(root + sockets["containerd"]) }, "containerd",
			"containerd: no socket /run/containerd/containerd.sock is there: start it, or name its socket with --engine-socket"},
		"another's folder": {func(root, _ string) { put(t, root+"/opt/cgpu/theirs", "") }, "auto", `"theirs" in it is not cgpu-installer's`},
		"a folder for all": {func(root, _ string) { _ = os.Mkdir(root+"/opt/cgpu", 0o755); _ = os.Chmod(root+"/opt", 0o777) }, "auto",
			"/opt: others than root can write there"},
		"half an image": {func(_, source string) { _ = os.Remove(source + "/bin/cgpu-guard") }, "auto", "bin/cgpu-guard: no such file"},
		"a folder": {func(_, source string) {
			_ = os.Remove(source + "/bin/cgpu")
			put(t, source+"/bin/cgpu/x", "")
		}, "auto", "want a file"},
		"a foreign link": {func(root, _ string) {
			_ = os.Mkdir(root+"/opt/cgpu", 0o755)
			_ = os.Symlink("/usr", root+"/opt/cgpu/current")
		}, "auto", `leads to "/usr"`},
		"versions of others": {func(root, _ string) {
			_ = os.MkdirAll(root+"/opt/cgpu/versions", 0o755)
			_ = os.Chmod(root+"/opt/cgpu/versions", 0o777)
		}, "auto", "/opt/cgpu/versions: others than root can write there"},
		"a version of others": {func(root, source string) {
			stageInto(t, root, source)
			_ = os.Chown(root+"/opt/cgpu/versions/"+nameOf(t, source)+"/lib/cgpu/libcgpu.so", 1000, 0)
		}, "auto", "libcgpu.so: others than root can write there: delete that folder"},
		"a changed file":  {func(root, source string) { corrupt(t, root, source) }, "auto", "it is not what was installed there"},
		"containerd's v1": {func(root, _ string) { put(t, root+"/etc/containerd/config.toml", "version = 1\n") }, "auto", "version"},
		"a foreign cgpu": {func(root, _ string) {
			put(t, root+"/etc/containerd/config.toml", administrators+"[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.cgpu]\n"+
				"runtime_type = 'io.containerd.runc.v2'\noptions.BinaryName = '/mine'\n")
		}, "auto", "it was not written by cgpu install"},
	} {
		t.Run(name, func(t *testing.T) {
			root, source := node(t), image(t, "one")
			c.change(root, source)
			before := read(t, filepath.Join(root, "etc/containerd/config.toml"))
			out, _, err := job{Root: root, Source: source, Engine: c.engine}.do(t)
			if err == nil || !strings.Contains(out, c.want) || strings.Contains(out, "install: install: ") {
				t.Errorf("%v: %s\nwant %q", err, out, c.want)
			}
			if read(t, filepath.Join(root, "etc/containerd/config.toml")) != before {
				t.Error("the configuration was changed")
			}
		})
	}
}

// corrupt changes a file of a version that is there.
func corrupt(t *testing.T, root, source string) {
	t.Helper()
	stageInto(t, root, source)
	put(t, root+"/opt/cgpu/versions/"+nameOf(t, source)+"/bin/cgpu-guard", "another")
}

func nameOf(t *testing.T, source string) string {
	t.Helper()
	v, err := readTree(os.DirFS(source), source)
	if err != nil {
		t.Fatal(err)
	}
	return v.name
}

// stageInto puts a version there.
func stageInto(t *testing.T, root, source string) {
	t.Helper()
	v, err := readTree(os.DirFS(source), source)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(root+"/opt/cgpu/versions", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := v.stage(root + "/opt/cgpu/versions"); err != nil {
		t.Fatal(err)
	}
}
