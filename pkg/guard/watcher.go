package guard

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// watcher waits for descriptors to hang up: processes that exit and filters whose last task is gone. It costs nothing
// while nothing happens.
type watcher struct {
	epfd   int
	mu     sync.Mutex
	on     map[int32]func()
	around func(func()) // is given all that is to be done
}

func newWatcher(around func(func())) (*watcher, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}
	w := &watcher{epfd: fd, on: map[int32]func(){}, around: around}
	go w.run()
	return w, nil
}

// watch calls f once, when one of events or a hang-up happens on fd. The descriptor must stay open until then.
func (w *watcher) watch(fd int, events uint32, f func()) error {
	w.mu.Lock()
	w.on[int32(fd)] = f
	w.mu.Unlock()
	return unix.EpollCtl(w.epfd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)})
}

func (w *watcher) run() {
	events := make([]unix.EpollEvent, 16)
	for {
		n, err := unix.EpollWait(w.epfd, events, -1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		w.around(func() {
			for _, e := range events[:max(n, 0)] {
				w.callBack(e.Fd)
			}
		})
	}
}

func (w *watcher) callBack(fd int32) {
	_ = unix.EpollCtl(w.epfd, unix.EPOLL_CTL_DEL, int(fd), nil)
	w.mu.Lock()
	f := w.on[fd]
	delete(w.on, fd)
	w.mu.Unlock()
	if f != nil {
		f()
	}
}

// watchProcess is told of each new process of the container.
func (g *Guard) watchProcess(p *process) {
	// A pidfd becomes readable when the process has exited; its files are closed by then.
	if err := g.watch.watch(p.pidfd, unix.EPOLLIN, func() { g.processGone(p) }); err != nil {
		g.log.Error("cannot watch a process", "pid", p.tgid, "err", err)
	}
}

// processGone gives back what a process held. Its clients went with its files, unless a child has those too.
func (g *Guard) processGone(p *process) {
	p.gone.Store(true)
	g.tasks.dropProcess(p)
	g.sweepNext()
	g.managedGone(p.tgid) // may wait for a sweep
}

// sweepNext sweeps at once or, where sweeps have just taken long, when the guard has rested from them. However many ask for it meanwhile,
// it is done once.
func (g *Guard) sweepNext() {
	if g.sweepPending.CompareAndSwap(false, true) {
		go func() {
			g.sweepTurnMu.Lock()
			defer g.sweepTurnMu.Unlock()
			time.Sleep(time.Until(g.sweepNotBefore))
			g.sweepPending.Store(false) // who asks from now on may have closed something that this one does not see
			took := g.chargeTime(func() { g.startSweep() })
			g.sweepNotBefore = time.Now().Add(backgroundShare * took)
		}()
	}
}

// sweepSoon sweeps a few times in the near future: memory whose last handle was freed is still held by a UVM mapping, and
// the program is likely to close that address space next (cudaDeviceReset).
func (g *Guard) sweepSoon() {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch g.sweepWait {
	case firstSweep: // it comes, however often it is asked for
		return
	case 0:
		g.sweepTimer = time.AfterFunc(firstSweep, g.sweepAgain)
	default: // the next one would come late
		g.sweepTimer.Reset(firstSweep)
	}
	g.sweepWait = firstSweep
}

const (
	firstSweep = 10 * time.Millisecond
	lastSweep  = 256 * firstSweep
)

func (g *Guard) sweepAgain() {
	g.sweepNext()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.sweepWait >= lastSweep || !g.account.hasZombies() {
		g.sweepWait = 0
		return
	}
	g.sweepWait = max(firstSweep, g.sweepWait) * 4
	g.sweepTimer.Reset(g.sweepWait)
}

// orphans are the UVM address spaces that no process of the container has open. Each process is looked at once, however many address
// spaces there are, and only until all are found: first those that used them, then the others.
func (g *Guard) orphans() []*file {
	left := map[*file]bool{}
	for _, f := range g.files.snapshot() {
		if f.strong >= 0 && f.tornDown == nil {
			left[f] = true
		}
	}
	seen := map[int]bool{}
	look := func(tgid int) {
		if seen[tgid] || len(left) == 0 {
			return
		}
		seen[tgid] = true
		eachTable(tgid, &g.nodes, func(fd int, _ place) bool {
			if f := g.files.find(fd, nodeUVM); f != nil {
				f.mu.Lock()
				f.owners[tgid] = true
				f.mu.Unlock()
				delete(left, f)
			}
			_ = unix.Close(fd)
			return len(left) > 0
		})
	}
	for _, f := range slices.Collect(maps.Keys(left)) {
		for _, tgid := range f.ownerPIDs() {
			if left[f] {
				look(tgid)
			}
		}
	}
	if len(left) > 0 {
		for _, tgid := range g.containerCgroups().processes() {
			look(tgid)
		}
	}
	return slices.Collect(maps.Keys(left))
}

func (g *Guard) firstPID() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.initPID
}

func (g *Guard) containerCgroups() cgroups {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.cgroups
}
