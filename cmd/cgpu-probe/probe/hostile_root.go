// SPDX-License-Identifier: Apache-2.0

package probe

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
// place. Some attempts succeed for a moment; the guard must find each out and free the clients of the process. The second that goes
// elsewhere, whatever became of it there, ends the process.
func hostileTOCTOURoot(o hostileOptions) error { return stealAll(o, (*client).swapRoots) }

// hostileTOCTOURootFile is the same on the client's own file: only the memory of the call is swapped, and all else about it is true.
func hostileTOCTOURootFile(o hostileOptions) error {
	return stealAll(o, func(c *client, out []byte, class uint32) *rootSwap { return c.swapHere(out, class, nil) })
}

// hostileTOCTOURootRights asks for rights on the client that nobody like it gets, so that the driver refuses what the guard has seen, and
// takes what has become of it.
func hostileTOCTOURootRights(o hostileOptions) error {
	rights, err := pages(rm.RightsSize)
	if err != nil {
		return err
	}
	return stealAll(o, func(c *client, out []byte, class uint32) *rootSwap { return c.swapHere(out, class, rights) })
}

// rightNice is RS_ACCESS_NICE (rs_access.h), for which the driver wants CAP_SYS_NICE.
const rightNice = 1 << 1

// rootSwapper begins to turn root allocs into another class below a client.
type rootSwapper func(c *client, out []byte, class uint32) *rootSwap

func stealAll(o hostileOptions, begin rootSwapper) error {
	mem, err := pages(8192)
	if err != nil {
		return err
	}
	out, params := mem[:allocSize], mem[4096:4096+128]
	tries, most, won := 0, min(o.tries, 20000), 0
	deadline := time.Now().Add(raceTime)
	for tries < most && won < 5 && time.Now().Before(deadline) {
		n, got, err := stealByRoot(begin, out, params, most-tries, deadline)
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
func stealByRoot(begin rootSwapper, out, params []byte, tries int, deadline time.Time) (n int, got bool, err error) {
	c, _, before, err := openCounted(patient)
	if err != nil {
		return 0, false, err
	}
	defer c.close()
	swap := begin(c, out, classMemory)
	defer swap.end()
	for ; n < tries && time.Now().Before(deadline); n++ {
		h, f, err := swap.try(func(h uint32) { c.fillMemoryAlloc(out, params, h, uint64(stolen)) })
		if err != nil {
			return n, false, err
		}
		lost, uncharged := c.outcome(h, before)
		if f >= 0 {
			syscall.Close(f)
		}
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

// hostileTOCTOURootGroup attacks the same call with a channel group, which no account of device memory shows. Of those that the guard
// has not seen made one may live, where the call looks like one that a signal has kept from being made. None may run.
func hostileTOCTOURootGroup(o hostileOptions) error {
	mem, err := pages(8192)
	if err != nil {
		return err
	}
	out, params := mem[:allocSize], mem[4096:4096+20]
	c, err := openGPU(patient)
	if err != nil {
		return err
	}
	defer c.close()
	swap := c.swapRoots(out, classGroup)
	defer swap.end()
	tries, won := 0, 0
	for range o.attempts() {
		tries++
		h, f, err := swap.try(func(h uint32) {
			clear(out)
			clear(params)
			rm.PutU32(params, rm.TSGEngineType, rm.ChannelEngineTypeGR)
			rm.PutU32(out, rm.AllocRoot, c.handle)
			rm.PutU32(out, rm.AllocParent, c.device)
			rm.PutU32(out, rm.AllocObject, h)
			putPtr(out, rm.AllocParams, params)
		})
		if err != nil {
			return err
		}
		syscall.Close(f)
		if c.control(h, controlGroupInfo, make([]byte, 4)) != nil {
			_ = c.free(h) // there is no such group, or nobody says what it is
			continue
		}
		if err := c.schedule(h, false); statusOf(err) == rm.StatusInvalidObjectHandle {
			// The driver has it, and the guard has not seen it made.
			if won++; won > 1 {
				return fmt.Errorf("%d channel groups were had that the guard does not know, after %d tries", won, tries)
			}
			continue
		}
		_ = c.free(h)
	}
	print("tries=%d\nunknown=%d", tries, won)
	return nil
}

// controlGroupInfo is NVA06C_CTRL_CMD_GET_INFO.
const controlGroupInfo = 0xa06c0106

// rootSwap makes root allocs, while a thread turns their class into another. They are on new files, and a thread puts a client's file in
// the place of the new one's; or here, on the client's.
type rootSwap struct {
	c      *client
	out    []byte
	here   bool
	rights []byte       // asked for of the client, and not of what is made in its place; nil: none
	fresh  atomic.Int64 // the new file, -1: none
	stop   atomic.Bool
	done   chan struct{}
	flip   func()
}

// swapSlot is the descriptor that the files change places at.
const swapSlot = 200

func (c *client) swapRoots(out []byte, class uint32) *rootSwap {
	s := &rootSwap{c: c, out: out, done: make(chan struct{})}
	s.fresh.Store(-1)
	go func() {
		runtime.LockOSThread()
		defer close(s.done)
		for !s.stop.Load() {
			if f := int(s.fresh.Load()); f >= 0 {
				_ = syscall.Dup3(f, swapSlot, syscall.O_CLOEXEC)
				_ = syscall.Dup3(c.fd, swapSlot, syscall.O_CLOEXEC)
			}
		}
	}()
	s.flip = flipBoth(out, c.handle, class, new(uint32))
	return s
}

// swapHere is swapRoots with the client's file alone.
func (c *client) swapHere(out []byte, class uint32, rights []byte) *rootSwap {
	s := &rootSwap{c: c, out: out, here: true, rights: rights, done: make(chan struct{})}
	close(s.done)
	mask := new(uint32)
	if rights != nil {
		mask = word(rights, 0)
	}
	s.flip = flipBoth(out, c.handle, class, mask)
	return s
}

// flipBoth turns a root alloc, with rights, into another one below a client, without, and back, until the returned function is called.
func flipBoth(out []byte, client, class uint32, rights *uint32) func() {
	var stop atomic.Bool
	done := make(chan struct{})
	root, what := word(out, rm.AllocRoot), word(out, rm.AllocClass)
	go func() {
		defer close(done)
		for !stop.Load() {
			atomic.StoreUint32(rights, rightNice)
			atomic.StoreUint32(root, 0)
			atomic.StoreUint32(what, classRootClient)
			for range 200 { // for as long as the guard's copy takes, more or less
				if stop.Load() {
					break
				}
			}
			atomic.StoreUint32(rights, 0)
			atomic.StoreUint32(root, client)
			atomic.StoreUint32(what, class)
			for range 200 {
				if stop.Load() {
					break
				}
			}
		}
	}()
	return func() {
		stop.Store(true)
		<-done
	}
}

// try makes one, and returns the handle that it had for what it may have become, and the new file; -1: there is none.
func (s *rootSwap) try(fill func(h uint32)) (h uint32, f int, err error) {
	if s.here {
		return s.tryHere(fill), -1, nil
	}
	if f, err = syscall.Open("/dev/nvidiactl", syscall.O_RDWR|syscall.O_CLOEXEC, 0); err != nil {
		return 0, -1, err
	}
	h = s.c.newHandle()
	fill(h)
	s.fresh.Store(int64(f))
	_ = syscall.Dup3(f, swapSlot, syscall.O_CLOEXEC)
	patientEscape(swapSlot, s.out)
	s.fresh.Store(-1)
	return h, f, nil
}

// tryHere makes one on the client's file, and frees the client that came of it.
func (s *rootSwap) tryHere(fill func(h uint32)) (h uint32) {
	h = s.c.newHandle()
	fill(h)
	if s.rights != nil {
		putPtr(s.out, rm.AllocRights, s.rights)
	}
	patientEscape(s.c.fd, s.out)
	if made := rm.U32(s.out, rm.AllocObject); made != h {
		_ = (&client{call: patient, fd: s.c.fd, handle: made}).free(made)
	}
	return h
}

func (s *rootSwap) end() {
	s.stop.Store(true)
	<-s.done
	s.flip()
	if !s.here {
		_ = syscall.Close(swapSlot)
	}
}

func patientEscape(fd int, out []byte) {
	_ = caller(patient).escape(fd, rm.EscAlloc, out)
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
