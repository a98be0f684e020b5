// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// Share is what one container asked of one GPU's time.
type Share = quota.Share

// Permille is a part of a GPU's time in thousandths.
type Permille int

// Whole is all of a GPU.
const Whole Permille = 1000

// Cap is the most of the GPU that a container gets whatever the others do. False: there is no such bound, and what it is
// promised of the GPU is nothing, or Whole where it asked for all of it.
func (c Card) Cap(s Share) (Permille, bool) {
	asked := Permille(s.Percent) * 10
	switch c.Policy {
	case PolicySoft, PolicyNative:
		return 0, false
	case PolicyFair, PolicyFixed:
		if asked == 0 && s.Priority == quota.PriorityHigh {
			return 0, false // as in cGPU, where it "pre-empts regardless of policy"
		}
	}
	slots := 1
	switch {
	case asked > 0:
	case c.Policy == PolicyFixed:
		slots = s.Weight
		fallthrough
	case c.Policy == PolicyFair:
		asked = max(1, Whole*Permille(slots)/Permille(c.MaxInst))
	default:
		return 0, false
	}
	return min(asked, Whole), asked < Whole
}

// Reason says why a share cannot be promised, and what to do about it.
type Reason struct{ Reason, Remedy string }

// Error is one line.
func (r *Reason) Error() string { return r.Reason + "; " + r.Remedy }

// Admit refuses, with a *Reason, a share that the card cannot promise beside others. Nothing is refused because the card is
// busy: only promises (caps that must not overlap) have to fit.
func (c Card) Admit(others []Share, s Share) error {
	switch {
	case s.Percent > 0 && c.Policy == PolicyNative:
		return &Reason{fmt.Sprintf("asked for %d %% of the GPU's time, but its policy is native, which enforces no share", s.Percent),
			"set another policy (cgpu policy GPU fixed), or ask for no percentage"}
	case s.Percent > 0 && c.Policy == PolicyFair && s.Percent*c.MaxInst > 100:
		return &Reason{fmt.Sprintf("asked for %d %% of the GPU's time, but under policy fair each of its %d places has %s", s.Percent, c.MaxInst,
			Whole/Permille(c.MaxInst)),
			"set another policy (cgpu policy GPU fixed), or lower max-inst"}
	}
	own, _ := c.Cap(s)
	if own == 0 {
		return nil
	}
	sum := Permille(0)
	for _, o := range others {
		n, _ := c.Cap(o)
		sum += n
	}
	if own > Whole-min(sum, Whole) {
		return &Reason{fmt.Sprintf("asked for %s of the GPU's time, but %s are free", own, Whole-min(sum, Whole)),
			"stop a container (cgpu smi lists them), ask for less (ALIYUN_COM_GPU_CORE_PERCENTAGE, ALIYUN_COM_GPU_SCHD_WEIGHT), or set policy soft"}
	}
	return nil
}

// String is the part in percent, such as "12.5 %".
func (p Permille) String() string {
	if p%10 == 0 {
		return fmt.Sprintf("%d %%", p/10)
	}
	return fmt.Sprintf("%d.%d %%", p/10, p%10)
}
