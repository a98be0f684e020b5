// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/rm"
)

// deniesProfiler reports that a call is a profiler's (pkg/rm says which are) and the node's settings do not allow those. The driver
// answers a user who may not read counters with the same status, which Nsight Compute shows as ERR_NVGPUCTRPERM.
func (g *Guard) deniesProfiler(profiling bool, name string) bool {
	switch {
	case !profiling || g.cfg.Settings.Profiling && !g.isMember():
		return false
	case g.isMember():
		g.logOnce("profiler", "denied a profiler call: a member of a trust domain computes in the context of all of them; leave CGPU_DOMAIN "+
			"(--domain) out to profile", "call", name, "domain", g.cfg.Domain)
	default:
		g.logOnce("profiler", "denied a profiler call: counters show what neighbours do; profiling = true in cgpu.toml allows them", "call",
			name)
	}
	g.stats.denied.Add(1)
	return true
}

// streams are those of one profiler object: samples that the GPU writes into memory of the profiler's own client. Held with the
// client's calls.
type streams struct {
	asked bool   // one was asked for
	given uint64 // the indices that the driver gave, a bit each, for good: what is freed is cleared. A GB100 has 20
}

// checkStream: the calls on a profiler's streams. The driver keeps them in arrays that it makes when the first is asked for,
// does not clear, and reads at the index that the caller names, or at 0 where none was made (kern_profiler_v2_ctrl.c,
// profilerBaseCtrlCmdAllocPmaStream_IMPL, …FreePmaStream_IMPL and …BindPmResources_IMPL, at least in 535 to 595). What it finds there it
// follows as a pointer; so only what it has itself put there may be named.
func (g *Guard) checkStream(c *trappedCall) plan {
	s := g.account.streamsOf(c.controlClient(), c.controlObject())
	if s == nil {
		return answer(c.status(rm.StatusInvalidObject))
	}
	switch c.control.Kind {
	case rm.ControlStreamFree:
		if i := rm.U32(c.params, rm.StreamFreeIndex); s.given&(1<<i) == 0 {
			return answer(c.status(rm.StatusInvalidArgument))
		}
	case rm.ControlStreamBind:
		if s.asked && s.given == 0 {
			return answer(c.status(rm.StatusInvalidState))
		}
	case rm.ControlStreamAlloc:
		s.asked = true
		g.account.noteObject(c.controlClient(), c.controlObject())
		return plan{ask: true, commit: func() {
			s.given |= 1 << rm.U32(c.params, rm.StreamAllocIndex) // nothing from 64 on
			g.account.noteObject(c.controlClient(), c.controlObject())
		}}
	}
	return pass()
}

// noteObject has what an object is written down.
func (a *account) noteObject(client, handle uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.clients[client]; c != nil && c.objects[handle] != nil {
		a.books.note(c.objects[handle])
	}
}

// streamsOf are those of a profiler object; nil: it is none.
func (a *account) streamsOf(client, handle uint32) *streams {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.clients[client]; c != nil && c.objects[handle] != nil {
		return c.objects[handle].streams
	}
	return nil
}
