// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"
	"slices"
)

// Serves reports the record of a domain's MPS server on a GPU.
func (r *Record) Serves(domain, uuid string) bool {
	return r.DomainServer && r.Domain == domain && slices.ContainsFunc(r.VGPUs, func(v VGPU) bool { return v.UUID == uuid })
}

// refuseDomain says why a record cannot be in its trust domain on a GPU; nil: it can, or is in none. There is one server for each, and
// members come after it.
func refuseDomain(others []Record, g GPU, r Record) *Refusal {
	if r.Domain == "" {
		return nil
	}
	served := slices.ContainsFunc(others, func(o Record) bool { return o.Serves(r.Domain, g.UUID) })
	switch {
	case r.DomainServer && served:
		return &Refusal{GPU: g, Reason: fmt.Sprintf("domain %s has an MPS server there already", r.Domain),
			Remedy: "stop that one (cgpu smi lists it), or take another name"}
	case !r.DomainServer && !served:
		return &Refusal{GPU: g, Reason: fmt.Sprintf("domain %s has no MPS server there", r.Domain),
			Remedy: fmt.Sprintf("start it before its members (cgpu run --domain-server %s …, docs/space.md), or leave the domain out", r.Domain)}
	}
	return nil
}
