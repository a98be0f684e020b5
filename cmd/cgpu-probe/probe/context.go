// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

const (
	classCompute  = 0xcbc0 // HOPPER_COMPUTE_A
	classDebugger = 0x83de // GT200_DEBUGGER

	classContextShare = 0x9067 // FERMI_CONTEXT_SHARE_A

	vaspaceSize  = 56 // NV_VASPACE_ALLOCATION_PARAMETERS
	vaspaceFlags = 4
	// IS_EXTERNALLY_OWNED and ENABLE_PAGE_FAULTING: an address space for UVM, as libcuda makes it.
	vaspaceForUVM = 1<<3 | 1<<6

	groupVASpace = 8 // of NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS

	// Of NV_CHANNEL_ALLOC_PARAMS. Nothing is fetched from the ring before work is announced, so no memory need be there.
	channelRing        = 8
	channelRingEntries = 16

	userdSize = 64 * quota.KiB // a page; a channel takes half a KiB of it
)

// rawContext is what computes, as the driver wants it of a program without CUDA: nothing is submitted to it.
type rawContext struct {
	space, group, channel, compute, userd uint32
}

func (c *client) addressSpace(flags uint32) (uint32, error) {
	p := make([]byte, vaspaceSize)
	rm.PutU32(p, vaspaceFlags, flags)
	return c.alloc(c.device, c.newHandle(), classVASpace, p)
}

// rawContext makes a context in an address space.
func (c *client) rawContext(space uint32) (x rawContext, err error) {
	x.space = space
	p := make([]byte, 20)
	rm.PutU32(p, groupVASpace, space)
	rm.PutU32(p, rm.TSGEngineType, rm.ChannelEngineTypeGR)
	if x.group, err = c.alloc(c.device, c.newHandle(), classGroup, p); err != nil {
		return x, err
	}
	if x.userd, _, err = c.memory(userdSize); err != nil {
		return x, err
	}
	p = make([]byte, channelSize)
	rm.PutU64(p, channelRing, 1<<30)
	rm.PutU32(p, channelRingEntries, 32)
	rm.PutU32(p, rm.ChannelUserdMemory, x.userd)
	rm.PutU32(p, rm.ChannelEngineType, rm.ChannelEngineTypeGR)
	if x.channel, err = c.alloc(x.group, c.newHandle(), classChannel, p); err != nil {
		return x, err
	}
	x.compute, err = c.alloc(x.channel, c.newHandle(), classCompute, make([]byte, 16))
	return x, err
}
