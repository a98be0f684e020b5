// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"sync"
	"time"
)

// bucket limits the rate of something. The zero value, and one of a rate of 0, limits nothing.
type bucket struct {
	mu               sync.Mutex
	perSecond, burst float64
	tokens           float64
	last             time.Time
}

// spend takes n tokens, if need be on credit.
func (b *bucket) spend(now time.Time, n float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.perSecond > 0 {
		b.fill(now)
		b.tokens -= n
	}
}

// owed is how long it takes until the debt is paid.
func (b *bucket) owed(now time.Time) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.perSecond <= 0 {
		return 0
	}
	b.fill(now)
	return b.debt()
}

// tryPay takes n tokens if the bucket is not in debt; else it says when it will not be.
func (b *bucket) tryPay(now time.Time, n float64) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.perSecond <= 0 {
		return 0
	}
	b.fill(now)
	if b.tokens >= 0 {
		b.tokens -= n
		return 0
	}
	return b.debt()
}

func (b *bucket) debt() time.Duration {
	if b.tokens >= 0 {
		return 0
	}
	return time.Duration(-b.tokens / b.perSecond * float64(time.Second))
}

// setRate changes how fast the bucket fills. One that had no rate begins full.
func (b *bucket) setRate(now time.Time, perSecond float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.perSecond > 0 {
		b.fill(now)
	} else {
		b.last = time.Time{}
	}
	b.perSecond = perSecond
}

// fill adds what has come since the last time.
func (b *bucket) fill(now time.Time) {
	if b.last.IsZero() {
		b.tokens = b.burst
	} else {
		b.tokens = min(b.burst, b.tokens+max(0, now.Sub(b.last)).Seconds()*b.perSecond)
	}
	b.last = now
}
