// SPDX-License-Identifier: Apache-2.0

// Package rmclient makes calls on NVIDIA's driver: a Driver carries them out, a Client is an RM client of our own, on a file that no
// container has.
package rmclient

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
	FD       int    // our copy of the descriptor
	File     uint32 // the simulated driver's name for the file
	PID, TID int    // the task, in the host's numbers
}

// Done closes the copy of the descriptor.
func (t Target) Done() {
	if t.FD >= 0 {
		_ = unix.Close(t.FD)
	}
}

type kernelDriver struct{}

// NewKernelDriver makes calls on NVIDIA's kernel modules.
func NewKernelDriver() Driver { return kernelDriver{} }

func (kernelDriver) Native() bool                           { return true }
func (kernelDriver) OpenFile(NodeKind, int) (uint32, error) { return 0, nil }
func (kernelDriver) CloseFile(uint32)                       {}
func (kernelDriver) CloseExport(uint32)                     {}
func (kernelDriver) Close()                                 {}

// Exec puts the blocks' addresses into place, makes the system call on the private copies, and puts the container's own
// pointers back. The copies live outside the Go heap (the guard's arena) or do not move, so their addresses are stable.
func (kernelDriver) Exec(t Target, call *rm.Call) syscall.Errno {
	for _, b := range call.Blocks {
		rm.PutU64(call.Parent(b), b.Off, blockAddr(b.Data))
	}
	_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(t.FD), uintptr(call.Cmd), uintptr(unsafe.Pointer(&call.Outer[0])))
	for _, b := range call.Blocks {
		rm.PutU64(call.Parent(b), b.Off, b.Addr)
	}
	return e
}

// blockAddr is null for an empty block: the driver must not get a pointer into our memory where it expects none.
func blockAddr(b []byte) uint64 {
	if len(b) == 0 {
		return 0
	}
	return uint64(uintptr(unsafe.Pointer(&b[0])))
}

const (
	controlTypeCode = 3<<30 | rm.ControlSize<<16 | 'F'<<8 | rm.EscControl
	freeTypeCode    = 3<<30 | rm.FreeSize<<16 | 'F'<<8 | rm.EscFree
)

// Control makes a control in the name of a client, on the file that it lives on.
func Control(d Driver, t Target, client, object, cmd uint32, params []byte) (status uint32, errno syscall.Errno) {
	outer := make([]byte, rm.ControlSize)
	rm.PutU32(outer, rm.ControlClient, client)
	rm.PutU32(outer, rm.ControlObject, object)
	rm.PutU32(outer, rm.ControlCmd, cmd)
	rm.PutU32(outer, rm.ControlParamsSize, uint32(len(params)))
	call := rm.Call{Cmd: controlTypeCode, Outer: outer, Blocks: []rm.Block{{In: -1, Off: rm.ControlParams, Data: params}}}
	e := d.Exec(t, &call)
	return rm.U32(outer, rm.ControlStatus), e
}

// Free frees an object or a client.
func Free(d Driver, t Target, client, handle uint32) (status uint32, errno syscall.Errno) {
	outer := make([]byte, rm.FreeSize)
	rm.PutU32(outer, rm.FreeRoot, client)
	rm.PutU32(outer, rm.FreeObject, handle)
	e := d.Exec(t, &rm.Call{Cmd: freeTypeCode, Outer: outer})
	return rm.U32(outer, rm.FreeStatus), e
}
