// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/keeper"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Share policies: what a program lets other RM clients do with its objects (RM_SHARE, and two controls that are the same). They know no
// containers: RS_SHARE_TYPE_ALL is everybody on the node, RS_SHARE_TYPE_OS_SECURITY_TOKEN whoever has the same user number, which all
// containers that run as root have (osValidateClientTokens). libcuda sets both, for CUDA IPC and for debuggers. So the driver is told of
// the owner's process instead (RS_SHARE_TYPE_PID, which it lets anyhow), the account remembers what the program said, and where another
// client of the container wants to make use of it the guard opens the object for the moment of that call.

// Share policies, src/common/sdk/nvidia/inc/rs_access.h.
const (
	shareTypeAll    = 1 // RS_SHARE_TYPE_*
	shareTypeToken  = 2
	shareTypeClient = 3
	shareTypePID    = 4
	shareTypeSMC    = 5
	shareTypeGPU    = 6
	shareTypeFM     = 7

	shareActionRevoke  = 1 // RS_SHARE_ACTION_FLAG_*
	shareActionRequire = 2
	shareActionCompose = 4

	accessDup   = 1 // RS_ACCESS_* as masks
	accessDebug = 4
)

const shareTypeCode = 3<<30 | rm.ShareSize<<16 | 'F'<<8 | rm.EscShare

// checkShare: RM_SHARE.
func (g *Guard) checkShare(c *trappedCall) plan {
	o := c.call.Outer
	object := rm.U32(o, rm.ShareObject)
	if g.account.isSpilled(rm.U32(o, rm.ShareClient), object) {
		return answer(g.refuseSpilled(c, "share"))
	}
	return g.planPolicy(rm.U32(o, rm.ShareClient), object, o[rm.SharePolicy:rm.SharePolicy+rm.SharePolicySize])
}

// checkSharePolicy: CLIENT_SET_INHERITED_SHARE_POLICY, of the client as a whole, and CLIENT_SHARE_OBJECT.
func (g *Guard) checkSharePolicy(c *trappedCall) plan {
	object, before := c.controlClient(), len(c.params)-rm.SharePolicySize
	if before > 0 {
		object = rm.U32(c.params, 0)
	}
	return g.planPolicy(c.controlClient(), object, c.params[before:])
}

// planPolicy is the plan of a change of an object's policies; p is the RS_SHARE_POLICY.
func (g *Guard) planPolicy(client, object uint32, p []byte) plan {
	own := [rm.SharePolicySize]byte(p)
	p[rm.SharePolicyType] = inContainer(own[:], g.account.ownsClient(rm.U32(p, rm.SharePolicyTarget)))
	return plan{ask: true, done: func() { copy(p, own[:]) }, commit: func() { g.account.setPolicy(client, object, own[:]) }}
}

// inContainer is the type of the policy that the driver is told of. ours says that the client that it names is the container's: the
// driver's answer about another one would tell whether there is one.
func inContainer(p []byte, ours bool) byte {
	kind, action := rm.U16(p, rm.SharePolicyType), p[rm.SharePolicyAction]
	foreign := kind == shareTypeClient && !ours
	switch {
	case foreign && action&shareActionRevoke != 0:
		return shareTypeAll // which no object has
	case foreign:
		return shareTypePID
	case action&(shareActionRevoke|shareActionRequire) != 0:
		break // takes rights away only
	case kind == shareTypeAll, kind == shareTypeToken, kind == shareTypeSMC, kind == shareTypeGPU, kind == shareTypeFM:
		return shareTypePID
	}
	return p[rm.SharePolicyType]
}

// policy are the rights that the policies of an object, or of a client as a whole, give to others, where the driver was told less.
type policy struct {
	all  uint32 // to everybody
	user uint32 // to the same user
}

// setPolicy remembers a change of policies that the driver has taken. They are kept as the driver would (clientShareResource_IMPL).
func (a *account) setPolicy(client, object uint32, p []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[client]
	if c == nil || object != client && c.objects[object] == nil {
		return
	}
	var l policy
	action, rights := p[rm.SharePolicyAction], rm.U32(p, rm.SharePolicyAccess)
	if action&shareActionCompose != 0 {
		l = c.policiesOf(object)
	}
	var of *uint32
	switch rm.U16(p, rm.SharePolicyType) {
	case shareTypeAll:
		of = &l.all
	case shareTypeToken:
		of = &l.user
	}
	switch {
	case of == nil || action&shareActionRequire != 0:
	case action&shareActionRevoke != 0:
		*of &^= rights
	default:
		*of |= rights
	}
	if c.policies == nil {
		c.policies = map[uint32]policy{}
	}
	c.policies[object] = l
	a.books.note(c)
}

// policiesOf finds the policies in force for an object: its own, or those of the first of its ancestors that has some
// (rsAccessGetActiveShareList). The caller holds the account's mu.
func (c *client) policiesOf(object uint32) policy {
	for range 64 { // as gpuOf
		if l, ok := c.policies[object]; ok {
			return l
		}
		o := c.objects[object]
		if o == nil {
			break
		}
		object = o.parent
	}
	return c.policies[c.handle]
}

// policiesLet reports that a client's policies give another one a right on an object that the driver was not told of. To a client of the
// same process it was.
func (a *account) policiesLet(from *client, object uint32, to *client, right uint32) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if from.tgid == to.tgid || from.objects[object] == nil {
		return false
	}
	l := from.policiesOf(object)
	return l.all&right != 0 || l.user&right != 0 && from.euid >= 0 && from.euid == to.euid
}

// setMaker notes the user number that a client was made under, since the driver compares that of then, and where its file was.
func (a *account) setMaker(c *client, euid int, at place) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c.euid, c.fileSeenAt = euid, at
	a.books.note(c)
}

// openForPolicies is what must be opened so that the driver heeds the policies that it was not told of, when it is asked for something that
// takes a right on an object of another client's; nil: nothing. The calls of both clients wait meanwhile.
func (g *Guard) openForPolicies(from *client, object uint32, to *client, right uint32) (o *opening, done func()) {
	if !g.account.policiesLet(from, object, to, right) {
		return nil, nil
	}
	t, ok := g.fileOf(from)
	if !ok {
		return nil, nil
	}
	return &opening{t, from.handle, []openRight{{object, right}}}, t.Done
}

// openRight is a right that everybody has on an object for the moment of a call.
type openRight struct{ object, right uint32 }

// openRights counts the calls for which objects of a client are open.
type openRights struct {
	mu    sync.Mutex // held while one is opened or closed
	calls map[openRight]int
	noted map[openRight]int // places in what the next guard reads
	// The call by which that is done. Each UVM mapping needs two of them, so they share their memory.
	share rm.Call
	outer [rm.ShareSize]byte
}

// whileShared calls f while everybody has some rights on objects of a client, as the guard or another client of the container must have for
// the call that f makes. What is open for another call stays so until that ends. A status other than OK, or an errno, says that an object
// could not be opened; f was not called then.
func (g *Guard) whileShared(t Target, client uint32, rights []openRight, f func()) (uint32, unix.Errno) {
	c := g.account.client(client)
	if c == nil {
		return rm.StatusInvalidClient, 0
	}
	for i, what := range rights {
		if s, e := g.grantRight(t, c, what); e != 0 || s != rm.StatusOK {
			g.revokeRights(t, c, rights[:i])
			return s, e
		}
	}
	f()
	g.revokeRights(t, c, rights)
	return rm.StatusOK, 0
}

func (g *Guard) revokeRights(t Target, c *client, rights []openRight) {
	for _, what := range rights {
		if s, e := g.revokeRight(t, c, what); e != 0 || s != rm.StatusOK {
			g.logOnce("unshare", "cannot close an object again that was open for a moment", "status", rm.StatusName(s), "errno", e)
		}
	}
}

func (g *Guard) grantRight(t Target, c *client, what openRight) (s uint32, e unix.Errno) {
	c.open.mu.Lock()
	defer c.open.mu.Unlock()
	if c.open.calls[what] == 0 {
		g.noteRight(c, what)
		if s, e = g.callShare(t, c, what, 0); e != 0 || s != rm.StatusOK {
			g.forgetRight(c, what)
			return s, e
		}
	}
	if c.open.calls == nil {
		c.open.calls = map[openRight]int{}
	}
	c.open.calls[what]++
	return rm.StatusOK, 0
}

func (g *Guard) revokeRight(t Target, c *client, what openRight) (uint32, unix.Errno) {
	c.open.mu.Lock()
	defer c.open.mu.Unlock()
	if c.open.calls[what]--; c.open.calls[what] > 0 {
		return rm.StatusOK, 0
	}
	delete(c.open.calls, what)
	s, e := g.callShare(t, c, what, shareActionRevoke)
	g.forgetRight(c, what)
	return s, e
}

// noteRight tells the next guard, should there be one, that an object is open, before it is. The caller holds c.open.mu.
func (g *Guard) noteRight(c *client, what openRight) {
	if g.keep == nil {
		return
	}
	if c.open.noted == nil {
		c.open.noted = map[openRight]int{}
	}
	at := g.keep.memory.SetRight(keeper.Right{Client: c.handle, Object: what.object, Access: what.right})
	if at < 0 {
		g.keep.lost(errors.New("too many objects are open at once"))
		return
	}
	c.open.noted[what] = at
}

func (g *Guard) forgetRight(c *client, what openRight) {
	if at, ok := c.open.noted[what]; ok {
		g.keep.memory.ClearRight(at)
		delete(c.open.noted, what)
	}
}

// callShare opens an object to every client, or closes it again. It adds to what the program has shared, and takes away from that: without
// the flag for it the driver first forgets the object's policies and those of its client (clientShareResource_IMPL), by which libcuda opens
// its objects to its own process. The caller holds c.open.mu.
func (g *Guard) callShare(t Target, c *client, what openRight, action byte) (uint32, unix.Errno) {
	c.open.outer = [rm.ShareSize]byte{}
	outer := c.open.outer[:]
	rm.PutU32(outer, rm.ShareClient, c.handle)
	rm.PutU32(outer, rm.ShareObject, what.object)
	rm.PutU32(outer, rm.SharePolicy+rm.SharePolicyTarget, c.handle)
	rm.PutU32(outer, rm.SharePolicy+rm.SharePolicyAccess, what.right)
	outer[rm.SharePolicy+rm.SharePolicyType] = shareTypeAll
	outer[rm.SharePolicy+rm.SharePolicyAction] = shareActionCompose | action
	c.open.share = rm.Call{Cmd: shareTypeCode, Outer: outer}
	e := g.driver.Exec(t, &c.open.share)
	return rm.U32(outer, rm.ShareStatus), e
}
