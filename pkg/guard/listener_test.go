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
// waiting, did not.
func TestUnparkFindsWaiting(t *testing.T) {
	null, err := os.Open(os.DevNull) // a filter that is gone
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	g := newKept(t, &inProcess{})
	l := &listener{guard: g, fd: int(null.Fd()), spare: make(chan *worker, 4)}
	l.total.Store(1) // the worker that this test is, and for which there was no memory
	l.waiting.Store(starting)
	l.park()
	l.unpark()
	l.rest()
	for l.total.Load() > 1 {
		shortly()
	}
	if len(l.spare) != 1 {
		t.Error("nobody takes up calls")
	}
}
