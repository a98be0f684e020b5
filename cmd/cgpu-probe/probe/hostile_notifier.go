// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// controlToken is GPFIFO_GET_WORK_SUBMIT_TOKEN, upon which the driver writes to the channel's error notifier.
const controlToken = 0xc36f0108

// hostileNotifierFreed frees what a channel writes errors to. It must stay the container's, and count, until the channel is gone:
// the driver keeps no reference, and writes there.
func hostileNotifierFreed(hostileOptions) error {
	const size = 2 * quota.MiB // the driver maps all of it, in a window of 16 MiB, to write there
	return withContext(func(c *client, x rawContext) error {
		memory, _, err := c.memory(size)
		if err != nil {
			return err
		}
		p := make([]byte, channelSize)
		rm.PutU32(p, rm.ChannelNotifiers[0], memory)
		rm.PutU64(p, channelRing, 1<<30)
		rm.PutU32(p, channelRingEntries, 32)
		rm.PutU32(p, rm.ChannelUserdMemory, x.userd)
		rm.PutU64(p, rm.ChannelUserdOffset, 512)
		rm.PutU32(p, rm.ChannelEngineType, rm.ChannelEngineTypeGR)
		channel, err := c.alloc(x.group, c.newHandle(), classChannel, p)
		if err != nil {
			return fmt.Errorf("make a channel with an error notifier: %w", err)
		}
		// Without an engine's object the channel has no runlist, and no token.
		if _, err := c.alloc(channel, c.newHandle(), classCompute, make([]byte, 16)); err != nil {
			return fmt.Errorf("make a compute object: %w", err)
		}
		if err := c.control(channel, controlToken, make([]byte, 4)); err != nil {
			return fmt.Errorf("have the notifier written: %w", err)
		}
		_, with, err := c.usage()
		if err != nil {
			return err
		}
		if err := c.free(memory); err != nil {
			return nil // refused: nothing is freed that is written
		}
		_, kept, err := c.usage()
		if err != nil {
			return err
		}
		print("free_with_mib=%d\nfree_kept_mib=%d", with/quota.MiB, kept/quota.MiB)
		if kept > with {
			return fmt.Errorf("%v are free of which a channel writes to some", kept-with)
		}
		if err := c.control(channel, controlToken, make([]byte, 4)); err != nil {
			return fmt.Errorf("have the notifier written again: %w", err)
		}
		if err := c.free(channel); err != nil {
			return err
		}
		for deadline := time.Now().Add(10 * time.Second); ; sleep10ms() {
			_, free, err := c.usage()
			if err != nil || free >= with+size {
				return err
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("free memory is %v: want %v, now that no channel writes there", free, with+size)
			}
		}
	})
}
