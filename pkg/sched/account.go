package sched

import "time"

// Account is the GPU time of a vGPU.
type Account struct {
	Usage                     // as far as records tell
	Pauses      uint64        // times that its channels were stopped
	Stopped     time.Duration // with work, while they were
	Granted     time.Duration // what its share of the GPU's busy time would have been
	Utilization Permille      // of the last second
}

// account is an Account as it grows, but for what the tracker knows.
type account struct {
	Account
	stopped time.Duration // when the channels were last stopped
	card    time.Duration // the GPU's busy time at the last look
	at      time.Duration // of the last look; 0: there was none
}

// grant counts what the vGPU's share of the GPU's busy time was since the last look.
func (a *account) grant(now, busy time.Duration, limit Permille, self Tenant, others []Tenant) {
	passed, elapsed := max(0, busy-a.card), now-a.at
	first := a.at == 0
	a.card, a.at = busy, now
	if first || self.Busy == 0 {
		return
	}
	if limit > 0 {
		a.Granted += elapsed * time.Duration(limit) / time.Duration(Whole)
		return
	}
	sum := self.Weight
	for _, o := range others {
		if o.Busy > 0 {
			sum += o.Weight
		}
	}
	a.Granted += passed * time.Duration(self.Weight) / time.Duration(max(sum, 1))
}
