// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Cases around memory that is not on the GPU alone: spilled, managed, and the page that shows the account.

// spillOf is the spill and the limit of the first GPU, by the vGPU page.
func spillOf() (spill, limit quota.Bytes) {
	p, err := page.Read(page.Path)
	if err != nil || p.Header().VGPUs == 0 {
		return 0, 0
	}
	return quota.Bytes(p.VGPU(0).Spill), quota.Bytes(p.VGPU(0).Limit)
}

// share opens an object to every client (RS_SHARE_TYPE_ALL, RS_ACCESS_DUP_OBJECT), by the escape.
func (c *client) share(object uint32) error { return c.policy(object, 1) }

// mustAnswer fails unless an attempt was refused with a status.
func mustAnswer(what string, err error, status uint32) error {
	print("%s=%s", what, describe(err))
	if statusOf(err) != status {
		return fmt.Errorf("%s: %s: want %s", what, describe(err), rm.StatusName(status))
	}
	return nil
}

// hostileSpill tries to make more of spilled memory than the limit and the spill together.
func hostileSpill(hostileOptions) error {
	spill, limit := spillOf()
	if spill == 0 {
		return skip("the container has no spill")
	}
	return withGPU(func(c *client) error {
		total, before, err := c.usage()
		if err != nil {
			return err
		}
		if total != limit+spill {
			return fmt.Errorf("the GPU shows %v: want the limit of %v and the spill of %v", total, limit, spill)
		}
		if err := c.holds("spill", c.via(patient)); err != nil {
			return err
		}
		const chunk = 16 * quota.MiB
		var all []uint32
		var sum quota.Bytes
		for sum < total-chunk {
			h, granted, err := c.memory(chunk)
			if err != nil {
				return fmt.Errorf("%v of %v: %w", sum, total, err)
			}
			all, sum = append(all, h), sum+granted
		}
		spilled := all[len(all)-1]
		fd, err := syscall.Open("/dev/nvidiactl", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer syscall.Close(fd)
		if err := errors.Join(mustAnswer("export", c.export(fd, spilled), rm.StatusNotSupported),
			mustAnswer("share", c.share(spilled), rm.StatusNotSupported)); err != nil {
			return err
		}
		if err := c.expectFree("full", before, sum); err != nil {
			return err
		}
		if err := c.twoHandles(spilled, before, sum); err != nil {
			return err
		}
		// The handle again: it is taken, and what is refused must neither be charged nor take the old object along.
		out, params := make([]byte, allocSize), make([]byte, 128)
		c.fillMemoryAlloc(out, params, all[len(all)-2], uint64(2*quota.MiB))
		if err := mustRefuse("same_handle", c.allocRaw(out, params)); err != nil {
			return err
		}
		for _, size := range []uint64{^uint64(0), ^uint64(0) - 0xffff, ^uint64(0) - uint64(2*quota.MiB) + 1, 1 << 63, 1<<63 - 1,
			-uint64(sum), -uint64(spill), uint64(total), uint64(spill) + 1} {
			if _, err := c.via(patient)(size); err == nil {
				return fmt.Errorf("got %#x bytes with %v of %v in use", size, sum, total)
			}
		}
		sum -= chunk // which twoHandles freed
		if err := c.expectFree("refused", before, sum); err != nil {
			return err
		}
		for i, h := range all[:len(all)-1] {
			if err := c.free(h); err != nil {
				return err
			}
			if i%2 == 0 {
				_ = c.free(h) // not there any more: RM says OK, and nothing may be given back for it
			}
		}
		if err := c.expectFree("end", before, 0); err != nil {
			return err
		}
		return c.spillAgain(chunk, total)
	})
}

// twoHandles duplicates spilled memory into another client: it counts once, and until the last handle is gone.
func (c *client) twoHandles(spilled uint32, before, sum quota.Bytes) error {
	b, err := openGPU(patient)
	if err != nil {
		return err
	}
	defer b.close()
	d, err := b.dup(c.handle, spilled)
	print("dup=%s", describe(err))
	if err != nil {
		return c.free(spilled) // refusing it keeps the limit too
	}
	if err := c.expectFree("after_dup", before, sum); err != nil {
		return err
	}
	if err := c.free(spilled); err != nil {
		return err
	}
	if err := c.expectFree("after_first_free", before, sum); err != nil {
		return err
	}
	return b.free(d)
}

// spillAgain lets threads fill and free at the edge of limit and spill. The sum of what they have is never above both.
func (c *client) spillAgain(chunk, total quota.Bytes) error {
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		live  quota.Bytes
		first error
	)
	for range 8 {
		wg.Go(func() {
			var own []uint32
			drop := func() {
				mu.Lock()
				live -= chunk // before the free: never more than the driver has
				mu.Unlock()
				_ = c.free(own[0])
				own = own[1:]
			}
			for range 400 {
				mu.Lock()
				stop := first != nil
				mu.Unlock()
				if stop {
					break
				}
				if rand.IntN(3) == 0 && len(own) > 0 {
					drop()
					continue
				}
				h, granted, err := c.memory(chunk)
				mu.Lock()
				switch {
				case err == nil:
					own = append(own, h)
					if live += granted; live > total && first == nil {
						first = fmt.Errorf("threads hold %v of a GPU of %v", live, total)
					}
				case statusOf(err) != rm.StatusNoMemory && first == nil:
					first = err
				}
				mu.Unlock()
			}
			for len(own) > 0 {
				drop()
			}
		})
	}
	wg.Wait()
	if first != nil {
		return first
	}
	_, free, err := c.usage()
	if err == nil && free != total {
		err = fmt.Errorf("free memory is %v after all threads: want %v", free, total)
	}
	return err
}

// hostilePage tries to write the page in which the guard says what is in use.
func hostilePage(hostileOptions) error {
	before, err := os.ReadFile(page.Path)
	if err != nil {
		return skip("no vGPU page")
	}
	if how, writable := pageWritable(); writable {
		return fmt.Errorf("the vGPU page can be written, by %s", how)
	}
	for _, try := range []struct {
		what string
		err  error
	}{
		{"remove", os.Remove(page.Path)},
		{"rename", os.Rename(page.Path, page.Path+"2")},
		{"truncate", os.Truncate(page.Path, 0)},
		{"chmod", os.Chmod(page.Path, 0o666)},
		{"through_proc", writeThroughProc()},
	} {
		if err := mustRefuse(try.what, try.err); err != nil {
			return err
		}
	}
	after, err := os.ReadFile(page.Path)
	if err != nil || len(after) != len(before) {
		return fmt.Errorf("the page was of %d bytes and is of %d: %v", len(before), len(after), err)
	}
	return nil
}

// writeThroughProc opens the page anew for writing, by a descriptor that may only read it.
func writeThroughProc() error {
	f, err := os.Open(page.Path)
	if err != nil {
		return err
	}
	defer f.Close()
	again, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), os.O_RDWR, 0)
	if err == nil {
		again.Close()
	}
	return err
}

// withUVM runs f with a client and an address space, both by plain system calls.
func withUVM(f func(*client, *uvmSpace) error) error {
	return withGPU(func(c *client) error {
		u, err := openUVM(bySyscall, rawIoctl)
		if err != nil {
			return skip("no nvidia-uvm: " + err.Error())
		}
		defer syscall.Close(u.fd)
		return f(c, u)
	})
}

// guarded reports that a guard answers what the limiter says. Without, the driver does, which knows none of it.
func (u *uvmSpace) guarded() bool {
	r, err := u.reserve(4096)
	return err == nil && u.announce(page.ReserveManaged, uint64(r.base), 4096) == nil &&
		u.announce(page.ReleaseManaged, uint64(r.base), 4096) == nil
}

// hostileAnnounce says nonsense to the guard in the limiter's place.
func hostileAnnounce(hostileOptions) error {
	return withUVM(func(c *client, u *uvmSpace) error {
		if !u.guarded() {
			return errors.New("no guard answers what the limiter says")
		}
		total, before, err := c.usage()
		if err != nil {
			return err
		}
		for _, bad := range [][2]uint64{{1 << 32, ^uint64(0)}, {^uint64(0), 2}, {^uint64(0) - 4095, 8192}, {4096, 1<<64 - 4096}, {0, 1 << 63},
			{1 << 63, 1 << 63},
			{4096, 1 << 63}, {1 << 32, 0}, {0, 0}, {1 << 32, uint64(total) + 1}, {1 << 32, uint64(before) + 1}, {1 << 46, 1 << 62}} {
			if err := mustRefuse(fmt.Sprintf("reserve_%#x+%#x", bad[0], bad[1]), u.announce(page.ReserveManaged, bad[0], bad[1])); err != nil {
				return err
			}
			if err := c.expectFree("refused", before, 0); err != nil {
				return err
			}
		}
		for _, addr := range []uintptr{0, 1, 0xffff888000000000, ^uintptr(0) - 16, 1<<47 - 8} {
			for _, cmd := range []uintptr{page.ReserveManaged, page.ReleaseManaged} {
				if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(u.fd), cmd, addr); errno == 0 {
					return fmt.Errorf("announce %#x with a structure at %#x: no error", cmd, addr)
				}
			}
		}
		for _, fd := range []int{c.fd, c.gpuFDs[0]} { // nodes that are not UVM's
			o := &uvmSpace{fd: fd, call: rawIoctl}
			if err := mustRefuse("reserve_elsewhere", o.announce(page.ReserveManaged, 1<<32, 4096)); err != nil {
				return err
			}
		}
		return c.releases(u, before)
	})
}

// releases gives back what was never taken, and what was taken more than once.
func (c *client) releases(u *uvmSpace, before quota.Bytes) error {
	const size = 64 * quota.MiB
	h, granted, err := c.memory(size)
	if err != nil {
		return err
	}
	// Something is reserved, so that there is something to be lost; the releases are all around it.
	const base, kept = 1 << 40, 1 << 44
	if err := u.announce(page.ReserveManaged, kept, uint64(size)); err != nil {
		return err
	}
	for _, r := range [][2]uint64{{base, uint64(size)}, {0, kept}, {1 << 63, 1 << 62}, {kept + uint64(size), 1 << 46},
		{kept + uint64(size), 1 << 62}, {kept, 0}} {
		print("release_%#x+%#x=%s", r[0], r[1], describe(u.announce(page.ReleaseManaged, r[0], r[1])))
		if err := c.expectFree("after_release", before, granted+size); err != nil {
			return err
		}
	}
	// More than there is gives back what there is.
	if err := u.announce(page.ReleaseManaged, 4096, 1<<46); err != nil {
		return err
	}
	if err := c.expectFree("after_wide_release", before, granted); err != nil {
		return err
	}
	// Twice the same range counts once, and so does its release; half a release is half.
	for range 2 {
		if err := u.announce(page.ReserveManaged, base, uint64(size)); err != nil {
			return err
		}
	}
	if err := c.expectFree("reserved", before, granted+size); err != nil {
		return err
	}
	for _, left := range []quota.Bytes{size / 2, 0, 0} {
		if err := u.announce(page.ReleaseManaged, base+uint64(left), uint64(size/2)); err != nil {
			return err
		}
		if err := c.expectFree("released", before, granted+left); err != nil {
			return err
		}
	}
	if err := c.free(h); err != nil {
		return err
	}
	return c.expectFree("end", before, 0)
}

// hostileAnnounceRace reserves and releases overlapping ranges in threads; nothing of it is ever mapped.
func hostileAnnounceRace(o hostileOptions) error {
	return withUVM(func(c *client, u *uvmSpace) error {
		if !u.guarded() {
			return errors.New("no guard answers what the limiter says")
		}
		total, before, err := c.usage()
		if err != nil {
			return err
		}
		// More ranges than the limit has room for, each of a quarter of what is free.
		size := uint64(before/4) &^ 0xffff
		const base = 1 << 40
		var (
			wg    sync.WaitGroup
			mu    sync.Mutex
			first error
			tries int
		)
		for range 8 {
			wg.Go(func() {
				for range max(o.tries/100, 50) {
					at := base + rand.Uint64N(16)*(size/2)&^0xffff
					cmd := uintptr(page.ReserveManaged)
					if rand.IntN(2) == 0 {
						cmd = page.ReleaseManaged
					}
					err := u.announce(cmd, at, size)
					_, free, uerr := c.usage()
					mu.Lock()
					tries++
					if first == nil && uerr != nil {
						first = uerr
					}
					if st := statusOf(err); first == nil && st != rm.StatusOK && st != rm.StatusNoMemory {
						first = err
					}
					if first == nil && free > total {
						first = fmt.Errorf("free memory is %v of %v", free, total)
					}
					stop := first != nil
					mu.Unlock()
					if stop {
						return
					}
				}
			})
		}
		wg.Wait()
		print("tries=%d", tries)
		if first != nil {
			return first
		}
		if err := u.announce(page.ReleaseManaged, base, 16*size); err != nil {
			return err
		}
		return c.expectFree("end", before, 0)
	})
}

// hostileManaged maps more managed memory than the limit and tells nobody: the guard must end the process.
func hostileManaged(hostileOptions) error {
	return withUVM(func(c *client, u *uvmSpace) error {
		total, _, err := c.usage()
		if err != nil {
			return err
		}
		for range 3 { // in parts that would each fit
			if _, err := u.mapManaged(total/2+quota.MiB, false); err != nil {
				return nil // refused keeps the limit too
			}
		}
		time.Sleep(4 * time.Second)
		return fmt.Errorf("mapped %v of managed memory under a limit of %v and lived", 3*(total/2+quota.MiB), total)
	})
}

// hostileSwarm maps more than the limit in pieces as small as the mappings that the driver makes for itself, which are not counted.
func hostileSwarm(hostileOptions) error {
	return withUVM(func(c *client, u *uvmSpace) error {
		total, _, err := c.usage()
		if err != nil {
			return err
		}
		const piece = 2 * quota.MiB
		for range 2 * (total/piece + 1) {
			r, err := u.reserve(2 * piece) // apart, so that the kernel does not make one mapping of them
			if err != nil {
				return err
			}
			r.length /= 2
			if err := u.mapAt(r); err != nil {
				return nil
			}
		}
		time.Sleep(4 * time.Second)
		return fmt.Errorf("mapped twice the limit of %v in pieces of %v and lived", total, piece)
	})
}
