package guard

import (
	"errors"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// listener is the notification descriptor of one seccomp filter: the container's, or one `docker exec`'s.
//
// Its workers sit in SECCOMP_IOCTL_NOTIF_RECV, each on a thread of its own; the kernel hands a notification to exactly one.
// There is always one more than busy ones (up to maxWorkers), so a driver call that takes long does not hold up others.
type listener struct {
	g       *Guard
	fd      int
	idle    atomic.Int32
	total   atomic.Int32
	dead    atomic.Bool
	leader  chan struct{} // held while waiting, on kernels where RECV does not end with the filter; else nil
	closing chan struct{}
}

const (
	maxWorkers  = 64
	idleWorkers = 2 // kept waiting when calm
)

// newListener starts to serve a filter.
func (g *Guard) newListener(fd int) *listener {
	l := &listener{g: g, fd: fd, closing: make(chan struct{})}
	if !recvEndsWithFilter() {
		l.leader = make(chan struct{}, 1)
	}
	// Wake the guard on the caller's core and back: the two take turns (Linux 6.6; older kernels refuse, no matter).
	_, _, _ = unix.Syscall(unix.SYS_IOCTL, uintptr(fd), ioctlNotifSetFlags, notifSyncWakeUp)
	l.spawn()
	return l
}

func (l *listener) spawn() {
	l.total.Add(1)
	l.idle.Add(1)
	go l.work()
}

// worker is a thread that serves notifications, with its scratch memory.
type worker struct {
	g     *Guard
	l     *listener
	mem   *arena
	notif seccompNotif
	call  trappedCall
	parts [maxParts]memoryPart
}

func (l *listener) work() {
	runtime.LockOSThread() // a thread that waits in RECV must not be handed to other goroutines in between
	defer runtime.UnlockOSThread()
	defer l.total.Add(-1)
	mem, err := newArena()
	if err != nil {
		l.idle.Add(-1)
		l.g.log.Error("no memory for a worker", "err", err)
		return
	}
	defer mem.free()
	w := &worker{g: l.g, l: l, mem: mem}
	for {
		ok := l.receive(&w.notif)
		if !ok {
			l.idle.Add(-1)
			return
		}
		if l.idle.Add(-1) == 0 && l.total.Load() < maxWorkers {
			l.spawn()
		}
		w.serve(&w.notif)
		if l.idle.Add(1) > idleWorkers && l.total.Load() > idleWorkers {
			l.idle.Add(-1)
			return
		}
	}
}

// receive waits for a notification. False: no task has the filter any more.
func (l *listener) receive(n *seccompNotif) bool {
	for !l.dead.Load() {
		if l.leader != nil {
			l.leader <- struct{}{}
			ok := l.pollIn()
			if !ok {
				<-l.leader
				return false
			}
		}
		*n = seccompNotif{} // the kernel insists on zeroes
		e := ioctlPtr(l.fd, ioctlNotifRecv, unsafe.Pointer(n))
		if l.leader != nil {
			<-l.leader
		}
		switch {
		case e == 0:
			return true
		case errors.Is(e, unix.EINTR), errors.Is(e, unix.EAGAIN):
		case errors.Is(e, unix.ENOENT):
			// The caller went away before it was taken up, or, since 6.11, the filter has no tasks left.
			if l.hungUp() {
				return false
			}
		default:
			return false
		}
	}
	return false
}

// pollIn waits for a notification without taking it.
func (l *listener) pollIn() bool {
	p := []unix.PollFd{{Fd: int32(l.fd), Events: unix.POLLIN}}
	for !l.dead.Load() {
		_, err := unix.Poll(p, -1)
		if err != nil && !errors.Is(err, unix.EINTR) {
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
	return err == nil && n == 1 && p[0].Revents&unix.POLLHUP != 0
}

// valid reports that the task is still in the call that the notification is about.
func (l *listener) valid(id uint64) bool {
	return ioctlPtr(l.fd, ioctlNotifIDValid, unsafe.Pointer(&id)) == 0
}

// answer sends the reply. False: the caller is gone.
func (l *listener) answer(id uint64, r reply) bool {
	resp := seccompResp{ID: id}
	if r.resume {
		resp.Flags = notifContinue
	} else if r.errno != 0 {
		resp.Error = -int32(r.errno)
	}
	return ioctlPtr(l.fd, ioctlNotifSend, unsafe.Pointer(&resp)) == 0
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
