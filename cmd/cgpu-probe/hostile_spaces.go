package main

import (
	"fmt"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// leastSpace is what an address space takes at least, of the GPU's pool of page tables (measured over 20,000 on an H200).
const leastSpace = 2 * quota.KiB

// hostileSpaces makes address spaces, each of which takes page tables and a bit of the firmware's heap, which all containers share.
// They must end at a number, or be charged.
func hostileSpaces(o hostileOptions) error {
	return withGPU(func(c *client) error {
		_, before, err := c.usage()
		if err != nil {
			return err
		}
		n := 0
		var refused error
		for ; n < min(o.tries, 2*bombCap); n++ {
			if _, refused = c.addressSpace(0); refused != nil {
				break
			}
		}
		_, after, err := c.usage()
		if err != nil {
			return err
		}
		print("spaces=%d\nrefused=%s\ncharged_kib=%d", n, describe(refused), (before-min(before, after))/quota.KiB)
		if refused == nil && n > bombCap && before-min(before, after) < quota.Bytes(n)*leastSpace {
			return fmt.Errorf("%d address spaces without a refusal, and %v charged for them", n, before-min(before, after))
		}
		return c.holds("after", c.via(patient))
	})
}
