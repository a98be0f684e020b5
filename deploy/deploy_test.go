// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	admission "k8s.io/api/admissionregistration/v1"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	node "k8s.io/api/node/v1"
	rbac "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/opencgpu/cgpu/pkg/decision"
)

var update = flag.Bool("update", false, "copy the chart's files from base")

// overlays by the settings of the chart that mean the same.
var overlays = map[string][]string{
	"overlays/dra":           nil,
	"overlays/device-plugin": {"frontends={deviceplugin}"},
	"overlays/both":          {"frontends={dra,deviceplugin}", "devicePluginGPUs=0", `draGPUs=1\,2\,3\,4\,5\,6\,7`},
	"overlays/gpushare": {"frontends={deviceplugin}", "nodeSelector.node-restriction\\.kubernetes\\.io/cgpu=null",
		"string:nodeSelector.gpushare=true"},
}

// TestOverlays: what holds for every way to install.
func TestOverlays(t *testing.T) {
	for dir := range overlays {
		t.Run(filepath.Base(dir), func(t *testing.T) { invariants(t, build(t, dir)) })
	}
	if a, b := build(t, "."), build(t, "overlays/dra"); len(a) != len(b) {
		t.Errorf("deploy/ has %d objects, overlays/dra %d", len(a), len(b))
	}
}

// paths of the host that the agent may have; docs/internals/agent.md says why.
var paths = []string{"/run/cgpu", "/var/run/cdi", "/var/lib/kubelet/plugins/gpu.cgpu.io", "/var/lib/kubelet/plugins_registry",
	"/var/lib/kubelet/device-plugins", "/var/lib/kubelet/pod-resources",
	"/var/run/nri"}

// namespacedKinds are those of our objects that a namespace has.
var namespacedKinds = []string{"ServiceAccount", "DaemonSet", "NetworkPolicy", "ConfigMap", "Service", "PodMonitor",
	"ServiceMonitor", "PrometheusRule"}

func invariants(t *testing.T, list []object) {
	t.Helper()
	sets := of[*apps.DaemonSet](list)
	if len(sets) != 1 {
		t.Fatalf("%d DaemonSets, want 1", len(sets))
	}
	pod := sets[0].Spec.Template
	checkPod(t, pod.Spec)
	checkUpdate(t, sets[0])
	if s := sets[0].Spec.Selector.MatchLabels; !labels.SelectorFromSet(s).Matches(labels.Set(pod.Labels)) {
		t.Errorf("the DaemonSet selects %v, its pods have %v", s, pod.Labels)
	}
	for _, arg := range pod.Spec.Containers[0].Args {
		name, _, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
		if !slices.Contains(agentFlags(t), name) {
			t.Errorf("argument %s: cgpu-agent has no flag --%s", arg, name)
		}
	}
	for _, class := range of[*node.RuntimeClass](list) {
		if class.Name != "cgpu" || class.Handler != "cgpu" || !maps.Equal(class.Scheduling.NodeSelector, pod.Spec.NodeSelector) {
			t.Errorf("RuntimeClass %s: handler %s, on nodes %v; the agent is on %v", class.Name, class.Handler, class.Scheduling.NodeSelector,
				pod.Spec.NodeSelector)
		}
	}
	for _, p := range of[*networking.NetworkPolicy](list) {
		if !labels.SelectorFromSet(p.Spec.PodSelector.MatchLabels).Matches(labels.Set(pod.Labels)) {
			t.Errorf("NetworkPolicy %s does not select the agent", p.Name)
		}
		if len(p.Spec.Ingress) != 1 || len(p.Spec.Ingress[0].Ports) != 1 ||
			p.Spec.Ingress[0].Ports[0].Port.IntVal != pod.Spec.Containers[0].Ports[0].ContainerPort {
			t.Errorf("NetworkPolicy %s: ingress is not the health port alone", p.Name)
		}
		// The port asks nobody who he is: an empty list of peers would be everybody.
		if from := p.Spec.Ingress[0].From; len(from) != 2 || from[0].NamespaceSelector.MatchLabels["cgpu.io/metrics"] != "true" ||
			from[1].PodSelector.MatchLabels["k8s-app"] != "konnectivity-agent" ||
			from[1].NamespaceSelector.MatchLabels["kubernetes.io/metadata.name"] != "kube-system" {
			t.Errorf("NetworkPolicy %s: admits %+v", p.Name, from)
		}
	}
	checkRBAC(t, list, sets[0].Namespace)
	checkPolicies(t, list, "system:serviceaccount:"+sets[0].Namespace+":"+pod.Spec.ServiceAccountName)
	for _, o := range list {
		namespaced := slices.Contains(namespacedKinds, strings.Fields(o.name)[0])
		if strings.Contains(o.name, " /") == namespaced {
			t.Errorf("%s: is of a namespace: want %v", o.name, namespaced)
		}
	}
	dra := strings.Contains(strings.Join(pod.Spec.Containers[0].Args, " "), "dra")
	if n := len(of[*resourceapi.DeviceClass](list)); (n == 2) != dra {
		t.Errorf("%d DeviceClasses, front end dra: %v", n, dra)
	}
	if !dra {
		for _, o := range list {
			if strings.Contains(fmt.Sprint(o.tree["apiVersion"]), "resource.k8s.io") {
				t.Errorf("%s: without dra nothing of a cluster before 1.34 is known", o.name)
			}
		}
	}
}

// checkUpdate: two agents of a node stand side by side only where their sockets do.
func checkUpdate(t *testing.T, set *apps.DaemonSet) {
	t.Helper()
	c := set.Spec.Template.Spec.Containers[0]
	plugin := strings.Contains(strings.Join(c.Args, " "), "deviceplugin")
	update := set.Spec.UpdateStrategy.RollingUpdate
	if surge := update.MaxSurge.IntValue(); (surge > 0) == plugin || (update.MaxUnavailable.IntValue() > 0) != plugin ||
		set.Spec.MinReadySeconds < 2 {
		t.Errorf("maxSurge %d, maxUnavailable %v, minReadySeconds %d, device plugin: %v", surge, update.MaxUnavailable,
			set.Spec.MinReadySeconds, plugin)
	}
	uid := slices.ContainsFunc(c.Env, func(e core.EnvVar) bool {
		return e.Name == "POD_UID" && e.ValueFrom.FieldRef.FieldPath == "metadata.uid"
	})
	if hostPort := slices.ContainsFunc(c.Ports, func(p core.ContainerPort) bool { return p.HostPort != 0 }); !uid || hostPort {
		t.Errorf("two agents at a time need POD_UID (%v) and no port of the host (%v)", uid, hostPort)
	}
}

func checkPod(t *testing.T, s core.PodSpec) {
	t.Helper()
	if s.HostNetwork || s.HostIPC || !s.HostPID || s.ShareProcessNamespace != nil {
		t.Errorf("hostNetwork %v, hostIPC %v, hostPID %v: want hostPID alone", s.HostNetwork, s.HostIPC, s.HostPID)
	}
	if s.PriorityClassName != "system-node-critical" || len(s.NodeSelector) == 0 {
		t.Errorf("priority class %q, node selector %v", s.PriorityClassName, s.NodeSelector)
	}
	if s.SecurityContext.SeccompProfile.Type != core.SeccompProfileTypeRuntimeDefault {
		t.Errorf("seccomp %v", s.SecurityContext.SeccompProfile.Type)
	}
	if len(s.InitContainers) > 0 || len(s.Containers) != 1 {
		t.Fatalf("%d containers, %d init containers: want the agent alone", len(s.Containers), len(s.InitContainers))
	}
	c := s.Containers[0]
	if name, _, _ := strings.Cut(c.Image, ":"); name != "cgpu-agent" {
		t.Errorf("image %q: want cgpu-agent, without a host", c.Image)
	}
	sc := c.SecurityContext
	if *sc.Privileged || *sc.AllowPrivilegeEscalation || !*sc.ReadOnlyRootFilesystem || len(sc.Capabilities.Add) > 0 ||
		!slices.Equal(sc.Capabilities.Drop, []core.Capability{"ALL"}) || sc.SeccompProfile != nil {
		t.Errorf("security context %+v", sc)
	}
	// The port is open to others, who could fill it: the probes ask past it.
	for what, p := range map[string]struct {
		*core.Probe
		want []string
	}{"liveness": {c.LivenessProbe, []string{"/cgpu-agent", "healthy"}},
		"readiness": {c.ReadinessProbe, []string{"/cgpu-agent", "healthy", "--ready"}}} {
		if p.Probe == nil || p.Exec == nil || !slices.Equal(p.Exec.Command, p.want) || p.HTTPGet != nil || p.TimeoutSeconds < 5 {
			t.Errorf("%s probe: %+v, want %q", what, p.Probe, p.want)
		}
	}
	if c.Resources.Limits.Memory().IsZero() || c.Resources.Requests.Cpu().IsZero() {
		t.Error("want requests, and a limit of memory")
	}
	mounted := map[string]string{}
	for _, m := range c.VolumeMounts {
		mounted[m.Name] = m.MountPath
	}
	for _, v := range s.Volumes {
		switch {
		case v.HostPath == nil || !slices.Contains(paths, v.HostPath.Path):
			t.Errorf("volume %s: want a path of %q", v.Name, paths)
		case mounted[v.Name] != v.HostPath.Path:
			t.Errorf("volume %s: %s is mounted at %q: want the same path", v.Name, v.HostPath.Path, mounted[v.Name])
		}
		delete(mounted, v.Name)
	}
	if len(mounted) > 0 {
		t.Errorf("mounts without volumes: %v", mounted)
	}
}

// checkRBAC: no wildcards, nothing that docs/internals/agent.md does not state, every role is bound to the agent alone.
func checkRBAC(t *testing.T, list []object, namespace string) {
	t.Helper()
	stated := statedRights(t)
	bound := map[string]bool{}
	for _, b := range of[*rbac.ClusterRoleBinding](list) {
		bound[b.RoleRef.Name] = true
		if len(b.Subjects) != 1 || b.Subjects[0].Kind != "ServiceAccount" || b.Subjects[0].Name != "cgpu-agent" ||
			b.Subjects[0].Namespace != namespace {
			t.Errorf("%s is bound to %v", b.Name, b.Subjects)
		}
	}
	for _, r := range of[*rbac.ClusterRole](list) {
		if !bound[r.Name] {
			t.Errorf("ClusterRole %s is bound to nobody", r.Name)
		}
		delete(bound, r.Name)
		for _, rule := range r.Rules {
			for _, resource := range rule.Resources {
				for _, verb := range rule.Verbs {
					if !stated[resource+" "+verb] {
						t.Errorf("ClusterRole %s: %s of %s: docs/internals/agent.md does not state it", r.Name, verb, resource)
					}
				}
			}
			if len(rule.NonResourceURLs) > 0 || slices.Contains(rule.APIGroups, "*") {
				t.Errorf("ClusterRole %s: %v", r.Name, rule)
			}
		}
	}
	if len(bound) > 0 {
		t.Errorf("bound roles that are not there: %v", bound)
	}
}

// statedRights are "resource verb" from the table in docs/internals/agent.md.
func statedRights(t *testing.T) map[string]bool {
	t.Helper()
	text, err := os.ReadFile("../docs/internals/agent.md")
	if err != nil {
		t.Fatal(err)
	}
	stated := map[string]bool{}
	for _, row := range regexp.MustCompile(`(?m)^\| ([a-z/]+)(?: \([a-z0-9.]+\))? \| ([a-z, ]+) \|`).FindAllStringSubmatch(string(text), -1) {
		for verb := range strings.SplitSeq(row[2], ",") {
			stated[row[1]+" "+strings.TrimSpace(verb)] = true
		}
	}
	if len(stated) < 8 {
		t.Fatalf("docs/internals/agent.md states %v: has its table another form?", stated)
	}
	return stated
}

// agentFlags are those of cgpu-agent, from its source: the program links half of Kubernetes.
func agentFlags(t *testing.T) (names []string) {
	t.Helper()
	text, err := os.ReadFile("../cmd/cgpu-agent/flags.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`\{name: "([a-z-]+)"`).FindAllStringSubmatch(string(text), -1) {
		names = append(names, m[1])
	}
	return names
}

// checkPolicies: each has a binding that does something, and the one of the agent names the agent.
func checkPolicies(t *testing.T, list []object, agent string) {
	t.Helper()
	bound := map[string]bool{}
	for _, b := range of[*admission.ValidatingAdmissionPolicyBinding](list) {
		bound[b.Spec.PolicyName] = len(b.Spec.ValidationActions) > 0
	}
	names := map[string]bool{}
	for _, p := range of[*admission.ValidatingAdmissionPolicy](list) {
		names[p.Name] = true
		if !bound[p.Name] {
			t.Errorf("policy %s is not bound", p.Name)
		}
		delete(bound, p.Name)
		if strings.HasPrefix(p.Name, "agent") && !strings.Contains(p.Spec.MatchConditions[0].Expression, `"`+agent+`"`) {
			t.Errorf("policy %s: %s is not %s", p.Name, p.Spec.MatchConditions[0].Expression, agent)
		}
	}
	if len(bound) > 0 || !names["agent.cgpu.io"] || !names["agent-events.cgpu.io"] || !names["pods.cgpu.io"] {
		t.Errorf("policies %v; bound ones that are not there: %v", names, bound)
	}
}

// TestChart: kustomize and helm make the same objects, up to labels and the namespace, which helm makes itself.
func TestChart(t *testing.T) {
	for dir, settings := range overlays {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			chart := render(t, settings...)
			invariants(t, chart)
			want, got := comparable(build(t, dir)), comparable(chart)
			delete(want, "Namespace /cgpu-system")
			if diff := gocmp.Diff(want, got); diff != "" {
				t.Errorf("helm differs (-kustomize +helm):\n%s", diff)
			}
		})
	}
}

// TestMonitoring: components and chart make the same monitors, rules and dashboards, and select the port that the agents have.
func TestMonitoring(t *testing.T) {
	settings := map[string]string{"pod-monitor": "monitoring.podMonitor=true", "service-monitor": "monitoring.serviceMonitor=true"}
	for monitor, setting := range settings {
		t.Run(monitor, func(t *testing.T) {
			list := with(t, monitor, "observability")
			invariants(t, list)
			pod := of[*apps.DaemonSet](list)[0].Spec.Template
			for _, s := range of[*core.Service](list) {
				if !labels.SelectorFromSet(s.Spec.Selector).Matches(labels.Set(pod.Labels)) ||
					s.Spec.Ports[0].TargetPort.StrVal != pod.Spec.Containers[0].Ports[0].Name {
					t.Errorf("%+v does not select the agent's port", s.Spec)
				}
			}
			maps := of[*core.ConfigMap](list)
			if len(maps) != 1 || len(maps[0].Data) != 4 || maps[0].Labels["grafana_dashboard"] != "1" {
				t.Errorf("dashboards: %+v", maps)
			}
			added := len(list) - len(build(t, "overlays/dra"))
			chart := render(t, setting, "monitoring.rules=true", "monitoring.dashboards=true", "monitoring.labels.release=x")
			want, got := comparable(list), comparable(chart)
			delete(want, "Namespace /cgpu-system")
			if diff := gocmp.Diff(want, got); diff != "" {
				t.Errorf("helm differs (-kustomize +helm):\n%s", diff)
			}
			if wanted := map[string]int{"pod-monitor": 3, "service-monitor": 4}[monitor]; added != wanted {
				t.Errorf("%d objects more, want %d", added, wanted)
			}
		})
	}
	for _, o := range render(t, "monitoring.podMonitor=true", "monitoring.rules=true", "monitoring.labels.release=x") {
		own, _ := o.tree["metadata"].(map[string]any)["labels"].(map[string]any)
		if o.typed == nil && own["release"] != "x" {
			t.Errorf("%s: labels %v: Prometheus does not select it", o.name, own)
		}
	}
}

// TestManifestsAsTheyAre: components and chart make the same of what runs manifests for other clusters, and with other names both places
// have them.
func TestManifestsAsTheyAre(t *testing.T) {
	list := with(t, "add-runtimeclass", "extended-resource")
	invariants(t, list)
	want, got := comparable(list), comparable(render(t, "runtimeClass.addToPods=true", "extendedResource=cgpu.io/gpu"))
	delete(want, "Namespace /cgpu-system")
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("helm differs (-kustomize +helm):\n%s", diff)
	}
	text := fmt.Sprint(comparable(render(t, "runtimeClass.addToPods=true", "runtimeClass.name=gold", "extendedResource=nvidia.com/gpu")))
	for _, want := range []string{`runtimeClassName: "gold"`, `"aliyun.com/gpu-mem", "nvidia.com/gpu", "deviceclass`,
		"extendedResourceName:nvidia.com/gpu"} {
		if !strings.Contains(text, want) {
			t.Errorf("the chart with other names lacks %s", want)
		}
	}
	if text := fmt.Sprint(comparable(render(t))); strings.Contains(text, "extendedResourceName") ||
		strings.Contains(text, "MutatingAdmissionPolicy") {
		t.Error("the chart has one of them without being asked for it")
	}
}

// comparable are objects by name, without labels, and with lists of named things in the order of their names.
func comparable(list []object) map[string]any {
	all := map[string]any{}
	for _, o := range list {
		if meta, ok := o.tree["metadata"].(map[string]any); ok {
			delete(meta, "labels")
		}
		all[o.name] = sorted(o.tree)
	}
	return all
}

func sorted(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k := range v {
			v[k] = sorted(v[k])
		}
	case []any:
		for i := range v {
			v[i] = sorted(v[i])
		}
		key := func(e any) string { m, _ := e.(map[string]any); s, _ := m["name"].(string); return s }
		if len(v) > 0 && key(v[0]) != "" {
			slices.SortFunc(v, func(a, b any) int { return strings.Compare(key(a), key(b)) })
		}
	}
	return v
}

// TestChartValues: each value reaches what it is for, and what contradicts itself is refused with the value's name.
func TestChartValues(t *testing.T) {
	if out, err := helm.run(t, "lint", "--strict", "helm/cgpu"); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	list := render(t, "frontends={deviceplugin}", "memoryUnit=MiB", "image.repository=registry.example/cgpu-agent", "image.tag=v1",
		"runtimeClass.name=gpu",
		"admission.runtimeClass=Deny", "networkPolicy.apiServerPorts={8443}", "networkPolicy.apiServerCIDRs={10.0.0.10/32}", "smi=off",
		"hook=/usr/bin/cgpu-hook", "nodeSelector.gpu=yes", "resources.limits.memory=1Gi")
	c := of[*apps.DaemonSet](list)[0].Spec.Template.Spec.Containers[0]
	if want := []string{"--frontends=deviceplugin", "--memory-unit=MiB", "--hook=/usr/bin/cgpu-hook", "--smi=off"}; !slices.Equal(c.Args,
		want) || c.Image != "registry.example/cgpu-agent:v1" {
		t.Errorf("image %q, arguments %q, want %q", c.Image, c.Args, want)
	}
	if class := of[*node.RuntimeClass](list)[0]; class.Name != "gpu" || class.Scheduling.NodeSelector["gpu"] != "yes" {
		t.Errorf("RuntimeClass %+v", class)
	}
	if p := of[*networking.NetworkPolicy](list)[0]; len(p.Spec.Egress[0].Ports) != 1 || p.Spec.Egress[0].Ports[0].Port.IntVal != 8443 {
		t.Errorf("egress %+v", p.Spec.Egress)
	} else if from := p.Spec.Ingress[0].From; len(from) != 3 || from[2].IPBlock.CIDR != "10.0.0.10/32" {
		t.Errorf("ingress %+v", from)
	}
	for _, b := range of[*admission.ValidatingAdmissionPolicyBinding](list) {
		if b.Spec.ValidationActions[0] != admission.Deny {
			t.Errorf("%s: %v", b.Name, b.Spec.ValidationActions)
		}
	}
	list = render(t, "admission.enabled=false", "networkPolicy.enabled=false", "runtimeClass.create=false")
	if n := len(of[*admission.ValidatingAdmissionPolicy](list)) + len(of[*networking.NetworkPolicy](list)) +
		len(of[*node.RuntimeClass](list)); n != 0 {
		t.Errorf("%d objects that are switched off", n)
	}
	list = render(t, "admission.privileges=false")
	if hasPolicy(list, privileges) || !hasPolicy(list, "agent.cgpu.io") {
		t.Error("admission.privileges=false: want the other policies alone")
	}
	list = render(t, "admission.limits.min-memory=7Gi", "admission.limits.max-cores=30", "admission.denyRuntimeClasses={nvidia,gold}")
	for name, want := range map[string]string{"vgpu-limits.cgpu.io": `{"max-cores":"30","min-memory":"7Gi"}`,
		"runtimeclasses.cgpu.io": `["nvidia","gold"]`} {
		if got := firstVariable(list, name); got != want || !hasPolicy(list, name) {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	// Without a value the chart says what base says.
	if list = render(t); firstVariable(list, "vgpu-limits.cgpu.io") != `{"min-memory":"512Mi"}` || hasPolicy(list, "runtimeclasses.cgpu.io") {
		t.Errorf("limits %s, runtime classes denied: %v", firstVariable(list, "vgpu-limits.cgpu.io"), hasPolicy(list, "runtimeclasses.cgpu.io"))
	}
	for set, want := range map[string]string{
		"admission.limits.max-mem=8Gi":                              "limits",
		"admission.limits.max-memory=lots":                          "limits",
		"frontends={dra,deviceplugin}":                              "set draGPUs and devicePluginGPUs",
		"draGPUs=0":                                                 "there is one front end",
		"frontends={dra,deviceplugin},draGPUs=0,devicePluginGPUs=0": "0 is in both",
		"frontends={mps}":                                           "frontends",
		"frontends=null":                                            "frontends",
		"memoryUnit=GB":                                             "memoryUnit",
		"image.registry=x":                                          "registry",
		"frontends={deviceplugin},extendedResource=cgpu.io/gpu":     "add dra to frontends",
		"extendedResource=gpu":                                      "extendedResource",
		"smi=yes":                                                   "smi",
		"monitoring.interval=15":                                    "interval",
		"monitoring.podMonitor=true,monitoring.serviceMonitor=true": "scraped twice",
		"networkPolicy.apiServerCIDRs={10.0.0.10}":                  "apiServerCIDRs",
		"admission.runtimeClass=Audit":                              "runtimeClass",
		"frontend={dra}":                                            "frontend",
	} {
		if out, err := helm.run(t, "template", "cgpu", "helm/cgpu", "--kube-version", kubeVersion, "--set", set); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("--set %s: %v, want %q\n%s", set, err, want, out)
		}
	}
}

// firstVariable is what the first variable of a policy says.
func firstVariable(list []object, policy string) string {
	for _, p := range of[*admission.ValidatingAdmissionPolicy](list) {
		if p.Name == policy {
			return p.Spec.Variables[0].Expression
		}
	}
	return ""
}

// privileges is the policy of high priority, spill and weight.
const privileges = "vgpu-privileges.cgpu.io"

// hasPolicy: a policy is there, and bound.
func hasPolicy(list []object, name string) bool {
	return slices.ContainsFunc(list, func(o object) bool { return o.name == "ValidatingAdmissionPolicy /"+name }) &&
		slices.ContainsFunc(list, func(o object) bool { return o.name == "ValidatingAdmissionPolicyBinding /"+name })
}

// TestNoPrivileges: the component takes out one policy with its binding, and nothing else.
func TestNoPrivileges(t *testing.T) {
	list := with(t, "no-privileges")
	invariants(t, list)
	if base := build(t, "overlays/dra"); len(list) != len(base)-2 || hasPolicy(list, privileges) || !hasPolicy(base, privileges) {
		t.Errorf("%d objects, without the component %d: want two less", len(list), len(base))
	}
}

// TestSchedulers: each scheduler has a component, which is a front end of its own with the policy that it needs.
func TestSchedulers(t *testing.T) {
	for _, s := range decision.Schedulers() {
		list := with(t, "no-dra", "scheduler-"+s.Name)
		invariants(t, list)
		args := of[*apps.DaemonSet](list)[0].Spec.Template.Spec.Containers[0].Args
		if !hasPolicy(list, s.PolicyName()) || !slices.Equal(args, []string{"--frontends=" + s.Name}) {
			t.Errorf("%s: %v", s.Name, args)
		}
	}
}

// TestChartFiles: the chart's copies of cluster-wide objects are those of base; -update copies them.
func TestChartFiles(t *testing.T) {
	for name, source := range map[string]string{
		"deviceclasses": "base/deviceclasses.yaml", "admission": "base/admission.yaml", "admission-agent": "base/admission-agent.yaml",
		"admission-pods": "base/admission-pods.yaml", "admission-privileges": "base/admission-privileges.yaml",
		"admission-limits":           "base/admission-limits.yaml",
		"admission-device-plugin":    "components/device-plugin/admission.yaml",
		"admission-gpushare":         "components/device-plugin/admission-gpushare.yaml",
		"admission-installer":        "components/installer/admission.yaml",
		"admission-runtimeclasses":   "components/deny-runtimeclasses/admission.yaml",
		"admission-add-runtimeclass": "components/add-runtimeclass/admission.yaml",
	} {
		want, err := os.ReadFile(source)
		if err != nil {
			t.Fatal(err)
		}
		file := "helm/cgpu/files/" + name + ".yaml"
		if *update {
			if err := os.WriteFile(file, want, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := os.ReadFile(file); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s is not %s (%v): go test ./deploy -run ChartFiles -update", file, source, err)
		}
	}
}

// TestImage: nothing is in the image but one program of ours.
func TestImage(t *testing.T) {
	text, err := os.ReadFile("image/Containerfile")
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	if want := []string{"FROM scratch", "COPY cgpu-agent /cgpu-agent", "USER 0:0", `ENTRYPOINT ["/cgpu-agent"]`}; !slices.Equal(lines, want) {
		t.Errorf("got %q, want %q", lines, want)
	}
}
