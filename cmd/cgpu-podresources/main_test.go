// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// kubelet is a server of the PodResources API.
type kubelet struct {
	podresources.UnimplementedPodResourcesListerServer
	pods  []*podresources.PodResources
	all   []*podresources.ContainerDevices
	noGet error
	busy  atomic.Int32 // answers that it refuses first
	hangs bool
}

func (k *kubelet) limited(ctx context.Context) error {
	if k.hangs {
		<-ctx.Done()
		return ctx.Err()
	}
	if k.busy.Add(-1) >= 0 {
		return status.Error(codes.ResourceExhausted, "rejected by rate limit")
	}
	return nil
}

func (k *kubelet) Get(ctx context.Context, r *podresources.GetPodResourcesRequest) (*podresources.GetPodResourcesResponse, error) {
	if err := errors.Join(k.noGet); err != nil {
		return nil, k.noGet
	}
	if err := k.limited(ctx); err != nil {
		return nil, err
	}
	for _, p := range k.pods {
		if p.Namespace == r.PodNamespace && p.Name == r.PodName {
			return &podresources.GetPodResourcesResponse{PodResources: p}, nil
		}
	}
	return nil, fmt.Errorf("pod %s in namespace %s not found", r.PodName, r.PodNamespace)
}

func (k *kubelet) List(ctx context.Context, _ *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	return &podresources.ListPodResourcesResponse{PodResources: k.pods}, k.limited(ctx)
}

func (k *kubelet) GetAllocatableResources(ctx context.Context,
	_ *podresources.AllocatableResourcesRequest) (*podresources.AllocatableResourcesResponse, error) {
	return &podresources.AllocatableResourcesResponse{Devices: k.all}, k.limited(ctx)
}

// serve starts k and returns its socket.
func serve(t testing.TB, k *kubelet) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(server, k)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	return socket
}

// devices are the ids of units from..to of a GPU, each in an entry of its own, as the kubelet tells them.
func devices(resource, uuid string, from, to int) (all []*podresources.ContainerDevices) {
	for n := from; n < to; n++ {
		all = append(all, &podresources.ContainerDevices{ResourceName: resource, DeviceIds: []string{fmt.Sprint(uuid, separator, n)}})
	}
	return all
}

func node() *kubelet {
	container := func(name string, all ...[]*podresources.ContainerDevices) *podresources.ContainerResources {
		c := &podresources.ContainerResources{Name: name}
		for _, d := range all {
			c.Devices = append(c.Devices, d...)
		}
		return c
	}
	return &kubelet{
		pods: []*podresources.PodResources{
			{Namespace: "other", Name: "train", Containers: []*podresources.ContainerResources{container("main",
				devices(memoryResource, "GPU-a", 0, 15))}},
			{Namespace: "ml", Name: "train", Containers: []*podresources.ContainerResources{
				container("main", devices(memoryResource, "GPU-b", 4, 7), devices(percentResource, "x", 0, 30),
					devices("nvidia.com/gpu", "GPU-c", 0, 9)),
				container("side", devices(memoryResource, "GPU-a", 0, 15)),
				container("none"),
			}},
		},
		all: append(append(devices(memoryResource, "GPU-a", 0, 15), devices(memoryResource, "GPU-b", 3, 15)...),
			devices("nvidia.com/gpu", "GPU-c", 0, 99)...),
	}
}

const want = "memory 3\npercent 30\ngpu GPU-a 15\ngpu GPU-b 15\nend\n"

func TestRun(t *testing.T) {
	large := node()
	for n := range 200 { // more than the 4 MiB that gRPC takes by itself
		large.all = append(large.all, devices(memoryResource, fmt.Sprint("GPU-", strings.Repeat("x", 100), n), 0, 200)...)
	}
	foreign := node()
	foreign.all = append(foreign.all, &podresources.ContainerDevices{ResourceName: memoryResource, DeviceIds: []string{"7"}})
	disabled := node()
	disabled.noGet = errors.New("PodResources API Get method disabled")
	old := node()
	old.noGet = status.Error(codes.Unimplemented, "unknown method Get")
	twice := node()
	twice.noGet = old.noGet
	twice.pods = append(twice.pods, &podresources.PodResources{Namespace: "ml", Name: "train"})
	busy := node()
	busy.busy.Store(5)
	for name, tt := range map[string]struct {
		kubelet   *kubelet
		container string
		want      string
		err       string
	}{
		"units":                 {node(), "main", want, ""},
		"the other container":   {node(), "side", "memory 15\npercent 0\ngpu GPU-a 15\ngpu GPU-b 15\nend\n", ""},
		"none":                  {node(), "none", "memory 0\npercent 0\nend\n", ""},
		"no such container":     {node(), "init", "", "container init of pod ml/train is not among"},
		"too often":             {busy, "main", want, ""},
		"Get is disabled":       {disabled, "main", want, ""},
		"Get is not known":      {old, "main", want, ""},
		"two pods of the name":  {twice, "main", "", "2 pods of this node are called ml/train"},
		"another device plugin": {foreign, "main", "", `calls a unit "7", which is not <GPU UUID>-_-<number>`},
		"many units":            {large, "none", "memory 0\npercent 0\nend\n", ""},
	} {
		var out bytes.Buffer
		err := run([]string{serve(t, tt.kubelet), "20s", "ml", "train", tt.container}, &out)
		if out.String() != tt.want || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s: %q, %v", name, out.String(), err)
		}
	}
	if err := run([]string{serve(t, node()), "20s", "ml", "gone", "main"}, &bytes.Buffer{}); err == nil ||
		!strings.Contains(err.Error(), "pod gone in namespace ml not found") {
		t.Error(err)
	}
}

// What all plugins offer, for cgpu doctor.
func TestOffered(t *testing.T) {
	k := node()
	k.all = append(devices("nvidia.com/gpu", "GPU-c", 0, 2),
		&podresources.ContainerDevices{ResourceName: "x.com/odd", DeviceIds: []string{"a b\nend", "c"}},
		&podresources.ContainerDevices{ResourceName: "x.com/none"})
	k.busy.Store(1)
	var out bytes.Buffer
	const want = "nvidia.com/gpu GPU-c-_-0\nnvidia.com/gpu GPU-c-_-1\nx.com/odd a_b_end\nx.com/odd c\nend\n"
	if err := run([]string{serve(t, k), "20s"}, &out); err != nil || out.String() != want {
		t.Errorf("%q, %v", out.String(), err)
	}
}

// Without an answer it ends in time, and with a reason.
func TestNobodyAnswers(t *testing.T) {
	hangs := node()
	hangs.hangs = true
	for socket, want := range map[string]string{
		serve(t, hangs):                       "no answer in time",
		filepath.Join(t.TempDir(), "nowhere"): "nobody answers",
	} {
		err := run([]string{socket, "200ms", "ml", "train", "main"}, &bytes.Buffer{})
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), socket) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	for _, args := range [][]string{nil, {"a", "b"}, {"/s", "1ms", "n"}, {"/s", "soon", "n", "p", "c"}} {
		if run(args, &bytes.Buffer{}) == nil {
			t.Errorf("%q", args)
		}
	}
}

// FuzzCount: ids that a device plugin makes up are counted or refused, and never fewer than there are.
func FuzzCount(f *testing.F) {
	f.Add("GPU-a-_-0", "GPU-a-_-14")
	f.Add("-_-", "GPU a-_-1")
	f.Fuzz(func(t *testing.T, a, b string) {
		mine := []*podresources.ContainerDevices{{ResourceName: memoryResource, DeviceIds: []string{a}}}
		u, err := count(mine, []*podresources.ContainerDevices{{ResourceName: memoryResource, DeviceIds: []string{a, b}}})
		if err != nil {
			return
		}
		sum := 0
		for uuid, n := range u.perGPU {
			if strings.ContainsAny(uuid, " \n") || n < 1 {
				t.Fatalf("%q", u.String())
			}
			sum += n
		}
		if u.memory != 1 || sum < 2 {
			t.Fatalf("%+v", u)
		}
	})
}

// BenchmarkAsk is the whole program, from its start to its end, with a kubelet of 8 GPUs in GiB.
func BenchmarkAsk(b *testing.B) {
	program := filepath.Join(b.TempDir(), "cgpu-podresources")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		b.Fatalf("%v\n%s", err, out)
	}
	k := node()
	for n := range 8 {
		k.all = append(k.all, devices(memoryResource, fmt.Sprintf("GPU-%d0000000-0000-0000-0000-000000000000", n), 0, 140)...)
	}
	socket := serve(b, k)
	for _, way := range []struct {
		name string
		args []string
	}{{"start", nil}, {"ask", []string{socket, "2s", "ml", "train", "main"}}} {
		b.Run(way.name, func(b *testing.B) {
			for b.Loop() {
				if err := exec.Command(program, way.args...).Run(); err != nil && way.args != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
