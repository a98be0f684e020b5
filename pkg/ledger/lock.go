// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
)

// lock is the held lock. It lies on a file of its own: a rename replaces ledger.json, and with it any lock on it. The
// kernel drops it when its holder dies.
type lock struct{ f *os.File }

// lock waits for the ledger's lock.
func (l *Ledger) lock() (*lock, error) {
	deadline := time.Now().Add(l.lockTimeout)
	for {
		// os.OpenFile sets O_CLOEXEC, so the low-level runtime that cgpu-runtime becomes does not inherit the lock.
		f, err := os.OpenFile(l.path(lockName), os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, fmt.Errorf("ledger: lock: %w", err)
		}
		if err := flock(f, deadline); err != nil {
			return nil, err
		}
		// Somebody may have removed the file while we waited (rm -r of the run directory): a lock on a file that
		// nobody else can open excludes nobody.
		held, err := f.Stat()
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("ledger: lock: %w", err)
		}
		if named, err := os.Stat(f.Name()); err == nil && os.SameFile(held, named) {
			return &lock{f}, nil
		}
		f.Close()
	}
}

// release lets go. Unlocking before closing matters: a child that is forked just now holds a copy of the descriptor
// until its exec, and with it the lock.
func (k *lock) release() {
	_ = syscall.Flock(int(k.f.Fd()), syscall.LOCK_UN)
	k.f.Close()
}

// flock locks f before the deadline; on an error f is closed, or will be.
func flock(f *os.File, deadline time.Time) error {
	fd := int(f.Fd())
	if err := syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB); err == nil {
		return nil
	} else if !errors.Is(err, syscall.EWOULDBLOCK) {
		f.Close()
		return fmt.Errorf("ledger: lock %s: %w", f.Name(), err)
	}
	// A blocking flock queues fairly, which polling would not, but knows no timeout: wait for it beside a timer.
	got := make(chan error, 1)
	go func() {
		for {
			err := syscall.Flock(fd, syscall.LOCK_EX)
			if !errors.Is(err, syscall.EINTR) {
				got <- err
				return
			}
		}
	}()
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	select {
	case err := <-got:
		if err != nil {
			f.Close()
			return fmt.Errorf("ledger: lock %s: %w", f.Name(), err)
		}
		return nil
	case <-timer.C:
		// The call may still get the lock; closing the file then gives it back.
		go func() {
			<-got
			f.Close()
		}()
		return fmt.Errorf("ledger: lock %s: still held by another process after the time limit: find it with lslocks or fuser", f.Name())
	}
}
