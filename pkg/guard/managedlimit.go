// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// reserveManaged charges managed memory on each sliced GPU, if it fits on all. A refusal counts as a denial if count is set.
func (a *account) reserveManaged(size quota.Bytes, count bool) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if i := a.tooSmall(size); i != noGPU {
		if count {
			a.deny(i, size, false)
		}
		return false
	}
	a.addManaged(size)
	return true
}

// fitsManaged reports that reserveManaged would succeed.
func (a *account) fitsManaged(size quota.Bytes) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.tooSmall(size) == noGPU
}

// tooSmall is a sliced GPU that size does not fit into; noGPU: it fits into each.
func (a *account) tooSmall(size quota.Bytes) int {
	return slices.IndexFunc(a.gpus, func(g gpuAccount) bool { return !g.native && !g.fits(size) })
}

// forceManaged charges what is mapped already, whether it fits or not.
func (a *account) forceManaged(size quota.Bytes) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.addManaged(size)
}

func (a *account) addManaged(size quota.Bytes) {
	for i := range a.gpus {
		if g := &a.gpus[i]; !g.native {
			g.managed += size
			g.addUsed(size)
		}
	}
}

func (a *account) releaseManaged(size quota.Bytes) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range a.gpus {
		if g := &a.gpus[i]; !g.native {
			n := min(size, g.managed)
			g.managed -= n
			g.subUsed(n)
		}
	}
}

// managedOver reports that the container has more than its limit.
func (a *account) managedOver() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, g := range a.gpus {
		if !g.native && g.used > g.limit {
			return true
		}
	}
	return false
}

// groupCount is the number of channel groups.
func (a *account) groupCount() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := 0
	for _, g := range a.gpus {
		n += g.tsgs
	}
	return n
}
