// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// slowCalls bounds calls that hold the driver's locks, under which all containers' calls wait, for milliseconds (rm.Control.HoldsLocks,
// measured on an H200). A failed kernel takes 0.3 s of them, so eight programs can fail at once; after that they take a tenth of the time.
func slowCalls() bucket { return bucket{perSecond: 0.1, burst: 3} }

// maxWaiters bounds the calls of a container that wait for a slow call: each has one of its filter's workers.
const maxWaiters = 16

// waitToPay waits until the container may make another slow call. False: the caller is away, or there are too many that wait, and the call
// has to come again.
func (g *Guard) waitToPay(c *trappedCall, locks time.Duration) bool {
	wait := g.slowBucket.tryPay(time.Now(), locks.Seconds())
	if wait == 0 {
		return true
	}
	defer g.waiters.Add(-1)
	if g.waiters.Add(1) > maxWaiters {
		return false
	}
	for wait > 0 && c.valid() {
		time.Sleep(min(wait, 10*time.Millisecond))
		wait = g.slowBucket.tryPay(time.Now(), locks.Seconds())
	}
	return wait == 0
}

// payForRange has a caller wait for the time that a range of addresses which has its tables at once holds the driver's locks: when it is
// made, and as long again when it is freed, for which nobody can be made to wait. Small ones are as other calls.
func (g *Guard) payForRange(c *trappedCall, length uint64) bool {
	const small, perMiB = 32 << 20, 17 * time.Microsecond // 417 to 493 ms and 456 to 590 ms for 64 GiB, on an H200
	if length < small {
		return true
	}
	return g.waitToPay(c, time.Duration(min(length, rm.MaxVirtual)>>20)*perMiB)
}

// payForTables has a caller wait for the time that a large mapping holds the driver's locks.
func (g *Guard) payForTables(c *trappedCall, length uint64) bool {
	const perGiB = 9 * time.Millisecond // measured on an H200
	if length < 1<<30 {
		return true
	}
	return g.waitToPay(c, time.Duration(min(length, rm.MaxVirtual)>>30)*perGiB)
}
