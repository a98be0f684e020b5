// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

const controlContextProperties = 0x801707 // NV0080_CTRL_CMD_FIFO_GET_ENGINE_CONTEXT_PROPERTIES

// contextRest is what a group takes beside the buffers of its context: instance blocks of channels, and tables. 0.66 MiB on an H200.
const contextRest = quota.MiB

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

// chargeGFXP adds what reserve took to what an object is charged. False: it is gone.
func (a *account) chargeGFXP(clientHandle, handle uint32, gpu int, size quota.Bytes) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.clients[clientHandle]
	if c == nil || c.objects[handle] == nil {
		return false
	}
	o := c.objects[handle]
	if o.group.gfxp = true; o.charge == nil {
		o.chargeAll(&charge{gpu: gpu})
	}
	o.charge.size += size
	return true
}
