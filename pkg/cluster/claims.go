// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// Names in our slices.
const (
	capacityMemory = "memory"
	capacityCores  = "cores"
)

// slices makes GPUs of the driver's devices. Of a pool only the newest generation counts: while a driver publishes anew,
// both are there.
func (c *accounts) slices(list []resourceapi.ResourceSlice) {
	newest := map[string]int64{}
	for i := range list {
		if s := &list[i].Spec; s.Driver == Driver {
			newest[s.Pool.Name] = max(newest[s.Pool.Name], s.Pool.Generation)
		}
	}
	for i := range list {
		s := &list[i].Spec
		if s.Driver != Driver || s.Pool.Generation != newest[s.Pool.Name] {
			continue
		}
		name := s.Pool.Name
		if s.NodeName != nil {
			name = *s.NodeName
		}
		n := c.node(name)
		for _, d := range s.Devices {
			g := GPU{Index: len(n.GPUs), FrontEnd: FrontEndDRA, Device: d.Name, Shares: []Share{}}
			if a, ok := d.Attributes["index"]; ok && a.IntValue != nil && *a.IntValue >= 0 && *a.IntValue < maxIndex {
				g.Index = int(*a.IntValue)
			}
			if a, ok := d.Attributes["uuid"]; ok && a.StringValue != nil {
				g.UUID = *a.StringValue
			}
			if a, ok := d.Attributes["productName"]; ok && a.StringValue != nil {
				g.Model = *a.StringValue
			}
			if m, ok := d.Capacity[capacityMemory]; ok {
				g.Total = bytesOf(m.Value)
			}
			c.devices[device{s.Pool.Name, d.Name}] = place{name, len(n.GPUs)}
			n.GPUs = append(n.GPUs, g)
		}
	}
}

// maxIndex bounds what is believed of an index: it becomes a column.
const maxIndex = 1024

// claims books what claims were allocated.
func (c *accounts) claims(list []resourceapi.ResourceClaim) {
	for i := range list {
		claim := &list[i]
		if claim.Status.Allocation == nil {
			continue
		}
		var pods []string
		for _, r := range claim.Status.ReservedFor {
			if r.APIGroup == "" && r.Resource == "pods" {
				pods = append(pods, r.Name)
			}
		}
		for _, r := range claim.Status.Allocation.Devices.Results {
			if r.Driver != Driver {
				continue
			}
			g := c.gpu(device{r.Pool, r.Device})
			s := Share{Namespace: claim.Namespace, Claim: claim.Name, Pods: append([]string{}, pods...),
				Admin: r.AdminAccess != nil && *r.AdminAccess}
			if r.ShareID != nil {
				s.ShareID = string(*r.ShareID)
			}
			if m, ok := r.ConsumedCapacity[capacityMemory]; ok {
				s.Memory = bytesOf(m)
			} else {
				s.Memory = g.Total // a device that is not shared is the claim's alone
			}
			if p, ok := r.ConsumedCapacity[capacityCores]; ok {
				s.Cores = max(p.Value(), 0)
			}
			if s.Admin {
				s.Memory, s.Cores = 0, 0
			}
			s.Whole = g.Total > 0 && s.Memory >= g.Total
			g.give(s)
		}
	}
}

// gpu finds a device. One that no slice has is a GPU that is gone, at its pool, which has the node's name.
func (c *accounts) gpu(d device) *GPU {
	p, ok := c.devices[d]
	if !ok {
		n := c.node(d.pool)
		p = place{d.pool, len(n.GPUs)}
		n.GPUs = append(n.GPUs, GPU{Index: freeIndex(n), FrontEnd: FrontEndDRA, Device: d.name, Gone: true, Shares: []Share{}})
		c.devices[d] = p
	}
	return &c.nodes[p.node].GPUs[p.gpu]
}

// freeIndex is the lowest that no GPU of the node has.
func freeIndex(n *Node) int {
	used := map[int]bool{}
	for _, g := range n.GPUs {
		used[g.Index] = true
	}
	i := 0
	for used[i] {
		i++
	}
	return i
}

func bytesOf(q resource.Quantity) quota.Bytes { return quota.Bytes(max(q.Value(), 0)) }

// finished pods hold nothing, whatever their claims and annotations say.
func finished(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}
