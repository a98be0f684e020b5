// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package deploy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	events "k8s.io/api/events/v1"
	node "k8s.io/api/node/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/opencgpu/cgpu/pkg/decision"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// cluster is a throw-away API server: test/kubernetes/k8s.sh up control-plane; CGPU_TEST_KUBECONFIG names its kubeconfig.
type cluster struct {
	*testing.T
	config *rest.Config
	admin  kubernetes.Interface
}

func newCluster(t *testing.T) cluster {
	t.Helper()
	file := os.Getenv("CGPU_TEST_KUBECONFIG")
	if file == "" {
		testenv.Lacks(t, "CGPU_TEST_KUBECONFIG is not set: no API server to ask (test/kubernetes/k8s.sh up control-plane)")
	}
	config, err := clientcmd.BuildConfigFromFlags("", file)
	if err != nil {
		t.Fatal(err)
	}
	return cluster{t, config, client(t, config)}
}

func client(t *testing.T, config *rest.Config) kubernetes.Interface {
	t.Helper()
	c, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// as is the API server for somebody else.
func (c cluster) as(user string, extra map[string][]string, groups ...string) kubernetes.Interface {
	config := rest.CopyConfig(c.config)
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Extra: extra, Groups: append([]string{"system:authenticated"}, groups...)}
	return client(c.T, config)
}

func (c cluster) apply(text string, more ...string) {
	c.Helper()
	cmd := exec.Command("kubectl", append([]string{"--kubeconfig", os.Getenv("CGPU_TEST_KUBECONFIG"), "apply", "--server-side",
		"--force-conflicts", "-f", "-"}, more...)...)
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		c.Fatalf("kubectl apply %s: %v\n%s", strings.Join(more, " "), err, out)
	} else if strings.Contains(string(out), "Warning") {
		c.Errorf("kubectl apply %s: %s", strings.Join(more, " "), out)
	}
}

// TestServer: a real API server takes every way to install and the examples, and the policies hold what they promise.
func TestServer(t *testing.T) {
	c := newCluster(t)
	c.apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: cgpu-system}\n")
	for dir := range overlays {
		c.apply(kustomize.must(t, "build", dir), "--dry-run=server")
	}
	c.apply(kustomize.must(t, "build", "overlays/both"))
	c.apply(helm.must(t, "template", "cgpu", "helm/cgpu", "--namespace", "cgpu-system", "--kube-version", kubeVersion), "--dry-run=server")
	// The labels are set before the examples, which need them; claims looks at a namespace without.
	c.apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: default, labels: {cgpu.io/allow-high-priority: \"true\", " +
		"cgpu.io/allow-spill: \"true\"}}\n")
	c.apply(kustomize.must(t, "build", "examples"), "--dry-run=server")
	t.Run("claims", c.claims)
	t.Run("limits", c.limits)
	t.Run("extended", c.extended)
	t.Run("quota", c.quota)
	t.Run("others", c.others)
	t.Run("pods", c.pods)
	t.Run("gpushare", c.gpushare)
	t.Run("schedulers", c.schedulers)
	t.Run("runtime classes", c.runtimeClasses)
	t.Run("add runtime class", c.addRuntimeClass)
	t.Run("node label", c.nodeLabel)
	t.Run("agent", c.agent)
	t.Run("installer", c.installer)
	t.Run("events", c.events)
}

func pod(name string, change func(*core.Pod)) *core.Pod {
	p := &core.Pod{ObjectMeta: meta.ObjectMeta{Name: name, Namespace: "default"},
		Spec: core.PodSpec{Containers: []core.Container{{Name: "c", Image: "c"}}}}
	change(p)
	return p
}

// eventually waits for policies, which the API server reads a moment after they are written.
func eventually(t *testing.T, what string, try func() string) {
	t.Helper()
	within(t, time.Minute, what, try)
}

func within(t *testing.T, limit time.Duration, what string, try func() string) {
	t.Helper()
	last := ""
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		if last = try(); last == "" {
			return
		}
	}
	t.Errorf("%s: %s", what, last)
}

// pods: no pod gets an annotation that only a device plugin may set, neither at first nor later.
func (c cluster) pods(t *testing.T) {
	dry := meta.CreateOptions{DryRun: []string{meta.DryRunAll}}
	forged := pod("forged", func(p *core.Pod) { p.Annotations = map[string]string{"alloc.cgpu.io/shares": "id=x,memory=1073741824"} })
	eventually(t, "a forged annotation", func() string {
		if _, err := c.admin.CoreV1().Pods("default").Create(t.Context(), forged, dry); !refused(err, "are for device plugins alone") {
			return text(err)
		}
		return ""
	})
	plain := pod("plain", func(p *core.Pod) { p.Annotations = map[string]string{"cgpu.io/weight": "2"} })
	if _, err := c.admin.CoreV1().Pods("default").Create(t.Context(), plain, meta.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.remove("plain") })
	patch := []byte(`{"metadata": {"annotations": {"alloc.cgpu.io/percent": "100"}}}`)
	if _, err := c.admin.CoreV1().Pods("default").
		Patch(t.Context(), "plain", types.MergePatchType, patch, meta.PatchOptions{}); !refused(err, "are for device plugins alone") {
		t.Errorf("forged later: %v", err)
	}
	if _, err := c.admin.CoreV1().Pods("default").
		Patch(t.Context(), "plain", types.MergePatchType, patch, meta.PatchOptions{}, "status"); !refused(err, "are for device plugins alone") {
		t.Errorf("forged with the status: %v", err)
	}
}

// gpushare: its annotations are written by who binds pods and by cgpu-agent, not by who makes them, in whatever way he may write them.
func (c cluster) gpushare(t *testing.T) {
	const want = "is for gpushare's scheduler"
	c.apply(`apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: test-status}
rules: [{apiGroups: [""], resources: [pods/status], verbs: [patch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: test-extender}
rules: [{apiGroups: [""], resources: [pods], verbs: [get, create, update, patch]}, {apiGroups: [""], resources: [pods/binding], verbs: [create]}]
---
` + bound("author-edits", "system:aggregate-to-edit", "author") + bound("author-status", "test-status", "author") + bound("owner-edits", "system:aggregate-to-edit", "owner") + bound("owner-admin", "system:aggregate-to-admin", "owner") + bound("extender", "test-extender", "extender"))
	// The controller that makes the roles edit and admin of these does not run here.
	author, owner, extender := c.as("author", nil), c.as("owner", nil), c.as("extender", nil)
	annotated := func(name, key string) *core.Pod {
		return pod(name, func(p *core.Pod) { p.Annotations = map[string]string{key: "0"} })
	}
	create := func(api kubernetes.Interface, p *core.Pod) error {
		_, err := api.CoreV1().Pods("default").Create(t.Context(), p, meta.CreateOptions{DryRun: []string{meta.DryRunAll}})
		return err
	}
	eventually(t, "the policy", func() string {
		if err := create(author, annotated("p", "ALIYUN_COM_GPU_MEM_IDX")); !refused(err, want) {
			return text(err)
		}
		return ""
	})
	for _, key := range []string{"ALIYUN_COM_GPU_MEM_ASSIGNED", "ALIYUN_COM_GPU_MEM_POD", "ALIYUN_COM_GPU_MEM_ASSUME_TIME",
		"scheduler.framework.gpushare.allocation"} {
		if err := create(owner, annotated("p", key)); !refused(err, want) {
			t.Errorf("%s: %v", key, err)
		}
	}
	if err := create(author, annotated("p", "cgpu.io/weight")); err != nil {
		t.Error(err)
	}
	// It makes pods of anybody's templates, and may bind.
	daemons := c.as("system:serviceaccount:kube-system:daemon-set-controller", nil)
	if err := create(daemons, annotated("p", "ALIYUN_COM_GPU_MEM_IDX")); !refused(err, want) {
		t.Errorf("of a DaemonSet's template: %v", err)
	}
	if err := create(daemons, annotated("p", "mine")); err != nil {
		t.Error(err)
	}
	if _, err := author.CoreV1().Pods("default").Create(t.Context(), annotated("shared", "mine"), meta.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.remove("shared") })
	patch := func(api kubernetes.Interface, annotations string, subresource ...string) error {
		_, err := api.CoreV1().Pods("default").Patch(t.Context(), "shared", types.MergePatchType,
			[]byte(`{"metadata": {"annotations": `+annotations+`}}`), meta.PatchOptions{}, subresource...)
		return err
	}
	if err := patch(extender, `{"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_ASSIGNED": "false"}`); err != nil {
		t.Errorf("the extender: %v", err)
	}
	for annotations, want := range map[string]string{
		`{"mine": "1"}`:                           "",
		`{"ALIYUN_COM_GPU_MEM_IDX": "1"}`:         "", // as it is
		`{"ALIYUN_COM_GPU_MEM_IDX": "0"}`:         want,
		`{"ALIYUN_COM_GPU_MEM_IDX": null}`:        want,
		`{"ALIYUN_COM_GPU_MEM_ASSIGN_TIME": "5"}`: want,
		`null`: want,
	} {
		for _, subresource := range [][]string{nil, {"status"}} {
			if err := patch(author, annotations, subresource...); want == "" && err != nil || want != "" && !refused(err, want) {
				t.Errorf("%s%v: %v, want %q", annotations, subresource, err, want)
			}
		}
	}
}

// schedulers: what is applied of each scheduler's component is what the agent knows. What the policies hold is in pkg/nri.
func (c cluster) schedulers(t *testing.T) {
	for _, s := range decision.Schedulers() {
		for _, file := range []string{"admission.yaml", "rbac.yaml"} {
			text, err := os.ReadFile("components/scheduler-" + s.Name + "/" + file)
			if err != nil {
				t.Fatal(err)
			}
			c.apply(string(text))
		}
		api := c.admin.AdmissionregistrationV1()
		t.Cleanup(func() {
			_ = api.ValidatingAdmissionPolicies().Delete(context.Background(), s.PolicyName(), meta.DeleteOptions{})
			_ = api.ValidatingAdmissionPolicyBindings().Delete(context.Background(), s.PolicyName(), meta.DeleteOptions{})
		})
		policy, err := api.ValidatingAdmissionPolicies().Get(t.Context(), s.PolicyName(), meta.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		binding, err := api.ValidatingAdmissionPolicyBindings().Get(t.Context(), s.PolicyName(), meta.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		since, err := s.Guarded(policy, binding)
		if age := time.Until(since); err != nil || age < 0 || age > time.Minute {
			t.Errorf("%s: since %v, %v", s.Name, since, err)
		}
	}
}

// bound is a ClusterRoleBinding to a user.
func bound(name, role, user string) string {
	return fmt.Sprintf(`apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: test-%s}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: %s}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: %s}]
---
`, name, role, user)
}

// runtimeClasses: with the component, a class that gives GPUs past cgpu is for namespaces with a label.
func (c cluster) runtimeClasses(t *testing.T) {
	text, err := os.ReadFile("components/deny-runtimeclasses/admission.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c.apply(`{apiVersion: node.k8s.io/v1, kind: RuntimeClass, metadata: {name: nvidia}, handler: nvidia}
---
{apiVersion: node.k8s.io/v1, kind: RuntimeClass, metadata: {name: other}, handler: other}
---
{apiVersion: v1, kind: Namespace, metadata: {name: gpu-operator, labels: {cgpu.io/allow-runtimeclasses: "true"}}}
`)
	create := func(namespace, class string) error {
		p := pod("p", func(p *core.Pod) { p.Namespace, p.Spec.RuntimeClassName = namespace, &class })
		if class == "" {
			p.Spec.RuntimeClassName = nil
		}
		_, err := c.admin.CoreV1().Pods(namespace).Create(t.Context(), p, meta.CreateOptions{DryRun: []string{meta.DryRunAll}})
		return err
	}
	if err := create("default", "nvidia"); err != nil {
		t.Errorf("without the component: %v", err)
	}
	c.apply(string(text))
	t.Cleanup(func() { c.mustDelete("-f", "components/deny-runtimeclasses/admission.yaml") })
	for _, tt := range []struct{ namespace, class, want string }{
		{"default", "nvidia", "runtimeClassName: nvidia: gives GPUs that nobody allocated"},
		{"default", "cgpu", ""}, {"default", "other", ""}, {"default", "", ""}, {"gpu-operator", "nvidia", ""},
	} {
		eventually(t, fmt.Sprintf("%s: class %q: want %q", tt.namespace, tt.class, tt.want), func() string {
			if err := create(tt.namespace, tt.class); tt.want == "" && err != nil || tt.want != "" && !refused(err, tt.want) {
				return fmt.Sprint(err)
			}
			return ""
		})
	}
}

// addRuntimeClass: pods that ask for what is ours get our class and its nodes, and no others do.
func (c cluster) addRuntimeClass(t *testing.T) {
	const file = "components/add-runtimeclass/admission.yaml"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	c.apply("{apiVersion: v1, kind: Namespace, metadata: {name: claims-ours, labels: {cgpu.io/add-runtimeclass: \"true\"}}}")
	asks := func(namespace, class, resourceName string, change func(*core.Pod)) *core.Pod {
		return pod("p", func(p *core.Pod) {
			p.Namespace = namespace
			if class != "" {
				p.Spec.RuntimeClassName = &class
			}
			if resourceName != "" {
				p.Spec.Containers[0].Resources.Limits = core.ResourceList{core.ResourceName(resourceName): resource.MustParse("1")}
			}
			change(p)
		})
	}
	nothing := func(*core.Pod) {}
	claim := func(p *core.Pod) {
		name := "gpu"
		p.Spec.ResourceClaims = []core.PodResourceClaim{{Name: name, ResourceClaimName: &name}}
		p.Spec.Containers[0].Resources.Claims = []core.ResourceClaim{{Name: name}}
	}
	inInit := func(p *core.Pod) {
		p.Spec.InitContainers, p.Spec.Containers = p.Spec.Containers, []core.Container{{Name: "main", Image: "c"}}
	}
	classOf := func(p *core.Pod) string {
		p, err := c.admin.CoreV1().Pods(p.Namespace).Create(t.Context(), p, meta.CreateOptions{DryRun: []string{meta.DryRunAll}})
		switch {
		case err != nil:
			return err.Error()
		case p.Spec.RuntimeClassName == nil:
			return ""
		case *p.Spec.RuntimeClassName == "cgpu" && len(p.Spec.NodeSelector) == 0:
			return "cgpu, but on any node"
		}
		return *p.Spec.RuntimeClassName
	}
	if class := classOf(asks("default", "", "aliyun.com/gpu-mem", nothing)); class != "" {
		t.Errorf("without the component: %q", class)
	}
	c.apply("{apiVersion: node.k8s.io/v1, kind: RuntimeClass, metadata: {name: other}, handler: other}")
	c.apply(string(text))
	t.Cleanup(func() { c.mustDelete("-f", file) })
	for _, tt := range []struct {
		what string
		pod  *core.Pod
		want string
	}{
		{"gpu-mem", asks("default", "", "aliyun.com/gpu-mem", nothing), "cgpu"},
		{"a class of devices", asks("default", "", "deviceclass.resource.kubernetes.io/gpu.cgpu.io", nothing), "cgpu"},
		{"a whole GPU", asks("default", "", "cgpu.io/gpu", nothing), "cgpu"},
		{"an init container", asks("default", "", "aliyun.com/gpu-mem", inInit), "cgpu"},
		{"a class of his own", asks("default", "other", "aliyun.com/gpu-mem", nothing), "other"},
		{"nothing of ours", asks("default", "", "example.com/fpga", nothing), ""},
		{"nothing", asks("default", "", "", nothing), ""},
		{"a claim", asks("default", "", "", claim), ""},
		{"a claim, with the label", asks("claims-ours", "", "", claim), "cgpu"},
		{"no claim, with the label", asks("claims-ours", "", "", nothing), ""},
	} {
		eventually(t, fmt.Sprintf("%s: want class %q", tt.what, tt.want), func() string {
			if class := classOf(tt.pod.DeepCopy()); class != tt.want {
				return fmt.Sprintf("%q", class)
			}
			return ""
		})
	}
}

// nodeLabel: a kubelet's own credential cannot bring the agent and its pods to its node.
func (c cluster) nodeLabel(t *testing.T) {
	label := ""
	for _, class := range of[*node.RuntimeClass](build(t, "base")) {
		for label = range class.Scheduling.NodeSelector {
		}
	}
	n := &core.Node{ObjectMeta: meta.ObjectMeta{Name: "kubelets"}}
	if _, err := c.admin.CoreV1().Nodes().Create(t.Context(), n, meta.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.mustDelete("node", "kubelets") })
	kubelet := c.as("system:node:kubelets", nil, "system:nodes")
	patch := func(api kubernetes.Interface, name string) error {
		_, err := api.CoreV1().Nodes().Patch(t.Context(), "kubelets", types.MergePatchType,
			[]byte(`{"metadata": {"labels": {"`+name+`": "true"}}}`), meta.PatchOptions{})
		return err
	}
	if err := patch(kubelet, label); !refused(err, "is not allowed to modify labels") {
		t.Errorf("%s, by the kubelet: %v", label, err)
	}
	// That it is the label which is refused, and not the kubelet.
	if err := patch(kubelet, "cgpu.io/node"); err != nil {
		t.Error(err)
	}
	if err := patch(c.admin, label); err != nil {
		t.Error(err)
	}
}

func (c cluster) remove(name string) {
	now := int64(0)
	if err := c.admin.CoreV1().Pods("default").Delete(context.Background(), name, meta.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
		c.Error(err)
	}
}

func (c cluster) mustDelete(args ...string) {
	args = append([]string{"--kubeconfig", os.Getenv("CGPU_TEST_KUBECONFIG"), "delete"}, args...)
	if out, err := exec.Command("kubectl", args...).CombinedOutput(); err != nil {
		c.Errorf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// installer: a token of cgpu-installer's changes one label of its own node.
func (c cluster) installer(t *testing.T) {
	for _, component := range []string{"uninstaller", "installer"} {
		c.apply(kustomize.must(t, "build", overlay(t, component)))
	}
	for _, name := range []string{"here2", "there2"} {
		n := &core.Node{ObjectMeta: meta.ObjectMeta{Name: name, Labels: map[string]string{"zone": "a"}, Annotations: map[string]string{"a": "b"}}}
		if _, err := c.admin.CoreV1().Nodes().Create(t.Context(), n, meta.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.mustDelete("node", name) })
	}
	const user = "system:serviceaccount:cgpu-system:cgpu-installer"
	own, nobody := c.as(user, map[string][]string{"authentication.kubernetes.io/node-name": {"here2"}}), c.as(user, nil)
	patch := func(api kubernetes.Interface, node, patch string, more ...string) error {
		_, err := api.CoreV1().Nodes().Patch(t.Context(), node, types.MergePatchType, []byte(patch), meta.PatchOptions{}, more...)
		return err
	}
	const set = `{"metadata": {"labels": {"node-restriction.kubernetes.io/cgpu": "true"}}}`
	const remove = `{"metadata": {"labels": {"node-restriction.kubernetes.io/cgpu": null}}}`
	eventually(t, "the installer's own node", func() string {
		if err := patch(nobody, "here2", set); !refused(err, "names no node") {
			return text(err)
		}
		if err := errors.Join(patch(own, "here2", set), patch(own, "here2", set), patch(own, "here2", remove)); err != nil {
			return err.Error()
		}
		return ""
	})
	const onlyLabel = "may change the label node-restriction.kubernetes.io/cgpu of its node only"
	for what, tt := range map[string]struct {
		err  error
		want string
	}{
		"another node":      {patch(own, "there2", set), "may not change node there2"},
		"another label":     {patch(own, "here2", `{"metadata": {"labels": {"node-restriction.kubernetes.io/x": "1"}}}`), onlyLabel},
		"a label of others": {patch(own, "here2", `{"metadata": {"labels": {"zone": null}}}`), onlyLabel},
		"an annotation":     {patch(own, "here2", `{"metadata": {"annotations": {"a": "c"}}}`), onlyLabel},
		"a taint":           {patch(own, "here2", `{"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}}`), onlyLabel},
		"unschedulable":     {patch(own, "here2", `{"spec": {"unschedulable": true}}`), onlyLabel},
		"an owner": {patch(own, "here2",
			`{"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "b"}]}}`), onlyLabel},
		"the status": {patch(own, "here2", `{"status": {"capacity": {"cpu": "999"}}}`, "status"), "cannot patch resource"},
	} {
		if !refused(tt.err, tt.want) {
			t.Errorf("%s: %v, want %q", what, tt.err, tt.want)
		}
	}
}

// agent: one node's agent does what it needs, with the rights of base alone, and nothing to another node.
func (c cluster) agent(t *testing.T) {
	for _, name := range []string{"here", "there"} {
		// As a kubelet has it: what the agent's patches leave alone is there to be compared.
		n := &core.Node{ObjectMeta: meta.ObjectMeta{Name: name, Labels: map[string]string{"zone": "a"}, Annotations: map[string]string{"a": "b"}},
			Status: core.NodeStatus{Capacity: core.ResourceList{"cpu": resource.MustParse("4")},
				Allocatable: core.ResourceList{"cpu": resource.MustParse("3500m")},
				Conditions: []core.NodeCondition{{Type: core.NodeReady, Status: core.ConditionTrue},
					{Type: "PIDPressure", Status: core.ConditionFalse}},
				Images: []core.ContainerImage{{Names: []string{"i"}}}, NodeInfo: core.NodeSystemInfo{KernelVersion: "6.1"}}}
		if _, err := c.admin.CoreV1().Nodes().Create(t.Context(), n, meta.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := c.admin.CoreV1().Nodes().Delete(context.Background(), name, meta.DeleteOptions{}); err != nil {
				t.Error(err)
			}
		})
		p := pod("on-"+name, func(p *core.Pod) { p.Spec.NodeName, p.Annotations = name, map[string]string{"kept": "yes"} })
		if _, err := c.admin.CoreV1().Pods("default").Create(t.Context(), p, meta.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.remove("on-" + name) })
	}
	const user = "system:serviceaccount:cgpu-system:cgpu-agent"
	agent := c.as(user, map[string][]string{"authentication.kubernetes.io/node-name": {"here"}})
	nobody := c.as(user, nil)
	dry := meta.CreateOptions{DryRun: []string{meta.DryRunAll}}
	status := func(api kubernetes.Interface, node, patch string) error {
		_, err := api.CoreV1().Nodes().Patch(t.Context(), node, types.StrategicMergePatchType, []byte(patch), meta.PatchOptions{}, "status")
		return err
	}
	const ready = `{"status": {"conditions": [{"type": "CGPUReady", "status": "True"}]}}`
	condition := func(api kubernetes.Interface, node string) error { return status(api, node, ready) }
	slice := func(api kubernetes.Interface, node, driver, pool string) error {
		s := &resourceapi.ResourceSlice{ObjectMeta: meta.ObjectMeta{Name: "s-" + node},
			Spec: resourceapi.ResourceSliceSpec{Driver: driver, NodeName: &node, Pool: resourceapi.ResourcePool{Name: pool, ResourceSliceCount: 1}}}
		_, err := api.ResourceV1().ResourceSlices().Create(t.Context(), s, dry)
		return err
	}
	annotate := func(api kubernetes.Interface, name, patch string) error {
		_, err := api.CoreV1().Pods("default").Patch(t.Context(), name, types.MergePatchType, []byte(patch), meta.PatchOptions{})
		return err
	}
	const count = `{"status": {"capacity": {"aliyun.com/gpu-count": "4"}, "allocatable": {"aliyun.com/gpu-count": "4"}}}`
	const assigned = `{"metadata": {"annotations": {"ALIYUN_COM_GPU_MEM_ASSIGNED": "true"}}}`
	eventually(t, "the agent's own node", func() string {
		if err := condition(nobody, "here"); !refused(err, "names no node") {
			return text(err)
		}
		for _, err := range []error{condition(agent, "here"), status(agent, "here", count), condition(agent, "here"),
			slice(agent, "here", "gpu.cgpu.io", "here"), annotate(agent, "on-here", assigned)} {
			if err != nil {
				return err.Error()
			}
		}
		return ""
	})
	const onlyOurs = "the condition CGPUReady and the number aliyun.com/gpu-count of a node only"
	for what, tt := range map[string]struct {
		err  error
		want string
	}{
		"another node's condition": {condition(agent, "there"), "may not change what is of node there"},
		"another node's slice":     {slice(agent, "there", "gpu.cgpu.io", "there"), "may not change what is of node there"},
		"another driver's slice":   {slice(agent, "here", "gpu.nvidia.com", "here"), "slices of the driver gpu.cgpu.io on its node only"},
		"another node's pool":      {slice(agent, "here", "gpu.cgpu.io", "there"), "the pool of its node only"},
		"another node's pod":       {annotate(agent, "on-there", assigned), "may not change what is of node there"},
		"a pod's finalizers":       {annotate(agent, "on-here", `{"metadata": {"finalizers": ["a/b"]}}`), "annotations of pods only"},
		"a pod's owner": {annotate(agent, "on-here",
			`{"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"}]}}`), "annotations of pods only"},
		"a pod's other annotation": {annotate(agent, "on-here", `{"metadata": {"annotations": {"cgpu.io/gpu-mem-limit": "1Gi"}}}`),
			"begin with ALIYUN_COM_GPU_MEM_"},
		"an annotation taken away": {annotate(agent, "on-here", `{"metadata": {"annotations": {"kept": null}}}`),
			"begin with ALIYUN_COM_GPU_MEM_"},
		"the node's labels":      {status(agent, "here", `{"metadata": {"labels": {"zone": "b"}}}`), "of a node only its status"},
		"a label taken away":     {status(agent, "here", `{"metadata": {"labels": null}}`), "of a node only its status"},
		"the node's annotations": {status(agent, "here", `{"metadata": {"annotations": {"x": "y"}}}`), "of a node only its status"},
		"the node's finalizers":  {status(agent, "here", `{"metadata": {"finalizers": ["a/b"]}}`), "of a node only its status"},
		"the node's owner": {status(agent, "here",
			`{"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"}]}}`), "of a node only its status"},
		"the node's readiness":   {status(agent, "here", `{"status": {"conditions": [{"type": "Ready", "status": "False"}]}}`), onlyOurs},
		"a condition taken away": {status(agent, "here", `{"status": {"conditions": [{"type": "Ready", "$patch": "delete"}]}}`), onlyOurs},
		"a condition of others":  {status(agent, "here", `{"status": {"conditions": [{"type": "Other", "status": "True"}]}}`), onlyOurs},
		"the node's processors":  {status(agent, "here", `{"status": {"capacity": {"cpu": "400"}}}`), onlyOurs},
		"units of GPU memory":    {status(agent, "here", `{"status": {"allocatable": {"aliyun.com/gpu-mem": "400"}}}`), onlyOurs},
		"a capacity taken away":  {status(agent, "here", `{"status": {"capacity": {"cpu": null}}}`), onlyOurs},
		"the node's addresses": {status(agent, "here", `{"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.66"}]}}`),
			onlyOurs},
		"the node's images":  {status(agent, "here", `{"status": {"images": null}}`), onlyOurs},
		"the kubelet's port": {status(agent, "here", `{"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 1}}}}`), onlyOurs},
		"a pod's labels":     {annotate(agent, "on-here", `{"metadata": {"labels": {"a": "b"}}}`), "annotations of pods only"},
		"a pod's image": {annotate(agent, "on-here", `{"spec": {"containers": [{"name": "c", "image": "other"}]}}`),
			"annotations of pods only"},
		// by either of two policies
		"forged, by the agent": {annotate(agent, "on-here", `{"metadata": {"annotations": {"alloc.cgpu.io/shares": "x"}}}`), "denied request"},
		"without a node":       {condition(nobody, "here"), "names no node"},
	} {
		if !refused(tt.err, tt.want) {
			t.Errorf("%s: %v, want %q", what, tt.err, tt.want)
		}
	}
	if _, err := agent.CoreV1().Secrets("kube-system").List(t.Context(), meta.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("secrets: %v", err)
	}
	if _, err := agent.CoreV1().Pods("").List(t.Context(), meta.ListOptions{FieldSelector: "spec.nodeName=here"}); err != nil {
		t.Error(err)
	}
}

// claims: what costs others is for namespaces with a label, each for itself.
func (c cluster) claims(t *testing.T) {
	dry := meta.CreateOptions{DryRun: []string{meta.DryRunAll}}
	// A claim and a template of one configuration.
	configured := func(namespace, parameters string) []error {
		spec := resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "vgpu.cgpu.io"}}},
			Config: []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: "gpu.cgpu.io",
				Parameters: runtime.RawExtension{Raw: []byte(`{"apiVersion": "cgpu.io/v1alpha1", "kind": "VGPUConfig", ` + parameters + `}`)}}}}}}}
		named := meta.ObjectMeta{GenerateName: "c-", Namespace: namespace}
		_, claim := c.admin.ResourceV1().ResourceClaims(namespace).
			Create(t.Context(), &resourceapi.ResourceClaim{ObjectMeta: named, Spec: spec}, dry)
		_, template := c.admin.ResourceV1().ResourceClaimTemplates(namespace).Create(t.Context(),
			&resourceapi.ResourceClaimTemplate{ObjectMeta: named, Spec: resourceapi.ResourceClaimTemplateSpec{Spec: spec}}, dry)
		return []error{claim, template}
	}
	const priority, spill, weight = "cgpu.io/allow-high-priority", "cgpu.io/allow-spill", "cgpu.io/allow-weight"
	plain := []string{`"weight": 10, "priority": "default", "spill": 0`, `"priority": "best-effort", "percent": 30, "spill": "0"`}
	costly := map[string]string{`"priority": "high"`: priority, `"spill": "1Gi"`: spill, `"spill": 1048576`: spill, `"weight": 11`: weight,
		`"weight": 64`: weight}
	for _, label := range []string{"", priority, spill, weight} {
		name := "plain"
		if label != "" {
			name = strings.TrimPrefix(label, "cgpu.io/")
		}
		c.apply(fmt.Sprintf("apiVersion: v1\nkind: Namespace\nmetadata: {name: %s, labels: {%q: \"true\"}}\n", name, cmp.Or(label, "other")))
		for parameters, needs := range costly {
			eventually(t, name+": "+parameters, func() string {
				for _, err := range configured(name, parameters) {
					if needs == label && err != nil || needs != label && !refused(err, needs) {
						return text(err)
					}
				}
				return ""
			})
		}
		for _, parameters := range plain {
			if err := errors.Join(configured(name, parameters)...); err != nil {
				t.Errorf("%s: %s: %v", name, parameters, err)
			}
		}
	}
}

// events: an agent tells under its own name, of its own node, what an agent tells; also through the group events.k8s.io, if somebody gave
// it the right.
func (c cluster) events(t *testing.T) {
	agent := c.as("system:serviceaccount:cgpu-system:cgpu-agent", map[string][]string{"authentication.kubernetes.io/node-name": {"here"}})
	other := c.as("system:serviceaccount:cgpu-system:cgpu-agent", map[string][]string{"authentication.kubernetes.io/node-name": {"there"}})
	// As client-go's recorder makes them.
	event := func(change func(*core.Event)) *core.Event {
		now := meta.Now()
		e := &core.Event{ObjectMeta: meta.ObjectMeta{GenerateName: "e-", Namespace: "default"}, Type: core.EventTypeWarning, Reason: "GPURefused",
			Message: "m", Count: 1,
			FirstTimestamp: now, LastTimestamp: now, Source: core.EventSource{Component: "cgpu-agent", Host: "here"},
			ReportingController: "cgpu-agent", ReportingInstance: "here",
			InvolvedObject: core.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: "default", Name: "p", UID: "u",
				FieldPath: "spec.containers{c}"}}
		change(e)
		return e
	}
	create := func(api kubernetes.Interface, change func(*core.Event)) (*core.Event, error) {
		return api.CoreV1().Events("default").Create(t.Context(), event(change), meta.CreateOptions{})
	}
	ofNode := func(e *core.Event) {
		e.InvolvedObject, e.Reason = core.ObjectReference{Kind: "Node", APIVersion: "v1", Name: "here", UID: "n"}, "CGPUReady"
	}
	const whose, where, what = "of the component cgpu-agent only", "from that host only", "with a reason GPU"
	eventually(t, "the policy", func() string {
		if _, err := create(agent, func(e *core.Event) { e.Source.Component = "kubelet" }); !refused(err, whose) {
			return text(err)
		}
		return ""
	})
	ours, err := create(agent, func(*core.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := create(agent, ofNode); err != nil {
		t.Error(err)
	}
	foreign, err := create(c.admin, func(e *core.Event) { e.Source.Component, e.ReportingController = "kubelet", "kubelet" })
	if err != nil {
		t.Fatal(err)
	}
	patch := func(api kubernetes.Interface, name, text string) error {
		_, err := api.CoreV1().Events("default").Patch(t.Context(), name, types.StrategicMergePatchType, []byte(text), meta.PatchOptions{})
		return err
	}
	if err := patch(agent, ours.Name, `{"count": 2, "message": "again"}`); err != nil {
		t.Error(err)
	}
	for name, tt := range map[string]struct {
		change func(*core.Event)
		want   string
	}{
		"the kubelet's":         {func(e *core.Event) { e.Source.Component = "kubelet" }, whose},
		"reported by another":   {func(e *core.Event) { e.ReportingController = "kubelet" }, whose},
		"of nobody":             {func(e *core.Event) { e.Source = core.EventSource{} }, whose},
		"from another host":     {func(e *core.Event) { e.Source.Host = "there" }, where},
		"of another instance":   {func(e *core.Event) { e.ReportingInstance = "there" }, where},
		"of another node":       {func(e *core.Event) { ofNode(e); e.InvolvedObject.Name = "there" }, what},
		"of a Deployment":       {func(e *core.Event) { e.InvolvedObject.Kind, e.InvolvedObject.APIVersion = "Deployment", "apps/v1" }, what},
		"of another API's Pod":  {func(e *core.Event) { e.InvolvedObject.APIVersion = "example.com/v1" }, what},
		"another reason":        {func(e *core.Event) { e.Reason = "FailedScheduling" }, what},
		"a node's other reason": {func(e *core.Event) { ofNode(e); e.Reason = "NodeNotReady" }, what},
		"related to something":  {func(e *core.Event) { e.Related = &core.ObjectReference{Kind: "Secret", Name: "s"} }, what},
	} {
		if _, err := create(agent, tt.change); !refused(err, tt.want) {
			t.Errorf("an Event %s: %v, want %q", name, err, tt.want)
		}
	}
	if err := patch(agent, ours.Name, `{"source": {"component": "kubelet"}}`); !refused(err, whose) {
		t.Errorf("its own Event made the kubelet's: %v", err)
	}
	for _, text := range []string{`{"message": "m2"}`, `{"source": {"component": "cgpu-agent"}, "reportingComponent": "cgpu-agent"}`} {
		if err := patch(agent, foreign.Name, text); !refused(err, whose) {
			t.Errorf("the kubelet's Event, %s: %v", text, err)
		}
	}
	if err := patch(other, ours.Name, `{"message": "m2"}`); !refused(err, where) {
		t.Errorf("another agent's Event: %v", err)
	}
	c.apply(manyEvents)
	eventually(t, "events.k8s.io", func() string {
		now := meta.NowMicro()
		e := &events.Event{ObjectMeta: meta.ObjectMeta{GenerateName: "e-", Namespace: "default"}, EventTime: now, ReportingController: "kubelet",
			ReportingInstance: "here", Action: "a",
			Reason: "FailedScheduling", Type: core.EventTypeWarning,
			Regarding: core.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: "default", Name: "p"}}
		if _, err := agent.EventsV1().Events("default").Create(t.Context(), e, meta.CreateOptions{}); !refused(err, whose) {
			return text(err)
		}
		return ""
	})
}

// manyEvents gives the agent a right that base does not.
const manyEvents = `apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: test-events}
rules: [{apiGroups: [events.k8s.io], resources: [events], verbs: [create]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: test-events}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: test-events}
subjects: [{kind: ServiceAccount, name: cgpu-agent, namespace: cgpu-system}]
`

func refused(err error, want string) bool {
	return err != nil && slices.ContainsFunc([]func(error) bool{apierrors.IsForbidden, apierrors.IsInvalid},
		func(is func(error) bool) bool { return is(err) }) && strings.Contains(err.Error(), want)
}

func text(err error) string {
	if err == nil {
		return "was taken"
	}
	return err.Error()
}
