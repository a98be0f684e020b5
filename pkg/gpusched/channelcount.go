// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"sync"

	"github.com/opencgpu/cgpu/pkg/peerpage"
)

// channelCount is how many channel ids the container has on the engine of a GPU where it has most, as other guards read on the page.
type channelCount struct {
	mu   sync.Mutex
	page *peerpage.Entry // nil: nobody is told
	n    int
}

func (c *channelCount) set(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n = n
	c.tell()
}

// share has the others told from now on, beginning with what there is already; nil: no more.
func (c *channelCount) share(p *peerpage.Entry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.page = p
	c.tell()
}

func (c *channelCount) tell() {
	if c.page != nil {
		c.page.TellChannels(c.n)
	}
}

func (c *channelCount) shared() *peerpage.Entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.page
}

// TellChannels tells other guards how many channels the container has on the engine of a GPU where it has most.
func (s *Scheduler) TellChannels(gpu, n int) {
	if x := s.onGPU(gpu); x != nil {
		x.channels.set(n)
	}
}

// OtherChannels is how many channels the other containers of a GPU have, at most. False: nobody knows, or not yet.
func (s *Scheduler) OtherChannels(gpu int) (n int, ok bool) {
	x := s.onGPU(gpu)
	if x == nil {
		return 0, false
	}
	p := x.channels.shared()
	if p == nil {
		return 0, false
	}
	return p.OtherChannels(), true
}
