// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	setup "github.com/opencgpu/cgpu/pkg/engine"
)

func TestJudgeKubernetes(t *testing.T) {
	good := setup.Pods{CDI: true, Handlers: []setup.Handler{{Name: "cgpu", Annotations: true, Allocations: true}}}
	// node is a good node, but for a change.
	node := func(change func(*kubernetes)) kubernetes {
		k := kubernetes{root: true, kubelet: true, pods: device.PodsAllocated, looked: true, found: good}
		k.found.Handlers = append([]setup.Handler{}, good.Handlers...)
		if change != nil {
			change(&k)
		}
		return k
	}
	handler := func(h setup.Handler) func(*kubernetes) {
		return func(k *kubernetes) { k.found.Handlers = append(k.found.Handlers, h) }
	}
	for _, tt := range []struct {
		name   string
		k      kubernetes
		judge  func(kubernetes) Result
		status Status
		says   string
	}{
		{"no node", kubernetes{pods: device.PodsAny}, kubernetes.judgePods, Skip, "no kubelet"},
		{"no node", kubernetes{pods: device.PodsAny}, kubernetes.judgePodAnnotations, "", ""},
		{"no node", kubernetes{pods: device.PodsAny, nvidia: []string{"nvidia"}}, kubernetes.judgeOtherRuntimes, "", ""},
		{"good", node(nil), kubernetes.judgeOtherRuntimes, OK, "no handler"},
		{"NVIDIA's", node(func(k *kubernetes) { k.nvidia = []string{"nvidia", "gold"} }), kubernetes.judgeOtherRuntimes, Fail,
			"handler nvidia, gold is NVIDIA's"},
		{"NVIDIA's beside gpushare", node(func(k *kubernetes) { k.nvidia, k.pods = []string{"nvidia"}, device.PodsGPUShare }),
			kubernetes.judgeOtherRuntimes, Fail, `"gpushare"`},
		{"NVIDIA's, any", node(func(k *kubernetes) { k.nvidia, k.pods = []string{"nvidia"}, device.PodsAny }), kubernetes.judgeOtherRuntimes,
			Warn, "past the scheduler"},
		{"unreadable", node(func(k *kubernetes) { k.err = errors.New("line 3") }), kubernetes.judgeOtherRuntimes, Warn,
			`line 3): it is not known whether a handler is NVIDIA's runtime, although pods = "allocated" → repair`},
		{"unreadable, any", node(func(k *kubernetes) { k.err, k.pods = errors.New("line 3"), device.PodsAny }), kubernetes.judgeOtherRuntimes,
			Skip, "cannot be read"},
		{"no node", kubernetes{pods: device.PodsAny}, kubernetes.judgeContainerAnnotations, "", ""},
		{"no node", kubernetes{pods: device.PodsAny}, kubernetes.judgeCDI, "", ""},
		{"no node", kubernetes{pods: device.PodsAny}, kubernetes.judgeAgent, "", ""},

		{"good", node(nil), kubernetes.judgePods, OK, `"allocated"`},
		{"gpushare", node(func(k *kubernetes) { k.pods = device.PodsGPUShare }), kubernetes.judgePods, OK, `"gpushare"`},
		{"any", node(func(k *kubernetes) { k.pods = device.PodsAny }), kubernetes.judgePods, Warn, "past the scheduler"},
		{"for a kubelet to come", node(func(k *kubernetes) { k.kubelet = false }), kubernetes.judgePods, OK, "no kubelet runs"},
		{"by its lists alone", kubernetes{pods: device.PodsAny, looked: true, found: good}, kubernetes.judgePods, OK, "no kubelet runs"},

		{"good", node(nil), kubernetes.judgePodAnnotations, OK, "does not"},
		{"forged", node(handler(setup.Handler{Name: "x", Forges: "*/*", Annotations: true, Allocations: true})), kubernetes.judgePodAnnotations,
			Fail, `handler x: pod_annotations has "*/*"`},
		{"deaf to pods", node(handler(setup.Handler{Name: "x", Allocations: true})), kubernetes.judgePodAnnotations, Warn,
			"handler x: pod_annotations lacks"},
		{"no handler", node(func(k *kubernetes) { k.found.Handlers = nil }), kubernetes.judgePodAnnotations, Warn, "no handler"},
		{"unreadable", node(func(k *kubernetes) { k.err = errors.New("version 1") }), kubernetes.judgePodAnnotations, Warn, "version 1 → repair"},
		{"not installed", node(func(k *kubernetes) { k.looked = false }), kubernetes.judgePodAnnotations, Skip, "not installed"},
		{"Docker's", node(func(k *kubernetes) { k.found.Disabled = true }), kubernetes.judgePodAnnotations, Skip, "disabled"},
		{"CRI-O", node(func(k *kubernetes) { k.found.Handlers, k.crio = nil, true }), kubernetes.judgePodAnnotations, Skip, "claims work"},
		{"both", node(func(k *kubernetes) { k.crio = true }), kubernetes.judgePodAnnotations, OK, ""},

		{"good", node(nil), kubernetes.judgeContainerAnnotations, OK, "gets through"},
		{"deaf", node(handler(setup.Handler{Name: "x", Annotations: true})), kubernetes.judgeContainerAnnotations, Warn,
			"handler x: container_annotations lacks"},
		{"deaf beside the device plugin", node(func(k *kubernetes) { k.found.Handlers[0].Allocations, k.agent.memory = false, true }),
			kubernetes.judgeContainerAnnotations, Fail, "does not reach"},
		{"deaf, claims alone", node(func(k *kubernetes) { k.found.Handlers[0].Allocations, k.agent.claims = false, true }),
			kubernetes.judgeContainerAnnotations, Warn, "claims work"},

		{"good", node(nil), kubernetes.judgeCDI, OK, "on"},
		{"off", node(func(k *kubernetes) { k.found.CDI = false }), kubernetes.judgeCDI, Warn, "would not reach"},
		{"off, and used", node(func(k *kubernetes) { k.found.CDI, k.agent.claims = false, true }), kubernetes.judgeCDI,
			Fail, "without their GPU"},
		{"1.6", node(func(k *kubernetes) { k.found.CDI, k.found.OldCDI = false, true }), kubernetes.judgeCDI, Warn, "a device plugin works"},

		{"nobody", node(nil), kubernetes.judgeAgent, Skip, "offers nothing"},
		{"not root", node(func(k *kubernetes) { k.root = false }), kubernetes.judgeAgent, Skip, "needs root"},
		{"both", node(func(k *kubernetes) { k.agent.claims, k.agent.memory = true, true }), kubernetes.judgeAgent, OK,
			"claims (gpu.cgpu.io), aliyun.com/gpu-mem"},
		{"gpushare's", node(func(k *kubernetes) { k.agent.gpushare, k.pods = true, device.PodsGPUShare }), kubernetes.judgeAgent,
			OK, "gpushare's own"},
		{"gpushare's, refused", node(func(k *kubernetes) { k.agent.gpushare = true }), kubernetes.judgeAgent, Warn, "--pods gpushare"},
	} {
		expect(t, tt.name, tt.judge(tt.k), tt.status, tt.says)
	}
}

// TestKubernetesHost: what is seen on a machine.
func TestKubernetesHost(t *testing.T) {
	names := func(h *Host) (list []string) {
		for _, r := range Examine(h, kubernetesChecks).Checks {
			list = append(list, r.Name+" "+string(r.Status))
		}
		return list
	}
	check := func(h *Host, want string) {
		t.Helper()
		h.loaded, h.tableErr = true, device.ErrMissing
		if got := strings.Join(names(h), ", "); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
	check(files(t, nil), "kubernetes skip")
	check(files(t, map[string]string{"proc/1/comm": "systemd\n", "proc/7/comm": "kubelet-x\n"}), "kubernetes skip")
	check(files(t, map[string]string{"proc/1/comm": "systemd\n", "proc/7/comm": "kubelet\n"}),
		"kubernetes warn, other-runtimes ok, pod-annotations skip, container-annotations skip, cdi skip, agent skip, offered-once skip")
	check(files(t, map[string]string{"var/lib/kubelet/pod-resources/kubelet.sock": ""}),
		"kubernetes warn, other-runtimes ok, pod-annotations skip, container-annotations skip, cdi skip, agent skip, offered-once skip")

	const section = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.cgpu]\npod_annotations = " +
		"[\"cgpu.io/*\"]\ncontainer_annotations = [\"alloc.cgpu.io/*\"]\n" +
		"[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.cgpu.options]\nBinaryName = \"/usr/bin/cgpu-runtime\"\n"
	node := map[string]string{"etc/containerd/config.toml": section,
		"usr/bin/containerd": "#!/bin/sh\necho containerd github.com/containerd/containerd v1.7.30 x\n"}
	h := files(t, node)
	check(h, "kubernetes ok, other-runtimes ok, pod-annotations ok, container-annotations ok, cdi warn, agent skip, offered-once skip")
	nvidia := "\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.nvidia.options]\nBinaryName = " +
		"\"/usr/bin/nvidia-container-runtime\"\n"
	h = files(t, map[string]string{"etc/containerd/config.toml": section + nvidia})
	check(h, "kubernetes ok, other-runtimes warn, pod-annotations ok, container-annotations ok, cdi warn, agent skip, offered-once skip")
	h = files(t, map[string]string{"proc/7/comm": "kubelet\n", "usr/bin/crio": "#!/bin/sh\n",
		"etc/crio/crio.conf.d/9-nvidia.conf": "[crio.runtime.runtimes.nvidia]\nruntime_path = \"/usr/bin/nvidia-container-runtime\"\n"})
	check(h, "kubernetes warn, other-runtimes warn, pod-annotations skip, container-annotations skip, cdi skip, agent skip, offered-once skip")
	// k3s brings its own containerd, whatever the machine has beside it.
	k3s := strings.ReplaceAll(strings.ReplaceAll(section, "version = 2", "version = 3"), "io.containerd.grpc.v1.cri",
		"io.containerd.cri.v1.runtime")
	h = files(t, map[string]string{"etc/containerd/config.toml": "version = 1\n", "usr/bin/containerd": node["usr/bin/containerd"],
		strings.TrimPrefix(setup.K3sConfig, "/"): k3s, "var/lib/kubelet/pod-resources/kubelet.sock": ""})
	check(h, "kubernetes warn, other-runtimes ok, pod-annotations ok, container-annotations ok, cdi ok, agent skip, offered-once skip")
	h = files(t, node)
	h.Engines = map[string]string{"docker": "/etc/docker/daemon.json"}
	check(h, "kubernetes skip")
	h = files(t, map[string]string{"proc/7/comm": "kubelet\n"})
	h.Engines = map[string]string{"docker": "/etc/docker/daemon.json"}
	check(h, "kubernetes skip")

	// A socket that is served, and one that is left over.
	h = files(t, node)
	folder := filepath.Join(h.Root, "var/lib/kubelet/plugins/gpu.cgpu.io")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Chdir(folder) // a socket's path has room for 107 characters
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: "dra-uid.sock"})
	if err != nil {
		t.Fatal(err)
	}
	check(h, "kubernetes ok, other-runtimes ok, pod-annotations ok, container-annotations ok, cdi fail, agent ok, offered-once skip")
	l.SetUnlinkOnClose(false)
	_ = l.Close()
	h.kube = nil
	check(h, "kubernetes ok, other-runtimes ok, pod-annotations ok, container-annotations ok, cdi warn, agent skip, offered-once skip")
}
