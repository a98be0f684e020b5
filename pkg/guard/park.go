// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// How everything in a guard comes to rest for a hand-over (upgrade.go), and goes on: nobody takes up a call, nobody accepts a connection,
// and nobody does what nobody asked for. Callers wait in the kernel meanwhile.

// wakeSignal interrupts a thread that waits for a notification. It is one that Go's runtime has a handler for and does nothing about.
const wakeSignal = 41

// saRestart is SA_RESTART.
const saRestart = 0x10000000

// letInterrupt has wakeSignal end a system call, which with Go's SA_RESTART would begin again.
func letInterrupt() error {
	var act struct {
		handler, flags, restorer uintptr
		mask                     uint64
	}
	if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, wakeSignal, 0, uintptr(unsafe.Pointer(&act)), 8, 0, 0); e != 0 {
		return os.NewSyscallError("rt_sigaction", e)
	}
	if act.handler <= 1 { // the default, which would end this process, or none
		return errors.New("no handler for the signal that wakes a worker")
	}
	act.flags &^= saRestart
	if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, wakeSignal, uintptr(unsafe.Pointer(&act)), 0, 8, 0, 0); e != 0 {
		return os.NewSyscallError("rt_sigaction", e)
	}
	return nil
}

// park has no worker take up a call until unpark. It does not wait for those that have one.
func (l *listener) park() { l.halted.Store(true) }

// unpark undoes park.
func (l *listener) unpark() {
	l.halted.Store(false)
	if l.dead.Load() {
		l.halted.Store(true)
	}
	l.spawn()
}

// wake interrupts the thread that waits for a notification, if one does. One that has taken a call up must not be hit, or the driver's call
// would be interrupted: see settle.
func (l *listener) wake() {
	l.waking.Lock()
	defer l.waking.Unlock()
	if thread := l.waiting.Load(); thread > 0 {
		_ = unix.Tgkill(unix.Getpid(), int(thread), wakeSignal)
	}
}

// settle is called by a worker that has just ceased to wait, although the listener is halted: a signal that was sent to it before is
// delivered before it goes on, by the end of a system call. Who sends one looks at waiting after halted is set, and the worker at halted
// after waiting is not, so none comes later.
func (l *listener) settle() {
	l.waking.Lock()
	//lint:ignore SA2001 whoever had it has sent his signal
	l.waking.Unlock()
	_, _, _ = unix.RawSyscall(unix.SYS_GETPID, 0, 0, 0)
}

// awaitIdle waits until no worker is left. False: one is, after that time. Workers wait one after the other. A thread that is woken just
// before it waits has to be woken again, but less and less often: each signal is delivered before it can go on, and who traces it may take
// longer for one than the next is away.
func (l *listener) awaitIdle(until time.Time) bool {
	var woken int32
	var wakes time.Time
	var pause time.Duration
	for l.total.Load() > 0 {
		now := time.Now()
		if now.After(until) {
			return false
		}
		if thread := l.waiting.Load(); thread != woken || !now.Before(wakes) {
			if thread != woken {
				pause = 50 * time.Microsecond
			}
			l.wake()
			woken, wakes, pause = thread, now.Add(pause), min(2*pause, 10*time.Millisecond)
		}
		shortly()
	}
	return true
}

// shortly waits a moment, for what others are about to do. time.Sleep takes a millisecond where nothing else runs: Go's timers are as fine
// as epoll_wait(2) then.
func shortly() {
	runtime.Gosched()
	_ = unix.Nanosleep(&unix.Timespec{Nsec: int64(50 * time.Microsecond)}, nil)
}

// doors are the guard's two sockets.
type doors struct{ seccomp, control door }

// door is where connections come in, one goroutine after another (acceptAll).
type door struct {
	mu     sync.Mutex
	inside int           // connections that are served
	shut   chan struct{} // closed when it opens again; nil: it is open
	waits  bool          // who accepts has seen that it is shut
}

func (d *door) enter() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.inside++
}

func (d *door) leave() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.inside--
}

// awaitOpen is for who accepts.
func (d *door) awaitOpen() {
	d.mu.Lock()
	shut := d.shut
	d.waits = shut != nil
	d.mu.Unlock()
	if shut != nil {
		<-shut
	}
}

// close has no connection accepted until open. Those that come wait.
func (d *door) close(l *net.UnixListener) {
	d.mu.Lock()
	d.shut = make(chan struct{})
	d.waits = false
	d.mu.Unlock()
	_ = l.SetDeadline(time.Unix(1, 0))
}

func (d *door) open(l *net.UnixListener) {
	_ = l.SetDeadline(time.Time{})
	d.mu.Lock()
	defer d.mu.Unlock()
	close(d.shut)
	d.shut = nil
}

// awaitEmpty waits until not more than some connections are served, and none is being accepted. False: there are more, after that time.
func (d *door) awaitEmpty(most int, until time.Time) bool {
	for {
		d.mu.Lock()
		empty := d.waits && d.inside <= most
		d.mu.Unlock()
		if empty || time.Now().After(until) {
			return empty
		}
		shortly()
	}
}

// descriptor is the number of a connection's or a socket's descriptor, which stays its.
func descriptor(c syscall.Conn) (fd int, err error) {
	raw, err := c.SyscallConn()
	if err == nil {
		err = raw.Control(func(n uintptr) { fd = int(n) })
	}
	return fd, err
}
