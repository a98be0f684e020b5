// SPDX-License-Identifier: Apache-2.0

// Command cgpu-podresources asks the kubelet how many units of GPU memory a device plugin allocated to a container, for
// cgpu-runtime, which it spares gRPC. Containers of pods = "gpushare" need it; nobody else starts it.
//
//	cgpu-podresources SOCKET TIMEOUT NAMESPACE POD CONTAINER
//
// prints "memory N", "percent N", "gpu UUID N" for each GPU of the plugin, and "end"; or a reason, and ends with status 1.
//
//	cgpu-podresources SOCKET TIMEOUT
//
// is for cgpu doctor: it prints "RESOURCE ID" for each device that a plugin of the node offers, and "end".
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Println(err) // cgpu-runtime shows it
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	if len(args) != 5 && len(args) != 2 {
		return errors.New("cgpu-podresources: want SOCKET TIMEOUT, or SOCKET TIMEOUT NAMESPACE POD CONTAINER")
	}
	timeout, err := time.ParseDuration(args[1])
	if err != nil {
		return fmt.Errorf("cgpu-podresources: timeout: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	socket := args[0]
	// The list of all units of a node can be larger than the 4 MiB that gRPC takes by itself.
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return fmt.Errorf("cgpu-podresources: %s: %w", socket, err)
	}
	defer connection.Close()
	kubelet := podresources.NewPodResourcesListerClient(connection)
	var said string
	if len(args) == 2 {
		said, err = offered(ctx, kubelet)
	} else {
		var u units
		u, err = ask(ctx, kubelet, args[2], args[3], args[4])
		said = u.String()
	}
	if err != nil {
		return fmt.Errorf("%s: %s", socket, told(err))
	}
	_, err = io.WriteString(out, said)
	return err
}

// offered lists all devices of device plugins, each as its plugin calls it.
func offered(ctx context.Context, kubelet podresources.PodResourcesListerClient) (string, error) {
	all, err := allocatable(ctx, kubelet)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, d := range all.GetDevices() {
		for _, id := range d.GetDeviceIds() {
			fmt.Fprintf(&b, "%s %s\n", d.GetResourceName(), strings.Join(strings.Fields(id), "_")) // one line, whatever a plugin thinks of
		}
	}
	return b.String() + "end\n", nil
}

func allocatable(ctx context.Context, kubelet podresources.PodResourcesListerClient) (*podresources.AllocatableResourcesResponse, error) {
	return patiently(ctx, func() (*podresources.AllocatableResourcesResponse, error) {
		return kubelet.GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
	})
}

// told is an error without gRPC's words around it.
func told(err error) string {
	s, ok := status.FromError(err)
	if !ok {
		return err.Error()
	}
	switch s.Code() {
	case codes.DeadlineExceeded:
		return "no answer in time: is the kubelet well?"
	case codes.Unavailable:
		return "nobody answers: is the kubelet running, and is this its socket (pod_resources in cgpu.toml)? " + s.Message()
	}
	return s.Message()
}

// ask asks for the container and, at the same time, for all units of the node.
func ask(ctx context.Context, kubelet podresources.PodResourcesListerClient, namespace, pod, container string) (units, error) {
	type answer struct {
		all *podresources.AllocatableResourcesResponse
		err error
	}
	answers := make(chan answer, 1)
	go func() {
		all, err := allocatable(ctx, kubelet)
		answers <- answer{all, err}
	}()
	mine, err := containerOf(ctx, kubelet, namespace, pod, container)
	if err != nil {
		return units{}, err
	}
	all := <-answers
	if all.err != nil {
		return units{}, all.err
	}
	return count(mine.GetDevices(), all.all.GetDevices())
}

// patiently tries again while the kubelet says that it is asked too often: many pods may start at once.
func patiently[T any](ctx context.Context, call func() (T, error)) (T, error) {
	for {
		answer, err := call()
		if status.Code(err) != codes.ResourceExhausted {
			return answer, err
		}
		select {
		case <-ctx.Done():
			return answer, err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// containerOf finds the container in what the kubelet has allocated. Kubelets before 1.34 may know no Get; they have List. Get
// answers for the pod that came last of those with the name, whose containers are the ones that are started.
func containerOf(ctx context.Context, kubelet podresources.PodResourcesListerClient, namespace, pod,
	container string) (*podresources.ContainerResources, error) {
	got, err := patiently(ctx, func() (*podresources.GetPodResourcesResponse, error) {
		return kubelet.Get(ctx, &podresources.GetPodResourcesRequest{PodNamespace: namespace, PodName: pod})
	})
	pods := []*podresources.PodResources{got.GetPodResources()}
	if code := status.Code(err); code == codes.Unimplemented || code == codes.Unknown && strings.Contains(err.Error(), "disabled") {
		var list *podresources.ListPodResourcesResponse
		list, err = patiently(ctx, func() (*podresources.ListPodResourcesResponse, error) {
			return kubelet.List(ctx, &podresources.ListPodResourcesRequest{})
		})
		pods = list.GetPodResources()
	}
	if err != nil {
		return nil, err
	}
	// The API has no UIDs. A pod that was deleted by force may still end here while another has its name, and which of them
	// asks cannot be told.
	pods = slices.DeleteFunc(pods, func(p *podresources.PodResources) bool { return p.GetNamespace() != namespace || p.GetName() != pod })
	if len(pods) > 1 {
		return nil, fmt.Errorf("%d pods of this node are called %s/%s: one of them was deleted by force and has not ended yet",
			len(pods), namespace, pod)
	}
	for _, p := range pods {
		for _, c := range p.GetContainers() {
			if c.GetName() == container {
				return c, nil
			}
		}
	}
	return nil, fmt.Errorf("container %s of pod %s/%s is not among those it tells of (init containers are not)", container, namespace, pod)
}

// Resources of gpushare's device plugin, and what stands between UUID and number in the ids of its units.
const (
	memoryResource  = "aliyun.com/gpu-mem"
	percentResource = "aliyun.com/gpu-core.percentage"
	separator       = "-_-"
)

// units is what is printed.
type units struct {
	memory, percent int
	perGPU          map[string]int
}

func (u units) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "memory %d\npercent %d\n", u.memory, u.percent)
	for _, uuid := range slices.SortedFunc(maps.Keys(u.perGPU), cmp.Compare[string]) {
		fmt.Fprintf(&b, "gpu %s %d\n", uuid, u.perGPU[uuid])
	}
	return b.String() + "end\n"
}

// count counts a container's units, and those of each GPU. Of those the kubelet tells the healthy ones only, but numbers begin
// at 0: a number that is missing below the highest counts too.
func count(mine, all []*podresources.ContainerDevices) (units, error) {
	u := units{perGPU: map[string]int{}}
	for _, d := range mine {
		switch d.GetResourceName() {
		case memoryResource:
			u.memory += len(d.GetDeviceIds())
		case percentResource:
			u.percent += len(d.GetDeviceIds())
		}
	}
	u.percent = min(u.percent, 100) // of one GPU there is no more
	if u.memory == 0 {
		return u, nil
	}
	counted := map[string]int{}
	for _, d := range all {
		if d.GetResourceName() != memoryResource {
			continue
		}
		for _, id := range d.GetDeviceIds() {
			uuid, number, ok := strings.Cut(id, separator)
			n, err := strconv.Atoi(number)
			if !ok || err != nil || n < 0 || uuid == "" || strings.ContainsAny(uuid, " \n\t") {
				return units{}, fmt.Errorf("the device plugin of %s calls a unit %.80q, which is not <GPU UUID>%s<number>: it is not gpushare's",
					memoryResource, id, separator)
			}
			counted[uuid]++
			u.perGPU[uuid] = max(u.perGPU[uuid], counted[uuid], n+1)
		}
	}
	return u, nil
}
