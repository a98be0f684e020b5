// SPDX-License-Identifier: Apache-2.0

// Package rmclient makes calls on NVIDIA's driver: a Driver carries them out, a Client is an RM client of our own, on a file that no
// container has.
package rmclient

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// Driver carries out calls: the kernel's (Kernel) or the simulated one, a process that the kernel knows nothing of. All that
// a guard has to do with either of them in another way is in these methods:
//
//   - what a task calls on a node reaches the kernel's only (ServesNodes);
//   - the kernel's sees the files that calls are made on, the simulated one has names for those that it is told of (NameFiles, OpenFile,
//     CloseFile, CloseExport, and Number for a file that a call names);
//   - a GPU gets its work through memory, a simulated one through controls that no other driver has (Control).
//
// Which device nodes are theirs says the guard's configuration.
type Driver interface {
	// ServesNodes says that what the guard lets through reaches the driver: the task makes the call, which for some calls nobody else
	// can, since the driver keeps who made them. The other kind is told for whom a call is made (Target), and the guard makes all.
	ServesNodes() bool
	// Exec makes a call on an open file. RM's refusals are in the structure; the errno is for everything else.
	Exec(t Target, call *rm.Call) syscall.Errno
	// Control knows the controls that only this driver has.
	Control(cmd uint32) (rm.Control, bool)
	// Number is what a call has in a descriptor's place for one of ours.
	Number(fd int) (uint32, error)
	// Open opens nvidiactl for a client of our own.
	Open(control string) (Target, error)
	// NameFiles lets the driver ask for the name (OpenFile) of the file behind a descriptor of ours.
	NameFiles(name func(fd int) (id uint32, err error))
	// OpenFile, CloseFile and CloseExport tell of the container's open files. 0: the driver needs no name.
	OpenFile(node NodeKind, minor int) (id uint32, err error)
	CloseFile(id uint32)
	CloseExport(id uint32)
	Close()
}

// NodeKind is the device node that a file was opened on.
type NodeKind uint8

// Kinds of nodes.
const (
	NodeOther NodeKind = iota // not NVIDIA's
	NodeControl
	NodeGPU
	NodeUVM
)

// Target is the open file that a call is made on, and for whom.
type Target struct {
	FD       int    // our copy of the descriptor; -1 where there is none
	File     uint32 // the simulated driver's name for a file without a descriptor
	PID, TID int    // the task, in the host's numbers
}

// Done closes the copy of the descriptor.
func (t Target) Done() {
	if t.FD >= 0 {
		_ = unix.Close(t.FD)
	}
}

// Kernel makes calls on NVIDIA's kernel modules.
type Kernel struct{}

func (Kernel) ServesNodes() bool                      { return true }
func (Kernel) Control(uint32) (rm.Control, bool)      { return rm.Control{}, false }
func (Kernel) Number(fd int) (uint32, error)          { return uint32(fd), nil }
func (Kernel) NameFiles(func(fd int) (uint32, error)) {}
func (Kernel) OpenFile(NodeKind, int) (uint32, error) { return 0, nil }
func (Kernel) CloseFile(uint32)                       {}
func (Kernel) CloseExport(uint32)                     {}
func (Kernel) Close()                                 {}

func (Kernel) Open(control string) (Target, error) {
	fd, err := unix.Open(control, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return Target{FD: -1}, fmt.Errorf("open %s: %w", control, err)
	}
	return Target{FD: fd}, nil
}

// Exec puts the blocks' addresses into place, makes the system call on the private copies, and puts the container's own
// pointers back. The copies live outside the Go heap (the guard's arena) or do not move, so their addresses are stable.
func (Kernel) Exec(t Target, call *rm.Call) syscall.Errno {
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
