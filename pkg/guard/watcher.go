// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"sync"

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
		if errors.Is(err, unix.EINTR) {
			continue // nothing has happened, and what a guard needs to do something may not be there yet
		}
		if err != nil {
			return
		}
		w.around(func() {
			for _, e := range events[:n] {
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
