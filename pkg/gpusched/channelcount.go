package gpusched

import "sync"

// channelCount is how many channel ids the container has on the engine of a GPU where it has most, as other guards are told.
type channelCount struct {
	mu   sync.Mutex
	page *peerPage // nil: nobody is told
	n    int
}

func (c *channelCount) set(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n = n
	c.tell()
}

// share has the others told from now on, beginning with what there is already; nil: no more.
func (c *channelCount) share(p *peerPage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.page = p
	c.tell()
}

func (c *channelCount) tell() {
	if c.page != nil {
		c.page.u32(c.page.own + pageChannels).Store(uint32(c.n))
	}
}

func (c *channelCount) shared() *peerPage {
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
	return p.otherChannels(), true
}
