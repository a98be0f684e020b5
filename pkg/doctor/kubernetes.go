// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"errors"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	setup "github.com/opencgpu/cgpu/pkg/engine"
)

var kubernetesChecks = []Check{
	{Name: "kubernetes",
		Means: "On a node of Kubernetes, pods get what was allocated to them and nothing by naming a GPU themselves (`pods` in cgpu.toml). " +
			"Skipped elsewhere, and the six checks below are left out.",
		Remedy: "cgpu install containerd --kubernetes, or k3s, rke2, crio", Run: checkPods},
	{Name: "other-runtimes",
		Means: "No handler of containerd or CRI-O is NVIDIA's runtime by the name of its program (nvidia-container-runtime…; a script or a " +
			"copy of another name is not found out): it gives a pod of its RuntimeClass the whole GPUs that the pod's variables name, past the " +
			"scheduler and the ledger, while `pods` in cgpu.toml promises that only what was allocated counts.",
		Remedy: "take the handler out of the engine's configuration and restart the engine; the policy in " +
			"deploy/components/deny-runtimeclasses keeps pods from it meanwhile", Run: checkOtherRuntimes},
	{Name: "pod-annotations",
		Means: "No handler with cgpu-runtime lets annotations through by which the author of a pod could give himself any share; those by " +
			"which he lowers it get through.",
		Remedy: "cgpu install containerd --kubernetes --restart", Run: checkPodAnnotations},
	{Name: "container-annotations", Means: "What a device plugin allocates reaches cgpu-runtime. Claims need no annotations.",
		Remedy: "cgpu install containerd --kubernetes --restart", Run: checkContainerAnnotations},
	{Name: "cdi",
		Means: "containerd hands on what claims allocate: CDI is on and reads the folder of cgpu-agent. containerd 1.7 has it off by default, " +
			"1.6 ignores it without a word.",
		Remedy: "cgpu install containerd --kubernetes --restart; where cdi_spec_dirs is set, add /var/run/cdi to it", Run: checkCDI},
	{Name: "agent", Means: "cgpu-agent's sockets are in the kubelet's folders: what it offers on this node.",
		Remedy: "kubectl -n cgpu-system get pods -o wide; its log, and the node's condition CGPUReady", Run: checkAgent},
	{Name: "offered-once", Means: "No GPU that cgpu-agent offers is offered to pods by somebody else as well, such as NVIDIA's device plugin.",
		Remedy: "give each its own nodes or its own GPUs: docs/beside.md", Run: checkOfferedOnce},
}

// kubernetes is what is known of this machine as a node.
type kubernetes struct {
	root    bool   // what only root may see was looked at
	kubelet bool   // one runs here
	folder  string // the kubelet's
	socket  string // its PodResources API
	pods    string // as in cgpu.toml
	// containerd's configuration: looked at, what it says, or why it cannot be read.
	looked bool
	found  setup.Pods
	err    error
	crio   bool     // CRI-O has cgpu-runtime
	nvidia []string // handlers of either whose program is NVIDIA's runtime
	agent  offers
}

// offers is what of cgpu-agent is in the kubelet's folders.
type offers struct {
	claims, memory bool
	gpushare       bool // gpushare's own device plugin
}

// node says whether cgpu has to do with Kubernetes here. containerd's lists without a kubelet: it is installed for one to come.
func (k kubernetes) node() bool {
	return k.kubelet || k.pods == device.PodsAllocated || k.pods == device.PodsGPUShare || k.handed()
}

// handed: a handler of containerd's hands on what is allocated.
func (k kubernetes) handed() bool {
	return slices.ContainsFunc(k.found.Handlers, func(h setup.Handler) bool { return h.Allocations })
}

// allocates: pods get GPUs of this node by what is allocated to them.
func (k kubernetes) allocates() bool {
	return k.pods == device.PodsAllocated || k.pods == device.PodsGPUShare || k.agent.claims || k.agent.memory ||
		k.agent.gpushare || k.handed()
}

// kubernetes looks once.
func (h *Host) kubernetes() kubernetes {
	if h.kube != nil {
		return *h.kube
	}
	s := h.settings()
	socket := cmp.Or(s.PodResources, config.Default().Settings.PodResources)
	// pod-resources/kubelet.sock is below the kubelet's folder, wherever that is.
	folder := filepath.Dir(filepath.Dir(socket))
	k := kubernetes{root: h.UID == 0, folder: folder, socket: socket, pods: cmp.Or(s.Pods, device.PodsAny), agent: h.offers(folder)}
	_, containerd := h.Engines["containerd"]
	_, crio := h.Engines["crio"]
	if len(h.Engines) == 0 || containerd || crio { // else a kubelet that runs is none of the engines' that were asked for
		// In some distributions the kubelet is a part of another program; its socket is there all the same.
		k.kubelet = h.runs("kubelet") || h.there(socket)
	}
	for _, e := range engines {
		file, named := h.Engines[e.name]
		if len(h.Engines) > 0 && !named {
			continue
		}
		switch e.name {
		case "containerd":
			if file == "" {
				file = h.containerdFile()
			}
			program := h.program(e.program)
			if program == "" && !h.there(file) {
				continue
			}
			text := ""
			if program != "" && file != setup.K3sConfig && file != setup.RKE2Config { // these have one of their own
				text, _ = output(program, "--version")
			}
			k.looked = true
			k.found, k.err = setup.ContainerdPods(os.DirFS(h.Root), file, setup.ContainerdVersion(text))
			k.nvidia = append(k.nvidia, k.found.NVIDIA...)
		case "crio":
			r, _, err := h.readEngine(e)
			k.crio = err == nil && len(r.cgpu()) > 0
			for _, name := range slices.Sorted(maps.Keys(r.paths)) {
				if setup.IsNVIDIA(r.paths[name]) {
					k.nvidia = append(k.nvidia, name)
				}
			}
		}
	}
	h.kube = &k
	return k
}

// containerdFile is the configuration of the containerd that a kubelet here uses, as far as one can see: k3s and RKE2 bring theirs along.
func (h *Host) containerdFile() string {
	for _, file := range []string{setup.K3sConfig, setup.RKE2Config} {
		if h.there(file) {
			return file
		}
	}
	return setup.ContainerdConfig
}

// runs looks for a process by its name.
func (h *Host) runs(name string) bool {
	files, _ := filepath.Glob(h.at("/proc/[0-9]*/comm"))
	return slices.ContainsFunc(files, func(file string) bool {
		text, err := readSome(file)
		return err == nil && strings.TrimSpace(string(text)) == name
	})
}

// offers looks for the sockets of cgpu-agent, and of gpushare's device plugin, in the kubelet's folder.
func (h *Host) offers(folder string) (o offers) {
	for pattern, there := range map[string]*bool{
		"plugins/gpu.cgpu.io/dra*.sock":      &o.claims,
		"device-plugins/cgpu-gpu-mem.sock":   &o.memory,
		"device-plugins/aliyungpushare.sock": &o.gpushare,
	} {
		*there = h.answers(filepath.Join(folder, pattern))
	}
	return o
}

// answers says that somebody serves a socket of that pattern. One that nobody serves any more, as after kill -9, is not there.
func (h *Host) answers(pattern string) bool {
	files, _ := filepath.Glob(h.at(pattern)) // the pattern is ours
	return slices.ContainsFunc(files, func(file string) bool {
		c, err := net.DialTimeout("unix", file, time.Second)
		if err == nil {
			_ = c.Close()
		}
		return !errors.Is(err, syscall.ECONNREFUSED)
	})
}

func checkPods(h *Host) Result { return h.kubernetes().judgePods() }

func (k kubernetes) judgePods() Result {
	switch {
	case !k.node():
		return skip("no kubelet runs here, and nothing is prepared for one")
	case k.kubelet && k.pods == device.PodsAny:
		return warn(`pods = "any" beside a kubelet: the author of a pod can take a GPU past the scheduler, by naming it`)
	case !k.kubelet:
		return ok(`no kubelet runs here; pods = %q`, k.pods)
	}
	return ok(`a kubelet runs here; pods = %q`, k.pods)
}

// containerd is what all checks of its configuration begin with; judge is not asked where there is nothing to judge.
func (k kubernetes) containerd(judge func() Result) Result {
	switch {
	case !k.node():
		return Result{}
	case k.crio && len(k.found.Handlers) == 0:
		return skip("CRI-O is used; below CRI-O claims work, a device plugin's allocations do not")
	case !k.looked:
		return skip("containerd is not installed")
	case k.err != nil:
		return warn("%v", k.err).but("repair or convert the configuration of containerd")
	case k.found.Disabled:
		return skip("the CRI plugin of containerd is disabled, so no kubelet uses it")
	}
	return judge()
}

// handlers is the same for what is looked up in handlers.
func (k kubernetes) handlers(judge func() Result) Result {
	return k.containerd(func() Result {
		if len(k.found.Handlers) == 0 {
			return warn("containerd has no handler with cgpu-runtime: no RuntimeClass leads to it")
		}
		return judge()
	})
}

// named are the handlers of which something holds.
func (k kubernetes) named(what func(setup.Handler) bool) string {
	var names []string
	for _, h := range k.found.Handlers {
		if what(h) {
			names = append(names, h.Name)
		}
	}
	return strings.Join(names, ", ")
}

func checkOtherRuntimes(h *Host) Result { return h.kubernetes().judgeOtherRuntimes() }

func (k kubernetes) judgeOtherRuntimes() Result {
	names := strings.Join(k.nvidia, ", ")
	switch {
	case !k.node():
		return Result{}
	case names == "" && k.err != nil && k.pods != device.PodsAny:
		return warn("containerd's configuration cannot be read (%v): it is not known whether a handler is NVIDIA's runtime, although pods = %q",
			k.err, k.pods).but("repair containerd's configuration, and look again")
	case names == "" && k.err != nil:
		return skip("containerd's configuration cannot be read")
	case names == "":
		return ok("no handler is NVIDIA's runtime by its program's name")
	case k.pods == device.PodsAny:
		return warn("handler %s is NVIDIA's runtime: a pod with its RuntimeClass takes whole GPUs past the scheduler", names)
	}
	return fail(`handler %s is NVIDIA's runtime: a pod with its RuntimeClass takes whole GPUs past the scheduler and the ledger, although pods = %q`, names, k.pods)
}

func checkPodAnnotations(h *Host) Result { return h.kubernetes().judgePodAnnotations() }

func (k kubernetes) judgePodAnnotations() Result {
	return k.handlers(func() Result {
		for _, h := range k.found.Handlers {
			if h.Forges != "" {
				return fail("handler %s: pod_annotations has %q, by which the author of a pod writes alloc.cgpu.io/ annotations and gives himself "+
					"any share", h.Name, h.Forges).
					but(`take it out and restart containerd; "cgpu.io/*" is enough`)
			}
		}
		if deaf := k.named(func(h setup.Handler) bool { return !h.Annotations }); deaf != "" {
			return warn("handler %s: pod_annotations lacks cgpu.io/*: pods cannot lower what they have", deaf)
		}
		return ok("handler %s: cgpu.io/* gets through, alloc.cgpu.io/* does not", k.named(func(setup.Handler) bool { return true }))
	})
}

func checkContainerAnnotations(h *Host) Result { return h.kubernetes().judgeContainerAnnotations() }

func (k kubernetes) judgeContainerAnnotations() Result {
	return k.handlers(func() Result {
		deaf := k.named(func(h setup.Handler) bool { return !h.Allocations })
		switch {
		case deaf != "" && k.agent.memory:
			return fail("handler %s: container_annotations lacks alloc.cgpu.io/*: what cgpu-agent's device plugin allocates does not reach "+
				"cgpu-runtime", deaf)
		case deaf != "":
			return warn("handler %s: container_annotations lacks alloc.cgpu.io/*: claims work, aliyun.com/gpu-mem of cgpu-agent does not", deaf)
		}
		return ok("handler %s: alloc.cgpu.io/* gets through", k.named(func(setup.Handler) bool { return true }))
	})
}

func checkCDI(h *Host) Result { return h.kubernetes().judgeCDI() }

func (k kubernetes) judgeCDI() Result {
	return k.containerd(func() Result {
		switch {
		case k.found.CDI:
			return ok("on")
		case k.found.OldCDI:
			return warn("this containerd is older than 1.7 and ignores CDI: no claims on this node, a device plugin works").
				but("containerd 1.7 or later, for claims")
		case k.agent.claims:
			return fail("it is off, or does not read /var/run/cdi: pods with a claim start without their GPU")
		}
		return warn("it is off, or does not read /var/run/cdi: claims would not reach containers")
	})
}

func checkAgent(h *Host) Result { return h.kubernetes().judgeAgent() }

func (k kubernetes) judgeAgent() Result {
	var list []string
	for _, o := range []struct {
		there bool
		name  string
	}{
		{k.agent.claims, "claims (gpu.cgpu.io)"},
		{k.agent.memory, "aliyun.com/gpu-mem"},
		{k.agent.gpushare, "gpushare's own device plugin"},
	} {
		if o.there {
			list = append(list, o.name)
		}
	}
	switch {
	case !k.node():
		return Result{}
	case len(list) > 0 && k.agent.gpushare && k.pods == device.PodsAllocated:
		return warn(`gpushare's own device plugin is here, and pods = "allocated" refuses its pods`).
			but("cgpu install containerd --kubernetes --pods gpushare, or cgpu-agent in its place")
	case len(list) > 0:
		return ok("%s", strings.Join(list, ", "))
	case !k.root:
		return skip("needs root")
	}
	return skip("no sockets of cgpu-agent: it offers nothing here, or is not there yet")
}
