// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// daemonOf starts an engine of this test alone and stops it at the end.
func daemonOf(t *testing.T, log string, args ...string) *exec.Cmd {
	t.Helper()
	f, err := os.Create(log)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = f, f
	cmd.Env = append(os.Environ(), "CONTAINERD_ADDRESS=", "DOCKER_HOST=")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // so that docker's own containerd does not get the test's signals
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	f.Close()
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM) //nolint:errcheck // it may have ended
		select {
		case <-ended:
		case <-time.After(time.Minute):
			cmd.Process.Kill() //nolint:errcheck
			<-ended
		}
		if text, err := os.ReadFile(log); t.Failed() && err == nil {
			t.Logf("%s:\n%s", args[0], text)
		}
	})
	return cmd
}

// folder is a temporary one with a short path: those of sockets end at 107 bytes.
func folder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "cgpu-i")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		mounts, _ := os.ReadFile("/proc/self/mounts")
		for _, line := range strings.Split(string(mounts), "\n") {
			if f := strings.Fields(line); len(f) > 1 && strings.HasPrefix(f[1], dir+"/") {
				syscall.Unmount(f[1], syscall.MNT_DETACH) //nolint:errcheck // what stays is seen below
			}
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// sameFiles asserts that a folder holds a file as it was, and nothing beside it.
func sameFiles(t *testing.T, path, want string) {
	t.Helper()
	if got, err := os.ReadFile(path); err != nil || string(got) != want {
		t.Errorf("%s: %v\ngot:\n%s\nwant:\n%s", path, err, got, want)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "*")); len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
}

// TestInstallDocker: install into a configuration of its own, start dockerd with it, run a container, make cgpu the default while
// dockerd runs, and take it out again.
func TestInstallDocker(t *testing.T) {
	for _, bin := range engines() {
		if bin != "" {
			t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
		}
		version := strings.Trim(strings.Fields(run(t, "dockerd", "--version"))[2], ",")
		t.Run(version, func(t *testing.T) { testInstallDocker(t, `"storage-driver": "vfs"`) })
		if bin != "" { // where images are containerd's, as Docker has it on new machines today
			t.Run(version+"/containerd's images", func(t *testing.T) {
				testInstallDocker(t, `"storage-driver": "native", "features": {"containerd-snapshotter": true}`)
			})
		}
	}
}

func testInstallDocker(t *testing.T, storage string) {
	noTrace(t)
	dir := folder(t)
	runtime := runtimeFor(t, dir)
	config := filepath.Join(dir, "etc", "daemon.json")
	before := fmt.Sprintf(`{
  "data-root": "%[1]s/data", "exec-root": "%[1]s/exec", "pidfile": "%[1]s/pid",
  "hosts": ["unix://%[1]s/sock"],
  %[3]s,	"iptables": false,  "bridge": "none",
  "runtimes": {"other": {"path": "%[2]s"}}, "default-runtime": "other"
}
`, dir, filepath.Join(lab.Dir, "lab", "runc"), storage)
	if err := os.Mkdir(filepath.Dir(config), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, []byte(before), 0o644); err != nil {
		t.Fatal(err)
	}
	cgpu(t, "install", "docker", "--config", config, "--runtime-path", runtime)
	daemonOf(t, filepath.Join(dir, "log"), "dockerd", "--config-file", config)
	env := []string{"DOCKER_HOST=unix://" + dir + "/sock"}
	info := func() string {
		r := lab.Run(env, "docker", "info", "--format", "{{.DefaultRuntime}} {{range $k, $v := .Runtimes}}{{$k}}={{$v.Path}} {{end}}")
		if r.Code != 0 {
			return ""
		}
		return strings.TrimSpace(r.Stdout)
	}
	eventually(t, 30*time.Second, func() string {
		if info() == "" {
			return "dockerd does not answer"
		}
		return ""
	})
	if r := lab.Run(env, "docker", "import", filepath.Join(lab.Dir, "image", "rootfs.tar"), image); r.Code != 0 {
		t.Fatal(r)
	}
	meminfo := func(options ...string) {
		t.Helper()
		args := append([]string{"docker", "run", "--rm", "--network", "none", "-e", "ALIYUN_COM_GPU_MEM_CONTAINER=6", "-e",
			"ALIYUN_COM_GPU_MEM_DEV=15",
			"-e", "ALIYUN_COM_GPU_VISIBLE_DEVICES=0"}, options...)
		r := lab.Run(env, append(args, image, "/bin/cgpu-probe", "meminfo")...)
		if r.Code != 0 {
			t.Fatal(r)
		}
		if got, want := total(t, r.Stdout), fraction(t, 6, 15); got != want {
			t.Errorf("total = %v, want %v", got, want)
		}
	}
	meminfo("--runtime=cgpu")

	if out := cgpu(t, "install", "docker", "--default", "--restart", "--config", config, "--runtime-path",
		runtime); !strings.Contains(out, "reads it now") {
		t.Errorf("--restart: %s", out)
	}
	eventually(t, 10*time.Second, func() string {
		if got := info(); !strings.HasPrefix(got, "cgpu ") || !strings.Contains(got, " cgpu="+runtime) || !strings.Contains(got, " other=") {
			return "docker info: " + got
		}
		return ""
	})
	meminfo()

	cgpu(t, "uninstall", "docker", "--restart", "--config", config)
	eventually(t, 10*time.Second, func() string {
		if got := info(); !strings.HasPrefix(got, "other ") || strings.Contains(got, "cgpu=") {
			return "docker info: " + got
		}
		return ""
	})
	sameFiles(t, config, before)
}

// runtimeFor is cgpu-runtime. Docker of today gives each container a namespace for time, which runc before 1.2 refuses, with cgpu or
// without: where the machine has such a one, a script takes that out first.
func runtimeFor(t *testing.T, dir string) string {
	t.Helper()
	path := filepath.Join(lab.Bin, "cgpu-runtime")
	if strings.Contains(run(t, "runc", "features"), `"time"`) {
		return path
	}
	script := fmt.Sprintf(`#!/bin/bash
for ((i = 1; i < $#; i++)); do
	case ${!i} in --bundle) j=$((i + 1)) && config=${!j}/config.json ;; esac
done
if [[ $config ]]; then
	jq -c 'del(.linux.namespaces[] | select(.type == "time"))' "$config" >"$config.new" && mv "$config.new" "$config"
fi
exec %s "$@"
`, path)
	path = filepath.Join(dir, "cgpu-runtime")
	if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestInstallDockerFlags: dockerd does not start where its options and its file both name runtimes.
func TestInstallDockerFlags(t *testing.T) {
	dir := folder(t)
	config := filepath.Join(dir, "etc", "daemon.json")
	before := fmt.Sprintf(`{"data-root": "%[1]s/data", "exec-root": "%[1]s/exec", "pidfile": "%[1]s/pid", "hosts": ["unix://%[1]s/sock"], "storage-driver": "vfs", "iptables": false, "bridge": "none"}`, dir)
	if err := os.Mkdir(filepath.Dir(config), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, []byte(before), 0o644); err != nil {
		t.Fatal(err)
	}
	daemonOf(t, filepath.Join(dir, "log"), "dockerd", "--config-file", config, "--add-runtime", "other="+filepath.Join(lab.Dir, "lab", "runc"))
	eventually(t, 30*time.Second, func() string {
		if r := lab.Run(nil, "docker", "-H", "unix://"+dir+"/sock", "version"); r.Code != 0 {
			return r.String()
		}
		return ""
	})
	r := tryCgpu("install", "docker", "--config", config)
	wantRefused(t, r, `was started with --add-runtime, and does not start when the file says the same`)
	sameFiles(t, config, before)
}

// TestInstallReadOnly: a folder that cannot be written is said to be so, and stays as it is.
func TestInstallReadOnly(t *testing.T) {
	dir := folder(t)
	config := filepath.Join(dir, "daemon.json")
	if err := os.WriteFile(config, []byte("{}"), 0o644); err != nil {
		t.Fatal(err)
	}
	script := fmt.Sprintf(`mount --bind %[1]s %[1]s && mount -o remount,ro,bind %[1]s && exec %[2]s/cgpu install docker --config %[3]s`, dir,
		lab.Bin, config)
	wantRefused(t, lab.Run(nil, "unshare", "--mount", "sh", "-c", script), `daemon\.json.*: read-only file system: make it writable`)
	sameFiles(t, config, "{}")
}

// engines are the folders of the engines to try: the machine's ("") and those that CGPU_TEST_ENGINES lists (hack/engines.sh).
func engines() []string {
	return append([]string{""}, filepath.SplitList(os.Getenv("CGPU_TEST_ENGINES"))...)
}

// TestInstallContainerd: the same with containerd, whose CRI plugin must still load. The tables that hold before and after are
// what containerd itself says they are.
func TestInstallContainerd(t *testing.T) {
	for _, bin := range engines() {
		if bin != "" {
			t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
		}
		version := run(t, "containerd", "--version")
		two := strings.Contains(version, "/v2 ")
		for name, config := range map[string]string{
			"plain": "",
			"runc with options": `[plugins."CRI".containerd]
  default_runtime_name = "runc" # ours
[plugins."CRI".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  [plugins."CRI".containerd.runtimes.runc.options]
    SystemdCgroup = false
`,
			"imports": `imports = ["/DIR/conf.d/*.toml"]`,
			"default": "", // the file that containerd itself writes, as most nodes of Kubernetes have it
		} {
			t.Run(strings.Fields(version)[2]+"/"+name, func(t *testing.T) {
				noTrace(t)
				dir := folder(t)
				main := filepath.Join(dir, "etc", "config.toml")
				for _, d := range []string{"etc", "conf.d"} {
					if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
						t.Fatal(err)
					}
				}
				head, cri := "version = 2\n", "io.containerd.grpc.v1.cri"
				if two {
					head, cri = "version = 3\n", "io.containerd.cri.v1.runtime"
				}
				head += fmt.Sprintf("root = \"%[1]s/root\"\nstate = \"%[1]s/state\"\n", dir)
				imports, tables := "", config
				if strings.HasPrefix(config, "imports") {
					imports, tables = config+"\n", ""
				}
				before := strings.NewReplacer("/DIR", dir, "CRI", cri).
					Replace(head + imports + fmt.Sprintf("[grpc]\n  address = \"%s/sock\"\n", dir) + tables)
				if name == "default" {
					before = strings.NewReplacer("/run/containerd/containerd.sock", dir+"/sock", "/run/containerd", dir+"/state",
						"/var/lib/containerd", dir+"/root",
						"/etc/containerd", dir, "/opt/containerd", dir+"/opt").Replace(run(t, "containerd", "config", "default"))
				}
				if err := os.WriteFile(main, []byte(before), 0o644); err != nil {
					t.Fatal(err)
				}
				dump := func() string {
					t.Helper()
					r := lab.Run(nil, "containerd", "--config", main, "config", "dump")
					if r.Code != 0 {
						t.Fatal(r)
					}
					return r.Stdout
				}
				was := dump()
				cgpu(t, "install", "containerd", "--default", "--config", main)
				for _, want := range []string{"runtimes.cgpu]", "runtimes.runc]", filepath.Join(lab.Bin, "cgpu-runtime")} {
					if got := dump(); !strings.Contains(got, want) {
						t.Errorf("no %s in:\n%s", want, got)
					}
				}
				if dropIn := filepath.Join(dir, "conf.d", "99-cgpu.toml"); strings.Contains(before, "conf.d/*.toml") && two {
					sameFiles(t, main, before)
					if _, err := os.Stat(dropIn); err != nil {
						t.Error(err)
					}
				}

				daemonOf(t, filepath.Join(dir, "log"), "containerd", "--config", main)
				ctr := func(args ...string) []string { return append([]string{"ctr", "--address", dir + "/sock"}, args...) }
				eventually(t, 30*time.Second, func() string {
					r := lab.Run(nil, ctr("plugins", "ls")...)
					for _, line := range strings.Split(r.Stdout, "\n") {
						f := strings.Fields(line)
						if len(f) > 2 && (f[1] == "cri" || f[1] == "runtime" && two && strings.Contains(f[0], "cri.v1")) && f[len(f)-1] == "ok" {
							return ""
						}
					}
					return "the CRI plugin is not ok: " + r.String()
				})
				tar := filepath.Join(dir, "image.tar")
				run(t, "docker", "save", "-o", tar, image)
				load := []string{"images", "import", "--snapshotter", "native"}
				if two {
					load = append(load, "--local") // its own way of loading knows only the default snapshotter
				}
				for _, args := range [][]string{ctr(append(load, tar)...), ctr("run", "--rm", "--snapshotter", "native",
					"--runc-binary", filepath.Join(lab.Bin, "cgpu-runtime"), "--env", "ALIYUN_COM_GPU_MEM_CONTAINER=6", "--env",
					"ALIYUN_COM_GPU_MEM_DEV=15",
					"--env", "ALIYUN_COM_GPU_VISIBLE_DEVICES=0", "docker.io/library/"+image+":latest", fmt.Sprintf("inst%d", os.Getpid()),
					"/bin/cgpu-probe", "meminfo")} {
					r := lab.Run(nil, args...)
					if r.Code != 0 {
						t.Fatal(r)
					}
					if strings.Contains(strings.Join(args, " "), "meminfo") && total(t, r.Stdout) != fraction(t, 6, 15) {
						t.Errorf("total: %s", r)
					}
				}

				cgpu(t, "uninstall", "containerd", "--config", main)
				sameFiles(t, main, before)
				if left, _ := filepath.Glob(filepath.Join(dir, "conf.d", "*")); len(left) > 0 {
					t.Errorf("left behind: %v", left)
				}
				if now := dump(); now != was {
					t.Errorf("containerd's configuration is not what it was:\n%s\nwas:\n%s", now, was)
				}
			})
		}
	}
}

// TestMakeInstall: make install brings every program that another one looks for beside itself, and nothing else. The node's
// programs are installed as they are: building them anew would change them under the feet of the other tests.
func TestMakeInstall(t *testing.T) {
	dir := folder(t)
	top := filepath.Dir(filepath.Dir(lab.Script))
	run(t, "sh", "-c", fmt.Sprintf("umask 077; make -C %s -o build install BIN=%s DESTDIR=%s", top, lab.Bin, dir))
	want := []string{"lib/cgpu/libcgpu.so", "lib/systemd/system/cgpu-exporter.service", "lib/systemd/system/cgpu-health.service",
		"lib/systemd/system/cgpu-km.service", "lib/systemd/system/cgpu-refresh.service", "lib/tmpfiles.d/cgpu.conf",
		"lib/udev/rules.d/71-cgpu.rules"}
	for _, name := range []string{"cgpu", "cgpu-guard", "cgpu-hook", "cgpu-probe", "cgpu-refresh", "cgpu-runtime"} {
		want = append(want, "bin/"+name)
	}
	for _, name := range want {
		path := filepath.Join(dir, "usr/local", name)
		info, err := os.Stat(path)
		if err != nil {
			t.Error(err)
			continue
		}
		mode := os.FileMode(0o644)
		if strings.HasPrefix(name, "bin/") {
			mode = 0o755
		}
		if info.Mode().Perm() != mode {
			t.Errorf("%s has mode %v, want %v", path, info.Mode(), mode)
		}
		if above, err := os.Stat(filepath.Dir(path)); err != nil || above.Mode().Perm() != 0o755 {
			t.Errorf("%s: %v, %v: others cannot enter it", filepath.Dir(path), above.Mode(), err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "usr/local/bin/cgpu-sim")); err == nil {
		t.Error("the simulated driver is installed")
	}
}
