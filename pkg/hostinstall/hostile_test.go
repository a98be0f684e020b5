// SPDX-License-Identifier: Apache-2.0

package hostinstall

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// systemd gives a node a systemctl that restarts containerd and notes it, and programs that are scripts.
func systemd(t *testing.T, root string) {
	t.Helper()
	busybox := testenv.NeedsProgram(t, "busybox")
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

// TestBadVersion: one whose programs do not run on this node does not become the one that engines call.
func TestBadVersion(t *testing.T) {
	root := node(t)
	j := job{Root: root, Source: image(t, "one"), Engine: "auto", Restarts: true, NoTable: true}
	if out, _, err := j.do(t); err == nil || read(t, root+"/etc/containerd/config.toml") != administrators {
		t.Errorf("%v\n%s\n%s", err, out, read(t, root+"/etc/containerd/config.toml"))
	}
	j.NoTable = false
	j.must(t)
	j.NoTable, j.Source = true, image(t, "two")
	if out, _, err := j.do(t); err == nil || read(t, root+"/opt/cgpu/current/bin/cgpu-runtime") != "one bin/cgpu-runtime" {
		t.Errorf("%v\n%s", err, out)
	}
	sound(t, root)
}

// TestFullDisk: a version of which a part could not be written leaves nothing.
func TestFullDisk(t *testing.T) {
	image, versions := t.TempDir(), t.TempDir()
	put(t, image+"/bin/cgpu", "x")
	if err := (tree{FS: os.DirFS(image), files: []string{"bin/cgpu", "bin/none"}, name: "x"}).stage(versions); err == nil {
		t.Error("no error")
	}
	if list, _ := os.ReadDir(versions); len(list) != 0 {
		t.Errorf("left %v", list)
	}
}

// TestHungFileSystem: what runs on a file system that does not answer, which a tenant may have made, holds nobody up.
func TestHungFileSystem(t *testing.T) {
	device, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		testenv.Lacks(t, "needs /dev/fuse: %v", err)
	}
	abort := sync.OnceFunc(func() { unix.Close(device) })
	defer abort()
	dir := t.TempDir()
	if err := unix.Mount("cgpu-test", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", device)); err != nil {
		testenv.Lacks(t, "needs to mount: %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	done := make(chan file)
	go func() { done <- identity(dir) }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Error("it waits for an answer")
		abort() // ends the wait
		<-done
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
	// The same for one that cannot be made.
	put(t, root+"/etc/containerd.cgpu-backup", "")
	put(t, root+"/usr/bin/containerd", "#!/bin/sh\nexit 0\n")
	out, _, err = job{Root: root, Source: image(t, "one"), Engine: "auto"}.do(t)
	if err == nil || !strings.Contains(out, "not a directory") {
		t.Errorf("%v\n%s", err, out)
	}
	if _, err := os.Stat(filepath.Join(root, pendingFile())); err == nil {
		t.Error("a restart is pending for files that did not change")
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
		"4/exe": "/home/a/conmon", "4/root": "/", // a user's
	}
	for process, uid := range map[string]string{"3": "0", "4": "1000"} {
		put(t, root+"/proc/"+process+"/cmdline", "conmon\x00-r\x00/opt/cgpu/current/bin/cgpu-runtime\x00")
		put(t, root+"/proc/"+process+"/status", "Name:\tconmon\nUid:\t"+uid+"\t0\t0\t0\n")
	}
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
	process, said := j.says(t, "programs of /opt/cgpu: pod a\n")
	if _, err := os.Stat(root + "/etc/crio/crio.conf.d/99-cgpu.conf"); err != nil {
		t.Error("CRI-O could not delete it: ", err)
	}
	_ = os.RemoveAll(dir + "/a")
	said.await(t, process, "waits until /run/crio/crio.sock is a new one")
	renew()
	if err := process.Wait(); err != nil {
		t.Errorf("%v\n%s", err, said.String())
	}
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
