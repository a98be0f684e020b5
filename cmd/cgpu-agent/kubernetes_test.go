// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/opencgpu/cgpu/pkg/agent"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/dra"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// The agent as a process at a real API server (test/kubernetes/k8s.sh up control-plane; KUBECONFIG is its administrator's),
// with no rights but those that docs/internals/agent.md lists: a node with a hundred pods, an event, a change, its memory.
//
//	go test -tags kubernetes -run TestAgainstAPIServer ./cmd/cgpu-agent
func TestAgainstAPIServer(t *testing.T) {
	admin := os.Getenv("KUBECONFIG")
	if admin == "" {
		testenv.Lacks(t, "KUBECONFIG is not set")
	}
	client := administrator(t, admin)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	const node, namespace = "agent-test", metav1.NamespaceDefault
	clean := func() {
		now := metav1.DeleteOptions{GracePeriodSeconds: new(int64)}
		ctx := context.Background()
		_ = client.CoreV1().Pods(namespace).DeleteCollection(ctx, now, metav1.ListOptions{LabelSelector: "test=agent"})
		_ = client.CoreV1().Nodes().Delete(ctx, node, now)
		unlabel := []byte(`{"metadata": {"labels": {"cgpu.io/max-resize-memory": null, "cgpu.io/max-weight": null}}}`)
		_, _ = client.CoreV1().Namespaces().Patch(ctx, namespace, types.MergePatchType, unlabel, metav1.PatchOptions{})
	}
	clean()
	t.Cleanup(clean)
	rights(ctx, t, client)
	// Without a controller-manager nobody makes the default namespace before it is needed.
	_, err := client.CoreV1().Namespaces().Create(ctx, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	_, err = client.CoreV1().Nodes().Create(ctx, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: node},
		Status: v1.NodeStatus{NodeInfo: v1.NodeSystemInfo{ContainerRuntimeVersion: "containerd://2.0.5"}}}, metav1.CreateOptions{})
	must(t, err)

	work := t.TempDir()
	runDir := filepath.Join(work, "run")
	must(t, os.MkdirAll(runDir, 0o700))
	p := start(ctx, t, work, runDir, restricted(t, admin, work), node)

	// Without a table it waits, and says so.
	condition := func(reason string) {
		t.Helper()
		eventually(t, "condition "+reason, func() error {
			n, err := client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, c := range n.Status.Conditions {
				if c.Type == agent.Condition && c.Reason == reason {
					return nil
				}
			}
			return fmt.Errorf("conditions %+v", n.Status.Conditions)
		})
	}
	condition(agent.ReasonNoTable)
	if code := get(p.health + "/readyz"); code != 503 {
		t.Errorf("ready without a table: %d", code)
	}
	time.Sleep(2 * time.Second)
	t.Logf("without pods: %d KiB resident, of which %d KiB are its own; the most it was: %d KiB", p.rss("VmRSS"), p.rss("RssAnon"),
		p.rss("VmHWM"))

	// Without a kubelet no front end is ready, but the node is known.
	const uuid = "GPU-00000000-0000-0000-0000-000000000001"
	gpu := ledger.GPU{UUID: uuid, Memory: 16 * quota.GiB}
	card := sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: sched.DefaultPrioRatio}
	key, err := device.ReadKey(device.DriverSim, "", "", "")
	must(t, err)
	table := &device.Table{Version: device.TableVersion, Driver: device.DriverSim, DriverVersion: "580.159.04", Key: key,
		HostMemory: 64 * quota.GiB,
		Hook:       "/opt/cgpu/bin/cgpu-hook",
		GPUs: []device.GPU{{UUID: uuid, BusID: "0000:01:00.0", Name: "Tesla T4", Memory: gpu.Memory,
			Node: device.Node{Path: "/dev/nvidia0", HostPath: "/dev/null", Major: 1, Minor: 3}},
			{Index: 1, Minor: 1, UUID: uuid[:len(uuid)-1] + "2", BusID: "0000:02:00.0", Name: "Tesla T4", Memory: gpu.Memory,
				Node: device.Node{Path: "/dev/nvidia1", HostPath: "/dev/null", Major: 1, Minor: 3}}},
		Config: device.Config{Overcommit: 1, MaxInst: 20, Policy: card.Policy, PrioRatio: card.PrioRatio, CapCycle: 100 * time.Millisecond,
			Pods: device.PodsAllocated, Headroom: device.Part{Bytes: 2 * quota.GiB}, HeadroomCores: 10}}
	must(t, table.Save(runDir))
	// The DRA driver needs no kubelet to publish what it has.
	condition(agent.ReasonFrontEnd)
	eventually(t, "a slice", func() error {
		list, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
		if err == nil && (len(list.Items) != 1 || len(list.Items[0].Spec.Devices) != 1) {
			err = fmt.Errorf("%+v", list.Items)
		}
		if err != nil {
			return err
		}
		// The scheduler is not told of what running pods may be raised into.
		has := list.Items[0].Spec.Devices[0].Capacity
		if memory, cores := has["memory"].Value, has["cores"].Value; memory.Value() != int64(14*quota.GiB) || cores.Value() != 90 {
			t.Errorf("the slice has %v and %v percent, want 14Gi and 90", &memory, &cores)
		}
		return nil
	})

	for i := range 100 {
		pod := bigPod(namespace, fmt.Sprintf("agent-test-%d", i), node)
		made, err := client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{})
		must(t, err)
		made.Status = v1.PodStatus{Phase: v1.PodRunning, ContainerStatuses: []v1.ContainerStatus{{Name: "main",
			ContainerID: fmt.Sprintf("containerd://id%d", i), State: v1.ContainerState{Running: &v1.ContainerStateRunning{}}}}}
		_, err = client.CoreV1().Pods(namespace).UpdateStatus(ctx, made, metav1.UpdateOptions{})
		must(t, err)
	}

	news := func(pod, reason, text string) {
		t.Helper()
		eventually(t, reason+" of "+pod, func() error {
			list, err := client.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			for _, e := range list.Items {
				if e.InvolvedObject.Name == pod && e.Reason == reason && strings.Contains(e.Message, text) {
					return nil
				}
			}
			return fmt.Errorf("%d Events, not that one", len(list.Items))
		})
	}
	must(t, event.Append(runDir, event.Event{Kind: event.Killed, Container: "id7", Name: "other/forged/name",
		Text: "process 7 \x1b[2J: managed memory beyond the limit"}))
	news("agent-test-7", "GPUProcessKilled", "process 7 ?[2J")

	given := ledger.VGPU{UUID: uuid, Limit: 6 * quota.GiB, Weight: 2, Priority: quota.PriorityDefault}
	book := ledger.Open(runDir)
	_, err = book.Reserve(ledger.Request{GPUs: []ledger.GPU{gpu}, Overcommit: 1, Card: card,
		Record: ledger.Record{ID: "id3", Nonce: "0123456789abcdef", LauncherPID: os.Getpid(),
			VGPUs: []ledger.VGPU{given}, Allocated: []ledger.Allocation{{ID: "claim/1", UUID: uuid, Given: given, Plugin: true}}}})
	must(t, err)
	annotate := func(name, value string) {
		t.Helper()
		patch, _ := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{name: value}}})
		_, err := client.CoreV1().Pods(namespace).Patch(ctx, "agent-test-3", types.MergePatchType, patch, metav1.PatchOptions{})
		must(t, err)
	}
	annotate("cgpu.io/gpu-schd-weight", "1")
	eventually(t, "weight 1", func() error {
		if r, err := book.Find("id3"); err != nil || r.VGPUs[0].Weight != 1 {
			return fmt.Errorf("%+v, %v", r.VGPUs, err)
		}
		return nil
	})
	annotate("cgpu.io/gpu-mem-limit", "100Gi")
	news("agent-test-3", "GPUChangeRefused", "6144MiB was allocated, and pods of this namespace may have 0MiB beyond that")
	label := []byte(`{"metadata": {"labels": {"cgpu.io/max-resize-memory": "2Gi", "cgpu.io/max-weight": "5"}}}`)
	_, err = client.CoreV1().Namespaces().Patch(ctx, namespace, types.MergePatchType, label, metav1.PatchOptions{})
	must(t, err)
	annotate("cgpu.io/gpu-schd-weight", "5")
	annotate("cgpu.io/gpu-mem-limit", "8Gi")
	eventually(t, "8 GiB and weight 5", func() error {
		if r, err := book.Find("id3"); err != nil || r.VGPUs[0].Limit != 8*quota.GiB || r.VGPUs[0].Weight != 5 {
			return fmt.Errorf("%+v, %v", r.VGPUs, err)
		}
		return nil
	})

	// Pods of a megabyte, as any author can make them, cost it nothing; one that has ended is as if it were not there.
	for i := range 20 {
		pod := bigPod(namespace, fmt.Sprintf("agent-test-big-%d", i), node)
		for n := range 4000 {
			pod.Spec.Containers = append(pod.Spec.Containers, v1.Container{Name: fmt.Sprintf("container-%d", n), Image: "localhost/none"})
		}
		for n := range 3000 {
			pod.Annotations[fmt.Sprintf("cgpu.io/annotation-%d", n)] = strings.Repeat("x", 60)
		}
		_, err := client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{})
		must(t, err)
	}
	// Nor do pods whose megabyte is 300,000 empty pieces, each of which an object of Go, nor claims of as much, all at once.
	for i := range 4 {
		pod := bigPod(namespace, fmt.Sprintf("agent-test-pieces-%d", i), node)
		sources := make([]v1.VolumeProjection, 300000)
		for n := range sources {
			sources[n].DownwardAPI = &v1.DownwardAPIProjection{}
		}
		pod.Spec.Volumes = []v1.Volume{{Name: "v", VolumeSource: v1.VolumeSource{Projected: &v1.ProjectedVolumeSource{Sources: sources}}}}
		_, err := client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{})
		must(t, err)
	}
	// Nor does a kubelet's list of 243,000 containers, which is asked for before each registration; there is one each second, since it
	// takes none.
	asked := hostileKubelet(t, filepath.Join(work, "kubelet"))
	eventually(t, "three lists of the kubelet's", func() error {
		if n := asked.Load(); n < 3 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	prepareBigClaims(ctx, t, client, filepath.Join(work, "kubelet", "plugins", dra.DriverName, "dra.sock"), node,
		strings.ToLower(table.GPUs[1].UUID))
	time.Sleep(shedEvery)
	t.Logf("with 100 pods: %d KiB resident, of which %d KiB are its own; the most it was: %d KiB", p.rss("VmRSS"), p.rss("RssAnon"),
		p.rss("VmHWM"))
	if kib := p.rss("VmHWM"); kib > 40<<10 {
		t.Errorf("%d KiB resident at the most, want 40 MiB", kib)
	}
	before := p.cpu()
	time.Sleep(2 * time.Second)
	t.Logf("while it asks that kubelet: %v of processor time in 2 s", p.cpu()-before)
	if code := get(p.health + "/healthz"); code != 200 {
		t.Errorf("healthz: %d", code)
	}
	must(t, p.cmd.Process.Signal(syscall.SIGTERM))
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("ended with %v", err)
	}
	text, err := os.ReadFile(p.log)
	must(t, err)
	for word, what := range map[string]string{"forbidden": "a right is missing",
		"watch ended with error": "events of pods are not understood"} {
		if strings.Contains(string(text), word) {
			t.Error(what)
		}
	}
}

// administrator is a client that is hardly held back, as the agent's own is.
func administrator(t *testing.T, kubeconfig string) kubernetes.Interface {
	t.Helper()
	c, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	must(t, err)
	c.QPS, c.Burst = 200, 400
	c.ContentType = "application/vnd.kubernetes.protobuf"
	client, err := kubernetes.NewForConfig(c)
	must(t, err)
	return client
}

// prepareBigClaims has claims of more than a megabyte prepared, as the kubelet does for two pods at once that have ten each.
func prepareBigClaims(ctx context.Context, t *testing.T, client kubernetes.Interface, socket, node, gpu string) {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	defer conn.Close()
	claims := client.ResourceV1().ResourceClaims(metav1.NamespaceDefault)
	var ask [2][]*drapb.Claim
	for i := range 20 {
		// Some have as many pieces as fit; with them the API server takes ten seconds each, since what it does with labels grows with the
		// square of their number.
		pieces, value := 14000, strings.Repeat("x", 60)
		if i < 4 {
			pieces, value = 50000, ""
		}
		labels := map[string]string{}
		for n := range pieces {
			labels[fmt.Sprintf("%05x", n)] = value
		}
		name := fmt.Sprintf("agent-test-%d", i)
		_ = claims.Delete(ctx, name, metav1.DeleteOptions{})
		made, err := claims.Create(ctx, &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
			Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
				Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "vgpu.cgpu.io"}}}}}},
			metav1.CreateOptions{})
		must(t, err)
		t.Cleanup(func() { _ = claims.Delete(context.Background(), name, metav1.DeleteOptions{}) })
		share := types.UID(fmt.Sprintf("4a3d8f1e-0000-4000-8000-0000000000%02d", i))
		made.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{
				Request: "gpu", Driver: dra.DriverName, Pool: node, Device: gpu, ShareID: &share,
				ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{
					"memory": resource.MustParse("20Mi"), "cores": resource.MustParse("0"), "containers": resource.MustParse("1")}}}}}
		made, err = claims.UpdateStatus(ctx, made, metav1.UpdateOptions{})
		must(t, err)
		if made.Size() < 1<<20 {
			t.Errorf("claim %d has %d bytes, want a megabyte", i, made.Size())
		}
		ask[i%2] = append(ask[i%2], &drapb.Claim{Namespace: made.Namespace, Name: name, Uid: string(made.UID)})
	}
	var pods sync.WaitGroup
	for _, list := range ask {
		pods.Go(func() {
			answer, err := drapb.NewDRAPluginClient(conn).NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: list})
			if err != nil {
				t.Error(err)
				return
			}
			for _, c := range list {
				if one := answer.Claims[c.Uid]; one == nil || one.Error != "" || len(one.Devices) != 1 {
					t.Errorf("claim %s: %v", c.Name, one)
				}
			}
		})
	}
	pods.Wait()
}

// hostileKubelet serves the kubelet's PodResources below a folder, with as many containers as authors of pods like, and no registration.
// It counts lists.
func hostileKubelet(t *testing.T, folder string) *atomic.Int32 {
	t.Helper()
	k := &hostileLister{}
	for i := range 27 {
		p := &podresources.PodResources{Name: fmt.Sprint("hostile-", i), Namespace: "a"}
		for n := range 9000 {
			p.Containers = append(p.Containers, &podresources.ContainerResources{Name: fmt.Sprintf("%063d", n)})
		}
		k.list.PodResources = append(k.list.PodResources, p)
	}
	g := grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(g, k)
	t.Cleanup(g.Stop)
	for _, path := range []string{"pod-resources/kubelet.sock", "device-plugins/kubelet.sock"} {
		path = filepath.Join(folder, path)
		must(t, os.MkdirAll(filepath.Dir(path), 0o700))
		l, err := net.Listen("unix", path)
		must(t, err)
		go func() { _ = g.Serve(l) }()
	}
	return &k.asked
}

type hostileLister struct {
	podresources.UnimplementedPodResourcesListerServer
	list  podresources.ListPodResourcesResponse
	asked atomic.Int32
}

func (k *hostileLister) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	k.asked.Add(1)
	return &k.list, nil
}

// rights makes the role of docs/internals/agent.md and binds it to the agent's service account.
func rights(ctx context.Context, t *testing.T, client kubernetes.Interface) {
	t.Helper()
	role := &rbac.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "agent-test"}, Rules: []rbac.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"list", "watch"}},
		{APIGroups: []string{""}, Resources: []string{"nodes", "namespaces"}, Verbs: []string{"get"}},
		{APIGroups: []string{""}, Resources: []string{"nodes/status"}, Verbs: []string{"patch"}},
		{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
		{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceslices"},
			Verbs: []string{"list", "watch", "create", "update", "delete"}},
		{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceclaims"}, Verbs: []string{"get"}}}}
	binding := &rbac.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "agent-test"},
		RoleRef:  rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: "agent-test"},
		Subjects: []rbac.Subject{{Kind: "ServiceAccount", Namespace: "cgpu-system", Name: "agent-test"}}}
	_, err := client.RbacV1().ClusterRoles().Create(ctx, role, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		_, err = client.RbacV1().ClusterRoles().Update(ctx, role, metav1.UpdateOptions{})
	}
	must(t, err)
	if _, err = client.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil &&
		!apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
}

// restricted is a kubeconfig by which the administrator acts as the agent's service account, and can do what that can.
func restricted(t *testing.T, admin, dir string) string {
	t.Helper()
	c, err := clientcmd.LoadFromFile(admin)
	must(t, err)
	for _, u := range c.AuthInfos {
		u.Impersonate = "system:serviceaccount:cgpu-system:agent-test"
	}
	file := filepath.Join(dir, "kubeconfig")
	must(t, clientcmd.WriteToFile(*c, file))
	return file
}

// bigPod is one as they are in real clusters, with all that the agent does not keep.
func bigPod(namespace, name, node string) *v1.Pod {
	var env []v1.EnvVar
	for i := range 50 {
		env = append(env, v1.EnvVar{Name: fmt.Sprintf("SETTING_%d", i), Value: strings.Repeat("v", 60)})
	}
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"test": "agent"},
		Annotations: map[string]string{"large": strings.Repeat("x", 4096)}},
		Spec: v1.PodSpec{NodeName: node, AutomountServiceAccountToken: new(bool), Containers: []v1.Container{{Name: "main",
			Image: "localhost/none", Env: env}}}}
}

// process is an agent that runs.
type process struct {
	t           *testing.T
	cmd         *exec.Cmd
	log, health string
}

func start(ctx context.Context, t *testing.T, work, runDir, kubeconfig, node string) process {
	t.Helper()
	program := filepath.Join(work, "cgpu-agent")
	build := exec.CommandContext(ctx, "go", "build", "-tags", "grpcnotrace", "-trimpath", "-ldflags", "-s -w", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	kubelet := filepath.Join(work, "kubelet")
	for _, folder := range []string{"device-plugins", "plugins", "plugins_registry"} {
		must(t, os.MkdirAll(filepath.Join(kubelet, folder), 0o700))
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	address := free.Addr().String()
	must(t, free.Close())
	p := process{t: t, log: filepath.Join(work, "log"), health: "http://" + address}
	p.cmd = exec.Command(program, "--node-name", node, "--frontends", "dra,deviceplugin", "--dra-gpus", "1", "--deviceplugin-gpus", "0",
		"--kubeconfig", kubeconfig, "--kubelet-dir", kubelet, "--cdi-dir", filepath.Join(work, "cdi"), "--health-address", address)
	p.cmd.Env = append(os.Environ(), "CGPU_RUN_DIR="+runDir)
	log, err := os.Create(p.log)
	must(t, err)
	p.cmd.Stderr = log
	must(t, p.cmd.Start())
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
		if text, err := os.ReadFile(p.log); err == nil && t.Failed() {
			t.Logf("its log:\n%s", text)
		}
	})
	return p
}

// rss reads a size of /proc/PID/status, in KiB.
func (p process) rss(field string) int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	must(p.t, err)
	for line := range strings.SplitSeq(string(text), "\n") {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			n, err := strconv.Atoi(strings.Fields(rest)[0])
			must(p.t, err)
			return n
		}
	}
	p.t.Fatalf("no %s", field)
	return 0
}

// cpu is the processor time that it has used.
func (p process) cpu() time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	must(p.t, err)
	_, rest, _ := strings.Cut(string(text), ") ")
	f := strings.Fields(rest)
	user, err1 := strconv.Atoi(f[11])
	system, err2 := strconv.Atoi(f[12])
	must(p.t, errors.Join(err1, err2))
	return time.Duration(user+system) * 10 * time.Millisecond
}

func get(url string) int {
	r, err := http.Get(url)
	if err != nil {
		return 0
	}
	r.Body.Close()
	return r.StatusCode
}
