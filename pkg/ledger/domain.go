// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"
	"slices"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// Serves reports the record of a domain's MPS server on a GPU.
func (r *Record) Serves(domain, uuid string) bool {
	return r.DomainServer && r.Domain == domain && slices.ContainsFunc(r.VGPUs, func(v VGPU) bool { return v.UUID == uuid })
}

// IsMember reports the record of a member of a trust domain.
func (r *Record) IsMember() bool { return r.Domain != "" && !r.DomainServer }

// Leader is whose cap and pause hold for a record on a GPU: of a member of a trust domain its server's, where that is there; else its own.
func (r *Record) Leader(records []Record, uuid string) *Record {
	if r.IsMember() {
		if i := slices.IndexFunc(records, func(o Record) bool { return o.Serves(r.Domain, uuid) }); i >= 0 {
			return &records[i]
		}
	}
	return r
}

// Share is a record's share of a GPU's time; zero: it has none.
func (r *Record) Share(uuid string) quota.Share {
	if i := slices.IndexFunc(r.VGPUs, func(v VGPU) bool { return v.UUID == uuid }); i >= 0 {
		return r.VGPUs[i].Share
	}
	return quota.Share{}
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
		return &Refusal{GPU: g, Domain: true, Reason: fmt.Sprintf("domain %s has an MPS server there already", r.Domain),
			Remedy: "stop that one (cgpu smi lists it), or take another name"}
	case !r.DomainServer && !served:
		return &Refusal{GPU: g, Domain: true, Reason: fmt.Sprintf("domain %s has no MPS server there", r.Domain),
			Remedy: fmt.Sprintf("start it before its members (cgpu run --domain-server %s …, docs/space.md), or leave the domain out", r.Domain)}
	}
	return nil
}

// refuseDomain says why a change is not for a record of a trust domain: only its server has a share, and no domain a priority.
func (req *ChangeRequest) refuseDomain(r *Record) *Refusal {
	switch {
	case r.IsMember() && (req.Weight != nil || req.Percent != nil || req.Priority != nil):
		return &Refusal{Time: true, Reason: fmt.Sprintf("it is a member of domain %s, which shares the GPU's time as a whole", r.Domain),
			Remedy: "set weight and percentage of the domain's MPS server (cgpu smi lists it)"}
	case r.DomainServer && req.Priority != nil && *req.Priority != quota.PriorityDefault:
		return &Refusal{Time: true, Reason: "a domain has no priority", Remedy: "set its weight or percentage"}
	}
	return nil
}
