// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/testenv"
	"github.com/opencgpu/cgpu/test/node"
)

// apart is a mount namespace in which folders that podman and CRI-O know by their fixed names are this test's: /etc/containers,
// /etc/cni, /var/lib, /run and /dev/shm. They are used there as they are on a machine, and what they mount does not leave it.
type apart struct {
	containers string // what is /etc/containers there
	enter      []string
}

// newApart makes the namespace; it is gone with the test.
func newApart(t *testing.T, dir string) apart {
	t.Helper()
	for _, program := range []string{"podman", "conmon"} {
		testenv.NeedsProgram(t, program)
	}
	a := apart{containers: filepath.Join(dir, "etc")}
	for _, name := range []string{"etc", "cni", "lib"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// The image is loaded from a file, which no policy has signed. vfs works on whatever /tmp is.
	a.write(t, "policy.json", `{"default": [{"type": "insecureAcceptAnything"}]}`)
	a.write(t, "storage.conf",
		"[storage]\ndriver = \"vfs\"\nrunroot = \"/run/containers/storage\"\ngraphroot = \"/var/lib/containers/storage\"\n")
	// A network needs plugins, a limit of files a capability that labs lack. conmon, and with it the runtime, gets no other environment.
	a.write(t, "containers.conf", fmt.Sprintf(`[containers]
netns = "none"
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "lab" # the machine's
conmon_env_vars = ["PATH=%s", "CGPU_RUN_DIR=%s", "CGPU_CONFIG=%s"]
[engine.runtimes]
lab = ["%s"]
`, os.Getenv("PATH"), lab.RunDir, os.Getenv("CGPU_CONFIG"), filepath.Join(lab.Dir, "lab", "runc")))

	cmd := exec.Command("unshare", "--mount", "sh", "-ec", `
mount --bind "$1/etc" /etc/containers
[ ! -d /etc/cni ] || mount --bind "$1/cni" /etc/cni
mount --bind "$1/lib" /var/lib
mount -t tmpfs tmpfs /run
mkdir /run/cgpu # podman starts a runtime with no environment, where conmon does not
mount --bind "$CGPU_RUN_DIR" /run/cgpu
mount -t tmpfs tmpfs /dev/shm
echo ready
read end`, "sh", dir)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		cmd.Wait() //nolint:errcheck // "read" fails at the end of its file
	})
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "ready\n" {
		rest, _ := io.ReadAll(stdout)
		t.Fatalf("no mount namespace: %q, %v, %s", line, err, rest)
	}
	a.enter = []string{"nsenter", fmt.Sprintf("--mount=/proc/%d/ns/mnt", cmd.Process.Pid)}
	return a
}

func (a apart) write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(a.containers, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// try runs a command in the namespace.
func (a apart) try(args ...string) node.Result {
	return lab.Run(nil, append(a.enter[:2:2], args...)...)
}

// run is try for a command that must succeed.
func (a apart) run(t *testing.T, args ...string) string {
	t.Helper()
	r := a.try(args...)
	if r.Code != 0 {
		t.Fatal(r)
	}
	return r.Stdout
}

// load puts the probe's image into the namespace's storage, as localhost/probe.
func (a apart) load(t *testing.T, dir string) {
	t.Helper()
	tar := filepath.Join(dir, "image.tar")
	docker(t, "save", "-o", tar, image)
	a.run(t, "podman", "load", "-i", tar)
}

// run of podman: its arguments for a container that asks for 6/15 of the first GPU.
func podmanRun(options ...string) []string {
	args := []string{"podman", "run"}
	for _, e := range sixOfFifteen {
		args = append(args, "-e", e)
	}
	return append(args, options...)
}

// TestInstallPodman: cgpu install writes the file that podman reads, and containers of podman, single ones and those of a pod, live
// from create to release as Docker's do.
func TestInstallPodman(t *testing.T) {
	noTrace(t)
	dir := folder(t)
	a := newApart(t, dir)
	a.load(t, dir)
	config := filepath.Join(a.containers, "containers.conf")
	if err := os.Mkdir(config+".d", 0o755); err != nil {
		t.Fatal(err)
	}
	before := treeOf(t, a.containers)
	t.Cleanup(func() {
		a.try("podman", "pod", "rm", "--all", "--force", "--time", "0")
		a.try("podman", "rm", "--all", "--force", "--time", "0")
	})

	cgpu := filepath.Join(lab.Bin, "cgpu")
	a.run(t, cgpu, "install", "podman")
	if text, err := os.ReadFile(config); err != nil || string(text) != before["containers.conf"] {
		t.Errorf("%s was touched: %v\n%s", config, err, text)
	}
	if got := a.run(t, "podman", "info", "--format", "{{.Host.OCIRuntime.Name}}"); got != "lab\n" {
		t.Errorf("default runtime: %s", got)
	}

	meminfo := func(args ...string) {
		t.Helper()
		if got, want := total(t, a.run(t, args...)), fraction(t, 6, 15); got != want {
			t.Errorf("%v: total = %v, want %v", args, got, want)
		}
	}
	const probe = "localhost/" + image
	meminfo(podmanRun("--runtime", "cgpu", "--rm", probe, "cgpu-probe", "meminfo")...)
	meminfo(podmanRun("--runtime", "cgpu", "--rm", "--privileged", probe, "cgpu-probe", "meminfo")...)
	wantRefused(t, a.try(podmanRun("--runtime", "cgpu", "--rm", probe, "cgpu-probe", "alloc", "100GiB")...), "status=NV_ERR_NO_MEMORY")

	// A container without a quota is podman's own affair.
	if r := a.try("podman", "run", "--rm", "--runtime", "cgpu", probe, "cgpu-probe", "meminfo"); r.Code == 0 {
		t.Errorf("a container without a quota has a GPU: %s", r)
	}

	// What is refused says why, in one line, and leaves nothing.
	r := a.try("podman", "run", "--name", "refused", "--runtime", "cgpu", "-e", "ALIYUN_COM_GPU_MEM_CONTAINER=7x", probe, "true")
	wantRefused(t, r, `cgpu: ALIYUN_COM_GPU_MEM_CONTAINER="7x": want a positive number of GiB`)
	if strings.Count(strings.TrimSpace(r.Stderr), "\n") > 0 {
		t.Errorf("more than one line: %s", r)
	}
	a.run(t, "podman", "rm", "refused")

	// One that lives: exec, pause, restart; and cgpu finds it by podman's name.
	a.run(t, podmanRun("--runtime", "cgpu", "-d", "--name", "web", probe, "cgpu-probe", "hold", "1GiB")...)
	named := func(state string) {
		t.Helper()
		if out := a.run(t, cgpu, "inspect", "web"); !strings.Contains(out, `"web"`) {
			t.Errorf("%s: %s", state, out)
		}
	}
	named("started")
	meminfo("podman", "exec", "web", "cgpu-probe", "meminfo")
	wantRefused(t, a.try("podman", "exec", "web", "cgpu-probe", "alloc", "6GiB"), "status=NV_ERR_NO_MEMORY")
	a.run(t, "podman", "pause", "web")
	a.run(t, "podman", "unpause", "web")
	a.run(t, "podman", "restart", "--time", "0", "web")
	named("restarted")
	meminfo("podman", "exec", "web", "cgpu-probe", "meminfo")
	if _, ok := recordOf(t, strings.TrimSpace(a.run(t, "podman", "inspect", "--format", "{{.ID}}", "web"))); !ok {
		t.Error("no reservation")
	}
	a.run(t, "podman", "stop", "--time", "0", "web")
	noRecord(t, "the end of a container")
	a.run(t, "podman", "start", "web")
	a.run(t, "podman", "rm", "--force", "--time", "0", "web")
	noRecord(t, "rm -f")

	// A pod of podman.
	a.run(t, "podman", "pod", "create", "--name", "pod", "--infra-image", probe, "--infra-command", "/bin/sleep 1000")
	a.run(t, podmanRun("--runtime", "cgpu", "-d", "--pod", "pod", "--name", "member", probe, "cgpu-probe", "hold", "1GiB")...)
	meminfo("podman", "exec", "member", "cgpu-probe", "meminfo")
	if out := a.run(t, cgpu, "inspect", "member"); !strings.Contains(out, `"member"`) {
		t.Error(out)
	}
	a.run(t, "podman", "pod", "rm", "--force", "--time", "0", "pod")

	a.run(t, cgpu, "install", "podman", "--default")
	if got := a.run(t, "podman", "info", "--format", "{{.Host.OCIRuntime.Name}} {{.Host.OCIRuntime.Path}}"); got != "cgpu "+
		filepath.Join(lab.Bin, "cgpu-runtime")+"\n" {
		t.Errorf("default runtime: %s", got)
	}
	meminfo(podmanRun("--rm", probe, "cgpu-probe", "meminfo")...)
	a.run(t, "podman", "run", "--rm", probe, "true")

	// crun, which is podman's own choice.
	withCrun := strings.TrimPrefix(withRuntimes(t, filepath.Join(lab.Dir, "lab", "crun"))[0], "CGPU_CONFIG=")
	a.write(t, "containers.conf", strings.ReplaceAll(before["containers.conf"], os.Getenv("CGPU_CONFIG"), withCrun))
	a.run(t, podmanRun("-d", "--name", "crun", probe, "cgpu-probe", "hold", "1GiB")...)
	a.run(t, "sh", "-c", "ls /run/crun/*/status") // its own state, not runc's
	meminfo("podman", "exec", "crun", "cgpu-probe", "meminfo")
	a.run(t, "podman", "pause", "crun")
	a.run(t, "podman", "unpause", "crun")
	a.run(t, "podman", "rm", "--force", "--time", "0", "crun")
	a.write(t, "containers.conf", before["containers.conf"])

	a.run(t, cgpu, "uninstall", "podman")
	if after := treeOf(t, a.containers); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("/etc/containers:\n%v\nwas:\n%v", after, before)
	}
	if got := a.run(t, "podman", "info", "--format", "{{.Host.OCIRuntime.Name}}"); got != "lab\n" {
		t.Errorf("default runtime: %s", got)
	}
	wantRefused(t, a.try(podmanRun("--runtime", "cgpu", "--rm", probe, "true")...), `"cgpu" not found|cgpu.*no such file`)
}

// treeOf is what a folder has: its files with their texts, its folders.
func treeOf(t *testing.T, dir string) map[string]string {
	t.Helper()
	tree := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		text := "(folder)"
		if !d.IsDir() {
			file, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			text = string(file)
		}
		tree[strings.TrimPrefix(path, dir+"/")] = text
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

// TestRootless: root of a user namespace is refused a share by what it lacks, and its other containers start.
func TestRootless(t *testing.T) {
	dir := folder(t)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	run(t, "cp", filepath.Join(lab.Bin, "cgpu-runtime"), dir)
	bundle := filepath.Join(dir, "bundle")
	quotaBundle(t, bundle, sixOfFifteen, "true")
	rootless := []string{"setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups", "unshare", "--user", "--map-root-user",
		filepath.Join(dir, "cgpu-runtime")}
	r := lab.Run(nil, append(rootless, "--root", dir, "run", "--bundle", bundle, "rootless")...)
	wantRefused(t, r, `needs the machine's root: start the container as root`)
	if r := lab.Run(nil, append(rootless, "--version")...); r.Code != 0 {
		t.Error(r)
	}
}
