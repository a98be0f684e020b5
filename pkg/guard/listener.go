// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// listener is the notification descriptor of one seccomp filter: the container's, or one `docker exec`'s.
//
// One worker at a time waits in SECCOMP_IOCTL_NOTIF_RECV and serves what it gets: the caller and that thread then take
// turns on one core, 3 µs for a round trip on our H200 machine. With a second thread waiting the kernel alternates between
// two cold ones and the median rises to 6–14 µs. So another worker is started only when one is seen to be slow
// (see monitor), and the first to finish finds its place taken and ends.
type listener struct {
	guard *Guard
	fd    int
	total atomic.Int32 // workers
	// waiting is the thread of the worker that waits, or is about to; starting: it has none yet, 0: nobody does.
	waiting atomic.Int32
	taken   atomic.Uint64 // notifications received
	dead    atomic.Bool
	closed  sync.Once
	halted  atomic.Bool  // dead, or nobody is to wait (park)
	waking  sync.Mutex   // held over the look at waiting and the signal that wakes that thread
	watched atomic.Bool  // by the monitor
	spare   chan *worker // workers at rest, whose scratch memory is warm
	// poll first, on kernels where RECV does not end with the filter
	pollFirst bool
}

// starting stands for the thread of a worker that has none yet.
const starting = -1

// maxWorkers bounds the slow calls that are under way at once for one filter.
const maxWorkers = 64

// workerPause is how long calls wait at least for a worker that there was no memory for.
const workerPause = 10 * time.Millisecond

// newListener is a filter that nobody serves yet (spawn).
func (g *Guard) newListener(fd int) *listener {
	l := &listener{guard: g, fd: fd, pollFirst: !recvEndsWithFilter(), spare: make(chan *worker, 4)}
	// Wake the guard on the caller's core and back (Linux 6.6; older kernels refuse, no matter).
	_, _, _ = unix.Syscall(unix.SYS_IOCTL, uintptr(fd), ioctlNotifSetFlags, notifSyncWakeUp)
	return l
}

// spawn starts a worker, unless one waits already.
func (l *listener) spawn() {
	if l.total.Load() < maxWorkers && !l.halted.Load() && l.waiting.CompareAndSwap(0, starting) {
		l.total.Add(1)
		go l.serveCalls()
	}
}

// worker serves notifications, with scratch memory of its own.
type worker struct {
	guard    *Guard
	listener *listener
	mem      *arena
	notif    *seccompNotif
	flight   *flight // nil: there is no keeper
	call     trappedCall
	parts    [maxParts]memoryPart

	start time.Time // when it began; times are told from then, since time.Now reads two clocks of the kernel's and time.Since one

	// Of the last call: the driver was asked and said OK, and how long it took.
	succeeded bool
	inDriver  time.Duration
	meter     meter
}

// serveCalls receives and serves, for as long as this worker is the one that waits.
func (l *listener) serveCalls() {
	rested := false
	defer func() { l.leave(rested) }()
	w, err := l.idleWorker()
	for ; err != nil; w, err = l.idleWorker() { // nobody else comes: calls wait until there is room
		if l.guard.logOnce("worker", "no memory for a worker", "err", err); l.halted.Load() {
			l.rest()
			rested = true
			return
		}
		time.Sleep(workerPause)
	}
	defer l.parkWorker(w)
	runtime.LockOSThread() // its clock is read
	defer runtime.UnlockOSThread()
	thread := int32(unix.Gettid())
	l.waiting.Store(thread)
	w.start = time.Now()
	w.meter.start(w.start)
	taken := false // another one waits
	for !taken && l.receive(w) {
		begin := time.Since(w.start)
		l.taken.Add(1)
		l.waiting.Store(0)
		if l.halted.Load() {
			l.settle()
		}
		l.guard.monitor.wake(l)
		w.succeeded, w.inDriver = false, 0
		w.serve(w.notif)
		end := time.Since(w.start)
		w.meter.countCall(w.succeeded, w.inDriver, end-begin-w.inDriver)
		if taken = !l.waiting.CompareAndSwap(0, thread); !taken {
			w.payBill(w.start.Add(end)) // as the one that waits: nobody is started in its place
		}
	}
	// Of a filter that is gone nobody waits any more: this thread will do other things, which no signal of wake may hit.
	rested = !l.waiting.CompareAndSwap(thread, starting) && !taken
	now := time.Now()
	u, _ := w.meter.spent(now, true)
	w.guard.bill.charge(now, u)
}

func (l *listener) idleWorker() (*worker, error) {
	select {
	case w := <-l.spare:
		return w, nil
	default:
	}
	mem, f, err := l.guard.newScratch()
	w := &worker{guard: l.guard, listener: l, mem: mem, flight: f, notif: new(seccompNotif)}
	if f != nil {
		w.notif = &f.notif
	}
	return w, err
}

func (l *listener) parkWorker(w *worker) {
	if !l.dead.Load() {
		select {
		case l.spare <- w:
			return
		default:
		}
	}
	w.mem.unmap()
}

// close lets go of a dead filter, after its last worker.
func (l *listener) close() {
	l.closed.Do(func() {
		l.guard.mu.Lock()
		delete(l.guard.filters, l)
		l.guard.books.note(&l.guard.own)
		l.guard.mu.Unlock()
		l.guard.books.close(l.fd)
		l.unmapSpares()
	})
}

// unmapSpares lets go of workers at rest.
func (l *listener) unmapSpares() {
	for {
		select {
		case w := <-l.spare:
			w.mem.unmap()
		default:
			return
		}
	}
}

// receive waits for a notification. False: no task has the filter any more.
func (l *listener) receive(w *worker) bool {
	for !l.halted.Load() {
		if l.pollFirst && !l.pollIn() {
			if l.halted.Load() {
				continue
			}
			return false
		}
		*w.notif = seccompNotif{} // the kernel insists on zeroes
		if w.flight != nil {
			w.flight.received(l.fd)
		}
		e := ioctlPtr(l.fd, ioctlNotifRecv, unsafe.Pointer(w.notif))
		switch {
		case e == 0:
			return true
		case l.gone(e):
			return false
		}
	}
	l.rest()
	return false
}

// gone is told of each call that has failed on the filter's descriptor: no task has the filter any more. Of any other failure, such as
// memory that is short, nothing follows but that it is tried again: were nobody to wait, calls would stay for ever.
func (l *listener) gone(e error) bool {
	switch {
	case errors.Is(e, unix.EINTR), errors.Is(e, unix.EAGAIN):
		return false
	case errors.Is(e, unix.EBADF), errors.Is(e, unix.ENOTTY), l.hungUp():
		return true
	case !errors.Is(e, unix.ENOENT): // the caller went away before it was taken up
		l.guard.logOnce("receive", "cannot take up calls; trying again", "err", e)
		time.Sleep(workerPause)
	}
	return false
}

// rest has nobody wait, of a listener that is halted. leave comes afterwards.
func (l *listener) rest() {
	l.waiting.Store(0)
	l.settle()
}

// leave is a worker's end.
func (l *listener) leave(rested bool) {
	switch {
	case l.total.Add(-1) == 0 && l.dead.Load():
		l.close()
	case rested: // unpark may have found this worker still waiting, or, with it, too many for another one
		l.spawn()
	}
}

// monitor starts another worker where one has been busy with one call for longer than a tick. It sleeps while no filter
// has calls, so an idle container costs nothing.
type monitor struct {
	mu   sync.Mutex
	on   map[*listener]uint64 // listeners with recent calls, and what they had taken at the last tick
	seen chan struct{}
}

const (
	monitorTick = 500 * time.Microsecond
	monitorCalm = 10 // ticks without a call before it goes to sleep
)

func newMonitor() *monitor {
	m := &monitor{on: map[*listener]uint64{}, seen: make(chan struct{}, 1)}
	go m.run()
	return m
}

// wake tells of a call; it is on the path of every one.
func (m *monitor) wake(l *listener) {
	if l.watched.Load() {
		return
	}
	m.mu.Lock()
	l.watched.Store(true)
	m.on[l] = 0
	m.mu.Unlock()
	select {
	case m.seen <- struct{}{}:
	default:
	}
}

func (m *monitor) run() {
	calm := map[*listener]int{}
	for range m.seen {
		for m.tick(calm) {
			time.Sleep(monitorTick)
		}
	}
}

// tick looks at every watched listener once; false when none is left.
func (m *monitor) tick(calm map[*listener]int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for l, before := range m.on {
		now := l.taken.Load()
		m.on[l] = now
		// With all workers at slow calls nobody can be started; the first to finish its call waits for the next one.
		waiting := l.waiting.Load() != 0 || l.total.Load() >= maxWorkers
		if now == before && !waiting && !l.dead.Load() {
			l.spawn()
		}
		if now != before || !waiting {
			calm[l] = 0
			if !l.dead.Load() {
				continue
			}
		}
		if calm[l]++; calm[l] > monitorCalm || l.dead.Load() {
			delete(m.on, l)
			delete(calm, l)
			l.watched.Store(false)
			if l.taken.Load() != now && !l.dead.Load() { // a call came in between and saw itself watched
				m.on[l] = now
				l.watched.Store(true)
			}
		}
	}
	return len(m.on) > 0
}

// pollIn waits for a notification without taking it.
func (l *listener) pollIn() bool {
	p := []unix.PollFd{{Fd: int32(l.fd), Events: unix.POLLIN}}
	for !l.halted.Load() {
		_, err := unix.Poll(p, -1)
		if err != nil && l.gone(err) {
			return false
		}
		if err == nil && p[0].Revents&unix.POLLIN != 0 {
			return true
		}
		if err == nil && p[0].Revents&(unix.POLLHUP|unix.POLLERR|unix.POLLNVAL) != 0 {
			return false
		}
	}
	return false
}

func (l *listener) hungUp() bool {
	p := []unix.PollFd{{Fd: int32(l.fd)}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1 && p[0].Revents&(unix.POLLHUP|unix.POLLNVAL) != 0
}

// valid reports that the task is still in the call that the notification is about.
func (l *listener) valid(id uint64) bool {
	return ioctlQuick(l.fd, ioctlNotifIDValid, unsafe.Pointer(&id)) == 0
}

// answer sends the reply. False: the caller is gone.
func (l *listener) answer(id uint64, r reply) bool {
	resp := seccompResp{ID: id}
	if r.resume {
		resp.Flags = notifContinue
	} else if r.errno != 0 {
		resp.Error = -int32(r.errno)
	}
	return ioctlQuick(l.fd, ioctlNotifSend, unsafe.Pointer(&resp)) == 0
}

// recvEndsWithFilter reports that NOTIF_RECV returns when the last task with the filter is gone: Linux 6.11 and later
// ("seccomp: interrupt SECCOMP_IOCTL_NOTIF_RECV when all users have exited"). Before, a waiting thread would be lost with
// every exec'ed process.
func recvEndsWithFilter() bool {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return false
	}
	major, minor := 0, 0
	part := &major
	for _, b := range u.Release {
		switch {
		case b >= '0' && b <= '9':
			*part = *part*10 + int(b-'0')
		case b == '.' && part == &major:
			part = &minor
		default:
			return major > 6 || major == 6 && minor >= 11
		}
	}
	return major > 6 || major == 6 && minor >= 11
}
