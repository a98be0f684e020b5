// SPDX-License-Identifier: Apache-2.0

package hostinstall

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
)

// systemd gives a node a systemctl that restarts containerd and notes it, and programs that are scripts.
func systemd(t *testing.T, root string) {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("needs busybox")
		}
		t.Skip("needs busybox")
	}
	for _, name := range []string{"/bin/sh", "/bin/busybox"} {
		put(t, root+name, read(t, busybox))
	}
	put(t, root+"/dev/null", "")
	put(t, root+"/run/systemd/system/x", "")
	put(t, root+"/usr/bin/systemctl", "#!/bin/sh\necho \"$@\" >>/systemctl.log\n: >/run/containerd/new\n"+
		"/bin/busybox mv /run/containerd/new /run/containerd/containerd.sock\n")
}

// restarts is how often systemctl was called.
func restarts(t *testing.T, root string) int {
	t.Helper()
	text, err := os.ReadFile(root + "/systemctl.log")
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return strings.Count(string(text), "restart containerd\n")
}

// TestRestarts: with leave to restart the engine, each change restarts it once, and an installer that has nothing to change, or starts
// again and again because it fails, does not.
func TestRestarts(t *testing.T) {
	root := node(t)
	systemd(t, root)
	j := job{Root: root, Source: image(t, "one"), Engine: "auto", Restarts: true, Systemd: true}
	fails := j
	fails.NoTable = true
	for range 3 {
		if out, _, err := fails.do(t); err == nil || !strings.Contains(out, "table of GPUs could not be made") {
			t.Errorf("without a driver: %v\n%s", err, out)
		}
	}
	if n := restarts(t, root); n != 0 {
		t.Errorf("%d restarts for an installer that fails", n)
	}
	for step, want := range []int{1, 1, 2, 2, 2} {
		j.Uninstall = step >= 2
		out := j.must(t)
		if n := restarts(t, root); n != want {
			t.Errorf("%d restarts after job %d, want %d\n%s", n, step, want, out)
		}
	}
}

// TestRefusesToStart: an engine that does not start with its configuration is not stopped.
func TestRefusesToStart(t *testing.T) {
	root := node(t)
	systemd(t, root)
	put(t, root+"/usr/bin/containerd", "#!/bin/sh\necho 'containerd: bad key' >&2\nexit 1\n")
	j := job{Root: root, Source: image(t, "one"), Engine: "auto", Restarts: true, Systemd: true}
	for range 2 {
		out, _, err := j.do(t)
		if err == nil || !strings.Contains(out, "bad key: it is not restarted") && !strings.Contains(out, "nothing to change, but") {
			t.Errorf("%v\n%s", err, out)
		}
	}
	if n := restarts(t, root); n != 0 {
		t.Errorf("%d restarts", n)
	}
}

// TestPutBack: an edit that the engine refuses, and that is taken back, leaves nothing for it to read.
func TestPutBack(t *testing.T) {
	root := node(t)
	systemd(t, root)
	put(t, root+"/usr/bin/containerd", "#!/bin/sh\n"+
		"/bin/busybox grep -q cgpu-runtime /etc/containerd/config.toml && { echo bad >&2; exit 1; }\nexit 0\n")
	out, _, err := job{Root: root, Source: image(t, "one"), Engine: "auto"}.do(t)
	if err == nil || !strings.Contains(out, "the files are as they were") {
		t.Errorf("%v\n%s", err, out)
	}
	if _, err := os.Stat(filepath.Join(root, pendingFile())); err == nil {
		t.Error("a restart is pending")
	}
}

// TestPods: as long as the engine may start containers by our runtime, a pod has what was allocated to it and nothing else.
func TestPods(t *testing.T) {
	root := node(t)
	j := job{Root: root, Source: image(t, "one"), Engine: "auto", Restarts: true}
	j.must(t)
	j.Uninstall, j.Restarts = true, false
	j.waits(t, "waits until /run/containerd/containerd.sock is a new one", func() {
		if strings.Contains(read(t, root+"/etc/containerd/config.toml"), "cgpu-runtime") {
			t.Error("the runtime is still there")
		}
		if text := read(t, root+"/etc/cgpu/cgpu.toml"); !strings.Contains(text, `pods = "allocated"`) {
			t.Errorf("containerd has yet to be restarted, and cgpu.toml is %q", text)
		}
		restart(root)
	})
	if text := read(t, root+"/etc/cgpu/cgpu.toml"); strings.Contains(text, "pods") {
		t.Errorf("after uninstall cgpu.toml is %q", text)
	}
}

// TestOthersRuntime: neither install nor uninstall touches a node that has cgpu by other means.
func TestOthersRuntime(t *testing.T) {
	for _, where := range []string{"/usr/bin", "/usr/local/bin", "/opt/mine/bin"} {
		root := node(t)
		j := job{Root: root, Source: image(t, "one"), Engine: "auto", Restarts: true}
		j.must(t)
		config := root + "/etc/containerd/config.toml"
		put(t, config, strings.ReplaceAll(read(t, config), "/opt/cgpu/current/bin", where))
		put(t, root+where+"/cgpu-runtime", "")
		before := read(t, config) + read(t, root+"/etc/cgpu/cgpu.toml")
		for _, j.Uninstall = range []bool{false, true} {
			if out, _, err := j.do(t); err == nil || !strings.Contains(out, where+"/cgpu-runtime") {
				t.Errorf("%s, uninstall %v: %v\n%s", where, j.Uninstall, err, out)
			}
			if read(t, config)+read(t, root+"/etc/cgpu/cgpu.toml") != before {
				t.Errorf("%s, uninstall %v: the configuration was changed", where, j.Uninstall)
			}
		}
	}
}

// TestInUseAgain: between an uninstall's last look and the lock another pod has installed.
func TestInUseAgain(t *testing.T) {
	root := node(t)
	j := job{Root: root, Source: image(t, "one"), Engine: "auto", Restarts: true}
	j.must(t)
	j.OnlyRemove = true
	if out, _, err := j.do(t); err == nil || !strings.Contains(out, "it is in use again") {
		t.Errorf("%v\n%s", err, out)
	}
	sound(t, root)
	if _, err := os.Stat(root + "/opt/cgpu/current/bin/cgpu-runtime"); err != nil {
		t.Error(err)
	}
}

// TestOthersFiles: what others have put beside ours stays.
func TestOthersFiles(t *testing.T) {
	root := node(t)
	j := job{Root: root, Source: image(t, "one"), Engine: "auto", Restarts: true}
	j.must(t)
	theirs := []string{"/opt/cgpu/versions/theirs/file", "/opt/cgpu/versions/.theirs", "/opt/cgpu/theirs"}
	for _, file := range theirs {
		put(t, root+file, "")
	}
	j.Uninstall = true
	j.must(t)
	for _, file := range theirs {
		if _, err := os.Stat(root + file); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Lstat(root + "/opt/cgpu/current"); err == nil {
		t.Error("what engines call is still there")
	}
	put(t, root+"/srv/current/index.html", "")
	j.Dir = "/srv"
	j.must(t)
	read(t, root+"/srv/current/index.html")
}

// TestUsers: what runs by the programs is found wherever its engine keeps it and whatever it is called; what a tenant calls so is not.
func TestUsers(t *testing.T) {
	root := node(t)
	systemd(t, root)
	put(t, root+"/usr/bin/containerd", "#!/bin/sh\n"+
		"[ \"$1\" = --version ] && echo x 2.1.0 && exit 0\n/bin/busybox cat /etc/containerd/config.toml\n")
	put(t, root+"/etc/containerd/config.toml", "state = '/run/elsewhere'\n"+administrators)
	j := job{Root: root, Source: image(t, "one"), Engine: "auto", Restarts: true}
	j.must(t)
	links := map[string]string{
		"1/exe": "/opt/cgpu/current/bin/cgpu-guard",                                              // as the kernel shows it: the file itself
		"2/exe": "/opt/cgpu/x)\nnext: \x1b[31mred", "3/exe": "/usr/bin/conmon", "3/root": "/etc", // a tenant's
	}
	put(t, root+"/proc/3/cmdline", "conmon\x00-r\x00/opt/cgpu/current/bin/cgpu-runtime\x00")
	put(t, root+"/proc/1/cmdline", "x\x00")
	put(t, root+"/proc/2/cmdline", "x\x00")
	for link, to := range links {
		if err := os.Symlink(to, root+"/proc/"+link); err != nil {
			t.Fatal(err)
		}
	}
	put(t, root+"/run/elsewhere/io.containerd.runtime.v2.task/k8s.io/a/runtime", "/opt/cgpu/current/bin/cgpu-runtime")
	j.Uninstall = true
	j.waits(t, "programs of /opt/cgpu: container a, process 1 (cgpu-guard)\n", func() {
		_ = os.RemoveAll(root + "/run/elsewhere")
		_ = os.RemoveAll(root + "/proc/1")
	})
}

// TestSandboxes: CRI-O calls a pod's runtime to delete it, also when its containers have ended and no monitor lives.
func TestSandboxes(t *testing.T) {
	root := node(t)
	j := job{Root: root, Source: image(t, "one"), Engine: "crio", Restarts: true}
	put(t, root+sockets["crio"], "")
	j.Restarts = false
	renew := func() {
		put(t, root+"/run/crio/new", "")
		if err := os.Rename(root+"/run/crio/new", root+sockets["crio"]); err != nil {
			t.Error(err)
		}
	}
	j.waits(t, "waits until /run/crio/crio.sock is a new one", renew)
	dir := root + "/run/containers/storage/overlay-containers"
	put(t, dir+"/a/userdata/config.json", `{"annotations": {"io.kubernetes.cri-o.RuntimeHandler": "cgpu"}}`)
	put(t, dir+"/b/userdata/config.json", `{"annotations": {"io.kubernetes.cri-o.RuntimeHandler": "runc"}}`)
	j.Uninstall = true
	j.waits(t, "programs of /opt/cgpu: pod a\n", func() {
		if _, err := os.Stat(root + "/etc/crio/crio.conf.d/99-cgpu.conf"); err != nil {
			t.Error("CRI-O could not delete it: ", err)
		}
		_ = os.RemoveAll(dir + "/a")
		for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			if _, err := os.Stat(filepath.Join(root, pendingFile())); err == nil {
				break
			}
		}
		renew()
	})
}

// TestLock: a user of the machine can neither take the lock nor see more of the run dir than he may.
func TestLock(t *testing.T) {
	root := node(t)
	if err := os.Mkdir(root+"/run/cgpu", 0o755); err != nil { // as a kubelet makes it
		t.Fatal(err)
	}
	j := job{Root: root, Source: image(t, "one"), Engine: "auto", Restarts: true}
	j.must(t)
	for path, want := range map[string]os.FileMode{"/run/cgpu": device.RunDirMode, "/run/cgpu/installer.lock": 0o600} {
		if info, err := os.Stat(root + path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v, want %v", path, info.Mode(), err, want)
		}
	}
	f, err := os.Open(root + "/run/cgpu/installer.lock")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	j.waits(t, "waits for another cgpu-installer, which has /run/cgpu/installer.lock locked\n", func() {
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_UN); err != nil {
			t.Error(err)
		}
	})
}
