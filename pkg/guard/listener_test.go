// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestReceiveFails: only of a filter that is gone nobody takes up calls any more; whatever else fails is tried again.
func TestReceiveFails(t *testing.T) {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(ends[0])
	l := &listener{guard: newFakeGuard(t, &inProcess{}), fd: ends[0]}
	for e, gone := range map[unix.Errno]bool{unix.EINTR: false, unix.EAGAIN: false, unix.ENOENT: false, unix.ENOMEM: false,
		unix.EFAULT: false, unix.EBADF: true, unix.ENOTTY: true} {
		if l.gone(e) != gone {
			t.Errorf("%v: gone: %v, want %v", e, !gone, gone)
		}
	}
	_ = unix.Close(ends[1]) // the last one who had it
	for _, e := range []unix.Errno{unix.ENOENT, unix.ENOMEM} {
		if !l.gone(e) {
			t.Errorf("%v, and nobody has the filter: it is taken for there", e)
		}
	}
}

// TestUnparkFindsWaiting: a worker that ceases to wait just when its filter is served again starts another one: unpark, which found it
// waiting, did not. So it is where all other workers there can be have slow calls.
func TestUnparkFindsWaiting(t *testing.T) {
	for _, workers := range []int32{1, maxWorkers} { // with the one that this test is, and for which there was no memory
		l := goneFilter(t)
		l.total.Store(workers)
		l.waiting.Store(starting)
		l.park()
		l.unpark()
		l.rest()
		l.leave(true)
		for l.total.Load() >= workers {
			shortly()
		}
		if len(l.spare) != 1 {
			t.Errorf("%d workers: nobody takes up calls", workers)
		}
	}
}

// TestUnparkFindsTooMany: a worker of the most there can be that has ceased to wait, but not ended, when its filter is served again starts
// another one: unpark could not.
func TestUnparkFindsTooMany(t *testing.T) {
	l := goneFilter(t)
	l.total.Store(maxWorkers)
	l.waiting.Store(starting)
	l.park()
	l.waking.Lock()
	go func() {
		for l.waiting.Load() != 0 {
			shortly()
		}
		l.unpark()
		l.waking.Unlock()
	}()
	l.serveCalls()
	if l.waiting.Load() == 0 {
		t.Error("nobody takes up calls")
	}
	for l.total.Load() >= maxWorkers {
		shortly()
	}
}

// goneFilter is one that is gone, which who waits for its calls notices.
func goneFilter(t *testing.T) *listener {
	t.Helper()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { null.Close() })
	return &listener{guard: newKept(t, &inProcess{}), fd: int(null.Fd()), spare: make(chan *worker, 4)}
}
