// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"
	"slices"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// Serves reports the record of a domain's MPS server on a GPU, be it on its way out.
func (r *Record) Serves(domain, uuid string) bool {
	return r.DomainServer && r.inDomain(domain, uuid)
}

// IsMember reports the record of a member of a trust domain.
func (r *Record) IsMember() bool { return r.Domain != "" && !r.DomainServer }

func (r *Record) inDomain(domain, uuid string) bool {
	return r.Domain == domain && domain != "" && r.has(uuid)
}

// sit gives a member the first seat on its GPU that no other has.
func (r *Record) sit(others []Record) {
	if !r.IsMember() || len(r.VGPUs) == 0 {
		return
	}
	for r.Seat = 1; slices.ContainsFunc(others, func(o Record) bool { return o.Seat == r.Seat && o.inDomain(r.Domain, r.VGPUs[0].UUID) }); {
		r.Seat++
	}
}

// HasMembers reports that a domain has some on a GPU.
func HasMembers(records []Record, domain, uuid string) bool {
	for i := range records {
		if r := &records[i]; r.IsMember() && r.inDomain(domain, uuid) {
			return true
		}
	}
	return false
}

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

// BesideDomains refuses a record that is in a trust domain beside one of high priority on its GPU, and the other way round: while that one
// takes turns with several others, members do not know whose turn it is.
func (r *Record) BesideDomains(records []Record) *Refusal {
	for _, o := range records {
		for _, v := range r.VGPUs {
			if o.Nonce == r.Nonce || !o.has(v.UUID) {
				continue
			}
			theirs := o.Share(v.UUID)
			switch {
			case r.Domain != "" && theirs.Priority == quota.PriorityHigh:
				return &Refusal{Domain: true, Reason: fmt.Sprintf("CGPU_DOMAIN (--domain) %q: container %s on GPU %s has high priority, to which "+
					"members of a trust domain do not give way", r.Domain, o.label(), v.UUID),
					Remedy: "name another GPU, set that one's priority to default (cgpu set), or leave the domain out"}
			case v.Priority == quota.PriorityHigh && o.Domain != "":
				return &Refusal{Time: true, Reason: fmt.Sprintf("high priority (cgpu.io/priority, ALIYUN_COM_GPU_HIGH_PRIO, --priority): container "+
					"%s on GPU %s is in trust domain %s, whose members do not give way", o.label(), v.UUID, o.Domain),
					Remedy: "name another GPU, or leave the priority out"}
			}
		}
	}
	return nil
}

// SoleServer refuses a second MPS server of a domain on a GPU: a Request's Refuse.
func SoleServer(domain string) func(others []Record, vgpus []VGPU) error {
	return func(others []Record, vgpus []VGPU) error {
		for _, v := range vgpus {
			if slices.ContainsFunc(others, func(o Record) bool { return o.Serves(domain, v.UUID) }) {
				return &Refusal{Domain: true, Reason: fmt.Sprintf("domain %s has an MPS server on GPU %s already", domain, v.UUID),
					Remedy: "there is one for each domain and GPU"}
			}
		}
		return nil
	}
}

// HasMembers reports that a domain has some on a GPU of which anything lives; doubt counts as living.
func (l *Ledger) HasMembers(domain, uuid string) (bool, error) {
	records, err := l.List()
	return l.haveLiving(records, domain, uuid), err
}

func (l *Ledger) haveLiving(records []Record, domain, uuid string) bool {
	return HasMembers(l.Living(records), domain, uuid)
}

// Living are the records of which anything lives; doubt counts as living. One whose guard and container were killed stays in the ledger
// until an admission is refused.
func (l *Ledger) Living(records []Record) []Record {
	living, _ := l.sift(records)
	return living
}

// Retire marks the record of a domain's server for its end, unless the domain has members: from then on nobody takes it for one that
// serves, and so it may be ended.
func (l *Ledger) Retire(nonce string) (retired bool, err error) {
	err = l.change(func(f *file) error {
		i, err := indexOf(f.Records, nonce)
		if err != nil {
			return err
		}
		r := &f.Records[i]
		if slices.ContainsFunc(r.VGPUs, func(v VGPU) bool { return l.haveLiving(f.Records, r.Domain, v.UUID) }) {
			return errUnchanged
		}
		r.Retired, retired = true, true
		return nil
	})
	return retired && err == nil, err
}

// refuseDomain says why a change is not for a record of a trust domain, or beside one: only its server has a share, and no domain a
// priority.
func (req *ChangeRequest) refuseDomain(r *Record, others []Record) *Refusal {
	switch {
	case r.Domain == "" && req.Priority != nil && *req.Priority == quota.PriorityHigh:
		raised := *r
		raised.VGPUs = slices.DeleteFunc(slices.Clone(r.VGPUs), func(v VGPU) bool { return !req.Changes(v.UUID) })
		for i := range raised.VGPUs {
			raised.VGPUs[i].Priority = quota.PriorityHigh
		}
		return raised.BesideDomains(others)
	case r.DomainServer && req.Threads != nil:
		return &Refusal{Domain: true, Reason: "it is a domain's MPS server, whose members have parts of the multiprocessors each",
			Remedy: "set it of a member (cgpu smi lists them)"}
	case r.Domain == "" && req.Threads != nil:
		return &Refusal{Domain: true, Reason: "it is in no trust domain, beside whose members a part of the multiprocessors counts",
			Remedy: "start it with CGPU_DOMAIN (--domain), or set its percentage of the GPU's time (--percent)"}
	case r.IsMember() && (req.Weight != nil || req.Percent != nil || req.Priority != nil):
		return &Refusal{Time: true, Reason: fmt.Sprintf("it is a member of domain %s, which shares the GPU's time as a whole", r.Domain),
			Remedy: "set weight and percentage of the domain's MPS server (cgpu smi lists it)"}
	case r.DomainServer && req.Priority != nil && *req.Priority != quota.PriorityDefault:
		return &Refusal{Time: true, Reason: "a domain has no priority", Remedy: "set its weight or percentage"}
	}
	return nil
}
