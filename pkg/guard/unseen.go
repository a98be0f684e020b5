// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"syscall"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// isUnseen reports an object that a root alloc which went elsewhere may have made, or an RM_ALLOC_MEMORY (which the task makes itself) that
// another thread has changed under way; t is the client's file.
func (c *trappedCall) isUnseen(t Target, client, handle uint32) bool {
	if handle == 0 || handle == client {
		return false
	}
	c.named, c.gone, c.elsewhere = handle, false, false
	g, roots := c.guard, c.guard.rootsLet.Load()
	o, known := g.account.lookup(client, handle)
	if known && o.isThere() {
		return false
	}
	t, done, ok := c.telling(t, client)
	if !ok {
		return true
	}
	defer done()
	class, s, e := g.handleInfo(t, client, handle, handleInfoClass)
	there := e == 0 && s == rm.StatusOK
	switch {
	case !there && known: // the driver would refuse it, unless it is just being made
		return true
	case !there:
		if !c.absent {
			c.absent, c.roots = true, roots
		}
		c.gone = g.astrayAt.Load() != 0 || g.pendingRoots.Load() > 0 || g.insideSettledRoot()
		return c.gone
	}
	return !known || class != classSystem && class != classOSDescriptor && class != o.class
}

// telling is the file on which the driver tells of a client's objects, where t is the call's. On a GPU's node it tells nothing
// (NV_CTL_DEVICE_ONLY in escape.c). False: nobody has the client's file.
func (c *trappedCall) telling(t Target, client uint32) (_ Target, done func(), ok bool) {
	if c.node.kind != nodeGPU {
		return t, func() {}, true
	}
	of := c.guard.account.client(client)
	if of == nil {
		return t, nil, false
	}
	control, ok := c.guard.fileWithin(of, &bucket{}) // the caller pays for the search: it is a part of its call
	return control, control.Done, ok
}

// clearName takes what the account has under a handle out of it, if the driver has nothing there. Otherwise it returns what the driver
// answers to a call that makes an object under it. The caller holds the client's calls.
func (c *trappedCall) clearName(client, handle uint32) (status uint32) {
	t, done, ok := c.telling(c.target(), client)
	if !ok {
		return rm.StatusInvalidClient
	}
	defer done()
	switch _, s, e := c.guard.handleInfo(t, client, handle, handleInfoClass); {
	case e != 0:
		return rm.StatusInvalidClient
	case s == rm.StatusOK:
		return rm.StatusInsertDuplicateName
	case s != rm.StatusObjectNotFound:
		return s
	}
	if _, known := c.guard.account.lookup(client, handle); known {
		c.guard.objectFreed(t, client, handle)
		c.guard.endWindows()
	}
	return rm.StatusOK
}

// isUncounted reports an object of which no call may make the driver keep more (RM_DUP_OBJECT, an export, a mapping, a window, another
// name): its references would be counted for nothing, or for something else (charges.go). What is not there is such an object too, since a
// thread in RM_ALLOC_MEMORY can make it before the driver looks; and host memory that is below another object than its record, with which
// it does not end. The driver is asked each time: what a record was right about once is no proof that a thread has not made another since.
func (c *trappedCall) isUncounted(t Target, client, handle uint32) bool {
	if c.isUnseen(t, client, handle) {
		return true
	}
	o, known := c.guard.account.lookup(client, handle)
	switch {
	case !known:
		c.named, c.gone = handle, true
		return true
	case o.charge == nil && (o.madeInTask || o.kind == rm.ClassPlain && o.class == 0): // from before an upgrade: of it nothing is known
		return true
	case !o.madeInTask:
		return false
	}
	parent, s, e := c.guard.handleInfo(t, client, handle, handleInfoParent)
	c.elsewhere = e == 0 && s == rm.StatusOK && parent != o.parent
	return e != 0 || s != rm.StatusOK || parent != o.parent
}

// isUncountedOf is isUncounted of an object of a client that may be on another file than the call: the driver tells of it there only.
func (c *trappedCall) isUncountedOf(client, handle uint32) bool {
	if o, known := c.guard.account.lookup(client, handle); known && o.isThere() { // nobody is asked
		return c.isUncounted(c.target(), client, handle)
	}
	t, ok := c.guard.fileWithin(c.locked.of(client), &bucket{})
	if !ok { // its process has ended
		c.named, c.gone = handle, true
		return true
	}
	defer t.Done()
	return c.isUncounted(t, client, handle)
}

// isThere reports that what the account has under a handle is what the driver has: the guard has made it. Of what the task was let make the
// record says nothing: the driver may have refused it, and the handle be given to something else since. What the driver ends with something
// else is taken out of the account then (dependants.go).
func (o *object) isThere() bool { return !o.madeInTask }

// namesUnseen reports that the parameters of an RM_ALLOC name such an object: a name of an address space, or of memory, is as good as a
// place below it.
func (c *trappedCall) namesUnseen() bool {
	for _, off := range namedObjects(c.class) {
		if off+4 > len(c.params) || c.class.ID == classNoMemory && rm.U32(c.params, off) == rm.NoAddressSpace {
			continue
		}
		if c.isUnseen(c.target(), c.allocClient(), rm.U32(c.params, off)) {
			return true
		}
	}
	return false
}

// namedObjects are where the parameters of a class name objects of the same client of which no other check needs the record.
func namedObjects(class rm.Class) []int {
	switch class.Kind {
	case rm.ClassTSG:
		return []int{rm.TSGVASpace}
	case rm.ClassChannel:
		return []int{rm.ChannelContextShare, rm.ChannelVASpace}
	case rm.ClassVirtual:
		return []int{rm.MemoryVASpace}
	case rm.ClassP2P:
		return []int{rm.P2PSubdevice, rm.P2PPeer}
	}
	switch class.ID {
	case classContextShare:
		return []int{rm.ContextShareVASpace}
	case classNoMemory:
		return []int{rm.AllMemoryVASpace}
	}
	return nil
}

const classContextShare = 0x9067 // FERMI_CONTEXT_SHARE_A

// overtaken reports that a call names what there was not when that was looked at, and that a root alloc was let through since.
func (c *trappedCall) overtaken() bool { return c.absent && c.guard.rootsLet.Load() != c.roots }

// isSecretlyUserShared reports that what the task was let make, and the account has for host memory, is the page that all users of a GPU
// share: a root alloc that became another call can have made that. The guard asks before it has a handle of its own on it, since the driver
// counts that for good (classUserShared).
func (g *Guard) isSecretlyUserShared(t Target, client uint32, o object) bool {
	return (o.madeInTask || o.class == 0) && g.classOf(t, client, o.handle) == classUserShared
}

// handleInfo asks the driver about an object, on the file of its client.
func (g *Guard) handleInfo(t Target, client, handle, what uint32) (result, status uint32, errno syscall.Errno) {
	var p [handleInfoSize]byte
	rm.PutU32(p[:], 0, handle)
	rm.PutU32(p[:], handleInfoIndex, what)
	status, errno = g.rmControl(t, client, client, controlHandleInfo, p[:])
	return rm.U32(p[:], handleInfoResult), status, errno
}

// classOf asks the driver of what class an object is; 0: it does not say, as there is none.
func (g *Guard) classOf(t Target, client, handle uint32) uint32 {
	if class, s, e := g.handleInfo(t, client, handle, handleInfoClass); e == 0 && s == rm.StatusOK {
		return class
	}
	return 0
}

// denyUnseen refuses a call on such an object. To one on what is not there it answers as the driver does: programs open CUDA IPC's memory
// of others that have freed it, or have ended.
func (c *trappedCall) denyUnseen() reply {
	if c.gone {
		return c.status(rm.StatusObjectNotFound)
	}
	if c.elsewhere {
		return c.deny(rm.StatusInvalidObjectHandle, "elsewhere",
			"denied a call that would keep host memory: it is below another device than the "+
				"RM_ALLOC_MEMORY said by which it was made, so another thread has changed that under way; free it, and make it again",
			"call", rm.EscapeName(c.call.NR()), "object", c.named)
	}
	return c.deny(rm.StatusInvalidObjectHandle, "unseen", "denied a call on an object that the guard has not seen made",
		"call", rm.EscapeName(c.call.NR()), "object", c.named, "absent", c.absent)
}

const (
	controlHandleInfo = 0xd02 // NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO
	handleInfoSize    = 16
	handleInfoIndex   = 4
	handleInfoParent  = 1 // NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO_INDEX_PARENT
	handleInfoClass   = 2 // NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO_INDEX_CLASSID
	handleInfoResult  = 8
)
