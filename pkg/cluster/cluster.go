// SPDX-License-Identifier: Apache-2.0

// Package cluster tells from objects of the Kubernetes API who holds what of the cluster's GPUs, and who waits for some. It
// joins both front ends: ResourceSlices and ResourceClaims of the DRA driver, and aliyun.com/gpu-mem of the device plugin,
// with gpushare's annotations. It is pure: kubectl-cgpu fetches, prints, and knows no arithmetic.
//
// What it says is what was promised. What is used only the node's guards know.
package cluster

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/schema"
)

// Driver is the DRA driver whose slices and claims count; pkg/dra is not imported, as it links the node's side.
const Driver = "gpu.cgpu.io"

// Objects are what the API server has.
type Objects struct {
	Nodes   []corev1.Node
	Pods    []corev1.Pod
	Slices  []resourceapi.ResourceSlice
	Claims  []resourceapi.ResourceClaim
	Classes []resourceapi.DeviceClass
	// Unit of aliyun.com/gpu-mem. The API does not tell it; zero: guessed for each node.
	Unit quota.Bytes
}

// Cluster is the accounting. Its JSON form is an interface, under the version of package schema.
type Cluster struct {
	Schema  int       `json:"schema"` // version of docs/json.md
	Nodes   []Node    `json:"nodes"`  // with GPUs, by name
	Pending []Waiting `json:"pending"`
}

// Node is a node that has GPUs.
type Node struct {
	Name    string `json:"name"`
	Address string `json:"address,omitempty"`
	// Promised and Total are the sums of GPUs and Unplaced.
	Promised quota.Bytes `json:"promised_bytes"`
	Total    quota.Bytes `json:"total_bytes"`
	GPUs     []GPU       `json:"gpus"` // by index
	// Unplaced are shares that were promised by the node without saying which GPU: gpushare's "pending".
	Unplaced []Share `json:"unplaced"`
}

// Front ends, as GPU.FrontEnd has them.
const (
	FrontEndDRA          = "dra"
	FrontEndDevicePlugin = "deviceplugin"
)

// GPU is one card of a node.
type GPU struct {
	Index    int         `json:"index"`
	FrontEnd string      `json:"front_end"`        // dra or deviceplugin
	Device   string      `json:"device,omitempty"` // in its pool of DRA
	UUID     string      `json:"uuid,omitempty"`
	Model    string      `json:"model,omitempty"`
	Total    quota.Bytes `json:"total_bytes"`
	Promised quota.Bytes `json:"promised_bytes"` // sum of the shares
	Cores    int64       `json:"cores_percent"`  // sum of the shares'
	// Gone: shares are of it, and nobody offers it any more.
	Gone   bool    `json:"gone,omitempty"`
	Shares []Share `json:"shares"`
}

// Share is what one claim, or one pod without a claim, has of a GPU.
type Share struct {
	Namespace string `json:"namespace"`
	// Claim and ShareID are empty where the device plugin gave it.
	Claim   string `json:"claim,omitempty"`
	ShareID string `json:"share_id,omitempty"`
	// Pods that may use it; none: the claim is allocated and nobody uses it.
	Pods   []string    `json:"pods"`
	Memory quota.Bytes `json:"memory_bytes"`
	Cores  int64       `json:"cores_percent,omitempty"` // of the GPU's time
	Whole  bool        `json:"whole,omitempty"`         // all of the GPU's memory
	// Admin: access for supervision, which takes nothing from others.
	Admin bool `json:"admin,omitempty"`
}

// Waiting is a pod or a claim that wants GPU memory and has none, or cannot start with what it has.
type Waiting struct {
	Kind      string `json:"kind"` // "Pod" or "ResourceClaim"
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Node      string `json:"node,omitempty"`
	Wants     string `json:"wants"`
	Why       string `json:"why"`
}

// Of is the accounting of objects.
func Of(o Objects) Cluster {
	c := accounts{nodes: map[string]*Node{}, devices: map[device]place{}}
	for i := range o.Nodes {
		n := &o.Nodes[i]
		c.nodes[n.Name] = &Node{Name: n.Name, Address: address(n), GPUs: []GPU{}, Unplaced: []Share{}}
	}
	c.slices(o.Slices)
	c.plugins(o)
	c.claims(o.Claims)
	c.pods(o)
	out := Cluster{Schema: schema.Version, Nodes: []Node{}, Pending: waiting(o)}
	for _, n := range c.nodes {
		if len(n.GPUs)+len(n.Unplaced) == 0 {
			continue
		}
		slices.SortStableFunc(n.GPUs, func(a, b GPU) int { return cmp.Or(cmp.Compare(a.Index, b.Index), strings.Compare(a.Device, b.Device)) })
		for g := range n.GPUs {
			sortShares(n.GPUs[g].Shares)
		}
		sortShares(n.Unplaced)
		n.sum()
		out.Nodes = append(out.Nodes, *n)
	}
	slices.SortFunc(out.Nodes, func(a, b Node) int { return strings.Compare(a.Name, b.Name) })
	return out
}

func sortShares(list []Share) {
	slices.SortStableFunc(list, func(a, b Share) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), slices.Compare(a.Pods, b.Pods), strings.Compare(a.Claim, b.Claim))
	})
}

// sum adds up what the node has.
func (n *Node) sum() {
	for _, g := range n.GPUs {
		n.Promised += g.Promised
		n.Total += g.Total
	}
	for _, s := range n.Unplaced {
		n.Promised += s.Memory
	}
}

// accounts is an accounting under way.
type accounts struct {
	nodes   map[string]*Node
	devices map[device]place
}

// device names one of DRA: pools are unique within a driver.
type device struct{ pool, name string }

// place is where a device stands: the GPUs of a node, by position in the list.
type place struct {
	node string
	gpu  int
}

// node is found by name, or made: a slice may outlive its node.
func (c *accounts) node(name string) *Node {
	n, ok := c.nodes[name]
	if !ok {
		n = &Node{Name: name, GPUs: []GPU{}, Unplaced: []Share{}}
		c.nodes[name] = n
	}
	return n
}

func address(n *corev1.Node) string {
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			return a.Address
		}
	}
	return ""
}

// give books a share.
func (g *GPU) give(s Share) {
	g.Shares = append(g.Shares, s)
	if !s.Admin {
		g.Promised += s.Memory
		g.Cores += s.Cores
	}
}
