// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"

	"github.com/opencgpu/cgpu/pkg/sched"
)

// Nobody stops the work of a container without a guard at the end of a slot.

// refusePreload says why a container without a guard cannot share a GPU as its card has it; nil when it can.
func (l load) refusePreload() *Refusal {
	switch l.card.Policy {
	case sched.PolicyFair, sched.PolicyFixed, sched.PolicySoft:
	default:
		return nil
	}
	return &Refusal{GPU: l.gpu, Free: l.free,
		Reason: fmt.Sprintf(`its policy is %s, which needs a guard, and the container would have none (enforcement, limits in cgpu.toml)`,
			l.card.Policy),
		Remedy: `choose another (cgpu policy: preempt, weight-preempt or native), or set enforcement = "guard" and limits = "guard" in cgpu.toml`}
}
