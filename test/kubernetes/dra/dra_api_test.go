// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package dra

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/dra"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/test/kubernetes/kube"
)

// runtime is a container runtime that takes CDI devices.
type runtime struct {
	cri.UnimplementedRuntimeServiceServer
}

func (runtime) Version(context.Context, *cri.VersionRequest) (*cri.VersionResponse, error) {
	return &cri.VersionResponse{RuntimeName: "containerd", RuntimeVersion: "v2.4.2"}, nil
}

func (runtime) Status(context.Context, *cri.StatusRequest) (*cri.StatusResponse, error) {
	return &cri.StatusResponse{}, nil
}

// table is a node with four T4.
func table() *device.Table {
	t := &device.Table{Version: device.TableVersion, Driver: device.DriverSim, DriverVersion: "580.159.04", Config: config.Default().Settings}
	for i := range 4 {
		t.GPUs = append(t.GPUs, device.GPU{Index: i, UUID: fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i), Minor: i,
			BusID: fmt.Sprintf("0000:%02x:00.0", i+1), Name: "Tesla T4", Memory: 15109 * quota.MiB})
	}
	return t
}

// start runs the driver and waits for its slice.
func start(t *testing.T) (*dra.Driver, dra.Options) {
	t.Helper()
	dir, err := os.MkdirTemp("", "dra")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "cri.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	cri.RegisterRuntimeServiceServer(server, runtime{})
	go server.Serve(listener) //nolint:errcheck // ends with the test
	t.Cleanup(server.Stop)
	o := dra.Options{Node: nodeName, Client: client, CDIDir: filepath.Join(dir, "cdi"), PluginDir: filepath.Join(dir, "p"),
		RegistryDir: filepath.Join(dir, "r"), RunDir: filepath.Join(dir, "run"), Hook: "/usr/local/bin/cgpu-hook",
		CRISocket: socket, Table: table()}
	if err := os.Mkdir(o.RegistryDir, 0o755); err != nil {
		t.Fatal(err)
	}
	d, err := dra.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Stop)
	published(t, 4)
	return d, o
}

func published(t *testing.T, gpus int) {
	t.Helper()
	kube.Until(t, time.Minute, "the slice is published", func() error {
		l, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
		if err != nil || len(l.Items) != 1 || len(l.Items[0].Spec.Devices) != gpus {
			return fmt.Errorf("%v, %+v", err, l)
		}
		for _, d := range l.Items[0].Spec.Devices {
			if d.AllowMultipleAllocations == nil || d.Capacity["memory"].RequestPolicy == nil {
				return fmt.Errorf("the apiserver dropped fields of %+v", d)
			}
		}
		return nil
	})
}

// ask makes a claim and a pod that uses it. index -1 is any GPU.
func ask(t *testing.T, name, class, capacity string, index int) {
	t.Helper()
	selectors := ""
	if index >= 0 {
		selectors = fmt.Sprintf(`, selectors: [{cel: {expression: 'device.attributes["gpu.cgpu.io"].index == %d'}}]`, index)
	}
	if capacity != "" {
		capacity = ", capacity: {requests: {" + capacity + "}}"
	}
	manifest := fmt.Sprintf(`
{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: %[1]s}, spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: %[2]s%[3]s%[4]s}}]}}}
---
{apiVersion: v1, kind: Pod, metadata: {name: %[1]s}, spec: {terminationGracePeriodSeconds: 0, automountServiceAccountToken: false, containers: [{name: c, image: none, resources: {claims: [{name: g}]}}], resourceClaims: [{name: g, resourceClaimName: %[1]s}]}}
`, name, class, selectors, capacity)
	if _, err := kube.Kubectl(dir, manifest, "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { forget(t, name) })
}

// forget takes pod and claim away, as kubelet and controller-manager would together.
func forget(t *testing.T, name string) {
	ctx := context.Background()
	now := int64(0)
	_ = client.CoreV1().Pods("default").Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: &now})
	claims := client.ResourceV1().ResourceClaims("default")
	if c, err := claims.Get(ctx, name, metav1.GetOptions{}); err == nil {
		c.Status.Allocation, c.Status.ReservedFor = nil, nil
		if c, err = claims.UpdateStatus(ctx, c, metav1.UpdateOptions{}); err != nil {
			t.Error(err)
		} else if c.Finalizers = nil; true {
			if _, err := claims.Update(ctx, c, metav1.UpdateOptions{}); err != nil {
				t.Error(err)
			}
		}
		_ = claims.Delete(ctx, name, metav1.DeleteOptions{})
	}
}

func allocated(t *testing.T, name string) resourceapi.DeviceRequestAllocationResult {
	t.Helper()
	var r resourceapi.DeviceRequestAllocationResult
	kube.Until(t, time.Minute, name+" is allocated", func() error {
		c, err := client.ResourceV1().ResourceClaims("default").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if c.Status.Allocation == nil || len(c.Status.ReservedFor) == 0 {
			return errors.New("no allocation")
		}
		r = c.Status.Allocation.Devices.Results[0]
		return nil
	})
	return r
}

func waits(t *testing.T, name string) {
	t.Helper()
	kube.Until(t, time.Minute, name+" waits", func() error {
		p, err := client.CoreV1().Pods("default").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && strings.Contains(c.Message, "cannot allocate all claims") {
				return nil
			}
		}
		return fmt.Errorf("on node %q: %+v", p.Spec.NodeName, p.Status.Conditions)
	})
}

func deviceName(i int) string { return strings.ToLower(table().GPUs[i].UUID) }

func TestScheduling(t *testing.T) {
	apply(t, "base/deviceclasses.yaml")
	start(t)
	const share = `memory: 6Gi, cores: 30`
	for _, name := range []string{"a", "b"} {
		ask(t, name, "vgpu.cgpu.io", share, 0)
		r := allocated(t, name)
		m, c, n := r.ConsumedCapacity["memory"], r.ConsumedCapacity["cores"], r.ConsumedCapacity["containers"]
		if r.Device != deviceName(0) || r.ShareID == nil || m.String() != "6Gi" || c.Value() != 30 || n.Value() != 1 {
			t.Errorf("%s: %+v", name, r)
		}
	}
	ask(t, "c", "vgpu.cgpu.io", share, 0)
	waits(t, "c")
	ask(t, "cores", "vgpu.cgpu.io", `memory: 1Gi, cores: 41`, 0)
	waits(t, "cores")
	ask(t, "whole0", "gpu.cgpu.io", "", 0)
	waits(t, "whole0")
	ask(t, "whole", "gpu.cgpu.io", "", -1)
	r := allocated(t, "whole")
	if m := r.ConsumedCapacity["memory"]; r.Device == deviceName(0) || m.String() != "15109Mi" {
		t.Errorf("whole: %+v", r)
	}
	ask(t, "beside", "vgpu.cgpu.io", `memory: 1Mi`, 1) // first fit: the whole claim has the first free card
	waits(t, "beside")
	forget(t, "a")
	allocated(t, "c")
}

// A card has as many vGPUs as max_inst says, however small.
func TestContainersPerGPU(t *testing.T) {
	apply(t, "base/deviceclasses.yaml")
	start(t)
	for i := range 20 {
		ask(t, fmt.Sprint("n", i), "vgpu.cgpu.io", `memory: 100Mi`, 2)
	}
	for i := range 20 {
		allocated(t, fmt.Sprint("n", i))
	}
	ask(t, "n20", "vgpu.cgpu.io", `memory: 100Mi`, 2)
	waits(t, "n20")
}

// The scheduler counts by the policy that a GPU has just now.
func TestPolicyOfGPU(t *testing.T) {
	apply(t, "base/deviceclasses.yaml")
	_, o := start(t)
	set := func(index int, policy sched.Policy) {
		t.Helper()
		g := table().GPUs[index]
		if _, err := ledger.Open(o.RunDir).SetCard(ledger.GPU{UUID: g.UUID, Index: index, Memory: g.Memory}, table().Config.Card(),
			func(c *sched.Card) error {
				c.Policy, c.MaxInst = policy, 4
				return nil
			}); err != nil {
			t.Fatal(err)
		}
		kube.Until(t, time.Minute, "the slice follows", func() error {
			l, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
			if err != nil || len(l.Items) != 1 {
				return fmt.Errorf("%v, %+v", err, l)
			}
			for _, d := range l.Items[0].Spec.Devices {
				if n := d.Capacity["containers"]; d.Name == deviceName(index) && n.Value.Value() == 4 {
					return nil
				}
			}
			return fmt.Errorf("%+v", l.Items[0].Spec.Devices)
		})
	}
	set(0, sched.PolicyNative)
	set(1, sched.PolicyFair)
	set(2, sched.PolicyFixed)
	for name, c := range map[string]struct {
		capacity string
		index    int
		cores    int64 // -1: it does not fit
	}{
		"native-none": {"memory: 1Gi", 0, 0}, "native": {"memory: 1Gi, cores: 1", 0, -1},
		"fair-none": {"memory: 1Gi", 1, 0}, "fair": {"memory: 1Gi, cores: 25", 1, 25}, "fair-more": {"memory: 1Gi, cores: 26", 1, -1},
		"fixed-none": {"memory: 1Gi", 2, 25}, "fixed": {"memory: 1Gi, cores: 70", 2, 70}, "preempt": {"memory: 1Gi, cores: 100", 3, 100},
	} {
		ask(t, name, "vgpu.cgpu.io", c.capacity, c.index)
		if c.cores < 0 {
			waits(t, name)
			continue
		}
		r := allocated(t, name)
		if n := r.ConsumedCapacity["cores"]; n.Value() != c.cores {
			t.Errorf("%s: %+v", name, r)
		}
	}
	ask(t, "fixed-more", "vgpu.cgpu.io", "memory: 1Gi", 2)
	waits(t, "fixed-more")
}

// Requests that are too large, negative or overflow an int64 when they are rounded neither fit nor make room for others.
func TestOddRequests(t *testing.T) {
	apply(t, "base/deviceclasses.yaml")
	start(t)
	for name, capacity := range map[string]string{"large": `memory: 9223372036854775807`, "larger": `memory: 100Ei`, "more": `memory: 15110Mi`,
		"cores": `memory: 1Gi, cores: 101`, "containers": `memory: 1Gi, containers: 21`} {
		ask(t, name, "vgpu.cgpu.io", capacity, 3)
		waits(t, name)
	}
	ask(t, "negative", "vgpu.cgpu.io", `memory: -1Gi, cores: -50, containers: -3`, 3)
	r := allocated(t, "negative")
	m, c, n := r.ConsumedCapacity["memory"], r.ConsumedCapacity["cores"], r.ConsumedCapacity["containers"]
	if m.String() != "1Mi" || c.Value() != 0 || n.Value() != 1 {
		t.Errorf("negative: %+v", r)
	}
	ask(t, "rest", "vgpu.cgpu.io", `memory: 15108Mi, cores: 100, containers: 19`, 3)
	allocated(t, "rest")
}

// The kubelet's calls, with what the scheduler wrote.
func TestPrepare(t *testing.T) {
	apply(t, "base/deviceclasses.yaml")
	d, o := start(t)
	ask(t, "p", "vgpu.cgpu.io", `memory: 6Gi, cores: 30`, 1)
	r := allocated(t, "p")
	claim, err := client.ResourceV1().ResourceClaims("default").Get(t.Context(), "p", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient("unix:"+filepath.Join(o.PluginDir, dra.DriverName, "dra.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	kubelet := drapb.NewDRAPluginClient(conn)
	claims := []*drapb.Claim{{Namespace: "default", Name: "p", Uid: string(claim.UID)}}
	answer, err := kubelet.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: claims})
	if err != nil {
		t.Fatal(err)
	}
	got := answer.Claims[string(claim.UID)]
	id := fmt.Sprintf("gpu.cgpu.io/share=%s.%s", claim.UID, *r.ShareID)
	if got == nil || got.Error != "" || len(got.Devices) != 1 || got.Devices[0].CdiDeviceIds[0] != id ||
		*got.Devices[0].ShareId != string(*r.ShareID) {
		t.Fatalf("%+v, want %s", got, id)
	}
	files := func() []string { f, _ := filepath.Glob(o.CDIDir + "/*"); return f }
	if len(files()) != 1 {
		t.Fatal(files())
	}
	text, err := os.ReadFile(files()[0])
	if want := fmt.Sprintf("id=%s/%s,uuid=%s,memory=6442450944,percent=30,weight=1", claim.UID, *r.ShareID, table().
		GPUs[1].UUID); err != nil || !strings.Contains(string(text), want) {
		t.Errorf("%v: %s, want %s", err, text, want)
	}
	if _, err := kubelet.NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: claims}); err != nil ||
		len(files()) != 0 {
		t.Errorf("%v, %v", err, files())
	}
	// A GPU that vanished.
	less := table()
	less.GPUs = append(less.GPUs[:1], less.GPUs[2:]...)
	if err := d.Update(t.Context(), less); err != nil {
		t.Fatal(err)
	}
	published(t, 3)
	answer, err = kubelet.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: claims})
	if err != nil || !strings.Contains(answer.Claims[string(claim.UID)].Error, "no such GPU any more") {
		t.Errorf("%v, %+v", err, answer)
	}
	if err := d.Healthy(); err != nil {
		t.Error(err)
	}
}
