// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"

	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/opencgpu/cgpu/pkg/wire"
)

// listing is what the kubelet says that the containers of its pods have: ids by "namespace/name" of the pod, container and resource.
// It has each pod of the kubelet, from before its admission on, and does not tell of init containers.
type listing map[string]map[string]map[string][]string

// list asks the kubelet (PodResources). In the middle of an admission it holds no lock for that which it needs to answer.
//
// The answer has each container of each pod, and a pod may have some thousands: no bound of its size would be harmless, since who makes
// pods could reach it, and then nobody would be sure of anything. It is read as it comes, so its size costs time and no memory.
func (p *Plugin) list(ctx context.Context) (listing, error) {
	all := reading{listing{}, p.o.Names}
	socket := filepath.Join(p.o.KubeletDir, "..", "pod-resources", kubeletSocket)
	if err := ask(ctx, socket, podresources.PodResourcesLister_List_FullMethodName, all.decode); err != nil {
		return nil, fmt.Errorf("the kubelet's PodResources: %w", err)
	}
	return all.listing, nil
}

// reading is a listing that is being read; the kubelet calls resources as pods do.
type reading struct {
	listing
	names Names
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
	name := make([]byte, 0, maxContainerName) // one for all: a pod has many
	return m.Fields(func(field int, v *wire.Message) error {
		if field != listPods {
			return nil
		}
		pod, namespace := "", ""
		containers := map[string]map[string][]string{}
		err := v.Fields(func(field int, v *wire.Message) (err error) {
			switch field {
			case podName:
				pod, err = v.Text(maxPodName)
			case podNamespace:
				namespace, err = v.Text(maxPodName)
			case podContainers:
				err = l.readDevices(v, name, containers)
			}
			return err
		})
		l.listing[namespace+"/"+pod] = containers
		return err
	})
}

// readDevices reads a ContainerResources, and adds it if it has units of ours. It writes to name.
func (l reading) readDevices(m *wire.Message, name []byte, containers map[string]map[string][]string) error {
	name = name[:0]
	return m.Fields(func(field int, v *wire.Message) (err error) {
		switch field {
		case containerName:
			name, err = v.Append(name[:0], maxContainerName)
		case containerDevices:
			resource := ""
			err = v.Fields(func(field int, v *wire.Message) (err error) {
				switch {
				case field == devicesResource:
					resource, err = v.OneOf(l.names.List())
					resource = l.names.Inside(resource)
				case field == devicesIDs && resource != "":
					var id string
					if id, err = v.Text(maxDevice); containers[string(name)] == nil {
						containers[string(name)] = map[string][]string{}
					}
					has := containers[string(name)]
					has[resource] = append(has[resource], id)
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
