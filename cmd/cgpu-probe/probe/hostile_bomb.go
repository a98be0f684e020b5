// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// bombCap is what no container may have of anything.
const bombCap = 4096

func hostileBombClients(hostileOptions) error {
	// The own limit of descriptors must not be what stops it.
	_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 1 << 19, Max: 1 << 19})
	var clients []*client
	var last error
	for len(clients) < bombCap {
		c, err := open(patient)
		if err != nil {
			last = err
			break
		}
		clients = append(clients, c)
	}
	print("clients=%d\nrefused=%s", len(clients), describe(last))
	for _, c := range clients {
		c.close()
	}
	if last == nil {
		return fmt.Errorf("%d clients without a refusal", len(clients))
	}
	if _, ok := errors.AsType[*rmError](last); !ok {
		return skip(fmt.Sprintf("%d clients, then %v", len(clients), last))
	}
	// They are gone: the next one works. The guard learns of closed files a moment later.
	return eventually(func() error {
		c, err := openGPU(patient)
		if err == nil {
			c.close()
		}
		return err
	})
}

func hostileBombGroups(c *client, _ hostileOptions) (err error) {
	n := 0
	for ; n < bombCap; n++ {
		if _, err = c.group(1); err != nil {
			break
		}
	}
	print("tsgs=%d\nrefused=%s", n, describe(err))
	if err == nil {
		return fmt.Errorf("%d channel groups without a refusal", n)
	}
	if n == 0 {
		return skip("no channel group at all")
	}
	return nil
}

// hostileBombObjects makes many cheap objects. None of them is limited by number; the host has to stand it.
func hostileBombObjects(c *client, o hostileOptions) (err error) {
	n := 0
	for ; n < min(o.tries, 20000); n++ {
		// An address space costs the driver a little of its own memory; a second subdevice it refuses.
		if _, err = c.alloc(c.device, c.newHandle(), classVASpace, make([]byte, 56)); err != nil {
			break
		}
	}
	print("objects=%d\nend=%s", n, describe(err))
	return c.holds("after", c.via(patient))
}

func hostileSizes(c *client, total, before quota.Bytes, _ hostileOptions) error {
	t := uint64(total)
	for _, size := range []uint64{0, 1 << 63, 1<<63 - 1, 1<<63 + 1, math.MaxUint64, math.MaxUint64 - 1, math.MaxUint64 - 65535,
		math.MaxUint64 - 2<<20, math.MaxUint64 - 2<<20 + 1, 1 << 40, 1<<32 + 1<<62, t + 1, t + 65536, t + 2<<20, 2 * t} {
		_, granted, err := c.memory(quota.Bytes(size))
		print("size_%#x=%s", size, describe(err))
		if err == nil {
			return fmt.Errorf("size %#x: got %d bytes", size, granted)
		}
		if e, ok := errors.AsType[*rmError](err); ok && e.errno != 0 {
			return fmt.Errorf("size %#x: errno %v: want a status", size, e.errno)
		}
	}
	// Sums that overflow: one real allocation first.
	h, _, err := c.memory(2 * quota.MiB)
	if err != nil {
		return err
	}
	for _, size := range []uint64{math.MaxUint64 - 2<<20 + 1, math.MaxUint64 - 4<<20, t - 1<<20} {
		if _, granted, err := c.memory(quota.Bytes(size)); err == nil {
			return fmt.Errorf("size %#x on top of 2 MiB: got %d bytes", size, granted)
		}
	}
	if err := c.free(h); err != nil {
		return err
	}
	return c.expectFree("end", before, 0)
}

func hostileSizesThreads(c *client, _, before quota.Bytes, _ hostileOptions) error {
	size := before/2 + 2*quota.MiB // two of them are too much
	for range 50 {
		var (
			wg  sync.WaitGroup
			got [8]uint32
			n   atomic.Int32
		)
		for i := range got {
			wg.Go(func() {
				if h, _, err := c.memory(size); err == nil {
					got[i] = h
					n.Add(1)
				}
			})
		}
		wg.Wait()
		for _, h := range got {
			if h != 0 {
				if err := c.free(h); err != nil {
					return err
				}
			}
		}
		if n.Load() > 1 {
			return fmt.Errorf("%d threads got %v each of %v", n.Load(), size, before)
		}
	}
	return c.expectFree("end", before, 0)
}

// eventually gives the guard a second to notice.
func eventually(f func() error) error {
	var err error
	for range 100 {
		if err = f(); err == nil {
			return nil
		}
		sleep10ms()
	}
	return err
}

// hostileOtherFile uses its own client through files that have no part in it.
func hostileOtherFile(c *client, _ hostileOptions) error {
	fd, err := syscall.Open("/dev/nvidiactl", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	o := c.as(c.handle)
	o.fd, o.device, o.subdevice = fd, c.device, c.subdevice
	if _, _, err := o.memory(2 * quota.MiB); statusOf(err) != rm.StatusInvalidClient {
		return fmt.Errorf("a client through another file: %s: want INVALID_CLIENT (0x23)", describe(err))
	}
	return nil
}
