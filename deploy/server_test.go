package deploy

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
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
		t.Skip("CGPU_TEST_KUBECONFIG is not set: no API server to ask (test/kubernetes/k8s.sh up control-plane)")
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
func (c cluster) as(user string, extra map[string][]string) kubernetes.Interface {
	config := rest.CopyConfig(c.config)
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Extra: extra, Groups: []string{"system:authenticated"}}
	return client(c.T, config)
}

func (c cluster) apply(text string, more ...string) {
	c.Helper()
	cmd := exec.Command("kubectl", append([]string{"--kubeconfig", os.Getenv("CGPU_TEST_KUBECONFIG"), "apply", "--server-side", "--force-conflicts", "-f", "-"}, more...)...)
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
	c.apply(kustomize.must(t, "build", "examples"), "--dry-run=server")
	t.Run("pods", c.pods)
	t.Run("agent", c.agent)
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
	last := ""
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
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
	if _, err := c.admin.CoreV1().Pods("default").Patch(t.Context(), "plain", types.MergePatchType, patch, meta.PatchOptions{}); !refused(err, "are for device plugins alone") {
		t.Errorf("forged later: %v", err)
	}
}

func (c cluster) remove(name string) {
	now := int64(0)
	if err := c.admin.CoreV1().Pods("default").Delete(context.Background(), name, meta.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
		c.Error(err)
	}
}

// agent: one node's agent does what it needs, with the rights of base alone, and nothing to another node.
func (c cluster) agent(t *testing.T) {
	for _, name := range []string{"here", "there"} {
		n := &core.Node{ObjectMeta: meta.ObjectMeta{Name: name}}
		if _, err := c.admin.CoreV1().Nodes().Create(t.Context(), n, meta.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := c.admin.CoreV1().Nodes().Delete(context.Background(), name, meta.DeleteOptions{}); err != nil {
				t.Error(err)
			}
		})
		p := pod("on-"+name, func(p *core.Pod) { p.Spec.NodeName = name })
		if _, err := c.admin.CoreV1().Pods("default").Create(t.Context(), p, meta.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.remove("on-" + name) })
	}
	const user = "system:serviceaccount:cgpu-system:cgpu-agent"
	agent := c.as(user, map[string][]string{"authentication.kubernetes.io/node-name": {"here"}})
	nobody := c.as(user, nil)
	dry := meta.CreateOptions{DryRun: []string{meta.DryRunAll}}
	condition := func(api kubernetes.Interface, node string) error {
		patch, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []any{map[string]any{"type": "CGPUReady", "status": "True"}}}})
		if err != nil {
			return err
		}
		_, err = api.CoreV1().Nodes().Patch(t.Context(), node, types.StrategicMergePatchType, patch, meta.PatchOptions{}, "status")
		return err
	}
	slice := func(api kubernetes.Interface, node, driver string) error {
		s := &resourceapi.ResourceSlice{ObjectMeta: meta.ObjectMeta{Name: "s-" + node},
			Spec: resourceapi.ResourceSliceSpec{Driver: driver, NodeName: &node, Pool: resourceapi.ResourcePool{Name: node, ResourceSliceCount: 1}}}
		_, err := api.ResourceV1().ResourceSlices().Create(t.Context(), s, dry)
		return err
	}
	annotate := func(api kubernetes.Interface, name, patch string) error {
		_, err := api.CoreV1().Pods("default").Patch(t.Context(), name, types.MergePatchType, []byte(patch), meta.PatchOptions{})
		return err
	}
	const assigned = `{"metadata": {"annotations": {"ALIYUN_COM_GPU_MEM_ASSIGNED": "true"}}}`
	eventually(t, "the agent's own node", func() string {
		for _, err := range []error{condition(agent, "here"), slice(agent, "here", "gpu.cgpu.io"), annotate(agent, "on-here", assigned)} {
			if err != nil {
				return err.Error()
			}
		}
		return ""
	})
	for what, tt := range map[string]struct {
		err  error
		want string
	}{
		"another node's condition": {condition(agent, "there"), "may not change what is of node there"},
		"another node's slice":     {slice(agent, "there", "gpu.cgpu.io"), "may not change what is of node there"},
		"another driver's slice":   {slice(agent, "here", "gpu.nvidia.com"), "slices of the driver gpu.cgpu.io only"},
		"another node's pod":       {annotate(agent, "on-there", assigned), "may not change what is of node there"},
		"a pod's labels":           {annotate(agent, "on-here", `{"metadata": {"labels": {"a": "b"}}}`), "annotations of pods only"},
		"a pod's image":            {annotate(agent, "on-here", `{"spec": {"containers": [{"name": "c", "image": "other"}]}}`), "annotations of pods only"},
		"forged, by the agent":     {annotate(agent, "on-here", `{"metadata": {"annotations": {"alloc.cgpu.io/shares": "x"}}}`), "device plugins alone"},
		"without a node":           {condition(nobody, "here"), "names no node"},
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

func refused(err error, want string) bool {
	return err != nil && slices.ContainsFunc([]func(error) bool{apierrors.IsForbidden, apierrors.IsInvalid}, func(is func(error) bool) bool { return is(err) }) && strings.Contains(err.Error(), want)
}

func text(err error) string {
	if err == nil {
		return "was taken"
	}
	return err.Error()
}
