// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/opencgpu/cgpu/pkg/wire"
)

// listing is what the kubelet says that the containers of its pods have: ids by "namespace/name" of the pod, container and resource.
// It has each pod of the kubelet, from before its admission on, and does not tell of init containers.
type listing map[string]map[string]map[string][]string

// maxListing bounds the kubelet's answer in bytes. Of 250 pods with ten containers each, of 64 processors, it has a megabyte.
const maxListing = 16 << 20

// list asks the kubelet (PodResources). In the middle of an admission it holds no lock for that which it needs to answer.
func (p *Plugin) list(ctx context.Context) (listing, error) {
	conn, err := dial(filepath.Join(p.o.KubeletDir, "..", "pod-resources", kubeletSocket))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	all := reading{listing{}, p.o.Names}
	if err := conn.Invoke(ctx, podresources.PodResourcesLister_List_FullMethodName, &podresources.ListPodResourcesRequest{}, &all,
		grpc.ForceCodecV2(codec{encoding.GetCodecV2("proto")}), grpc.MaxCallRecvMsgSize(maxListing)); err != nil {
		return nil, fmt.Errorf("the kubelet's PodResources: %w", err)
	}
	return all.listing, nil
}

// reading is a listing that is being read; the kubelet calls resources as pods do.
type reading struct {
	listing
	names Names
}

// codec reads a listing off an answer. The answer has each container of each pod, and a pod may have some thousands: 300,000 empty ones are
// 3 MB here, and 48 MB as objects of Go.
type codec struct{ encoding.CodecV2 }

// Unmarshal reads a message.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	all, ok := v.(*reading)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	r := data.Reader()
	defer r.Close()
	return all.decode(wire.Of(wire.NewReader(r), data.Len()))
}

// Numbers of the fields that are read, of k8s.io/kubelet/pkg/apis/podresources/v1/api.proto. TestListing compares with the types.
const (
	listPods                                = 1
	podName, podNamespace, podContainers    = 1, 2, 3
	containerName, containerDevices         = 1, 2
	devicesResource, devicesIDs             = 1, 2
	maxPodName, maxContainerName, maxDevice = 253, 63, 253
)

// decode reads a ListPodResourcesResponse, of which the names come first in each part.
func (l reading) decode(m *wire.Message) error {
	return m.Fields(func(field int, v *wire.Message) error {
		if field != listPods {
			return nil
		}
		name, namespace := "", ""
		containers := map[string]map[string][]string{}
		err := v.Fields(func(field int, v *wire.Message) (err error) {
			switch field {
			case podName:
				name, err = v.Text(maxPodName)
			case podNamespace:
				namespace, err = v.Text(maxPodName)
			case podContainers:
				err = l.readDevices(v, containers)
			}
			return err
		})
		l.listing[namespace+"/"+name] = containers
		return err
	})
}

// readDevices reads a ContainerResources, and adds it if it has units of ours.
func (l reading) readDevices(m *wire.Message, containers map[string]map[string][]string) error {
	name := ""
	return m.Fields(func(field int, v *wire.Message) (err error) {
		switch field {
		case containerName:
			name, err = v.Text(maxContainerName)
		case containerDevices:
			resource := ""
			err = v.Fields(func(field int, v *wire.Message) (err error) {
				switch {
				case field == devicesResource:
					resource, err = v.OneOf(l.names.List())
					resource = l.names.Inside(resource)
				case field == devicesIDs && resource != "":
					var id string
					if id, err = v.Text(maxDevice); containers[name] == nil {
						containers[name] = map[string][]string{}
					}
					containers[name][resource] = append(containers[name][resource], id)
				}
				return err
			})
		}
		return err
	})
}

// holder is the container that a grant was for; empty where the kubelet does not say.
func (l listing) holder(s *lastGrant) (name, container string) {
	for name, containers := range l {
		for container, has := range containers {
			if slices.Contains(has[s.resource], s.id) {
				return name, container
			}
		}
	}
	return "", ""
}
