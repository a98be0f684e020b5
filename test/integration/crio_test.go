// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// crio is a CRI-O of this test and the pod that a kubelet would have it start.
type crio struct {
	cri.RuntimeServiceClient
	dir     string
	pod     string
	sandbox *cri.PodSandboxConfig
	made    int
}

// crioProgram is CRI-O with its pinns beside it, from hack/engines.sh.
func crioProgram(t *testing.T) string {
	t.Helper()
	for _, bin := range engines() {
		if path := filepath.Join(bin, "crio"); bin != "" && exists(path) {
			return path
		}
	}
	testenv.Lacks(t, "no CRI-O: CGPU_TEST_ENGINES names no folder with it (hack/engines.sh builds one)")
	return ""
}

// start runs a pod with a runtime handler; "" is CRI-O's default.
func (c *crio) start(t *testing.T, handler string, annotations map[string]string) {
	t.Helper()
	c.made++
	host := cri.NamespaceMode_NODE // a pod's own network needs plugins
	c.sandbox = &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: "train", Namespace: "ml", Uid: fmt.Sprint("uid", c.made)},
		LogDirectory: filepath.Join(c.dir, "logs"),
		Annotations:  annotations,
		Linux: &cri.LinuxPodSandboxConfig{CgroupParent: filepath.Join("/", filepath.Base(c.dir)),
			SecurityContext: &cri.LinuxSandboxSecurityContext{
				NamespaceOptions: &cri.NamespaceOption{Network: host, Pid: cri.NamespaceMode_CONTAINER}}},
	}
	r, err := c.RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: c.sandbox, RuntimeHandler: handler})
	if err != nil {
		t.Fatal(err)
	}
	c.pod = r.PodSandboxId
}

// end removes the pod, its containers, and its cgroups, which are the kubelet's.
func (c *crio) end(t *testing.T) {
	t.Helper()
	if _, err := c.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: c.pod}); err != nil {
		t.Error(err)
	}
	if _, err := c.RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: c.pod}); err != nil {
		t.Error(err)
	}
	name := filepath.Base(c.dir)
	eventually(t, 10*time.Second, func() string { // conmon's is empty when that has ended
		lab.Run(nil, "sh", "-c", fmt.Sprintf("find /sys/fs/cgroup/%s /sys/fs/cgroup/*/%[1]s -depth -type d -exec rmdir {} +", name))
		left, _ := filepath.Glob("/sys/fs/cgroup/*/" + name)
		if exists(filepath.Join("/sys/fs/cgroup", name)) || len(left) > 0 {
			return fmt.Sprintf("cgroup %s is still there: %v", name, left)
		}
		return ""
	})
}

// create makes a container of the pod and starts it; the kubelet's labels and annotations are what it gives.
func (c *crio) create(t *testing.T, env, devices []string, command ...string) (id string, err error) {
	t.Helper()
	c.made++
	config := &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: fmt.Sprint("main", c.made)},
		Image:    &cri.ImageSpec{Image: "localhost/" + image + ":latest"},
		Command:  command,
		LogPath:  fmt.Sprint(c.made, ".log"),
		Labels: map[string]string{"io.kubernetes.pod.namespace": "ml", "io.kubernetes.pod.name": "train",
			"io.kubernetes.pod.uid":        c.sandbox.Metadata.Uid,
			"io.kubernetes.container.name": fmt.Sprint("main", c.made)},
		Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Network: cri.NamespaceMode_NODE, Pid: cri.NamespaceMode_CONTAINER}}},
	}
	for _, e := range env {
		key, value, _ := strings.Cut(e, "=")
		config.Envs = append(config.Envs, &cri.KeyValue{Key: key, Value: []byte(value)})
	}
	for _, d := range devices {
		config.CDIDevices = append(config.CDIDevices, &cri.CDIDevice{Name: d})
	}
	r, err := c.CreateContainer(t.Context(), &cri.CreateContainerRequest{PodSandboxId: c.pod, Config: config, SandboxConfig: c.sandbox})
	if err != nil {
		return "", err
	}
	_, err = c.StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: r.ContainerId})
	return r.ContainerId, err
}

// hold is create for a container that must live; it does nothing but hold some memory.
func (c *crio) hold(t *testing.T, env, devices []string) string {
	t.Helper()
	id, err := c.create(t, env, devices, "cgpu-probe", "hold", "1GiB")
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// exec runs a command in a container, as kubectl exec of a probe does.
func (c *crio) exec(t *testing.T, id string, command ...string) (stdout string, code int32) {
	t.Helper()
	r, err := c.ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: id, Cmd: command, Timeout: 30})
	if err != nil {
		t.Fatal(err)
	}
	return string(r.Stdout), r.ExitCode
}

func (c *crio) remove(t *testing.T, id string) {
	t.Helper()
	if _, err := c.StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: id}); err != nil {
		t.Error(err)
	}
	noRecord(t, "the end of a container")
	if _, err := c.RemoveContainer(t.Context(), &cri.RemoveContainerRequest{ContainerId: id}); err != nil {
		t.Error(err)
	}
}

// TestInstallCRIO: CRI-O reads what cgpu install writes; a kubelet's calls start pods whose containers ask by variables, and on a
// node of Kubernetes have a share by a claim alone.
func TestInstallCRIO(t *testing.T) {
	program := crioProgram(t)
	noTrace(t)
	dir := folder(t)
	a := newApart(t, dir)
	a.load(t, dir)
	// The simulated driver lives on in the cgroup of the container for which it was started, which must not be the pod's.
	container{env: sixOfFifteen, cmd: []string{"true"}}.run(t)
	etc := filepath.Join(dir, "crio")
	dropIns := filepath.Join(etc, "crio.conf.d")
	if err := os.MkdirAll(dropIns, 0o755); err != nil {
		t.Fatal(err)
	}
	// Seccomp's default profile is C, and this CRI-O has none; conmon has no other environment than the one that is named.
	text := fmt.Sprintf(`[crio.api]
listen = "%[1]s/sock"
stream_port = "0"
[crio.runtime]
cgroup_manager = "cgroupfs"
conmon_cgroup = "pod"
pinns_path = "%[2]s/pinns"
cdi_spec_dirs = ["%[1]s/cdi"]
default_runtime = "lab"
[crio.runtime.runtimes.lab]
runtime_path = "%[3]s/lab/runc"
runtime_root = "/run/lab"
monitor_env = ["PATH=%[4]s", "CGPU_RUN_DIR=%[5]s", "CGPU_CONFIG=%[6]s"]
[crio.image]
pause_image = "localhost/%[7]s:latest"
pause_command = "/bin/sleep 1000"
signature_policy_dir = "%[1]s/policies"
[crio.network]
network_dir = "%[1]s/cni"
plugin_dirs = ["%[1]s/cni"]
[crio.nri]
enable_nri = false
`, dir, filepath.Dir(program), lab.Dir, os.Getenv("PATH"), lab.RunDir, os.Getenv("CGPU_CONFIG"), image)
	if err := os.WriteFile(filepath.Join(etc, "crio.conf"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	before := treeOf(t, etc)
	t.Setenv("PATH", os.Getenv("PATH")+":"+filepath.Dir(program)) // cgpu install asks it
	config := filepath.Join(dropIns, "99-cgpu.conf")
	if out := a.run(t, filepath.Join(lab.Bin, "cgpu"), "install", "crio", "--config", config); strings.Contains(out, "note:") {
		t.Error(out)
	}

	daemonOf(t, filepath.Join(dir, "log"), append(a.enter[:2:2], program, "--config", filepath.Join(etc, "crio.conf"),
		"--config-dir", dropIns)...)
	conn, err := grpc.NewClient("unix://"+dir+"/sock", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	c := &crio{RuntimeServiceClient: cri.NewRuntimeServiceClient(conn), dir: dir}
	eventually(t, 30*time.Second, func() string {
		if _, err := c.Version(t.Context(), &cri.VersionRequest{}); err != nil {
			return err.Error()
		}
		return ""
	})
	holds := func(id string, container, dev quota.Bytes) {
		t.Helper()
		out, _ := c.exec(t, id, "cgpu-probe", "meminfo")
		if got, want := total(t, out), fraction(t, container, dev); got != want {
			t.Errorf("total = %v, want %v", got, want)
		}
		if out, code := c.exec(t, id, "cgpu-probe", "alloc", "14GiB"); code == 0 {
			t.Errorf("beyond the limit: %s", out)
		}
		if r, ok := recordOf(t, id); !ok || !strings.HasPrefix(r.Name, "ml/train/main") {
			t.Errorf("record: %+v", r)
		}
	}
	refused := func(err error, want string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: want %q", err, want)
		}
		if left := records(t); len(left) > 0 {
			t.Errorf("left behind: %+v", left)
		}
	}

	t.Run("variables", func(t *testing.T) {
		c.start(t, "cgpu", nil)
		defer c.end(t)
		id := c.hold(t, sixOfFifteen, nil)
		holds(id, 6, 15)
		c.remove(t, id)
		_, err := c.create(t, []string{"ALIYUN_COM_GPU_MEM_CONTAINER=7x"}, nil, "true")
		refused(err, `cgpu: ALIYUN_COM_GPU_MEM_CONTAINER="7x": want a positive number of GiB`)
		c.hold(t, sixOfFifteen, nil) // ends with its pod
	})
	noRecord(t, "the pod's end")

	// As a claim reaches a container (pkg/dra, cdiSpec).
	gpu := gpus(t)[0]
	share := alloc.Share{ID: "11111111-2222-3333-4444-555555555555/a", UUID: gpu.UUID,
		Slice: quota.Slice{Limit: fraction(t, 5, 15), Share: quota.Share{Priority: quota.PriorityDefault}}, Containers: 1}
	device := strings.ReplaceAll(share.ID, "/", ".")
	spec, err := json.Marshal(map[string]any{"cdiVersion": "0.5.0", "kind": "gpu.cgpu.io/share",
		"devices": []any{map[string]any{"name": device,
			"containerEdits": map[string]any{"hooks": []any{map[string]any{"hookName": "createRuntime", "path": filepath.Join(lab.Bin, "cgpu-hook"),
				"args": alloc.HookArgs(share)}}}}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "cdi"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "cdi", "gpu.cgpu.io-share_a.json"), spec, 0o644); err != nil {
		t.Fatal(err)
	}
	claim := []string{"gpu.cgpu.io/share=" + device}

	nodes, err := os.ReadFile(os.Getenv("CGPU_CONFIG"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // the other tests want theirs back, whatever happens
		os.WriteFile(os.Getenv("CGPU_CONFIG"), nodes, 0o644) //nolint:errcheck // seen below
		lab.Run(nil, filepath.Join(lab.Bin, "cgpu-refresh"))
	})
	a.run(t, filepath.Join(lab.Bin, "cgpu"), "install", "crio", "--kubernetes", "--config", config)
	t.Run("kubernetes", func(t *testing.T) {
		c.start(t, "cgpu", nil)
		defer c.end(t)
		id := c.hold(t, nil, claim)
		holds(id, 5, 15)
		c.remove(t, id)
		_, err := c.create(t, sixOfFifteen, nil, "true")
		refused(err, "ALIYUN_COM_GPU_MEM_CONTAINER")
	})
	t.Run("forged", func(t *testing.T) {
		c.start(t, "cgpu", map[string]string{alloc.AnnotationShares: share.Text()})
		defer c.end(t)
		_, err := c.create(t, nil, nil, "true")
		refused(err, "below CRI-O a pod's author can write it")
	})
	t.Run("no handler", func(t *testing.T) {
		c.start(t, "", nil)
		defer c.end(t)
		_, err := c.create(t, nil, claim, "true")
		refused(err, "set runtimeClassName: cgpu")
	})

	for range 2 { // the second, when CRI-O was restarted, is for cgpu.toml
		a.run(t, filepath.Join(lab.Bin, "cgpu"), "uninstall", "crio", "--config", config)
	}
	if after := treeOf(t, etc); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("%v\nwas:\n%v", after, before)
	}
	if now, err := os.ReadFile(os.Getenv("CGPU_CONFIG")); err != nil || string(now) != string(nodes) {
		t.Errorf("cgpu.toml: %v\n%s\nwas:\n%s", err, now, nodes)
	}
}
