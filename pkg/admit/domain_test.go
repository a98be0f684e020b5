// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"cmp"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

// TestDomain: a container is in a trust domain where the node has them, and what it asks for can be had there.
func TestDomain(t *testing.T) {
	const pod = `"io.kubernetes.cri.container-type":"container"`
	for _, c := range []struct {
		name        string
		off         bool
		enforcement string
		annotations string
		env         []string
		refused     string
		names       string // the variable that is refused; empty: CGPU_DOMAIN
		threads     int
	}{
		{name: "a member", env: []string{"CGPU_GPUS=0"}},
		{name: "one that is placed"},
		{name: "domains are off", off: true, refused: "there are no trust domains on this node; set domains = true"},
		{name: "no guard", enforcement: device.EnforcePreload, refused: "nothing keeps domains apart"},
		{name: "a pod", annotations: pod, refused: "not for pods"},
		{name: "two GPUs", env: []string{"CGPU_GPUS=0,1"}, refused: "is for one GPU"},
		{name: "a whole GPU beside", env: []string{"CGPU_GPUS=0", "NVIDIA_VISIBLE_DEVICES=1"}, refused: "is for one GPU"},
		{name: "a weight", env: []string{"CGPU_WEIGHT=2"}, refused: "the domain's as a whole"},
		{name: "a percentage", env: []string{"CGPU_PERCENT=20"}, refused: "the domain's as a whole"},
		{name: "a part of the multiprocessors", env: []string{"CGPU_THREADS=30"}, threads: 30},
		{name: "a part that it says itself", env: []string{"CGPU_THREADS=30", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30"}, threads: 30},
		{name: "two parts", env: []string{"CGPU_THREADS=30", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=60"},
			refused: `disagrees with CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="60"`, names: "CGPU_THREADS"},
		{name: "a priority", env: []string{"ALIYUN_COM_GPU_HIGH_PRIO=1"}, refused: "has no priority"},
	} {
		t.Run(c.name, func(t *testing.T) {
			node := table()
			node.Config.Domains, node.Config.Enforcement = !c.off, c.enforcement
			a := read(t, c.annotations, append(c.env, "CGPU_MEM=1", "CGPU_DOMAIN=team")...)
			req, err := a.Reservation(ledger.Record{ID: "x", Nonce: "n"}, node, "/run/cgpu")
			switch {
			case c.refused == "" && (err != nil || req.Record.Domain != "team" || req.Record.DomainServer || req.Record.Threads != c.threads):
				t.Errorf("%+v, %v", req.Record, err)
			case c.refused != "" && (err == nil || !strings.Contains(err.Error(), c.refused) || !strings.Contains(err.Error(), cmp.Or(c.names, "CGPU_DOMAIN"))):
				t.Errorf("%v, want %q", err, c.refused)
			}
		})
	}
}

// TestThreadsAlone: without a domain nobody computes beside the container.
func TestThreadsAlone(t *testing.T) {
	a := read(t, "", "CGPU_MEM=1", "CGPU_THREADS=30")
	_, err := a.Reservation(ledger.Record{ID: "x", Nonce: "n"}, table(), "/run/cgpu")
	if err == nil || !strings.Contains(err.Error(), "CGPU_THREADS") || !strings.Contains(err.Error(), "set CGPU_DOMAIN too") {
		t.Error(err)
	}
}
