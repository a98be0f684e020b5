// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// The device plugin's resources, and gpushare's annotation of the GPU.
const (
	resourceMemory  = "aliyun.com/gpu-mem"
	resourcePercent = "aliyun.com/gpu-core.percentage"
	resourceCount   = "aliyun.com/gpu-count"
	annotationIndex = "ALIYUN_COM_GPU_MEM_IDX"
)

// mostGiB is what one GPU may have so that units are GiB. No GPU has a TiB, and none that is for sale less than a GiB, which
// is 1024 in MiB.
const mostGiB = 1024

// plugins makes GPUs of what nodes advertise in units. gpushare knows GPUs by number only, and takes all of a node for equal.
// Where the DRA driver has some of the node's, the plugin's are the rest.
func (c *accounts) plugins(o Objects) {
	for i := range o.Nodes {
		node := &o.Nodes[i]
		units := amount(node.Status.Allocatable, resourceMemory)
		if units <= 0 {
			continue
		}
		count := amount(node.Status.Allocatable, resourceCount)
		if count <= 0 {
			count = amount(node.Status.Capacity, resourceCount)
		}
		count = min(max(count, 1), maxIndex)
		n := c.node(node.Name)
		unit := unitOf(o, units/count)
		for g := range count {
			// What does not divide evenly is the first one's, so that the sum is right.
			share := units / count
			if g == 0 {
				share += units % count
			}
			n.GPUs = append(n.GPUs, GPU{Index: freeIndex(n), FrontEnd: FrontEndDevicePlugin, Total: quota.Bytes(share) * unit, Shares: []Share{}})
		}
	}
}

// unitOf is the size of one, of a node whose GPUs have so many.
func unitOf(o Objects, each int64) quota.Bytes {
	switch {
	case o.Unit > 0:
		return o.Unit
	case each >= mostGiB:
		return quota.MiB
	}
	return quota.GiB
}

// pods books what pods have without claims.
func (c *accounts) pods(o Objects) {
	units := map[string]quota.Bytes{}
	for i := range o.Nodes {
		n := &o.Nodes[i]
		count := max(amount(n.Status.Allocatable, resourceCount), amount(n.Status.Capacity, resourceCount), 1)
		units[n.Name] = unitOf(o, amount(n.Status.Allocatable, resourceMemory)/count)
	}
	for i := range o.Pods {
		p := &o.Pods[i]
		memory := limit(p, resourceMemory)
		if p.Spec.NodeName == "" || finished(p) || memory <= 0 {
			continue
		}
		n := c.node(p.Spec.NodeName)
		unit, ok := units[n.Name]
		if !ok {
			unit = unitOf(o, 0)
		}
		s := Share{Namespace: p.Namespace, Pods: []string{p.Name}, Memory: quota.Bytes(memory) * unit, Cores: limit(p, resourcePercent)}
		g := pluginGPU(n, p.Annotations[annotationIndex])
		if g == nil {
			n.Unplaced = append(n.Unplaced, s)
			continue
		}
		s.Whole = g.Total > 0 && s.Memory >= g.Total
		g.give(s)
	}
}

// pluginGPU is the GPU that an annotation names: its position among those of the plugin. nil where it names none.
func pluginGPU(n *Node, index string) *GPU {
	want, err := strconv.Atoi(index)
	if err != nil || want < 0 {
		return nil
	}
	for i := range n.GPUs {
		if g := &n.GPUs[i]; g.FrontEnd == FrontEndDevicePlugin {
			if want == 0 {
				return g
			}
			want--
		}
	}
	return nil
}

// limit is the sum of the containers' limits. Like gpushare, it leaves init containers out.
func limit(p *corev1.Pod, name corev1.ResourceName) (sum int64) {
	for _, c := range p.Spec.Containers {
		sum += max(amount(c.Resources.Limits, name), 0)
	}
	return sum
}

func amount(list corev1.ResourceList, name corev1.ResourceName) int64 {
	q, ok := list[name]
	if !ok {
		return 0
	}
	return q.Value()
}
