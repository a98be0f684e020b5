// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"
)

// Offsets of GP_GET and GP_PUT in a channel's user-driver page (Nvc36fControl to Nvc86fControl, class/clc36f.h).
const (
	userdGPGet = 0x88
	userdGPPut = 0x8c
	// UserWords is how much of it is read.
	UserWords = userdGPPut + 4
)

// UserPages reads the user-driver pages of the container's channels on a GPU: work is there when the program has put in more than
// the GPU has got. libcuda keeps these pages in device memory; a read over the bus takes 1 µs (H200).
type UserPages struct {
	x       *gpuScheduler
	next    time.Duration     // when to look for new channels
	viewing sync.Mutex        // pages. After a client's calls, with which the container may be in LetGo
	pages   map[any]*userPage // by channel
}

type userPage struct {
	*UserPage
	get, put uint32
}

func newUserPages(x *gpuScheduler) *UserPages {
	return &UserPages{x: x, pages: map[any]*userPage{}}
}

// UserPages are those that are looked at for a high-priority container; nil: none can be.
func (s *Scheduler) UserPages(gpu int) *UserPages {
	x := s.onGPU(gpu)
	if x == nil || x.priority == nil {
		return nil
	}
	p, _ := x.priority.work.(*UserPages)
	return p
}

func (v *userPage) word(at int) uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&v.Words[at])).Load()
}

// hadWork reports that some channel has had work since the last look.
func (p *UserPages) hadWork() (worked bool) {
	if now := p.x.s.Now(); now >= p.next {
		p.next = now + pressFor
		p.Sync()
	}
	p.viewing.Lock()
	defer p.viewing.Unlock()
	for _, v := range p.pages {
		put := v.word(userdGPPut)
		if put != v.put || v.get != put {
			get := v.word(userdGPGet)
			worked = worked || put != v.put || get != put
			v.get, v.put = get, put
		}
	}
	return worked
}

// Sync maps the pages of new channels and lets go of those that are gone. It reports how many are seen.
func (p *UserPages) Sync() (seen int) {
	p.forget()
	for _, ch := range p.x.s.Container.Channels(p.x.gpu, false) {
		if p.sees(ch) {
			seen++
		}
	}
	return seen
}

// sees reports that a channel's page is mapped, now if it can be. Who holds the calls of a client may be in forget, so viewing is not
// held over the opening.
func (p *UserPages) sees(ch Channel) bool {
	p.viewing.Lock()
	seen := p.pages[ch.Object] != nil
	p.viewing.Unlock()
	if seen {
		return true
	}
	page, err := p.x.s.Container.UserPage(p.x.gpu, ch)
	if err != nil {
		p.x.s.LogOnce("userd", "cannot see in a channel when a high-priority container has work", "err", err)
	}
	if page == nil {
		return false
	}
	v := &userPage{UserPage: page}
	v.put, v.get = v.word(userdGPPut), v.word(userdGPGet)
	p.viewing.Lock()
	defer p.viewing.Unlock()
	p.pages[ch.Object] = v
	return true
}

// forget is called where memory is needed, too: a page keeps its memory.
func (p *UserPages) forget() {
	p.viewing.Lock()
	defer p.viewing.Unlock()
	if len(p.pages) == 0 {
		return
	}
	live := map[any]bool{}
	for _, ch := range p.x.s.Container.Channels(p.x.gpu, false) {
		live[ch.Object] = true
	}
	maps.DeleteFunc(p.pages, func(ch any, v *userPage) bool {
		if !live[ch] {
			v.Close()
		}
		return !live[ch]
	})
}

// Release lets go of all pages: they hold memory of the container.
func (p *UserPages) Release() {
	p.viewing.Lock()
	defer p.viewing.Unlock()
	for _, v := range p.pages {
		v.Close()
	}
	clear(p.pages)
	p.next = 0
}
