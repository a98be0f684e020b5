// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package nri

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	corev1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/decision"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// Schedulers at a real API server (test/kubernetes/k8s.sh up control-plane; KUBECONFIG is its administrator's): a stand-in for each
// patches and binds as the real one does, with the rights that its manifests give it; an author of pods, as the role edit has them, forges.
//
//	go test -tags kubernetes -run TestAgainstAPIServer ./pkg/nri
func TestAgainstAPIServer(t *testing.T) {
	file := os.Getenv("KUBECONFIG")
	if file == "" {
		testenv.Lacks(t, "KUBECONFIG is not set")
	}
	config, err := clientcmd.BuildConfigFromFlags("", file)
	must(t, err)
	config.QPS, config.Burst = 200, 400
	admin := as(t, config, "")
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	_, err = admin.CoreV1().Namespaces().Create(t.Context(), space, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		must(t, err)
	}
	grant(t, admin, "test-author", rule("get,create,update,patch", "pods"), rule("patch", "pods/status"))
	for _, s := range decision.Schedulers() {
		s.Settling = 10 * time.Second
		// HAMi: charts/hami/templates/scheduler/clusterrole.yaml; Volcano: installer/helm/chart/volcano/templates/scheduler.yaml; KAI: the
		// binder's.
		grant(t, admin, "test-"+s.Name, rule("get,list,watch,patch,update", "pods"), rule("create", "pods/binding"))
		agent := rule("get", "validatingadmissionpolicies,validatingadmissionpolicybindings")
		agent.APIGroups, agent.ResourceNames = []string{"admissionregistration.k8s.io"}, []string{s.PolicyName()}
		grant(t, admin, "test-agent-"+s.Name, rule("get", "pods"), agent)
		t.Run(s.Name, func(t *testing.T) {
			t.Parallel() // each waits until its policy has settled
			(&stage{T: t, s: s, config: config, admin: admin}).play()
		})
	}
}

// stage is where one scheduler plays.
type stage struct {
	*testing.T
	s      *decision.Scheduler
	config *rest.Config
	admin  kubernetes.Interface
}

func (g *stage) play() {
	ctx, policies := g.Context(), g.admin.AdmissionregistrationV1()
	author, scheduler := as(g.T, g.config, "test-author"), as(g.T, g.config, "test-"+g.s.Name)
	h := &handler{&Plugin{o: Options{Node: "node1", Client: as(g.T, g.config, "test-agent-"+g.s.Name), Scheduler: g.s, RunDir: g.TempDir(),
		Log: slog.New(slog.DiscardHandler)}}}
	must(g.T, h.p.Update(ctx, tableOf(device.PodsAllocated)))
	_ = policies.ValidatingAdmissionPolicies().Delete(ctx, g.s.PolicyName(), metav1.DeleteOptions{})
	_ = policies.ValidatingAdmissionPolicyBindings().Delete(ctx, g.s.PolicyName(), metav1.DeleteOptions{})

	// Before there is the policy, an author writes what he likes, and it is nothing.
	forged := g.make(author, "forged-"+g.s.Name, true)
	g.bind(scheduler, forged)
	g.refused(h, forged, "is missing")
	_, err := policies.ValidatingAdmissionPolicies().Create(ctx, g.s.Policy(), metav1.CreateOptions{})
	must(g.T, err)
	g.Cleanup(func() {
		_ = policies.ValidatingAdmissionPolicies().Delete(context.Background(), g.s.PolicyName(), metav1.DeleteOptions{})
		_ = policies.ValidatingAdmissionPolicyBindings().Delete(context.Background(), g.s.PolicyName(), metav1.DeleteOptions{})
	})
	g.refused(h, forged, "is missing") // its binding
	_, err = policies.ValidatingAdmissionPolicyBindings().Create(ctx, g.s.Binding(), metav1.CreateOptions{})
	must(g.T, err)
	// With it, what was there before stays nothing.
	g.refused(h, forged, "is older than the policy")

	until(g.T, "the policy is followed", func() error {
		_, err := author.CoreV1().Pods("default").Create(ctx, g.pod("p", true), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return want(err, "is for the scheduler "+g.s.Name)
	})
	// The scheduler's own account cannot make a pod with them either: controllers make pods of anybody's templates.
	_, err = g.admin.CoreV1().Pods("default").Create(ctx, g.pod("p", true), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	must(g.T, want(err, "is for the scheduler"))

	// A pod that is made later is placed, and its container gets what was decided.
	placed := g.make(author, "placed-"+g.s.Name, false)
	since, err := h.p.since(ctx)
	must(g.T, err)
	for i := 0; !placed.CreationTimestamp.After(since); i++ {
		time.Sleep(time.Second)
		placed = g.make(author, fmt.Sprintf("placed-%s-%d", g.s.Name, i), false)
	}
	must(g.T, want(g.annotate(author, placed, g.decided()), "is for the scheduler"))
	must(g.T, want(g.annotate(author, placed, g.decided(), "status"), "is for the scheduler"))
	must(g.T, g.annotate(author, placed, map[string]any{"mine": "1"}))
	must(g.T, g.annotate(scheduler, placed, g.decided()))
	g.bind(scheduler, placed)
	hooks, err := g.create(h, placed)
	must(g.T, err)
	share, ours, err := alloc.FromHookArgs(hooks[0].Args)
	if err != nil || !ours || len(hooks) != 1 || share.UUID != gpu0 || share.Memory != 3000*quota.MiB {
		g.Errorf("%+v, %v", share, err)
	}
	// However many annotations a pod has, the policy's evaluation comes to an end within what the API server allows, and its author goes on.
	large := g.pod("large-"+g.s.Name, false)
	for i := range 36000 {
		large.Annotations[strconv.FormatInt(int64(i), 36)] = ""
	}
	_ = g.admin.CoreV1().Pods("default").Delete(ctx, large.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
	large, err = author.CoreV1().Pods("default").Create(ctx, large, metav1.CreateOptions{})
	must(g.T, err)
	must(g.T, g.annotate(author, large, map[string]any{"mine": "1"}))
	must(g.T, want(g.annotate(author, large, g.decided()), "is for the scheduler"))
	must(g.T, g.admin.CoreV1().Pods("default").Delete(ctx, large.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
	// Afterwards nobody but the scheduler changes it, in no way.
	for key := range g.all() {
		for _, value := range []any{"x", nil} {
			for _, sub := range [][]string{nil, {"status"}} {
				if err := want(g.annotate(author, placed, map[string]any{key: value}, sub...), "is for the scheduler"); err != nil {
					g.Errorf("%s=%v%v: %v", key, value, sub, err)
				}
			}
		}
	}
	// A decision for a GPU that is not there.
	for key := range g.decided() {
		if strings.Contains(fmt.Sprint(g.decided()[key]), gpu0) {
			text := strings.ReplaceAll(fmt.Sprint(g.decided()[key]), gpu0, "GPU-elsewhere")
			must(g.T, g.annotate(scheduler, placed, map[string]any{key: text}))
		}
	}
	g.refused(h, placed, "is not among the 1 of this node")
}

// decided is what the scheduler writes when it has decided, asked what the author writes before; all is both.
func (g *stage) decided() map[string]any { return g.pick(true) }
func (g *stage) all() map[string]any {
	all := g.pick(false)
	for key, value := range g.pick(true) {
		all[key] = value
	}
	return all
}

func (g *stage) pick(decided bool) map[string]any {
	some := map[string]any{}
	for key, value := range decisions[g.s.Name] {
		if g.s.Decides(map[string]string{key: value}, "main") == decided {
			some[key] = value
		}
	}
	return some
}

func (g *stage) pod(name string, forged bool) *corev1.Pod {
	limits := corev1.ResourceRequirements{Limits: asked()}
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{}},
		Spec: corev1.PodSpec{SchedulerName: "none", AutomountServiceAccountToken: new(bool),
			InitContainers: []corev1.Container{{Name: "init", Image: "c"}},
			Containers:     []corev1.Container{{Name: "side", Image: "c"}, {Name: "main", Image: "c", Resources: limits}}}}
	annotations := g.pick(false)
	if forged {
		annotations = g.all()
	}
	for key, value := range annotations {
		p.Annotations[key] = fmt.Sprint(value)
	}
	return p
}

func (g *stage) make(c kubernetes.Interface, name string, forged bool) *corev1.Pod {
	g.Helper()
	now := metav1.DeleteOptions{GracePeriodSeconds: new(int64)}
	_ = g.admin.CoreV1().Pods("default").Delete(g.Context(), name, now)
	p, err := c.CoreV1().Pods("default").Create(g.Context(), g.pod(name, forged), metav1.CreateOptions{})
	must(g.T, err)
	g.Cleanup(func() { _ = g.admin.CoreV1().Pods("default").Delete(context.Background(), name, now) })
	return p
}

func (g *stage) annotate(c kubernetes.Interface, p *corev1.Pod, annotations map[string]any, subresource ...string) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": annotations}})
	must(g.T, err)
	_, err = c.CoreV1().Pods(p.Namespace).Patch(g.Context(), p.Name, types.MergePatchType, patch, metav1.PatchOptions{}, subresource...)
	return err
}

func (g *stage) bind(c kubernetes.Interface, p *corev1.Pod) {
	g.Helper()
	b := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name},
		Target: corev1.ObjectReference{Kind: "Node", Name: "node1"}}
	must(g.T, c.CoreV1().Pods(p.Namespace).Bind(g.Context(), b, metav1.CreateOptions{}))
}

func (g *stage) create(h *handler, p *corev1.Pod) ([]*api.Hook, error) {
	sandbox := &api.PodSandbox{Namespace: p.Namespace, Name: p.Name, Uid: string(p.UID), Annotations: decisions[g.s.Name]}
	adjust, _, err := h.CreateContainer(g.Context(), sandbox, &api.Container{Id: "id", Name: "main"})
	return adjust.GetHooks().GetCreateRuntime(), err
}

func (g *stage) refused(h *handler, p *corev1.Pod, why string) {
	g.Helper()
	if hooks, err := g.create(h, p); hooks != nil || want(err, why) != nil {
		g.Errorf("%v, %v, want %q", hooks, err, why)
	}
}

func want(err error, text string) error {
	if err == nil || !strings.Contains(err.Error(), text) {
		return fmt.Errorf("%v, want %q", err, text) //nolint:errorlint // nobody looks into it
	}
	return nil
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func until(t *testing.T, what string, try func() error) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		if err = try(); err == nil {
			return
		}
	}
	t.Fatalf("%s: %v", what, err)
}

// as is the API server for somebody; "" is its administrator.
func as(t *testing.T, config *rest.Config, user string) kubernetes.Interface {
	t.Helper()
	c := rest.CopyConfig(config)
	if user != "" {
		c.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: []string{"system:authenticated"}}
	}
	client, err := kubernetes.NewForConfig(c)
	must(t, err)
	return client
}

func rule(verbs, resources string) rbac.PolicyRule {
	return rbac.PolicyRule{APIGroups: []string{""}, Verbs: strings.Split(verbs, ","), Resources: strings.Split(resources, ",")}
}

// grant gives a user rights.
func grant(t *testing.T, admin kubernetes.Interface, user string, rules ...rbac.PolicyRule) {
	t.Helper()
	roles, bindings := admin.RbacV1().ClusterRoles(), admin.RbacV1().ClusterRoleBindings()
	_, err := roles.Create(t.Context(), &rbac.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: user}, Rules: rules}, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		must(t, err)
	}
	_, err = bindings.Create(t.Context(), &rbac.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: user},
		RoleRef:  rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: user},
		Subjects: []rbac.Subject{{Kind: "User", Name: user}}}, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		must(t, err)
	}
}
