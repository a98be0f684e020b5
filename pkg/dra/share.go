// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opencgpu/cgpu/pkg/alloc"
	"github.com/opencgpu/cgpu/pkg/api/v1alpha1"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// allocated is one result of a claim's allocation with the share that comes of it.
type allocated struct {
	request, device string
	shareID         *types.UID
	share           alloc.Share
}

// node is what a claim's allocation is checked against.
type node struct {
	name  string
	table *device.Table
	ours  func(device.GPU) bool
	cards map[string]sched.Card // settings of GPUs, by UUID
}

// shares are those of an allocated claim that this node's driver has to prepare. Nothing in the API object is
// believed that would be more than a GPU: others than the scheduler may write a claim's status.
func (n node) shares(claim *resourceapi.ResourceClaim) ([]allocated, error) {
	if err := isUID(claim.UID); err != nil {
		return nil, fmt.Errorf("uid: %w", err)
	}
	if claim.Status.Allocation == nil {
		return nil, errors.New("is not allocated")
	}
	devices := claim.Status.Allocation.Devices
	if len(devices.Results) > alloc.MaxShares {
		return nil, fmt.Errorf("has %d devices, at most %d are prepared", len(devices.Results), alloc.MaxShares)
	}
	var list []allocated
	for i := range devices.Results {
		r := &devices.Results[i]
		if r.Driver != DriverName {
			continue
		}
		s, err := n.share(claim.UID, r, askedOf(r.Request, claim.Spec.Devices.Requests), devices.Config)
		if err != nil {
			return nil, fmt.Errorf("request %s: %w", r.Request, err)
		}
		if slices.ContainsFunc(list, func(a allocated) bool { return a.share.ID == s.ID }) {
			return nil, fmt.Errorf("request %s: share %s occurs twice", r.Request, s.ID)
		}
		// A container has one share of a GPU. The runtime would refuse one that names the whole claim, again and again; which containers
		// name which requests the kubelet does not say.
		if i := slices.IndexFunc(list, func(a allocated) bool { return a.share.UUID == s.UUID }); i >= 0 {
			return nil, fmt.Errorf("requests %s and %s have shares of the same GPU, %s: ask for one share of their sum, for two GPUs "+
				"(constraint distinctAttribute: %s/uuid), or, where each is another container's, by two claims", list[i].request, r.Request,
				r.Device, DriverName)
		}
		list = append(list, allocated{r.Request, r.Device, r.ShareID, s})
	}
	return list, nil
}

// asked is what a claim's own request says. It is its author's word, but can never change, so it tells what the scheduler went by
// whatever the node's settings have become since.
type asked struct {
	whole  bool // a whole GPU, which nobody else has
	memory bool // so much memory; without it the scheduler counted all that there was
}

// askedOf finds the request of a result, which is "request" or "request/subrequest".
func askedOf(request string, requests []resourceapi.DeviceRequest) asked {
	of := func(class string, capacity *resourceapi.CapacityRequirements) asked {
		memory := false
		if capacity != nil {
			for _, name := range []resourceapi.QualifiedName{capacityMemory, DriverName + "/" + capacityMemory} {
				_, ok := capacity.Requests[name]
				memory = memory || ok
			}
		}
		return asked{whole: class == WholeClass && !memory, memory: memory}
	}
	main, sub, _ := strings.Cut(request, "/")
	for _, r := range requests {
		if r.Name != main {
			continue
		}
		if r.Exactly != nil && sub == "" {
			return of(r.Exactly.DeviceClassName, r.Exactly.Capacity)
		}
		for _, s := range r.FirstAvailable {
			if s.Name == sub {
				return of(s.DeviceClassName, s.Capacity)
			}
		}
	}
	return asked{memory: true}
}

func (n node) share(claim types.UID, r *resourceapi.DeviceRequestAllocationResult, asked asked,
	configs []resourceapi.DeviceAllocationConfiguration) (alloc.Share, error) {
	fault := func(err error) (alloc.Share, error) { return alloc.Share{}, err }
	if r.Pool != n.name {
		return fault(fmt.Errorf("pool %s is not of node %s", r.Pool, n.name))
	}
	if r.AdminAccess != nil && *r.AdminAccess {
		return fault(errors.New("adminAccess: is not served, because a container with it would have a GPU that nobody counts: use cgpu " +
			"smi or the metrics"))
	}
	i := slices.IndexFunc(n.table.GPUs, func(g device.GPU) bool { return deviceName(g) == r.Device && (n.ours == nil || n.ours(g)) })
	if i < 0 {
		return fault(fmt.Errorf("device %s: the node has no such GPU any more: delete the pod, so that it is placed anew", r.Device))
	}
	g := n.table.GPUs[i]
	config, err := configOf(r.Request, configs)
	if err != nil {
		return fault(err)
	}
	s := alloc.Share{ID: string(claim) + "/" + r.Device, UUID: g.UUID, Containers: 1}
	s.Priority = quota.PriorityDefault
	var used consumption
	if r.ShareID == nil {
		// A device that several claims may share has a share ID in each. Without one the API server or the scheduler does
		// not know shares (DRAConsumableCapacity is off), and this claim has the device alone.
		if len(r.ConsumedCapacity) != 0 {
			return fault(errors.New("consumedCapacity is there, but no shareID"))
		}
		used = consumption{memory: g.Memory, containers: 1}
		if config.Percent != nil {
			used.cores = *config.Percent
		}
		if config.Containers != nil {
			used.containers = *config.Containers
		}
	} else {
		if err := isUID(*r.ShareID); err != nil {
			return fault(fmt.Errorf("shareID: %w", err))
		}
		s.ID = string(claim) + "/" + string(*r.ShareID)
		if used, err = consumed(r.ConsumedCapacity); err != nil {
			return fault(err)
		}
	}
	if err := divide(&s, used, asked, config, g.Memory.FloorMiB()); err != nil {
		return fault(err)
	}
	if card := cardOf(n.table.Config, g, n.cards); card.Policy == sched.PolicyFixed && s.Percent == 0 && s.Weight > 1 &&
		s.Priority != quota.PriorityHigh {
		return fault(fmt.Errorf("%s weight: under policy fixed, which GPU %d has, a weight is a hard cap, and the claim has none of \"cores\": "+
			"request some, and leave weight out", v1alpha1.Kind, g.Index))
	}
	// What cgpu-runtime could not read would be found out only when the container starts.
	if _, err := alloc.Parse(s.Text()); err != nil {
		return fault(err)
	}
	return s, nil
}

func whole(s alloc.Share) alloc.Share {
	w := alloc.Share{ID: s.ID, UUID: s.UUID, Whole: true, Containers: 1}
	w.Priority = quota.PriorityDefault
	return w
}

// consumption is what a share takes of a GPU's capacities.
type consumption struct {
	memory            quota.Bytes
	cores, containers int64
}

// consumed reads the capacities within the bounds that the slices have; a scheduler that knows them writes nothing else.
func consumed(c map[resourceapi.QualifiedName]resource.Quantity) (consumption, error) {
	bounded := func(name resourceapi.QualifiedName, least, most int64) (int64, error) {
		q, ok := c[name]
		if !ok {
			// Names without a domain are the driver's own, and may be written with it.
			q, ok = c[DriverName+"/"+name]
		}
		if !ok {
			return 0, fmt.Errorf("consumedCapacity: %s is missing: was the claim allocated by an older driver? Delete the pod, so that it is "+
				"placed anew", name)
		}
		if q.Cmp(*resource.NewQuantity(least, q.Format)) < 0 || q.Cmp(*resource.NewQuantity(most, q.Format)) > 0 {
			return 0, fmt.Errorf("consumedCapacity: %s: %s is not within %d and %d", name, &q, least, most)
		}
		n := q.Value()
		if q.Cmp(*resource.NewQuantity(n, q.Format)) < 0 {
			n-- // Value rounds up, and nobody gets more than was counted
		}
		return n, nil
	}
	memory, err := bounded(capacityMemory, int64(quota.MiB), 1<<62)
	if err != nil {
		return consumption{}, err
	}
	cores, err := bounded(capacityCores, 0, quota.MaxPercent)
	if err != nil {
		return consumption{}, err
	}
	containers, err := bounded(capacityContainers, 1, 1<<20)
	if err != nil {
		return consumption{}, err
	}
	return consumption{quota.Bytes(memory), cores, containers}, nil
}

// divide sets in s what one container gets of what the claim consumes.
//
// That a claim has consumed all memory does not make it a whole GPU: what "all" was when the scheduler counted is not known any
// more once overcommit or the card's memory is another, and a GPU without limits must not come of an error in that. So only
// who asked for a whole GPU gets one.
func divide(s *alloc.Share, used consumption, asked asked, config *v1alpha1.VGPUConfig, card quota.Bytes) error {
	containers := min(used.containers, v1alpha1.MaxContainers)
	if config.Containers != nil {
		if *config.Containers > used.containers {
			return fmt.Errorf("%s containers: %d: the claim has %d of the GPU's capacity \"containers\": request more of it",
				v1alpha1.Kind, *config.Containers, used.containers)
		}
		containers = *config.Containers
	}
	percent := used.cores
	if config.Percent != nil {
		if *config.Percent > used.cores {
			return fmt.Errorf("%s percent: %d: the claim has %d of the GPU's capacity \"cores\": request more of it",
				v1alpha1.Kind, *config.Percent, used.cores)
		}
		percent = *config.Percent
	}
	spill := quota.Bytes(config.Spill.Value()).FloorMiB()
	if asked.whole && containers == 1 && config.Percent == nil && spill == 0 {
		if config.Domain != nil {
			return fmt.Errorf("%s domain: %q: is for shares of a GPU, and this is all of it: ask for some memory of it",
				v1alpha1.Kind, *config.Domain)
		}
		*s = whole(*s)
		return nil
	}
	if config.Domain != nil {
		s.Domain = *config.Domain
	}
	memory := used.memory
	if !asked.memory {
		// All that is promised of the GPU was counted; one container can have no more of it than there is.
		memory = min(memory, card*quota.Bytes(containers))
	}
	s.Containers = int(containers)
	s.Limit = (memory / quota.Bytes(containers)).FloorMiB()
	switch {
	case s.Limit > card:
		return fmt.Errorf("memory %v for one container is more than the GPU has, %v: request less", s.Limit, card)
	case s.Limit < quota.MiB:
		return fmt.Errorf("memory %v among %d containers is less than 1MiB for each: request more", used.memory, containers)
	case spill > 0 && spill/quota.Bytes(containers) < quota.MiB:
		return fmt.Errorf("%s spill: %v among %d containers is less than 1MiB for each", v1alpha1.Kind, spill, containers)
	case percent > 0 && percent < containers:
		return fmt.Errorf("%d of \"cores\" among %d containers is less than 1 for each: request more, or none", percent, containers)
	}
	s.Percent = int(percent / containers)
	// One container in place of several must get no more than they do together.
	s.Weight = int(max(*config.Weight/containers, 1))
	s.Spill = (spill / quota.Bytes(containers)).FloorMiB()
	var err error
	s.Priority, err = quota.ParsePriority(*config.Priority)
	return err
}

// configOf merges what classes and claim say of a request: a claim's word counts more than a class's, and a later more than
// an earlier.
func configOf(request string, configs []resourceapi.DeviceAllocationConfiguration) (*v1alpha1.VGPUConfig, error) {
	merged := new(v1alpha1.VGPUConfig)
	for _, source := range []resourceapi.AllocationConfigSource{resourceapi.AllocationConfigSourceClass,
		resourceapi.AllocationConfigSourceClaim} {
		for i, c := range configs {
			if c.Source != source || c.Opaque == nil || c.Opaque.Driver != DriverName || !applies(c.Requests, request) {
				continue
			}
			one, err := v1alpha1.Decode(c.Opaque.Parameters.Raw)
			if err != nil {
				return nil, fmt.Errorf("config %d (%s): %w", i, source, err)
			}
			merged.Override(one)
		}
	}
	merged.Default()
	return merged, nil
}

// applies tells whether a configuration for these requests is for a result's request, which is "request" or
// "request/subrequest". The name of a request stands for all of its subrequests.
func applies(requests []string, request string) bool {
	main, _, _ := strings.Cut(request, "/")
	return len(requests) == 0 || slices.Contains(requests, request) || slices.Contains(requests, main)
}

// isUID checks what becomes a part of a file's name.
func isUID(uid types.UID) error {
	if len(uid) == 0 || len(uid) > 64 {
		return fmt.Errorf("has %d bytes", len(uid))
	}
	for _, c := range []byte(uid) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' || uid[0] == '-' || uid[len(uid)-1] == '-' {
			return fmt.Errorf("%.80q is no UID", uid)
		}
	}
	return nil
}
