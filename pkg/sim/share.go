package sim

import (
	"slices"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// Share policy types, RS_SHARE_TYPE_* in src/common/sdk/nvidia/inc/rs_access.h.
const (
	shareAll    = 1
	shareToken  = 2 // same host user or same process (osValidateClientTokens)
	shareClient = 3
	sharePID    = 4
)

// actionRevoke is RS_SHARE_ACTION_FLAG_REVOKE.
const actionRevoke = 1

// policy is one RS_SHARE_POLICY.
type policy struct {
	kind   uint16
	target uint32
}

// policies say who may duplicate an object, beside its own process.
type policies []policy

// apply adds or revokes the RS_SHARE_POLICY in b.
func (p policies) apply(b []byte) (policies, uint32) {
	if len(b) < rm.SharePolicySize {
		return p, rm.StatusInvalidParamStruct
	}
	n := policy{kind: rm.U16(b, rm.SharePolicyType), target: rm.U32(b, rm.SharePolicyTarget)}
	if n.kind > 7 {
		return p, rm.StatusInvalidArgument
	}
	p = slices.DeleteFunc(slices.Clone(p), func(o policy) bool { return o == n })
	if b[rm.SharePolicyAction]&actionRevoke == 0 {
		p = append(p, n)
	}
	return p, rm.StatusOK
}

// allows reports whether to may duplicate an object of from.
func (p policies) allows(from, to *client) bool {
	if from.pid == to.pid {
		return true // serverInitGlobalSharePolicies: same ProcID
	}
	return slices.ContainsFunc(p, func(q policy) bool {
		switch q.kind {
		case shareAll, shareToken: // every container of the simulation runs as the same user
			return true
		case shareClient:
			return q.target == to.handle
		case sharePID:
			return q.target == uint32(to.pid)
		}
		return false
	})
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
	p, st := o.shares.apply(b)
	o.shares = p
	return st
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
	p := from.shares
	if len(p) == 0 {
		p = src.shares
	}
	if !p.allows(src, c) {
		return rm.StatusInsufficientPermissions
	}
	switch from.class {
	case classRootClient, classDevice, classSubdevice, classGroup:
		return rm.StatusInvalidArgument // cannot be copied (their class has no CanCopy)
	}
	o := &object{handle: rm.U32(out, rm.DupObject), class: from.class, gpu: from.gpu, memory: from.memory, channel: from.channel, size: from.size}
	if o.memory != nil {
		o.memory.refs++
	}
	return r.finish(c, parent, o, rm.DupObject)
}
