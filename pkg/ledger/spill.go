// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"
	"math"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// Spill is memory of the host, not of a GPU: its bound is one for the whole node, and each GPU of a container counts.

// freeSpill is what records leave of most.
func freeSpill(records []Record, most quota.Bytes) quota.Bytes {
	free := most
	for _, r := range records {
		// max_spill may have been lowered since: then nothing is free.
		free -= min(free, spillOf(r.VGPUs))
	}
	return free
}

// spillOf is the spill of a container. A sum beyond 64 bits is as good as the largest number: neither is ever free.
func spillOf(vgpus []VGPU) quota.Bytes {
	var sum quota.Bytes
	for _, v := range vgpus {
		if v.Spill > math.MaxUint64-sum {
			return math.MaxUint64
		}
		sum += v.Spill
	}
	return sum
}

// refuseSpill says why slices cannot have their spill beside the records of others; nil when they can.
func refuseSpill(others []Record, vgpus []VGPU, most quota.Bytes) error {
	asked, free := spillOf(vgpus), freeSpill(others, most)
	if asked <= free {
		return nil
	}
	r := &Refusal{Asked: asked, Free: free, Spill: true}
	each := ""
	if len(vgpus) > 1 {
		each = fmt.Sprintf(" on %d GPUs together", len(vgpus))
	}
	reason, want := fmt.Sprintf("%s are free of the node's %s", free.FloorMiB(), most.FloorMiB()), "ask for less"
	if most == 0 {
		reason, want = "this node allows none", "do without"
	}
	r.Reason = fmt.Sprintf("asked for %s of spill%s, but %s", asked, each, reason)
	r.Remedy = want + " (CGPU_MEM_SPILL, cgpu set --spill), or raise max_spill in cgpu.toml"
	return r
}
