// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"slices"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Share policy types, RS_SHARE_TYPE_* in src/common/sdk/nvidia/inc/rs_access.h.
const (
	shareAll    = 1
	shareToken  = 2 // same host user or same process (osValidateClientTokens)
	shareClient = 3
	sharePID    = 4
)

// RS_SHARE_ACTION_FLAG_* and RS_ACCESS_* as masks, ibidem.
const (
	actionRevoke  = 1
	actionRequire = 2
	actionCompose = 4

	accessDup   = 1
	accessDebug = 4
)

// policy is one RS_SHARE_POLICY.
type policy struct {
	kind    uint16
	require bool
	target  uint32 // of shareClient
	rights  uint32
}

// policies are those in force for an object: its own, or those of the first of its ancestors that has some
// (rsAccessGetActiveShareList).
func (o *object) policies() []policy {
	for ; o != nil; o = o.parent {
		if o.shared {
			return o.shares
		}
	}
	return []policy{{kind: sharePID, rights: accessDup}} // serverInitGlobalSharePolicies
}

// share changes an object's policies by the RS_SHARE_POLICY in b (clientShareResource_IMPL).
func (o *object) share(b []byte) uint32 {
	if len(b) < rm.SharePolicySize {
		return rm.StatusInvalidParamStruct
	}
	action := b[rm.SharePolicyAction]
	n := policy{kind: rm.U16(b, rm.SharePolicyType), require: action&actionRequire != 0, rights: rm.U32(b, rm.SharePolicyAccess)}
	if n.kind > 7 {
		return rm.StatusInvalidArgument
	}
	if n.kind == shareClient {
		n.target = rm.U32(b, rm.SharePolicyTarget)
	}
	var list []policy
	if action&actionCompose != 0 {
		list = slices.Clone(o.policies())
	}
	same := func(p policy) bool { return p.kind == n.kind && p.require == n.require && p.target == n.target }
	if i := slices.IndexFunc(list, same); i >= 0 {
		if action&actionRevoke != 0 {
			list[i].rights &^= n.rights
		} else {
			list[i].rights |= n.rights
		}
	} else if action&actionRevoke == 0 {
		list = append(list, n)
	}
	o.shared, o.shares = true, slices.DeleteFunc(list, func(p policy) bool { return p.rights == 0 })
	return rm.StatusOK
}

// rights are what a client may do with an object of another one's (_rsAccessGetSharedRights). Nil is UVM's own client: whoever asks it is
// a guard, which is neither the owner's process nor of its user.
func (o *object) rights(to *client) uint32 {
	var granted, denied uint32
	for _, p := range o.policies() {
		passes := false
		switch p.kind {
		case shareAll:
			passes = true
		case shareToken: // every container of the simulation runs as the same user
			passes = to != nil
		case shareClient:
			passes = to != nil && p.target == to.handle
		case sharePID:
			passes = to != nil && to.pid == o.client.pid
		}
		switch {
		case passes && !p.require:
			granted |= p.rights
		case !passes && p.require:
			denied |= p.rights
		}
	}
	return granted &^ denied
}

// share is RM_SHARE: a policy for one object.
func (r *request) share() uint32 {
	out := r.call.Outer
	c, st := r.client(rm.U32(out, rm.ShareClient))
	if st != rm.StatusOK {
		return st
	}
	return shareObject(c, rm.U32(out, rm.ShareObject), out[rm.SharePolicy:])
}

func shareObject(c *client, handle uint32, b []byte) uint32 {
	o := c.objects[handle]
	if o == nil {
		return rm.StatusObjectNotFound
	}
	return o.share(b)
}

// dup is RM_DUP_OBJECT: another handle for the same thing. Only the destination client is checked against the file; the
// source is guarded by its share policy.
func (r *request) dup() uint32 {
	out := r.call.Outer
	c, st := r.client(rm.U32(out, rm.DupClient))
	if st != rm.StatusOK {
		return st
	}
	parent := c.objects[rm.U32(out, rm.DupParent)]
	if parent == nil {
		return rm.StatusObjectNotFound
	}
	src := r.d.clients[rm.U32(out, rm.DupClientSrc)]
	if src == nil {
		return rm.StatusInvalidClient
	}
	from := src.objects[rm.U32(out, rm.DupObjectSrc)]
	if from == nil {
		return rm.StatusObjectNotFound
	}
	if src != c && from.rights(c)&accessDup == 0 {
		return rm.StatusInsufficientPermissions
	}
	switch from.class {
	case classRootClient, classDevice, classSubdevice, classContextDMA:
		return rm.StatusInvalidArgument
	}
	if isEngineObject(from.class) {
		return rm.StatusInvalidArgument // nor what sits on a channel
	}
	first := from.group != nil && from.group.others == nil
	if first {
		if st := from.group.takeOthers(from.gpu); st != rm.StatusOK {
			return st
		}
	}
	o := &object{handle: rm.U32(out, rm.DupObject), class: from.class, gpu: from.gpu, memory: from.memory, pages: from.pages,
		channel: from.channel, group: from.group, vaspace: from.vaspace, size: from.size, tables: from.tables}
	for _, m := range []*memory{o.memory, o.tables} {
		if m != nil {
			m.ref()
		}
	}
	if o.class == classUserShared { // never taken off again (gpushareddataDestruct_IMPL)
		o.gpu.userShared.ref()
	}
	st = r.finish(c, parent, o, rm.DupObject)
	if st != rm.StatusOK && first {
		r.d.unref(from.group.others)
		from.group.others = nil
	}
	return st
}

// SharedContextCost is what a channel group takes for a second client, once.
const SharedContextCost = 128 * quota.MiB

func (g *group) takeOthers(of *gpu) uint32 {
	if !of.reserveHidden(SharedContextCost) {
		return rm.StatusNoMemory
	}
	g.others = &memory{gpu: of, size: SharedContextCost, refs: 1, hidden: true}
	return rm.StatusOK
}
