// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// rmClient is an RM client on a file of its own, with device and subdevice.
type rmClient struct {
	fd          int
	client      uint32
	dev, subdev uint32
	once        bool // do not repeat a call that a signal ended
}

func testCmd(nr uint32, size int) uintptr { return 3<<30 | uintptr(size)<<16 | 'F'<<8 | uintptr(nr) }

func rawIoctl(fd int, cmd uintptr, b []byte) syscall.Errno {
	escaped.Store(unsafe.SliceData(b))
	_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), cmd, uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	runtime.KeepAlive(b)
	return e
}

// interrupted counts calls that a signal ended.
var interrupted atomic.Int64

func (c *rmClient) ioctl(nr uint32, b []byte) error {
	for {
		e := rawIoctl(c.fd, testCmd(nr, len(b)), b)
		if e == unix.EINTR {
			interrupted.Add(1)
			if !c.once {
				continue // as NVIDIA's libraries do
			}
		}
		if e != 0 {
			return fmt.Errorf("escape %#x: %w", nr, e)
		}
		return nil
	}
}

func statusError(what string, s uint32) error {
	if s == rm.StatusOK {
		return nil
	}
	return fmt.Errorf("%s: %s", what, rm.StatusName(s))
}

// escaped keeps what a structure points at off the stack, which moves.
var escaped atomic.Pointer[byte]

// putPointer writes the address of p; the caller keeps p alive over the call.
func putPointer(b []byte, off int, p []byte) {
	if len(p) > 0 {
		escaped.Store(&p[0])
		rm.PutU64(b, off, uint64(uintptr(unsafe.Pointer(&p[0]))))
	}
}

func (c *rmClient) alloc(parent, handle, class uint32, params []byte) (uint32, error) {
	o := make([]byte, 48)
	rm.PutU32(o, rm.AllocRoot, c.client)
	rm.PutU32(o, rm.AllocParent, parent)
	rm.PutU32(o, rm.AllocObject, handle)
	rm.PutU32(o, rm.AllocClass, class)
	putPointer(o, rm.AllocParams, params)
	err := c.ioctl(rm.EscAlloc, o)
	runtime.KeepAlive(params)
	if err != nil {
		return 0, err
	}
	return rm.U32(o, rm.AllocObject), statusError("alloc", rm.U32(o, 40))
}

func (c *rmClient) memory(handle uint32, size uint64) (uint32, error) {
	p := make([]byte, 128)
	rm.PutU32(p, rm.MemoryOwner, 1)
	rm.PutU64(p, rm.MemorySize, size)
	return c.alloc(c.dev, handle, classVidmem, p)
}

func (c *rmClient) free(handle uint32) error {
	o := make([]byte, rm.FreeSize)
	rm.PutU32(o, rm.FreeRoot, c.client)
	rm.PutU32(o, rm.FreeObject, handle)
	if err := c.ioctl(rm.EscFree, o); err != nil {
		return err
	}
	return statusError("free", rm.U32(o, rm.FreeStatus))
}

func (c *rmClient) control(object, cmd uint32, params []byte) error {
	o := make([]byte, rm.ControlSize)
	rm.PutU32(o, rm.ControlClient, c.client)
	rm.PutU32(o, rm.ControlObject, object)
	rm.PutU32(o, rm.ControlCmd, cmd)
	rm.PutU32(o, rm.ControlParamsSize, uint32(len(params)))
	putPointer(o, rm.ControlParams, params)
	err := c.ioctl(rm.EscControl, o)
	runtime.KeepAlive(params)
	if err != nil {
		return err
	}
	return statusError("control", rm.U32(o, rm.ControlStatus))
}

func (c *rmClient) dup(srcClient, src uint32) (uint32, error) { return c.dupAs(0, srcClient, src) }

func (c *rmClient) dupAs(handle, srcClient, src uint32) (uint32, error) {
	o := make([]byte, rm.DupSize)
	rm.PutU32(o, rm.DupObject, handle)
	rm.PutU32(o, rm.DupClient, c.client)
	rm.PutU32(o, rm.DupParent, c.dev)
	rm.PutU32(o, rm.DupClientSrc, srcClient)
	rm.PutU32(o, rm.DupObjectSrc, src)
	if err := c.ioctl(rm.EscDupObject, o); err != nil {
		return 0, err
	}
	return rm.U32(o, rm.DupObject), statusError("dup", rm.U32(o, rm.DupStatus))
}

func (s *childState) newClient(flags int) (*rmClient, error) {
	fd, err := s.open("nvidiactl", flags)
	if err != nil {
		return nil, err
	}
	c := &rmClient{fd: fd}
	if c.client, err = c.alloc(0, 0, rmclient.ClassClient, nil); err != nil {
		return nil, err
	}
	if c.dev, err = c.alloc(c.client, 0, rmclient.ClassDevice, make([]byte, 56)); err != nil {
		return nil, err
	}
	c.subdev, err = c.alloc(c.dev, 0, rmclient.ClassSubdevice, make([]byte, 4))
	return c, err
}

// mapMemory is RM_MAP_MEMORY of CLIENT MEMORY OFFSET LENGTH on a new file.
func (s *childState) mapMemory(a []int, node string) (address uint64, fd int, err error) {
	if fd, err = s.open(node, unix.O_CLOEXEC); err != nil {
		return 0, -1, err
	}
	c := s.clients[a[0]]
	o := make([]byte, rm.MapMemorySize)
	rm.PutU32(o, rm.MapMemoryClient, c.client)
	rm.PutU32(o, rm.MapMemoryDevice, c.dev)
	rm.PutU32(o, rm.MapMemoryMemory, uint32(a[1]))
	rm.PutU64(o, rm.MapMemoryOffset, uint64(a[2]))
	rm.PutU64(o, rm.MapMemoryLength, uint64(a[3]))
	rm.PutU32(o, rm.MapMemoryFD, uint32(fd))
	if err = c.ioctl(rm.EscMapMemory, o); err == nil {
		err = statusError("map", rm.U32(o, rm.MapMemoryStatus))
	}
	return rm.U64(o, rm.MapMemoryAddress), fd, err
}

// allocMapped is RM_ALLOC_MEMORY of host memory that is mapped into a file.
func (s *childState) allocMapped(c *rmClient, size uint64, handle uint32, fd int) error {
	gpu, err := s.open("nvidia0", unix.O_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(gpu)
	on := &rmClient{fd: gpu}
	registered := make([]byte, rm.RegisterFDSize)
	rm.PutU32(registered, rm.RegisterFDFD, uint32(c.fd))
	if err := on.ioctl(rm.EscRegisterFD, registered); err != nil {
		return err
	}
	o := make([]byte, rm.AllocMemorySize)
	putWords(o, 0, c.client, c.dev, handle, classSystem)
	rm.PutU64(o, rm.AllocMemoryLimit, size-1)
	rm.PutU32(o, rm.AllocMemoryFD, uint32(fd))
	if err := on.ioctl(rm.EscAllocMemory, o); err != nil {
		return err
	}
	if named := rm.U32(o, rm.AllocMemoryFD); named != uint32(fd) {
		return fmt.Errorf("the call comes back with file %d, not %d", named, fd)
	}
	return statusError("RM_ALLOC_MEMORY", rm.U32(o, rm.AllocMemoryStatus))
}
