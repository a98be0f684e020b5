// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/rm"
)

// isUnseen reports an object that a root alloc which went elsewhere may have made; t is the client's file. Host memory is made by the task
// itself (escape 0x27).
func (g *Guard) isUnseen(t Target, client, handle uint32) bool {
	if handle == 0 || handle == client {
		return false
	}
	if _, ok := g.account.lookup(client, handle); ok {
		return false
	}
	switch g.classOf(t, client, handle) {
	case classSystem, classOSDescriptor:
		return false
	case 0: // the driver refuses it, unless it is just being made
		return g.astrayAt.Load() != 0 || g.pendingRoots.Load() > 0 || g.insideSettledRoot()
	}
	return true
}

// classOf asks the driver of what class an object is; 0: it does not say, as there is none.
func (g *Guard) classOf(t Target, client, handle uint32) uint32 {
	var p [handleInfoSize]byte
	rm.PutU32(p[:], 0, handle)
	rm.PutU32(p[:], handleInfoIndex, handleInfoClass)
	if s, e := g.rmControl(t, client, client, controlHandleInfo, p[:]); e != 0 || s != rm.StatusOK {
		return 0
	}
	return rm.U32(p[:], handleInfoResult)
}

// denyUnseen refuses a call on such an object.
func (c *trappedCall) denyUnseen() reply {
	return c.deny(rm.StatusInvalidObjectHandle, "unseen", "denied a call on an object that the guard has not seen made")
}

const (
	controlHandleInfo = 0xd02 // NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO
	handleInfoSize    = 16
	handleInfoIndex   = 4
	handleInfoClass   = 2 // NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO_INDEX_CLASSID
	handleInfoResult  = 8
)
