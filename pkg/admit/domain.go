// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"strconv"
	"strings"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// join puts the container into the trust domain that it names, or refuses: there the GPU's time is shared by who computes on it, so what
// needs a container to itself cannot be had.
func (a *Ask) join(request *ledger.Request, table *device.Table) error {
	q, r := a.Quota, &request.Record
	if err := a.checkThreads(); err != nil || q.Domain == "" {
		return err
	}
	gpus := len(r.VGPUs)
	if request.Place != nil {
		gpus++
	}
	switch {
	case !table.Config.Domains:
		return q.RefuseDomain("there are no trust domains on this node", "set domains = true in cgpu.toml, or leave it out")
	case r.Preload:
		return q.RefuseDomain("with "+table.Config.Unguarded()+" in cgpu.toml nothing keeps domains apart", "leave it out")
	case a.Pod:
		return q.RefuseDomain("is not for pods yet: a pod's author could name another namespace's domain", "leave it out")
	case gpus != 1 || len(r.Native) > 0:
		return q.RefuseDomain("a domain's MPS server is for one GPU, and the container has others", "ask for a slice of one GPU")
	case !q.DomainServer && (q.Percent != 0 || q.Weight > 1):
		return q.RefuseDomain("the share of the GPU's time is the domain's as a whole, and its MPS server has it",
			"set weight and percentage of cgpu run --domain-server, and leave them out here")
	case q.Priority != quota.PriorityDefault:
		return q.RefuseDomain("a domain has no priority", "leave the priority out")
	}
	r.Domain, r.DomainServer, r.Threads = q.Domain, q.DomainServer, q.Threads
	return nil
}

// checkThreads refuses a part of the multiprocessors that would not count.
func (a *Ask) checkThreads() error {
	q := a.Quota
	if q.Threads == 0 {
		return nil
	}
	if q.Domain == "" || q.DomainServer {
		return q.RefuseThreads("only members of a trust domain compute side by side", "set CGPU_DOMAIN too, or CGPU_PERCENT in its place")
	}
	for _, e := range a.env {
		if own, ok := strings.CutPrefix(e, spec.ThreadsVariable+"="); ok && own != strconv.Itoa(q.Threads) {
			return q.RefuseThreads("disagrees with "+spec.ThreadsVariable+"="+strconv.Quote(own), "set one of them")
		}
	}
	return nil
}
