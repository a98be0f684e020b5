package guard

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// Driver carries out calls: the kernel's (see NewKernelDriver) or the simulated one.
type Driver interface {
	// Native says that a kernel driver is behind the container's nodes: calls that the guard lets through run in the task.
	// Without it the guard must carry out every call.
	Native() bool
	// Exec makes a call on an open file. RM's refusals are in the structure; the errno is for everything else.
	Exec(t Target, call *rm.Call) syscall.Errno
	// OpenFile, CloseFile and CloseExport tell a simulated driver of the container's open files, which it cannot see.
	OpenFile(node NodeKind, minor int) (id uint32, err error)
	CloseFile(id uint32)
	CloseExport(id uint32)
	Close()
}

// NodeKind is the kind of a device node, for OpenFile.
type NodeKind uint8

// Nodes of a simulated driver.
const (
	NodeControl NodeKind = iota
	NodeGPU
	NodeUVM
)

// Target is the open file that a call is made on, and for whom.
type Target struct {
	FD       int    // the guard's copy of the descriptor
	File     uint32 // the simulated driver's name for the file
	PID, TID int    // the task, in the host's numbers
}

// simFile is a simulated driver's name for a file; 0 means that it was not told of it.
type simFile uint32

type kernelDriver struct{}

// NewKernelDriver makes calls on NVIDIA's kernel modules.
func NewKernelDriver() Driver { return kernelDriver{} }

func (kernelDriver) Native() bool                           { return true }
func (kernelDriver) OpenFile(NodeKind, int) (uint32, error) { return 0, nil }
func (kernelDriver) CloseFile(uint32)                       {}
func (kernelDriver) CloseExport(uint32)                     {}
func (kernelDriver) Close()                                 {}

// Exec puts the blocks' addresses into place, makes the system call on the private copies, and puts the container's own
// pointers back. The copies live outside the Go heap (see arena), so their addresses are stable.
func (kernelDriver) Exec(t Target, call *rm.Call) syscall.Errno {
	for _, b := range call.Blocks {
		rm.PutU64(parentOf(call, b), b.Off, blockAddr(b.Data))
	}
	_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(t.FD), uintptr(call.Cmd), uintptr(unsafe.Pointer(&call.Outer[0])))
	for _, b := range call.Blocks {
		rm.PutU64(parentOf(call, b), b.Off, b.Addr)
	}
	return e
}

func parentOf(call *rm.Call, b rm.Block) []byte {
	if b.In < 0 {
		return call.Outer
	}
	return call.Blocks[b.In].Data
}

// blockAddr is null for an empty block: the driver must not get a pointer into the guard where it expects none.
func blockAddr(b []byte) uint64 {
	if len(b) == 0 {
		return 0
	}
	return uint64(uintptr(unsafe.Pointer(&b[0])))
}

// arena is scratch memory of one worker for the private copies of one call, outside the Go heap.
type arena struct {
	mem  []byte
	used int
}

// arenaSize holds two copies of the largest call: 16 KiB outer, 128 KiB parameters, 128 KiB behind pointers.
const arenaSize = 1 << 20

func newArena() (*arena, error) {
	m, err := unix.Mmap(-1, 0, arenaSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	return &arena{mem: m}, nil
}

func (a *arena) free() { _ = unix.Munmap(a.mem) }

func (a *arena) reset() { a.used = 0 }

// take returns n bytes, 16-byte aligned, with old content; nil if there is no room.
func (a *arena) take(n int) []byte {
	start := (a.used + 15) &^ 15
	if n < 0 || n > len(a.mem)-start {
		return nil
	}
	a.used = start + n
	return a.mem[start : start+n : start+n]
}
