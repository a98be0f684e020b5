// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// fillMemoryAlloc writes an RM_ALLOC of device memory into out and params.
func (c *client) fillMemoryAlloc(out, params []byte, handle uint32, size uint64) {
	clear(out)
	rm.PutU32(out, rm.AllocRoot, c.handle)
	rm.PutU32(out, rm.AllocParent, c.device)
	rm.PutU32(out, rm.AllocObject, handle)
	rm.PutU32(out, rm.AllocClass, classMemory)
	putPtr(out, rm.AllocParams, params)
	copy(params, memoryParams(size))
}

// word is a place in memory that a racing thread changes.
func word(b []byte, off int) *uint32 { return (*uint32)(unsafe.Pointer(&b[off])) }

// flip starts a thread that writes a and b to p in turn until stop is called.
func flip(p *uint32, a, b uint32) (stop func()) {
	var end atomic.Bool
	done := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		defer close(done)
		for !end.Load() {
			atomic.StoreUint32(p, a)
			atomic.StoreUint32(p, b)
		}
	}()
	return func() { end.Store(true); <-done }
}

// race issues RM_ALLOCs of device memory while other threads change the structures, and checks at the end that every
// object is gone again and that nothing was had for free.
func (c *client) race(o hostileOptions, out, params []byte, fill func(i int, handle uint32), done func()) error {
	_, before, err := c.usage()
	if err != nil {
		return err
	}
	var granted, errnos, uncharged, tries int
	for i := range o.attempts() {
		tries++
		h := c.newHandle()
		fill(i, h)
		if errno := c.call.escape(c.fd, rm.EscAlloc, out); errno != 0 {
			errnos++
			continue
		}
		// The racing thread may have overwritten the answer. Now and then ask what there is; then free it in any case.
		if i%64 == 0 && c.exists(h) {
			granted++
			_, free, err := c.usage()
			if err != nil {
				return err
			}
			if before-min(before, free) < 2*quota.MiB {
				uncharged++
			}
		}
		if err := c.free(h); err != nil {
			return err
		}
	}
	done()
	runtime.KeepAlive(params)
	print("tries=%d\nerrnos=%d\nsampled_granted=%d", tries, errnos, granted)
	if uncharged > 0 {
		return fmt.Errorf("%d of %d sampled objects were not charged", uncharged, granted)
	}
	if err := c.expectFree("end", before, 0); err != nil {
		return err
	}
	if o.keep {
		return wait("")
	}
	return nil
}

// hostileTOCTOUOuter turns a root allocation, which may run natively, into device memory between check and use.
func hostileTOCTOUOuter(c *client, total, _ quota.Bytes, o hostileOptions) error {
	mem, err := pages(8192)
	if err != nil {
		return err
	}
	out, params := mem[:allocSize], mem[4096:4096+128]
	huge := uint64(total) + uint64(quota.GiB)
	stop := flip(word(out, rm.AllocClass), classRootClient, classMemory)
	before := func(_ int, h uint32) { c.fillMemoryAlloc(out, params, h, huge) }
	// On this client's file: a client exists here, so the root allocation itself must be refused or harmless.
	if err := c.race(o, out, params, before, stop); err != nil {
		return err
	}
	// Any memory of that size would show as less free memory than nothing; a last check that the limit is as it was.
	return c.holds("after", c.via(patient))
}

// hostileTOCTOUInner makes the size small when it is looked at and huge when it is used.
func hostileTOCTOUInner(c *client, o hostileOptions) error {
	mem, err := pages(8192)
	if err != nil {
		return err
	}
	out, params := mem[:allocSize], mem[4096:4096+128]
	// The upper half of the size: 0 or 1 << 40 more than 2 MiB.
	stop := flip(word(params, rm.MemorySize+4), 0, 1<<8)
	fill := func(_ int, h uint32) { c.fillMemoryAlloc(out, params, h, uint64(2*quota.MiB)) }
	if err := c.race(o, out, params, fill, stop); err != nil {
		return err
	}
	// And the other structure: where the block is. A second block with a huge size.
	big := mem[6144 : 6144+128]
	copy(big, memoryParams(1<<40))
	lo := uint32(uintptr(unsafe.Pointer(&params[0])))
	stop = flip(word(out, rm.AllocParams), lo, lo+2048)
	if err := c.race(o, out, params, fill, stop); err != nil {
		return err
	}
	return c.holds("after", c.via(patient))
}

// Controls of a channel group.
const (
	ctrlSetTimeslice = 0xa06c0103
	ctrlGetTimeslice = 0xa06c0104
	ctrlPreempt      = 0xa06c0105
)

// stolenUs is a timeslice that no guard would set.
const stolenUs = 7_654_321

// hostileTOCTOUControl turns a harmless control into SET_TIMESLICE.
func hostileTOCTOUControl(c *client, o hostileOptions) error {
	tsg, err := c.group(1)
	if err != nil {
		return skip("no channel group: " + err.Error())
	}
	mem, err := pages(8192)
	if err != nil {
		return err
	}
	out, params := mem[:rm.ControlSize], mem[4096:4096+8]
	stop := flip(word(out, rm.ControlCmd), ctrlGetTimeslice, ctrlSetTimeslice)
	for range o.attempts() {
		cmd := atomic.LoadUint32(word(out, rm.ControlCmd))
		clear(out)
		rm.PutU32(out, rm.ControlClient, c.handle)
		rm.PutU32(out, rm.ControlObject, tsg)
		atomic.StoreUint32(word(out, rm.ControlCmd), cmd)
		rm.PutU32(out, rm.ControlParamsSize, 8)
		putPtr(out, rm.ControlParams, params)
		rm.PutU64(params, 0, stolenUs)
		_ = c.call.escape(c.fd, rm.EscControl, out)
	}
	stop()
	us, err := c.timeslice(tsg)
	if err != nil {
		return err
	}
	print("timeslice_us=%d", us)
	if us == stolenUs {
		return fmt.Errorf("a racing thread set the timeslice to %d µs", us)
	}
	return nil
}

// hostileTOCTOUFD swaps the file behind the descriptor between check and use: an ioctl that looks like one on /dev/null
// must not reach nvidiactl unchecked.
func hostileTOCTOUFD(c *client, total, before quota.Bytes, o hostileOptions) error {
	null, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	ctl, err := syscall.Dup(c.fd)
	if err != nil {
		return err
	}
	target, err := syscall.Dup(null)
	if err != nil {
		return err
	}
	var end atomic.Bool
	done := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		defer close(done)
		for !end.Load() {
			_ = syscall.Dup3(ctl, target, syscall.O_CLOEXEC)
			_ = syscall.Dup3(null, target, syscall.O_CLOEXEC)
		}
	}()
	mem, err := pages(8192)
	if err != nil {
		return err
	}
	out, params := mem[:allocSize], mem[4096:4096+128]
	huge := uint64(total) + uint64(quota.GiB)
	errnos := map[syscall.Errno]int{}
	var granted []uint32
	for i := range o.attempts() {
		h := c.newHandle()
		size := uint64(2 * quota.MiB)
		if i%2 == 0 {
			size = huge
		}
		c.fillMemoryAlloc(out, params, h, size)
		rm.PutU32(out, 40, 0xbad)
		errno := patient(target, cmdOf(rm.EscAlloc, allocSize), unsafe.Pointer(&out[0]))
		errnos[errno]++
		if errno != 0 || rm.U32(out, 40) != rm.StatusOK {
			continue
		}
		if size == huge {
			end.Store(true)
			return fmt.Errorf("got %d bytes, more than the GPU shows", huge)
		}
		if granted = append(granted, h); len(granted) < 16 {
			continue
		}
		// What was got must be charged.
		_, free, err := c.usage()
		if err != nil {
			return err
		}
		if want := 2 * quota.MiB * quota.Bytes(len(granted)); before-min(before, free) < want {
			end.Store(true)
			return fmt.Errorf("%v allocated, but free memory went from %v to %v", want, before, free)
		}
		for _, h := range granted {
			if err := c.free(h); err != nil {
				return err
			}
		}
		granted = granted[:0]
	}
	end.Store(true)
	<-done
	for _, h := range granted {
		if err := c.free(h); err != nil {
			return err
		}
	}
	for e, n := range errnos {
		print("errno_%d=%d", int(e), n)
	}
	// A call that was made, and whose answer a signal kept back while the descriptor changed, has an object that is charged and that nobody
	// knows here. It goes with the client.
	c.close()
	return waitIdle(before)
}
