// SPDX-License-Identifier: Apache-2.0

package admit

import "github.com/opencgpu/cgpu/pkg/ledger"

// join puts the container into the trust domain that it names. What else a domain asks for its guard knows (package domain): this is what
// a guard does not.
func (a *Ask) join(r *ledger.Record) error {
	q := a.Quota
	switch {
	case q.Domain == "":
		return nil
	case a.Pod:
		return q.RefuseDomain("is not for pods: their authors could name another namespace's domain", "leave it out")
	case r.Preload:
		return q.RefuseDomain("without a guard nothing keeps domains apart", "leave it out")
	}
	r.Domain, r.DomainServer, r.Threads = q.Domain, q.DomainServer, q.Threads
	return nil
}
