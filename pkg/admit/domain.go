// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"strings"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

// join puts the container into the trust domain that it names, or that was allocated with its share. What else a domain asks for its guard
// knows (package domain): this is what a guard does not.
func (a *Ask) join(r *ledger.Record, node *device.Config) error {
	q := a.Quota
	for _, s := range a.Shares {
		if q.Domain == "" {
			q.Domain = s.Domain
		}
	}
	if q.Domain == "" {
		return nil
	}
	if r.Preload {
		return q.RefuseDomain("without a guard nothing keeps domains apart", "leave it out")
	}
	r.Domain, r.DomainServer, r.Threads = q.Domain, q.DomainServer, q.Threads
	if !a.Pod {
		return nil
	}
	// Who writes a pod writes in his namespace, which the engine tells at the beginning of the name.
	namespace, _, _ := strings.Cut(a.name, "/")
	d := node.Domain(q.Domain)
	if !d.Lets(namespace) {
		return q.RefuseDomain("is not for pods of namespace "+namespace,
			"have the administrator of the node name that in cgpu.toml, or leave it out")
	}
	if !d.Shared {
		r.Domain = namespace + "." + q.Domain
	}
	return nil
}
