// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"flag"
	"fmt"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// expectFree fails unless exactly used bytes more than at before are in use.
func (c *client) expectFree(when string, before, used quota.Bytes) error {
	_, free, err := c.usage()
	if err != nil {
		return err
	}
	print("free_%s_mib=%d", when, free/quota.MiB)
	if free+used != before {
		return fmt.Errorf("%s: free memory is %v: want %v less than %v", when, free, used, before)
	}
	return nil
}

func cmdDup(args []string) error {
	size := 64 * quota.MiB
	if len(args) > 0 {
		var err error
		if size, err = parseSize(args[0]); err != nil {
			return err
		}
	}
	a, err := openGPU(patient)
	if err != nil {
		return err
	}
	defer a.close()
	b, err := openGPU(patient)
	if err != nil {
		return err
	}
	defer b.close()
	_, before, err := a.usage()
	if err != nil {
		return err
	}
	h, granted, err := a.memory(size)
	if err != nil {
		return err
	}
	if err := a.expectFree("after_alloc", before, granted); err != nil {
		return err
	}
	d, err := b.dup(a.handle, h)
	if err != nil {
		return err
	}
	if err := a.expectFree("after_dup", before, granted); err != nil {
		return err
	}
	if err := a.free(h); err != nil {
		return err
	}
	if err := a.expectFree("after_first_free", before, granted); err != nil {
		return err
	}
	if err := b.free(d); err != nil {
		return err
	}
	return a.expectFree("after_last_free", before, 0)
}

// mustRefuse prints what came of an attempt and fails if it succeeded.
func mustRefuse(what string, err error) error {
	print("%s=%s", what, describe(err))
	if err == nil {
		return fmt.Errorf("%s succeeded: want a refusal", what)
	}
	return nil
}

func cmdDupForeign(c *client, args []string) error {
	cl, err := handleArg(arg(args, 0))
	if err != nil {
		return err
	}
	obj, err := handleArg(arg(args, 1))
	if err != nil {
		return err
	}
	_, err = c.dup(cl, obj)
	return mustRefuse("dup", err)
}

// as returns a client that names another client's handle on c's file.
func (c *client) as(handle uint32) *client {
	o := &client{call: c.call, fd: c.fd, handle: handle, device: firstProbeHandle, subdevice: firstProbeHandle + 1}
	o.next.Store(0x5d000001)
	o.fbInfo.Store(c.fbInfo.Load())
	return o
}

func cmdClientForeign(c *client, args []string) error {
	h, err := handleArg(arg(args, 0))
	if err != nil {
		return err
	}
	return c.attack(h)
}

// attack tries to use another client by its handle.
func (c *client) attack(handle uint32) error {
	f := c.as(handle)
	_, _, alloc := f.memory(2 * quota.MiB)
	_, dup := f.dup(c.handle, c.device)
	_, _, usage := f.usage()
	for _, try := range []struct {
		what string
		err  error
	}{
		{"alloc", alloc}, {"dup_into", dup}, {"control", usage},
		{"root_control", f.control(handle, 0x201, make([]byte, 128))},
		{"free_device", f.free(f.device)}, {"free_client", f.free(handle)},
	} {
		if err := mustRefuse(try.what, try.err); err != nil {
			return err
		}
	}
	return nil
}

func cmdGuess(args []string) error {
	fs := flag.NewFlagSet("guess", flag.ExitOnError)
	n := fs.Uint("clients", 4096, "how many handles from 0xc1d00000 on")
	_ = fs.Parse(args)
	c, err := openGPU(patient)
	if err != nil {
		return err
	}
	defer c.close()
	var hits int
	for h := uint32(0xc1d00000); h < 0xc1d00000+uint32(*n); h++ {
		if h == c.handle {
			continue
		}
		f := c.as(h)
		if f.control(h, 0x201, make([]byte, 128)) == nil {
			hits++
			print("hit=%#x control", h)
		}
		if f.free(firstProbeHandle+2) == nil {
			hits++
			print("hit=%#x free", h)
		}
		for o := uint32(firstProbeHandle); o < firstProbeHandle+4; o++ {
			if d, err := c.dup(h, o); err == nil {
				hits++
				print("hit=%#x dup of %#x", h, o)
				_ = c.free(d)
			}
		}
	}
	print("clients=%d\nhits=%d", *n, hits)
	if hits > 0 {
		return fmt.Errorf("%d guesses were right", hits)
	}
	return nil
}

// export ties an object to an nvidiactl descriptor.
func (c *client) export(fd int, object uint32) error {
	p := make([]byte, 24)
	rm.PutU32(p, rm.ExportFDObject+rm.ExportObjectType, 1)
	rm.PutU32(p, rm.ExportFDObject+rm.ExportObjectDevice, c.device)
	rm.PutU32(p, rm.ExportFDObject+rm.ExportObjectParent, c.device)
	rm.PutU32(p, rm.ExportFDObject+rm.ExportObjectHandle, object)
	rm.PutU32(p, rm.ExportFDFD, uint32(fd))
	return c.control(c.handle, 0x3d05, p)
}

// imported makes a handle for what a descriptor holds.
func (c *client) imported(fd int) (uint32, error) {
	p := make([]byte, 20)
	rm.PutU32(p, rm.ImportFDFD, uint32(fd))
	rm.PutU32(p, rm.ImportFDObject+rm.ExportObjectType, 1)
	rm.PutU32(p, rm.ImportFDObject+rm.ExportObjectDevice, c.device)
	rm.PutU32(p, rm.ImportFDObject+rm.ExportObjectParent, c.device)
	rm.PutU32(p, rm.ImportFDObject+rm.ExportObjectHandle, c.newHandle())
	err := c.control(c.handle, 0x3d06, p)
	return rm.U32(p, rm.ImportFDObject+rm.ExportObjectHandle), err
}

func cmdExport(args []string) error {
	fs := flag.NewFlagSet("export", flag.ExitOnError)
	chunk := fs.String("chunk", "64MiB", "size of each allocation")
	limit := fs.Int("max", 4096, "stop after so many")
	_ = fs.Parse(args)
	size, err := parseSize(*chunk)
	if err != nil {
		return err
	}
	c, total, before, err := openCounted(patient)
	if err != nil {
		return err
	}
	defer c.close()
	var (
		held quota.Bytes
		fds  []int
		last error
	)
	for len(fds) < *limit {
		var h uint32
		var granted quota.Bytes
		if h, granted, last = c.memory(size); last != nil {
			break
		}
		fd, err := syscall.Open("/dev/nvidiactl", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("/dev/nvidiactl: %w", err)
		}
		if err := c.export(fd, h); err != nil {
			print("export=%s", describe(err)) // refusing exports keeps the limit too
			syscall.Close(fd)
			if err := c.free(h); err != nil {
				return err
			}
			return c.expectFree("after_refusal", before, held)
		}
		if err := c.free(h); err != nil {
			return err
		}
		fds = append(fds, fd)
		held += granted
	}
	print("exports=%d\nheld_mib=%d\nrefused=%s", len(fds), held/quota.MiB, describe(last))
	if held > total {
		return fmt.Errorf("descriptors hold %v of a GPU of %v", held, total)
	}
	if err := c.expectFree("held", before, held); err != nil {
		return err
	}
	if len(fds) > 0 {
		h, err := c.imported(fds[0])
		print("import=%s", describe(err))
		if err == nil {
			if err := c.expectFree("imported", before, held); err != nil {
				return err
			}
			if err := c.free(h); err != nil {
				return err
			}
		}
	}
	for _, fd := range fds {
		syscall.Close(fd)
	}
	after, err := c.waitFree(before)
	print("free_before_mib=%d\nfree_after_mib=%d", before/quota.MiB, after/quota.MiB)
	return err
}
