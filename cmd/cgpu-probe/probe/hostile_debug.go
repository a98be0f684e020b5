// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// GT200_DEBUGGER's controls (ctrl83dedebug.h), and GR_GET_CTXSW_MODES (ctrl2080gr.h).
const (
	ctrlMMUDebug    = 0x83de0307 // SET_MODE_MMU_DEBUG
	ctrlMMUDebugGet = 0x83de0308
	ctrlSuspend     = 0x83de0317 // SUSPEND_CONTEXT
	ctrlResume      = 0x83de0318
	ctrlSwitchModes = 0x20801235

	switchModesSize    = 24
	switchModesChannel = 0
	switchModesCompute = 16
)

// hostileDebugger debugs: its own context in ways that reach beyond it, and others' contexts.
func hostileDebugger(hostileOptions) error {
	return withContext(func(c *client, x rawContext) error {
		debug := func(client, object uint32) (uint32, error) {
			p := make([]byte, 12) // NV83DE_ALLOC_PARAMETERS
			rm.PutU32(p, 4, client)
			rm.PutU32(p, 8, object)
			return c.alloc(c.device, c.newHandle(), classDebugger, p)
		}
		for _, client := range []uint32{c.handle - 1, c.handle + 1, 0xc1d00000} {
			_, err := debug(client, x.compute)
			if err := mustRefuse(fmt.Sprintf("debugger_of_%#x", client), err); err != nil {
				return err
			}
		}
		d, err := debug(c.handle, x.compute)
		print("debugger=%s", describe(err))
		if err != nil {
			return skip("no debugger object: " + err.Error())
		}
		// A mode of the whole GPU. It may be answered, but must not be set.
		for _, mode := range []uint32{1, 2, 3} {
			p := make([]byte, 4)
			rm.PutU32(p, 0, mode)
			print("mmu_debug_%d=%s", mode, describe(c.control(d, ctrlMMUDebug, p)))
			p = make([]byte, 4)
			if err := c.control(d, ctrlMMUDebugGet, p); err == nil && rm.U32(p, 0) == 1 {
				return fmt.Errorf("SET_MODE_MMU_DEBUG %d: the whole GPU is in that mode", mode)
			}
		}
		// A suspended context may stay on the GPU: another one must get it all the same.
		print("suspend=%s", describe(c.control(d, ctrlSuspend, make([]byte, 8))))
		other, err := c.rawContext(x.space)
		if err != nil {
			return fmt.Errorf("make a context beside a suspended one: %w", err)
		}
		if err := c.schedule(other.group, false); err != nil {
			return fmt.Errorf("let a context run beside a suspended one: %w", err)
		}
		print("resume=%s", describe(c.control(d, ctrlResume, make([]byte, 4))))
		return nil
	})
}

// cmdSwitchModes says how the kernels of a context are preempted for which nobody asked. A guard answers no such question.
func cmdSwitchModes([]string) error {
	return withContext(func(c *client, x rawContext) error {
		p := make([]byte, switchModesSize)
		rm.PutU32(p, switchModesChannel, x.channel)
		if err := c.control(c.subdevice, ctrlSwitchModes, p); err != nil {
			return err
		}
		print("compute_preemption=%d", rm.U32(p, switchModesCompute))
		return nil
	})
}

// withContext runs f with a client that has a context in an address space of the driver's.
func withContext(f func(*client, rawContext) error) error {
	return withGPU(func(c *client) error {
		space, err := c.addressSpace(0)
		if err != nil {
			return err
		}
		x, err := c.rawContext(space)
		if err != nil {
			return fmt.Errorf("make a context: %w", err)
		}
		return f(c, x)
	})
}
