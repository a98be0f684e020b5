package main

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// stolen is how much each attempt of hostileTOCTOURoot tries to get for nothing.
const stolen = 64 * quota.MiB

// hostileTOCTOURoot attacks the one allocation that runs natively, the root alloc on a file without a client. While it is
// under way one thread turns its class into device memory, and another puts a file that has a client in the descriptor's
// place. Some attempts succeed for a moment; the guard must find each out and free the clients of the process.
func hostileTOCTOURoot(o hostileOptions) error {
	mem, err := pages(8192)
	if err != nil {
		return err
	}
	out, params := mem[:allocSize], mem[4096:4096+128]
	tries, most, won := 0, min(o.tries, 20000), 0
	deadline := time.Now().Add(raceTime)
	for tries < most && won < 5 && time.Now().Before(deadline) {
		n, got, err := stealByRoot(out, params, most-tries, deadline)
		if err != nil {
			return err
		}
		tries += n
		if got {
			won++
		}
	}
	print("tries=%d\nwon_and_lost_again=%d", tries, won)
	c, err := openGPU(patient)
	if err != nil {
		return err
	}
	defer c.close()
	return c.holds("after", c.via(patient))
}

// stealByRoot tries with one client, until it got memory that was not charged and lost the client for it.
func stealByRoot(out, params []byte, tries int, deadline time.Time) (n int, got bool, err error) {
	c, _, before, err := openCounted(patient)
	if err != nil {
		return 0, false, err
	}
	defer c.close()
	race := c.newRootRace(out, classMemory)
	defer race.stop()
	for ; n < tries && time.Now().Before(deadline); n++ {
		f, err := syscall.Open("/dev/nvidiactl", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
		if err != nil {
			return n, false, err
		}
		h := c.newHandle()
		c.fillMemoryAlloc(out, params, h, uint64(stolen))
		race.try(f)
		lost, uncharged := c.outcome(h, before)
		syscall.Close(f)
		if lost {
			return n + 1, true, nil
		}
		if uncharged {
			// It is here and nobody counted it: now the guard has a second to find out.
			for deadline := time.Now().Add(time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
				if lost, uncharged = c.outcome(h, before); lost || !uncharged {
					break
				}
			}
			if uncharged && !lost {
				return n, false, fmt.Errorf("%v of device memory were had for nothing", stolen)
			}
			return n + 1, true, nil
		}
		_ = c.free(h)
	}
	return n, false, nil
}

// rootSlot is the descriptor by which root allocs are made.
const rootSlot = 200

// rootRace swaps file and class of root allocs that are under way.
type rootRace struct {
	out   []byte
	fresh atomic.Int64 // a file without a client, while one is under way; else -1
	stop  func()
}

// newRootRace makes allocations of a class out of the root allocs in out.
func (c *client) newRootRace(out []byte, class uint32) *rootRace {
	r := &rootRace{out: out}
	r.fresh.Store(-1)
	var end atomic.Bool
	done := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		defer close(done)
		for !end.Load() {
			if f := int(r.fresh.Load()); f >= 0 {
				_ = syscall.Dup3(f, rootSlot, syscall.O_CLOEXEC)
				_ = syscall.Dup3(c.fd, rootSlot, syscall.O_CLOEXEC)
			}
		}
	}()
	stopFlip := flip(word(out, rm.AllocClass), classRootClient, class)
	r.stop = func() {
		end.Store(true)
		<-done
		stopFlip()
		_ = syscall.Close(rootSlot)
	}
	return r
}

// try makes a root alloc on f.
func (r *rootRace) try(f int) {
	r.fresh.Store(int64(f))
	_ = syscall.Dup3(f, rootSlot, syscall.O_CLOEXEC)
	_ = caller(patient).escape(rootSlot, rm.EscAlloc, r.out)
	r.fresh.Store(-1)
}

// outcome tells whether the client has been freed by the guard, and whether it has an object that was not charged.
func (c *client) outcome(h uint32, before quota.Bytes) (lost, uncharged bool) {
	_, free, err := c.usage()
	if err != nil {
		return statusOf(err) == rm.StatusInvalidClient, false
	}
	if before-min(before, free) >= stolen {
		return false, false // charged
	}
	return false, c.exists(h)
}
