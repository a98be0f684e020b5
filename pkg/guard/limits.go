// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"sync/atomic"

	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// cost is what an object takes before the driver is asked for it: memory of a GPU, or of the host.
type cost struct {
	gpu   int
	size  quota.Bytes
	slack quota.Bytes // by which it may pass the limit
	host  bool
}

// gpuAccount is what the container may have of a GPU, and what it has.
type gpuAccount struct {
	limit    quota.Bytes
	native   bool // no limit
	used     quota.Bytes
	peak     quota.Bytes
	denied   uint64
	managed  quota.Bytes // the part of used that is managed memory
	spill    quota.Bytes // host memory allowed beyond limit
	spilled  quota.Bytes // what is used of it
	windows  quota.Bytes // of BAR1
	flexible quota.Bytes // NVLink addresses that have no memory of their own
	attached int         // pieces of memory at these, at most
	counts
	show *page.VGPU // nil: nobody is told
}

// reserve takes memory from the limit of a GPU before the driver is asked. False: it does not fit, and the denial is counted
// if count is set.
func (a *account) reserve(want cost, count bool) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	gpu, size := want.gpu, want.size
	g := &a.gpus[gpu]
	if !g.native && !g.fitsWithSlack(size, want.slack) {
		if count {
			a.deny(gpu, size, false)
		}
		return false
	}
	if g.used+size < g.used { // a native card has no limit that would have refused this
		return false
	}
	g.addUsed(size)
	return true
}

// fits subtracts on the side that cannot wrap: size comes from the container and may be 2⁶⁴−1.
func (g *gpuAccount) fits(size quota.Bytes) bool { return g.fitsWithSlack(size, 0) }

func (g *gpuAccount) fitsWithSlack(size, slack quota.Bytes) bool {
	most := g.limit + slack
	return g.used <= most && size <= most-g.used
}

// deny counts a denial and tells of it. The caller holds mu.
func (a *account) deny(gpu int, size quota.Bytes, spill bool) {
	a.gpus[gpu].denied++
	if a.onDenied != nil {
		a.onDenied(gpu, size, spill, a.gpus[gpu])
	}
}

func (g *gpuAccount) addUsed(size quota.Bytes) {
	g.used += size
	g.peak = max(g.peak, g.used)
	g.publish()
}

// publish writes use into the vGPU page.
func (g *gpuAccount) publish() {
	if g.show == nil {
		return
	}
	atomic.StoreUint64(&g.show.Used, uint64(g.used))
	atomic.StoreUint64(&g.show.Managed, uint64(g.managed))
	atomic.StoreUint64(&g.show.Spilled, uint64(g.spilled))
}

// unreserve gives back what reserve took.
func (a *account) unreserve(what cost) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refund(&charge{gpu: what.gpu, size: what.size, host: what.host})
}

func (g *gpuAccount) subUsed(size quota.Bytes) {
	g.used -= min(size, g.used)
	g.publish()
}

// publishTo has use and limits written into a page from now on.
func (a *account) publishTo(p *page.Page) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range min(len(a.gpus), page.MaxVGPUs) {
		a.gpus[i].show = p.VGPU(i)
		a.gpus[i].publish()
	}
}

// total and free are what the container sees of a GPU: its limit, and host memory behind it.
func (g *gpuAccount) total() quota.Bytes { return g.limit + g.spill }

func (g *gpuAccount) free() quota.Bytes {
	return g.limit - min(g.used, g.limit) + g.spill - min(g.spilled, g.spill)
}

// setLimits changes a GPU's limit and spill. One below what is used refuses new memory until enough is freed.
func (a *account) setLimits(gpu int, limit, spill quota.Bytes) {
	a.mu.Lock()
	defer a.mu.Unlock()
	g := &a.gpus[gpu]
	if g.native || limit == 0 || g.limit == limit && g.spill == spill {
		return
	}
	g.limit, g.spill = limit, spill
	a.noteGPU(gpu)
	if g.show != nil {
		atomic.StoreUint64(&g.show.Limit, uint64(limit))
		atomic.StoreUint64(&g.show.Spill, uint64(spill))
	}
}

// charge and refund count memory on the GPU, or spilled to the host.
func (g *gpuAccount) charge(size quota.Bytes, spilled bool) {
	if spilled {
		g.spilled += size
		g.publish()
	} else {
		g.addUsed(size)
	}
}

func (g *gpuAccount) refund(size quota.Bytes, spilled bool) {
	if spilled {
		g.spilled -= min(size, g.spilled)
		g.publish()
	} else {
		g.subUsed(size)
	}
}
