// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"

	"github.com/opencgpu/cgpu/pkg/sched"
)

// In preload mode a container has no guard, so nobody stops its work at the end of a slot.

// refusePreload says why a container in preload mode cannot share a GPU as its card has it; nil when it can.
func (l load) refusePreload() *Refusal {
	switch l.card.Policy {
	case sched.PolicyFair, sched.PolicyFixed, sched.PolicySoft:
	default:
		return nil
	}
	return &Refusal{GPU: l.gpu, Free: l.free,
		Reason: fmt.Sprintf(`its policy is %s, which the preload library cannot enforce (enforcement = "preload" in cgpu.toml)`, l.card.Policy),
		Remedy: `choose another (cgpu policy: preempt, weight-preempt or native), or set enforcement = "guard" in cgpu.toml`}
}
