// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/test/interrupt"
)

// childSignals CLIENT TIMER_US MS: allocations, frees, and files that lend their identity, under a timer, half of the time with SA_RESTART,
// and 50 at least.
func childSignals(s *childState, a []int) (string, error) {
	c := s.clients[a[0]]
	seen := make(chan os.Signal, 1024)
	signal.Notify(seen, syscall.SIGALRM)
	go func() {
		for range seen {
		}
	}()
	stop, err := interrupt.Thread(time.Duration(a[1]) * time.Microsecond)
	if err != nil {
		return "", err
	}
	defer stop()
	calls := 0
	for i, restart := range []bool{true, false} {
		if err := interrupt.Restart(syscall.SIGALRM, restart); err != nil {
			return "", err
		}
		for end := time.Now().Add(time.Duration(a[2]) * time.Millisecond / 2); time.Now().Before(end) || calls < 25*(i+1); calls += 2 {
			want := uint32(0)
			if calls%4 == 0 {
				want = 0x5c000001 // the driver would notice a second one of these, but not of those that it names itself
			}
			h, err := c.memory(want, 2<<20)
			if err == nil {
				err = c.free(h)
			}
			if err == nil {
				err = s.lend(c)
			}
			if err != nil {
				return "", fmt.Errorf("call %d, SA_RESTART %v: %w", calls, restart, err)
			}
		}
	}
	return fmt.Sprint(calls, " ", interrupted.Load()), nil
}

// lend gives a new file the identity of a client's. The driver refuses that the second time.
func (s *childState) lend(c *rmClient) error {
	fd, err := s.open("nvidiactl", unix.O_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	o := make([]byte, rm.RegisterFDSize)
	rm.PutU32(o, rm.RegisterFDFD, uint32(c.fd))
	return (&rmClient{fd: fd}).ioctl(rm.EscRegisterFD, o)
}

// childRace CLIENT MS: threads make, copy and free the same few handles at the same time, each without a look at the others.
func childRace(s *childState, a []int) (string, error) {
	c := s.clients[a[0]]
	end := time.Now().Add(time.Duration(a[1]) * time.Millisecond)
	const x, y = 0x5c000001, 0x5c000002
	done := make(chan error)
	run := func(f func() error) {
		go func() {
			var errno syscall.Errno
			for time.Now().Before(end) {
				if err := f(); errors.As(err, &errno) { // RM's refusals are part of the game
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for range 2 {
		run(func() error { return c.free(x) })
		run(func() error { _, err := c.memory(x, 4<<20); return err })
		run(func() error { _, err := c.memory(x, 64<<10); return err })
		run(func() error {
			_, err := c.dupAs(y, c.client, x)
			return errors.Join(err, c.free(y))
		})
	}
	var err error
	for range 8 {
		err = errors.Join(err, <-done)
	}
	return "", err
}
