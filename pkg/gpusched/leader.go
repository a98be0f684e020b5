// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"os"
	"time"

	"github.com/opencgpu/cgpu/pkg/peerpage"
)

// successorTime is for how long there may be no arbiter before its rows do not hold any more. A standby needs milliseconds.
const successorTime = time.Second

// watchLeader notes when the arbiter ends and none comes after it. Rows of a GPU at rest never expire, and work that returns on contexts
// that are there traps nothing: without this nobody would ever decide again.
func (x *gpuScheduler) watchLeader(p *peerpage.Entry) {
	for {
		leader, ok := x.awaitLeader(p)
		if !ok || !x.awaitEnd(leader) {
			return
		}
	}
}

// awaitLeader waits for who decides. False: the guard ends.
func (x *gpuScheduler) awaitLeader(p *peerpage.Entry) (*os.File, bool) {
	patience := time.NewTimer(successorTime)
	defer patience.Stop()
	for {
		if leader, ok := p.LeaderFile(); ok {
			return leader, true
		}
		select {
		case <-x.s.stop:
			return nil, false
		case <-x.rung:
		case <-patience.C:
			x.lapse(p)
		}
	}
}

// awaitEnd waits for the arbiter's end. False: the guard ends.
func (x *gpuScheduler) awaitEnd(leader *os.File) bool {
	over := make(chan struct{})
	if leader == nil { // there is one, but no descriptor to be had: rows expire while the GPU works
		<-x.s.stop
		return false
	}
	defer leader.Close()
	go func() {
		if err := peerpage.AwaitEnd(leader); err == nil {
			close(over)
		}
	}()
	select {
	case <-x.s.stop:
		return false
	case <-over:
		return true
	}
}

// lapse has the container do without the row, until there is another, and its guard start who writes that.
func (x *gpuScheduler) lapse(p *peerpage.Entry) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.receiveRow()
	// After the row was taken: a new arbiter says that it leads before it writes one.
	leader, ok := p.LeaderFile()
	if ok {
		_ = leader.Close()
		return
	}
	x.local.Lapse()
	kick(x.kick)
	kick(x.s.pausesKick)
}
