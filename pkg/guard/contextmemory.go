// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

const controlContextProperties = 0x801707 // NV0080_CTRL_CMD_FIFO_GET_ENGINE_CONTEXT_PROPERTIES

// contextRest is what a group takes beside the buffers of its context: instance blocks of channels, and tables. 0.66 MiB on an H200.
const contextRest = quota.MiB

// sharedContext is what a channel group takes beside its context when a second client has it: the driver makes room for the contexts of 63
// others. 126 MiB of an H200, which are in no process' account and stay as long as the group (580.159.04, docs/internals/mps.md).
const sharedContext = 128 * quota.MiB

// chargeShared charges a group what it takes for its second client, once. False: it does not fit.
func (g *Guard) chargeShared(client uint32, o object) bool {
	if g.account.isSet(&o.group.shared) {
		return true
	}
	want := cost{gpu: g.account.gpuOf(client, o.handle), size: sharedContext}
	if want.gpu == noGPU || !g.reserve(want) {
		return false
	}
	if !g.account.chargeGroup(client, o.handle, want, &o.group.shared) {
		g.account.unreserve(want)
	}
	return true
}

// contextMemory is what a channel group with a context on the graphics engine is charged: context_overhead, or what its buffers come to on
// this GPU where that is more. 0 in the configuration means nothing.
func (g *Guard) contextMemory(gpu int) quota.Bytes {
	least := g.cfg.Settings.ContextOverhead
	if least == 0 {
		return 0
	}
	if sum, ok := rm.ContextMemory(g.bufferSizes(gpu)); ok {
		return max(least, quota.Bytes(sum)+contextRest)
	}
	return least
}

// bufferSizes asks the driver for the sizes of a GPU's context buffers. They never change.
func (g *Guard) bufferSizes(gpu int) func(buffer uint32) (uint64, bool) {
	return func(buffer uint32) (uint64, bool) {
		key := contextBuffer{gpu, buffer}
		g.mu.Lock()
		size, ok := g.contextBuffers[key]
		g.mu.Unlock()
		if ok {
			return size, true
		}
		own, err := g.guardClient()
		if err != nil {
			return 0, false
		}
		p := make([]byte, rm.ContextBufferSize)
		rm.PutU32(p, rm.ContextBufferEngine, buffer)
		if s, e := own.Control(own.Device(gpu), controlContextProperties, p); e != 0 || s != rm.StatusOK {
			return 0, false
		}
		size = uint64(rm.U32(p, rm.ContextBufferBytes))
		g.mu.Lock()
		g.contextBuffers[key] = size
		g.mu.Unlock()
		return size, true
	}
}

type contextBuffer struct {
	gpu    int
	buffer uint32
}

// chargeGroup adds what reserve took to what a group is charged, for what flag stands for. False: it is gone, or has been charged for that.
func (a *account) chargeGroup(client, handle uint32, took cost, flag *bool) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	o := a.clients[client].object(handle)
	if o == nil || *flag {
		return false
	}
	if *flag = true; o.charge == nil {
		o.chargeAll(&charge{gpu: took.gpu})
	}
	o.charge.size += took.size
	a.noteHandles(o)
	a.books.note(o.charge)
	return true
}
