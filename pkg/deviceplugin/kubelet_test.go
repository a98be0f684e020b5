// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// kubelet is the part of the kubelet that a device plugin meets: the registration server and the device manager, with its
// order of things (pkg/kubelet/cm/devicemanager/manager.go of Kubernetes 1.36): one pod at a time, init containers first,
// whose devices the containers after them get first; then what the plugin prefers; then anything. Resources of a container,
// and devices of a set, come in an order by chance.
type kubelet struct {
	t   *testing.T
	dir string // …/device-plugins

	admission sync.Mutex
	mu        sync.Mutex
	servers   []*grpc.Server
	conns     []*grpc.ClientConn
	endpoints map[string]pluginapi.DevicePluginClient
	healthy   map[string]map[string]bool
	unhealthy map[string]map[string]bool
	registers int
	// deaf: the preference is not asked for, as before Kubernetes 1.19.
	deaf bool
	// The checkpoint: it stays over stop and start.
	pods map[types.UID]*booking
}

type booking struct {
	pod     *corev1.Pod
	devices map[string]map[string][]string // container, resource
	answers map[string][]*pluginapi.ContainerAllocateResponse
}

func newKubelet(t *testing.T) *kubelet {
	t.Helper()
	root, err := os.MkdirTemp("", "dp") // t.TempDir may be longer than a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	k := &kubelet{t: t, dir: filepath.Join(root, "device-plugins"), pods: map[types.UID]*booking{}}
	for _, d := range []string{k.dir, filepath.Join(root, "pod-resources")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(k.stop)
	return k
}

func (k *kubelet) start() {
	k.t.Helper()
	entries, err := os.ReadDir(k.dir)
	if err != nil {
		k.t.Fatal(err)
	}
	for _, e := range entries {
		if e.Type()&os.ModeSocket != 0 {
			os.Remove(filepath.Join(k.dir, e.Name()))
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.endpoints, k.healthy, k.unhealthy = map[string]pluginapi.DevicePluginClient{}, map[string]map[string]bool{}, map[string]map[string]bool{}
	for path, register := range map[string]func(*grpc.Server){
		filepath.Join(k.dir, "kubelet.sock"): func(g *grpc.Server) {
			pluginapi.RegisterRegistrationServer(g,
				registration{k: k})
		},
		filepath.Join(k.dir, "..", "pod-resources", "kubelet.sock"): func(g *grpc.Server) {
			podresources.RegisterPodResourcesListerServer(g,
				lister{k: k})
		},
	} {
		os.Remove(path)
		l, err := net.Listen("unix", path)
		if err != nil {
			k.t.Fatal(err)
		}
		g := grpc.NewServer()
		register(g)
		go g.Serve(l)
		k.servers = append(k.servers, g)
	}
}

func (k *kubelet) stop() {
	k.mu.Lock()
	servers, conns := k.servers, k.conns
	k.servers, k.conns = nil, nil
	k.mu.Unlock()
	for _, g := range servers {
		g.Stop()
	}
	for _, c := range conns {
		c.Close()
	}
}

type registration struct {
	pluginapi.UnimplementedRegistrationServer
	k *kubelet
}

func (r registration) Register(_ context.Context, q *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	conn, err := dial(filepath.Join(r.k.dir, q.Endpoint))
	if err != nil {
		return nil, err
	}
	client := pluginapi.NewDevicePluginClient(conn)
	stream, err := client.ListAndWatch(context.Background(), &pluginapi.Empty{})
	if err != nil {
		return nil, err
	}
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	r.k.conns = append(r.k.conns, conn)
	r.k.endpoints[q.ResourceName] = client
	r.k.registers++
	go func() {
		for {
			list, err := stream.Recv()
			if err != nil {
				return
			}
			r.k.mu.Lock()
			good, bad := map[string]bool{}, map[string]bool{}
			for _, d := range list.Devices {
				if d.Health == pluginapi.Healthy {
					good[d.ID] = true
				} else {
					bad[d.ID] = true
				}
			}
			r.k.healthy[q.ResourceName], r.k.unhealthy[q.ResourceName] = good, bad
			r.k.mu.Unlock()
		}
	}()
	return &pluginapi.Empty{}, nil
}

type lister struct {
	podresources.UnimplementedPodResourcesListerServer
	k *kubelet
}

func (l lister) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	l.k.mu.Lock()
	defer l.k.mu.Unlock()
	answer := &podresources.ListPodResourcesResponse{}
	for _, b := range l.k.pods {
		one := &podresources.PodResources{Name: b.pod.Name, Namespace: b.pod.Namespace}
		for _, c := range b.pod.Spec.Containers {
			r := &podresources.ContainerResources{Name: c.Name}
			for resource, ids := range b.devices[c.Name] {
				r.Devices = append(r.Devices, &podresources.ContainerDevices{ResourceName: resource, DeviceIds: ids})
			}
			one.Containers = append(one.Containers, r)
		}
		answer.PodResources = append(answer.PodResources, one)
	}
	return answer, nil
}

// capacity is how many healthy and unhealthy devices the kubelet knows.
func (k *kubelet) capacity(resource string) (healthy, unhealthy int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.healthy[resource]), len(k.unhealthy[resource])
}

// until waits for the kubelet to know so many devices.
func (k *kubelet) until(resource string, healthy, unhealthy int) {
	k.t.Helper()
	eventually(k.t, func() string {
		if h, u := k.capacity(resource); h != healthy || u != unhealthy {
			return fmt.Sprintf("%s: %d healthy, %d unhealthy, want %d and %d", resource, h, u, healthy, unhealthy)
		}
		return ""
	})
}

func eventually(t *testing.T, why func() string) {
	t.Helper()
	end := time.Now().Add(time.Minute)
	for why() != "" {
		if time.Now().After(end) {
			t.Fatal(why())
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// admit is the admission of a pod; a refused pod keeps nothing.
func (k *kubelet) admit(pod *corev1.Pod) error {
	k.admission.Lock()
	defer k.admission.Unlock()
	k.mu.Lock()
	b := k.pods[pod.UID]
	if b == nil {
		b = &booking{pod: pod, devices: map[string]map[string][]string{}, answers: map[string][]*pluginapi.ContainerAllocateResponse{}}
		k.pods[pod.UID] = b
	}
	k.mu.Unlock()
	reusable := map[string][]string{}
	for i, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		if err := k.admitContainer(b, c, reusable); err != nil {
			k.remove(pod)
			return err
		}
		for resource, ids := range b.devices[c.Name] {
			if i < len(pod.Spec.InitContainers) {
				reusable[resource] = union(reusable[resource], ids)
			} else {
				reusable[resource] = slices.DeleteFunc(reusable[resource], func(id string) bool { return slices.Contains(ids, id) })
			}
		}
	}
	return nil
}

func (k *kubelet) remove(pod *corev1.Pod) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.pods, pod.UID)
}

func (k *kubelet) admitContainer(b *booking, c corev1.Container, reusable map[string][]string) error {
	for name, q := range c.Resources.Limits {
		resource, needed := string(name), int(q.Value())
		k.mu.Lock()
		endpoint := k.endpoints[resource]
		if endpoint == nil {
			k.mu.Unlock()
			continue
		}
		if b.devices[c.Name][resource] != nil {
			gone := slices.ContainsFunc(b.devices[c.Name][resource], func(id string) bool { return !k.healthy[resource][id] })
			k.mu.Unlock()
			if gone {
				return fmt.Errorf("previously allocated devices are no longer healthy; cannot allocate unhealthy devices %s", resource)
			}
			continue // booked before a restart
		}
		used := map[string]bool{}
		for _, other := range k.pods {
			for _, of := range other.devices {
				for _, id := range of[resource] {
					used[id] = true
				}
			}
		}
		var available []string
		for id := range k.healthy[resource] {
			if !used[id] {
				available = append(available, id)
			}
		}
		k.mu.Unlock()

		var taken []string
		have := map[string]bool{}
		take := func(ids []string) {
			for _, id := range ids {
				if len(taken) < needed && !have[id] {
					taken, have[id] = append(taken, id), true
				}
			}
		}
		take(shuffled(reusable[resource]))
		if len(taken) < needed {
			if len(available) < needed-len(taken) {
				return fmt.Errorf("requested number of devices unavailable for %s", resource)
			}
			if !k.deaf {
				p, err := endpoint.GetPreferredAllocation(context.Background(),
					&pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{
						AvailableDeviceIDs: union(available, taken), MustIncludeDeviceIDs: taken, AllocationSize: int32(needed),
					}}})
				if err != nil {
					return err
				}
				free := map[string]bool{}
				for _, id := range available {
					free[id] = true
				}
				take(slices.DeleteFunc(p.ContainerResponses[0].DeviceIDs, func(id string) bool { return !free[id] }))
			}
			take(shuffled(available))
		}
		r, err := endpoint.Allocate(context.Background(),
			&pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: shuffled(taken)}}})
		if err != nil {
			return err
		}
		if len(r.ContainerResponses) != 1 {
			return errors.New("want one answer")
		}
		k.mu.Lock()
		if b.devices[c.Name] == nil {
			b.devices[c.Name] = map[string][]string{}
		}
		b.devices[c.Name][resource] = taken
		b.answers[c.Name] = append(b.answers[c.Name], r.ContainerResponses[0])
		k.mu.Unlock()
	}
	return nil
}

func shuffled(ids []string) []string {
	ids = slices.Clone(ids)
	rand.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return ids
}

// shares are what the runtime reads of a container.
func (k *kubelet) shares(pod *corev1.Pod, container string) []alloc.Share {
	k.t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	b := k.pods[pod.UID]
	if b == nil {
		return nil
	}
	annotations := map[string]string{}
	for _, a := range b.answers[container] {
		for name, value := range a.Annotations {
			annotations[name] = value
		}
	}
	shares, err := alloc.FromAnnotations(annotations)
	if err != nil {
		k.t.Error(err)
	}
	return shares
}

// check adds up all shares of containers (without init containers, which end before) by GPU.
func (k *kubelet) check(limit map[string]quota.Bytes) (sum map[string]quota.Bytes, percent map[string]int) {
	k.t.Helper()
	k.mu.Lock()
	var pods []*corev1.Pod
	for _, b := range k.pods {
		pods = append(pods, b.pod)
	}
	k.mu.Unlock()
	sum, percent = map[string]quota.Bytes{}, map[string]int{}
	for _, pod := range pods {
		for _, c := range pod.Spec.Containers {
			for _, s := range k.shares(pod, c.Name) {
				sum[s.UUID] += s.Limit
				percent[s.UUID] += s.Percent
			}
		}
	}
	for uuid, bytes := range sum {
		if bytes > limit[uuid] || percent[uuid] > 100 {
			k.t.Errorf("GPU %s is over-booked: %v of %v, %d%%", uuid, bytes, limit[uuid], percent[uuid])
		}
	}
	return sum, percent
}

// table is a node with n GPUs of so much memory.
func table(placement string, memory ...quota.Bytes) *device.Table {
	t := &device.Table{Version: device.TableVersion, Config: device.Config{Overcommit: 1, Placement: placement}}
	for i, m := range memory {
		t.GPUs = append(t.GPUs, device.GPU{Index: i, Minor: i, UUID: uuid(i), BusID: fmt.Sprintf("0000:%02x:00.0", i+1), Name: "Tesla T4",
			Memory: m})
	}
	return t
}

func uuid(i int) string { return fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i) }

const t4 = 15109 * quota.MiB // 14 units of a GiB

// begin starts a plugin on the kubelet's node.
func (k *kubelet) begin(o Options) *Plugin {
	k.t.Helper()
	o.Node, o.KubeletDir = "n", k.dir
	if o.RunDir == "" {
		o.RunDir = filepath.Join(k.dir, "..", "run")
	}
	if c, ok := o.Client.(*fake.Clientset); ok && o.Pods == nil {
		o.Pods = func() ([]Pod, bool) { return podsOf(k.t, c), true }
	}
	p, err := start(context.Background(), o, filepath.Join(k.dir, "..", "sys"))
	if err != nil {
		k.t.Fatal(err)
	}
	k.t.Cleanup(p.Stop)
	return p
}

// podsOf are the pods of an API server as the agent's watch has them (pkg/agent, TestReadPod).
func podsOf(t *testing.T, c *fake.Clientset) (all []Pod) {
	objects, err := c.Tracker().List(corev1.SchemeGroupVersion.WithResource("pods"), corev1.SchemeGroupVersion.WithKind("Pod"), "")
	if err != nil {
		t.Error(err)
		return nil
	}
	for _, p := range objects.(*corev1.PodList).Items {
		if p.Spec.NodeName == "n" && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed {
			all = append(all, podFrom(&p))
		}
	}
	return all
}

func podFrom(p *corev1.Pod) Pod {
	one := Pod{Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), Created: p.CreationTimestamp.Time,
		Waiting: p.Status.Phase == corev1.PodPending,
		Started: p.Status.StartTime != nil, Ending: p.DeletionTimestamp != nil, Annotations: p.Annotations, Count: p.Labels[ResourceCount],
		Memory: podMemory(p)}
	for _, init := range []bool{true, false} {
		list := p.Spec.Containers
		if init {
			list = p.Spec.InitContainers
		}
		for _, c := range list {
			w := Container{Name: c.Name, Init: init}
			for _, resource := range []string{ResourceMemory, ResourcePercent} {
				q := c.Resources.Limits[corev1.ResourceName(resource)]
				w.Set(resource, int(q.Value()))
			}
			if w.Memory+w.Percent > 0 {
				one.Containers = append(one.Containers, w)
			}
		}
	}
	if len(one.Containers) > MaxContainers {
		one.Containers, one.More = one.Containers[:MaxContainers], true
	}
	return one
}

// podMemory is what gpushare counts of a pod.
func podMemory(p *corev1.Pod) (sum int) {
	for _, c := range p.Spec.Containers {
		q := c.Resources.Limits[ResourceMemory]
		sum += int(q.Value())
	}
	return sum
}

// podOf makes a pod with a container for each pair of memory and percent.
func podOf(name string, limits ...[2]int) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "d", UID: types.UID("uid-" + name), CreationTimestamp: metav1.Now(),
			Annotations: map[string]string{}, Labels: map[string]string{}},
		Spec:   corev1.PodSpec{NodeName: "n"},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}
	for i, l := range limits {
		p.Spec.Containers = append(p.Spec.Containers, container(fmt.Sprintf("c%d", i), l[0], l[1]))
	}
	return p
}

func container(name string, memory, percent int) corev1.Container {
	c := corev1.Container{Name: name, Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{}}}
	for r, n := range map[corev1.ResourceName]int{ResourceMemory: memory, ResourcePercent: percent} {
		if n > 0 {
			c.Resources.Limits[r] = *resource.NewQuantity(int64(n), resource.DecimalSI)
		}
	}
	return c
}

func node() *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{}}}
}

// bind puts a pod on the API server as the scheduler leaves it, the extender if index is one.
func bind(t *testing.T, c *fake.Clientset, p *corev1.Pod, index int) {
	t.Helper()
	if index != noIndex {
		p.Annotations[annotationIndex] = fmt.Sprint(index)
		p.Annotations[annotationPod] = fmt.Sprint(podMemory(p))
		p.Annotations[annotationDev] = "14"
		p.Annotations[annotationAssigned] = "false"
		p.Annotations[annotationAssumeTime] = fmt.Sprint(time.Now().UnixNano())
	}
	if _, err := c.CoreV1().Pods(p.Namespace).Create(context.Background(), p, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// started is the kubelet's first status of a pod.
func started(t *testing.T, c *fake.Clientset, p *corev1.Pod, phase corev1.PodPhase) {
	t.Helper()
	now, err := c.CoreV1().Pods(p.Namespace).Get(context.Background(), p.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	start := metav1.Now()
	now.Status.StartTime, now.Status.Phase = &start, phase
	if _, err := c.CoreV1().Pods(p.Namespace).UpdateStatus(context.Background(), now, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}
