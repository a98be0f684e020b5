// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"
	"slices"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// Budget is the most that all records of an owner may have of the node's GPU memory together.
type Budget struct {
	Owner  string // as in Record.Owners
	Memory quota.Bytes
}

// Within refuses slices that do not fit into their owners' budgets: a Request's Refuse.
func Within(budgets []Budget) func(others []Record, vgpus []VGPU) error {
	return func(others []Record, vgpus []VGPU) error { return refuseBudget(budgets, others, vgpus) }
}

// refuseBudget says whose budget slices do not fit into, beside the records of others; nil when they do.
func refuseBudget(budgets []Budget, others []Record, vgpus []VGPU) error {
	asked := limitsOf(vgpus)
	for _, b := range budgets {
		free := b.Memory
		for _, r := range others {
			if slices.Contains(r.Owners, b.Owner) {
				free -= min(free, limitsOf(r.VGPUs)) // the budget may have been lowered since
			}
		}
		if asked > free {
			return &Refusal{Asked: asked, Free: free, Reason: fmt.Sprintf("asked for %s, but %s may have %s on this node, of which %s are free",
				asked, b.Owner, b.Memory.FloorMiB(), free.FloorMiB()), Remedy: "wait for others of the same owner to end, or ask for less"}
		}
	}
	return nil
}

// limitsOf is no more than the node's memory: each limit was compared with its GPU's.
func limitsOf(vgpus []VGPU) (sum quota.Bytes) {
	for _, v := range vgpus {
		sum += v.Limit
	}
	return sum
}
