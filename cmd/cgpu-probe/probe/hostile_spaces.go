// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// hostileSpaces looks for addresses that others have, too: the GPU's own address spaces, and those of other clients. Two clients that are
// in one address space cannot both have a range at the same place.
func hostileSpaces(c *client, _ hostileOptions) error {
	other, err := openGPU(patient) // both say hClientShare 0: the global address space
	if err != nil {
		return err
	}
	defer other.close()
	if err := c.fixedRange(0); err != nil {
		return fmt.Errorf("a range in the device's own address space: %w", err)
	}
	own, err := c.vaSpaceBy(rm.VASpaceDevice, 0)
	if err != nil {
		return fmt.Errorf("a handle of the device's own address space: %w", err)
	}
	if err := errors.Join(mustRefuse("again", c.fixedRange(0)), mustRefuse("again_by_handle", c.fixedRange(own))); err != nil {
		return fmt.Errorf("the same place twice, so the attack proves nothing: %w", err)
	}
	if err := other.fixedRange(0); err != nil {
		return fmt.Errorf("another client's range is in the way: %w", err)
	}
	for _, index := range []uint32{1, rm.VASpaceGlobal, 4} { // the window in BAR1, the global one, NVLink's
		_, err := c.vaSpaceBy(index, 0)
		if err := mustRefuse(fmt.Sprint("space_", index), err); err != nil {
			return err
		}
	}
	if _, err = c.vaSpaceBy(rm.VASpaceNew, rm.VASpaceFlagFLA); err == nil {
		return errors.New("an address space like NVLink's was made: who dups its ranges gets a handle of the GPU's")
	}
	if _, _, err := c.newDevice(c.handle - 1000); mustRefuse("device_of_a_stranger", err) != nil {
		return errors.New("a device on the address space of a client that is not the container's was made")
	}
	// Clients that name each other have the driver call itself until the kernel's stack is full, so the other one names nobody.
	device, _, err := c.newDevice(other.handle)
	if err != nil {
		return fmt.Errorf("a device that names another client of its own, as graphics libraries do: %w", err)
	}
	if err := c.fixedRangeBelow(device, 0); err != nil {
		return fmt.Errorf("its address space is the other client's: a range there is in the way: %w", err)
	}
	_, err = c.alloc(c.handle, c.newHandle(), classDevice, nil)
	return mustRefuse("device_without_parameters", err)
}

// fixedRange takes a range of addresses in an address space, always at the same place.
func (c *client) fixedRange(space uint32) error { return c.fixedRangeBelow(c.device, space) }

func (c *client) fixedRangeBelow(device, space uint32) error {
	p := virtualParams(space, uint64(2*quota.MiB), rm.MemoryFlagLazy|rm.MemoryFlagFixed)
	rm.PutU64(p, rm.MemoryOffset, 1<<38)
	_, err := c.alloc(device, c.newHandle(), classVirtual, p)
	return err
}
