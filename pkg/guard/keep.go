// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/guard/journal"
	"github.com/opencgpu/cgpu/pkg/guard/keeper"
)

// keep is what a guard has so that another one goes on should it be killed (docs/adr/0015-keeper.md): the books, memory that both map, and
// the keeper, which has all that and the guard's descriptors.
type keep struct {
	guard   *Guard
	memory  *keeper.Memory
	program *os.File

	mu      sync.Mutex
	free    []int // flights
	process *keeper.Process
	started []time.Time // keepers, lately
	over    bool        // there is none any more

	useless atomic.Bool // for good: the books do not say what is so
}

// A keeper that ends is replaced, but not for ever.
const (
	maxKeepers = 5
	keeperTime = time.Minute
)

// startKeeping begins it. A container is served as well without: as it was before there were keepers.
func (g *Guard) startKeeping() {
	g.beginBooks(nil)
	g.startKeeper()
}

// beginBooks is the first half: from now on it is written down what happens.
func (g *Guard) beginBooks(before *keeper.Memory) {
	if !g.cfg.Settings.Keeper {
		return
	}
	_, err := g.findSockets()
	if err == nil {
		err = g.newKeep(before)
	}
	if err != nil {
		g.noKeeper(err)
	}
}

// startKeeper is the second half: from now on somebody goes on.
func (g *Guard) startKeeper() {
	if g.keep == nil {
		return
	}
	if err := g.keep.start(); err != nil {
		g.noKeeper(err)
	}
}

func (g *Guard) noKeeper(err error) {
	g.log.Error("no keeper: should this guard be killed, nobody goes on in its place", "err", err)
	g.events.Note(event.Event{Kind: event.Warning, Text: "no keeper: " + err.Error()})
}

// newKeep begins the books. before is the memory of a guard that was killed; nil: there was none.
func (g *Guard) newKeep(before *keeper.Memory) (err error) {
	k := &keep{guard: g}
	if k.memory, err = keeper.NewMemory(); err != nil {
		return err
	}
	if before != nil {
		k.memory.CopyRestarts(before)
	}
	if k.program, err = os.Open("/proc/self/exe"); err != nil {
		return err
	}
	j, err := journal.New(k.memory.Active())
	if err != nil {
		return err
	}
	k.memory.SetFiles(j.Descriptors())
	for i := range keeper.MaxFlights {
		k.free = append(k.free, i)
	}
	g.rmClientMu.Lock() // it may be made just now
	g.keepBooks(j, k.lost)
	g.keep = k
	g.tellHandles()
	g.rmClientMu.Unlock()
	return nil
}

// findSockets notes descriptors that are in objects of package net. idle: no call of a simulated driver is under way.
func (g *Guard) findSockets() (idle bool, err error) {
	g.mu.Lock() // the books read it
	defer g.mu.Unlock()
	p := &g.own.sockets
	for _, x := range []struct {
		of syscall.Conn
		to *int
	}{{g.sockets.Seccomp, &p.Seccomp}, {g.sockets.Control, &p.Control}} {
		if *x.to, err = descriptor(x.of); err != nil {
			return false, err
		}
	}
	d, ok := g.driver.(handsOver)
	if !ok {
		return true, nil
	}
	conn, last, idle := d.State()
	p.SimNext = last
	p.Sim, err = descriptor(conn)
	return idle, err
}

// start makes a keeper, and another one when that ends.
func (k *keep) start() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	k.started = slices.DeleteFunc(k.started, func(t time.Time) bool { return now.Sub(t) > keeperTime })
	if k.over || k.useless.Load() {
		return nil
	}
	if len(k.started) >= maxKeepers {
		return fmt.Errorf("%d keepers have ended within %v", len(k.started), keeperTime)
	}
	k.started = append(k.started, now)
	p, err := keeper.Start(k.program, k.memory)
	if err != nil {
		return err
	}
	k.process = p
	return k.guard.watch.watch(p.Descriptor(), unix.EPOLLIN, func() { k.ended(p) })
}

// ended is told of a keeper's end.
func (k *keep) ended(p *keeper.Process) {
	k.mu.Lock()
	mine := k.process == p
	if mine {
		k.process = nil
		p.Kill()
	}
	k.mu.Unlock()
	if !mine {
		return
	}
	go p.Wait()
	k.guard.log.Warn("the keeper has ended; there is another one", "pid", p.PID)
	if err := k.start(); err != nil {
		k.lost(err)
	}
}

// lost: the next guard would know less than there is, or there would be none. So nobody goes on.
func (k *keep) lost(err error) {
	if k.useless.Swap(true) {
		return
	}
	k.memory.Ended().Store(1)
	k.guard.log.Error("should this guard be killed, nobody goes on in its place", "err", err)
	k.guard.events.Note(event.Event{Kind: event.Warning, Text: "the keeper is of no use any more: " + err.Error()})
}

// pid is the keeper's; 0: there is none.
func (k *keep) pid() int {
	if k == nil {
		return 0
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.process == nil {
		return 0
	}
	return k.process.PID
}

// stop kills the keeper: the guard is over, or becomes another program. It does not wait for its end: the container's calls may wait.
func (k *keep) stop() (killed *keeper.Process) {
	if k == nil {
		return nil
	}
	k.memory.Ended().Store(1)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.over = true
	if killed = k.process; killed != nil {
		k.process = nil
		_ = unix.EpollCtl(k.guard.watch.epfd, unix.EPOLL_CTL_DEL, killed.Descriptor(), nil)
		killed.Kill()
	}
	return killed
}

// resume undoes stop.
func (k *keep) resume(killed *keeper.Process) {
	if k == nil {
		return
	}
	go killed.Wait()
	k.mu.Lock()
	k.over = false
	k.mu.Unlock()
	if k.memory.Ended().Store(0); k.useless.Load() {
		k.memory.Ended().Store(1)
	}
	if err := k.start(); err != nil {
		k.lost(err)
	}
}

// newScratch is a worker's memory; where there is a keeper, with what the next guard must know of its call.
func (g *Guard) newScratch() (*arena, *flight, error) {
	k := g.keep
	if k == nil {
		mem, err := newArena()
		return mem, nil, err
	}
	n, ok := k.takeFlight()
	if !ok {
		if g.letGoOfSpares() > keeper.MaxFlights { // in each of them somebody waits for calls, with a flight: there will never be one
			k.lost(fmt.Errorf("the container has more than %d filters", keeper.MaxFlights))
			mem, err := newArena()
			return mem, nil, err
		}
		if n, ok = k.takeFlight(); !ok {
			return nil, nil, errors.New("too many calls are under way")
		}
	}
	f, body := flightAt(k.memory.Flight(n))
	return &arena{mem: body, release: func() {
		f.notif = seccompNotif{}
		f.received(0)
		_ = unix.Madvise(body, unix.MADV_REMOVE) // or each of them would be as large for good as it ever was
		k.mu.Lock()
		defer k.mu.Unlock()
		k.free = append(k.free, n)
	}}, f, nil
}

func (k *keep) takeFlight() (n int, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.free) == 0 {
		return 0, false
	}
	n = k.free[len(k.free)-1]
	k.free = k.free[:len(k.free)-1]
	return n, true
}

// letGoOfSpares gives back what workers at rest have, of all filters, and says how many filters there are.
func (g *Guard) letGoOfSpares() int {
	g.mu.Lock()
	filters := slices.Collect(maps.Keys(g.filters))
	g.mu.Unlock()
	for _, l := range filters {
		l.unmapSpares()
	}
	return len(filters)
}
