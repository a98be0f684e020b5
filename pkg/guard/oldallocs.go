// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Graphics libraries make some objects by calls that are older than RM_ALLOC. The driver itself turns them into RM_ALLOC
// (src/nvidia/interface/deprecated), and so does the guard, so that one set of rules is for both.

// allocation is what an old call asks of RM_ALLOC.
type allocation struct {
	client, parent, handle uint32
	class                  uint32
	params                 []byte
}

// onContextDMA handles RM_ALLOC_CONTEXT_DMA2, by which Vulkan names memory for notifiers (RmDeprecatedAllocContextDma).
func (g *Guard) onContextDMA(c *trappedCall) reply {
	o := c.call.Outer
	client, memory := rm.U32(o, rm.OldContextDMAClient), rm.U32(o, rm.OldContextDMAMemory)
	if class := rm.U32(o, rm.OldContextDMAClass); class != classContextDMA {
		return c.deny(rm.StatusNotSupported, "0x54", "denied RM_ALLOC_CONTEXT_DMA2 of another class than a context DMA", "class", class)
	}
	of, ok := g.account.lookup(client, memory)
	if !ok {
		return c.status(rm.StatusInvalidObjectHandle)
	}
	p := make([]byte, rm.ContextDMASize)
	rm.PutU32(p, rm.ContextDMASubdevice, rm.U32(o, rm.OldContextDMASubdevice))
	rm.PutU32(p, rm.ContextDMAFlags, rm.U32(o, rm.OldContextDMAFlags))
	rm.PutU32(p, rm.ContextDMAMemory, memory)
	rm.PutU64(p, rm.ContextDMAOffset, rm.U64(o, rm.OldContextDMAOffset))
	rm.PutU64(p, rm.ContextDMALimit, rm.U64(o, rm.OldContextDMALimit))
	return g.allocInstead(c, allocation{client, of.parent, rm.U32(o, rm.OldContextDMAObject), classContextDMA, p})
}

// checkNoMemory is for RM_ALLOC_MEMORY of the classes by which OpenGL and Vulkan ask for all of the card's registers, which they do not
// map, and for all of its memory, to learn how large it is. The driver gives whoever is no administrator an object without memory for the
// latter (_rmAllocMemoryLocalUser), and the guard has it do so for both. The call comes on the GPU's node, where there is no RM_ALLOC.
func (g *Guard) checkNoMemory(c *trappedCall) plan {
	o := c.call.Outer
	asked, client, parent := rm.U32(o, rm.AllocMemoryClass), rm.U32(o, rm.AllocMemoryRoot), rm.U32(o, rm.AllocMemoryParent)
	if rm.U32(o, rm.AllocMemoryObject) == 0 { // the driver would choose one that it tells nobody: such objects would be counted as one
		return answer(c.status(rm.StatusInvalidObjectNew))
	}
	if c.isUnseen(c.target(), client, parent) {
		return answer(c.denyUnseen())
	}
	if !g.roomForObject(rm.ClassPlain, noGPU) {
		return answer(c.status(rm.StatusInsufficientResources))
	}
	pointer, fd := rm.U64(o, rm.AllocMemoryPointer), rm.U32(o, rm.AllocMemoryFD) // of the task; the guard has others
	rm.PutU32(o, rm.AllocMemoryClass, classNoMemory)
	rm.PutU64(o, rm.AllocMemoryPointer, 0)
	rm.PutU32(o, rm.AllocMemoryFD, ^uint32(0))
	restore := func() {
		rm.PutU32(o, rm.AllocMemoryClass, asked)
		rm.PutU64(o, rm.AllocMemoryPointer, pointer)
		rm.PutU32(o, rm.AllocMemoryFD, fd)
	}
	return plan{ask: true, done: restore, commit: func() {
		handle := rm.U32(o, rm.AllocMemoryObject)
		g.account.addObject(client, object{handle: handle, parent: parent, class: classNoMemory, kind: rm.ClassPlain, gpu: noGPU}, noGPU, 0, 0)
		limit := uint64(0xffffffff) // of the registers' (_rmAllocMemoryLocalPrivileged)
		if asked == classVidmem {
			limit = g.heapSize(client, parent) - 1
		}
		rm.PutU64(o, rm.AllocMemoryLimit, limit)
	}}
}

// heapSize is how much memory the GPU has, to the container, in bytes.
func (g *Guard) heapSize(client, device uint32) uint64 {
	gpu := g.account.gpuOf(client, device)
	if gpu == noGPU {
		gpu = 0
	}
	u := g.account.usage(gpu)
	return uint64(u.total())
}

const (
	classContextDMA = 0x2  // NV01_CONTEXT_DMA
	classRegisters  = 0x3f // NV01_MEMORY_LOCAL_PRIVILEGED
	classNoMemory   = 0x70 // NV01_MEMORY_SYSTEM_DYNAMIC
)

// allocInstead makes an RM_ALLOC in the place of the task's call, which gets its status.
func (g *Guard) allocInstead(c *trappedCall, a allocation) reply {
	class, ok := g.abi.Class(a.class)
	if !ok || len(a.params) != class.ParamsSize {
		return c.status(rm.StatusNotSupported)
	}
	asked := c.call
	c.call, c.class, c.params = g.allocCall(a), class, a.params
	rep := g.serveAlloc(c)
	status := c.statusWord()
	c.call = asked
	if rep != replyDone {
		return rep
	}
	return c.status(status)
}

// allocCall is RM_ALLOC as the driver has it.
func (g *Guard) allocCall(a allocation) rm.Call {
	form, ok := g.abi.AllocForm(48)
	if !ok {
		form, _ = g.abi.AllocForm(32)
	}
	o := make([]byte, form.Size)
	rm.PutU32(o, rm.AllocRoot, a.client)
	rm.PutU32(o, rm.AllocParent, a.parent)
	rm.PutU32(o, rm.AllocObject, a.handle)
	rm.PutU32(o, rm.AllocClass, a.class)
	return rm.Call{Cmd: 3<<30 | uint32(form.Size)<<16 | 'F'<<8 | rm.EscAlloc, Outer: o,
		Blocks: []rm.Block{{In: -1, Off: rm.AllocParams, Data: a.params}}}
}
