// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/opencgpu/cgpu/pkg/guard/handover"
)

// settledRoots are root allocs of which the file has a client, or of which the driver makes none for anybody. RM tells nobody who made it:
// it can be one that somebody outside of the container made on a file which was sent to him, and the container's call can have become an
// allocation of device memory that the guard has not seen. So when the thread has left the call, the guard asks the driver whether it
// counts more for the container than was allocated for it.
type settledRoots struct {
	mu        sync.Mutex
	inside    map[*task]*pendingRoot // whose threads may not have left the call yet
	due       bool                   // they will be looked at
	notBefore time.Time              // when they may be
}

const (
	// settledPatience is for how long root allocs are collected for one look: libraries make two or three when they begin.
	settledPatience = 250 * time.Millisecond
	// settledEvery is the least time between two looks: each holds the locks of all GPUs for a moment.
	settledEvery = time.Second
	// settledTries is how often the two accounts are compared, settledStep apart, until they agree: calls in flight make it wrong for a
	// moment. Who allocates and frees all the time can have them agree now and then, so that counts only if nothing did meanwhile; who
	// leaves no such moment is looked at for longer.
	settledTries = 5
	settledStep  = 20 * time.Millisecond
)

// rootSettled is told of a root alloc whose file has a client, or that the driver refuses the guard too.
func (g *Guard) rootSettled(p *pendingRoot) {
	s := &g.settledRoots
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.inside == nil {
		s.inside = map[*task]*pendingRoot{}
	}
	s.inside[p.task] = p // one of before has been left: a thread makes one call at a time
	g.books.note(&g.own)
	g.dueLocked()
}

// checkSettledRootsSoon goes on with those of the program before.
func (g *Guard) checkSettledRootsSoon() {
	s := &g.settledRoots
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.inside) > 0 {
		g.dueLocked()
	}
}

func (g *Guard) dueLocked() {
	if s := &g.settledRoots; !s.due {
		s.due = true
		time.AfterFunc(max(settledPatience, time.Until(s.notBefore)), g.checkSettledRoots)
	}
}

// checkSettledRoots looks, and comes again as long as threads may be inside.
func (g *Guard) checkSettledRoots() {
	inside := 0
	took := g.chargeTime(func() { inside = g.lookAtSettledRoots() })
	s := &g.settledRoots
	s.mu.Lock()
	defer s.mu.Unlock()
	rest := max(settledEvery, backgroundShare*took)
	s.notBefore = time.Now().Add(rest)
	if s.due = inside > 0 || len(s.inside) > 0; s.due {
		time.AfterFunc(rest, g.checkSettledRoots)
	}
}

func (g *Guard) lookAtSettledRoots() (inside int) {
	s := &g.settledRoots
	s.mu.Lock()
	var list []*pendingRoot
	for _, p := range s.inside {
		list = append(list, p)
	}
	s.mu.Unlock()
	for _, p := range list {
		s.mu.Lock()
		at := p.whereabouts()
		s.mu.Unlock()
		if at != threadOutside {
			inside++
			if time.Since(p.since) > time.Second { // what it made may be here, and its thread be held on the way back
				g.startAudit(suspects)
			}
			continue
		}
		s.mu.Lock()
		if s.inside[p.task] == p {
			delete(s.inside, p.task)
		}
		s.mu.Unlock()
	}
	own, err := g.guardClient()
	if err != nil {
		g.log.Error("cannot ask the driver what the container holds", "err", err)
		g.startAudit(suspects)
		return inside
	}
	for range settledTries {
		if u, quiet := g.holdsUncharged(own); quiet && u == (uncharged{}) {
			return inside
		}
		time.Sleep(settledStep)
	}
	g.startAudit(unsure)
	return inside
}

// insideSettledRoot reports that a thread may still be in such a call, and make something else of it.
func (g *Guard) insideSettledRoot() bool {
	g.settledRoots.mu.Lock()
	defer g.settledRoots.mu.Unlock()
	for _, p := range g.settledRoots.inside {
		if p.whereabouts() != threadOutside {
			return true
		}
	}
	return false
}

// looksAtRoots reports that a look at settled root allocs is still to come.
func (g *Guard) looksAtRoots() bool {
	g.settledRoots.mu.Lock()
	defer g.settledRoots.mu.Unlock()
	return g.settledRoots.due
}

// state lists those whose threads may be inside.
func (s *settledRoots) state() (list []handover.Root) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.inside {
		if p.whereabouts() != threadOutside {
			list = append(list, handover.Root{TID: p.task.tid, Args: p.args, Since: p.since.UnixNano()})
		}
	}
	slices.SortFunc(list, func(x, y handover.Root) int { return cmp.Or(cmp.Compare(x.TID, y.TID), cmp.Compare(x.Since, y.Since)) })
	return slices.CompactFunc(list, func(x, y handover.Root) bool { return x.TID == y.TID })
}

func (s *settledRoots) restore(list []handover.Root) {
	s.inside = map[*task]*pendingRoot{}
	for _, x := range list {
		p := &pendingRoot{task: &task{tid: x.TID}, args: x.Args, since: time.Unix(0, x.Since)}
		s.inside[p.task] = p
	}
}
