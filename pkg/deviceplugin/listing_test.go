// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"bytes"
	"fmt"
	"reflect"
	"runtime"
	"testing"

	"google.golang.org/protobuf/proto"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/opencgpu/cgpu/pkg/wire"
)

func read(t *testing.T, list *podresources.ListPodResourcesResponse) (listing, uint64) {
	t.Helper()
	text, err := proto.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	all := reading{listing{}, Names{}}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if err := all.decode(wire.Of(wire.NewReader(bytes.NewReader(text)), len(text))); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	return all.listing, after.TotalAlloc - before.TotalAlloc
}

// What is read is what the types hold, and no more of it than counts.
func TestListing(t *testing.T) {
	devices := func(resource string, ids ...string) *podresources.ContainerDevices {
		return &podresources.ContainerDevices{ResourceName: resource, DeviceIds: ids,
			Topology: &podresources.TopologyInfo{Nodes: []*podresources.NUMANode{{ID: 1}}}}
	}
	list := &podresources.ListPodResourcesResponse{PodResources: []*podresources.PodResources{
		{Name: "p", Namespace: "n", Containers: []*podresources.ContainerResources{
			{Name: "main", CpuIds: []int64{0, 3}, Memory: []*podresources.ContainerMemory{{MemoryType: "memory", Size: 5}},
				Devices: []*podresources.ContainerDevices{
					devices("nvidia.com/gpu", "x"), devices(ResourceMemory, "a", "b"), devices(ResourceMemory, "c"), devices(ResourcePercent, "d")}},
			{Name: "side", DynamicResources: []*podresources.DynamicResource{{ClaimName: "c"}}},
			{Name: "none", Devices: []*podresources.ContainerDevices{devices(ResourceMemory)}}}},
		{Name: "q", Namespace: "n"}}}
	got, _ := read(t, list)
	want := listing{"n/p": {"main": {ResourceMemory: {"a", "b", "c"}, ResourcePercent: {"d"}}}, "n/q": {}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	for i := range 50 {
		p := &podresources.PodResources{Name: fmt.Sprint("p", i), Namespace: "a"}
		for n := range 6000 {
			p.Containers = append(p.Containers, &podresources.ContainerResources{Name: fmt.Sprint(n)})
		}
		list.PodResources = append(list.PodResources, p)
	}
	// Decoded by the types it would be 48 MiB. The race detector adds some to the 14.
	if got, allocated := read(t, list); len(got) != 52 || allocated > 24<<20 {
		t.Errorf("of 300,000 containers %d pods are kept, for %d KiB", len(got), allocated>>10)
	}
}
