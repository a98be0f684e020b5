// SPDX-License-Identifier: Apache-2.0

package rm

// A context on the graphics engine has buffers in device memory that no allocation shows. Their sizes are the GPU's, and the driver tells
// them (NV0080_CTRL_CMD_FIFO_GET_ENGINE_CONTEXT_PROPERTIES). ctrl0080fifo.h has the numbers.

// contextBuffers are those that come with a channel group (kgrmgrIsCtxBufSupported_IMPL): main, performance monitors, patch.
var contextBuffers = [...]uint32{0x0, 0x9, 0x10}

// gfxpBuffers are those of a context that is switched in the middle of a triangle (GR_CTX_BUFFER in kernel_graphics_context_buffers.h):
// preempt, spill, page pool, beta circular buffer, RTV, setup.
var gfxpBuffers = [...]uint32{0xb, 0xc, 0xd, 0xe, 0xf, 0x19}

// subcontexts is how many a group can have. Their headers, of a page each, are at the end of the main buffer from the start
// (kgraphicsGetMainCtxBufferSize_IMPL), so more of them take nothing.
const subcontexts = 64

// poolChunks are what the driver reserves for a buffer that must be in one piece, as all three are: the first that is large enough
// (ctxBufPoolGetSizeAndPageSize, poolConfig in pool_alloc.c).
var poolChunks = [...]uint64{64 << 10, 256 << 10, 4 << 20, 512 << 20}

// ContextMemory is what a channel group's context takes, by the sizes that the driver tells of a buffer. False: it tells none.
func ContextMemory(size func(buffer uint32) (uint64, bool)) (sum uint64, ok bool) {
	for i, b := range contextBuffers {
		n, told := size(b)
		if !told {
			return 0, false
		}
		if i == 0 {
			n = (n+pageSize-1)/pageSize*pageSize + subcontexts*pageSize
		}
		for _, chunk := range poolChunks {
			if n <= chunk {
				n = chunk
				break
			}
		}
		sum += n
	}
	return sum, true
}

// GFXPMemory is what graphics preemption adds to it. False: the driver does not tell.
func GFXPMemory(size func(buffer uint32) (uint64, bool)) (sum uint64, ok bool) {
	for _, b := range gfxpBuffers {
		n, told := size(b)
		if !told {
			return 0, false
		}
		sum += (n + poolChunks[0] - 1) / poolChunks[0] * poolChunks[0]
	}
	return sum, true
}

const pageSize = 4 << 10
