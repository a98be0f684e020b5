// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// files is what Session and Conn have in common; the guard uses the driver through the same.
type files interface {
	OpenFile(node NodeKind, minor int) (FileID, error)
	CloseFile(id FileID) error
	Ioctl(id FileID, pid, tid int32, call *rm.Call) syscall.Errno
	CloseExport(key int32) error
	Close() error
}

var (
	_ files = (*Session)(nil)
	_ files = (*Conn)(nil)
)

func testConfig() Config {
	return Config{DriverVersion: "580.159.04", GPUs: []GPU{
		{Index: 0, Minor: 0, UUID: "GPU-00000000-0000-0000-0000-000000000001", BusID: "0000:01:00.0", Name: "Tesla T4",
			Memory: 15109 * quota.MiB},
		{Index: 1, Minor: 3, UUID: "GPU-00000000-0000-0000-0000-000000000002", BusID: "0000:02:00.0", Name: "Tesla T4",
			Memory: 15109 * quota.MiB},
	}}
}

func newDriver(t *testing.T) *Driver {
	t.Helper()
	d, err := New(testConfig())
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// user is a client in a test, with device and subdevice of GPU 0.
type user struct {
	t          *testing.T
	s          files
	file       FileID
	pid        int32
	client     uint32
	dev, subd  uint32
	nextHandle uint32
}

func newUser(t *testing.T, s files, pid int32) *user {
	t.Helper()
	f, err := s.OpenFile(Control, 0)
	if err != nil {
		t.Fatal(err)
	}
	u := &user{t: t, s: s, file: f, pid: pid, nextHandle: 0x5c000001}
	var st uint32
	if u.client, st = u.alloc(0, 0, classRootClient, nil); st != 0 {
		t.Fatalf("root alloc: status %#x", st)
	}
	return u
}

func newGPUUser(t *testing.T, s files, pid int32) *user {
	t.Helper()
	u := newUser(t, s, pid)
	u.dev = u.must(u.alloc(u.client, u.handle(), classDevice, make([]byte, 56)))
	u.subd = u.must(u.alloc(u.dev, u.handle(), classSubdevice, make([]byte, 4)))
	return u
}

func (u *user) must(h, st uint32) uint32 {
	u.t.Helper()
	if st != 0 {
		u.t.Fatalf("status %#x", st)
	}
	return h
}

func (u *user) handle() uint32 { u.nextHandle++; return u.nextHandle - 1 }

func cmd(nr uint32, size int) uint32 { return 3<<30 | uint32(size)<<16 | 'F'<<8 | nr }

// call issues an escape; block is what the pointer at ptrOff points at.
func (u *user) call(nr uint32, outer []byte, ptrOff int, block []byte) syscall.Errno {
	c := &rm.Call{Cmd: cmd(nr, len(outer)), Outer: outer}
	if block != nil {
		c.Blocks = []rm.Block{{In: -1, Off: ptrOff, Data: block}}
	}
	return u.s.Ioctl(u.file, u.pid, u.pid, c)
}

func (u *user) alloc(parent, handle, class uint32, params []byte) (uint32, uint32) {
	u.t.Helper()
	out := make([]byte, 48)
	rm.PutU32(out, rm.AllocRoot, u.client)
	rm.PutU32(out, rm.AllocParent, parent)
	rm.PutU32(out, rm.AllocObject, handle)
	rm.PutU32(out, rm.AllocClass, class)
	if e := u.call(rm.EscAlloc, out, rm.AllocParams, params); e != 0 {
		u.t.Fatalf("RM_ALLOC of class %#x: %v", class, e)
	}
	return rm.U32(out, rm.AllocObject), rm.U32(out, 40)
}

func (u *user) memory(size uint64) (handle uint32, granted quota.Bytes, status uint32) {
	u.t.Helper()
	p := make([]byte, 128)
	rm.PutU32(p, rm.MemoryOwner, 1)
	rm.PutU64(p, rm.MemorySize, size)
	h, st := u.alloc(u.dev, u.handle(), classMemoryLocal, p)
	return h, quota.Bytes(rm.U64(p, rm.MemorySize)), st
}

func (u *user) free(object uint32) uint32 {
	u.t.Helper()
	out := make([]byte, rm.FreeSize)
	rm.PutU32(out, rm.FreeRoot, u.client)
	rm.PutU32(out, rm.FreeObject, object)
	if e := u.call(rm.EscFree, out, 0, nil); e != 0 {
		u.t.Fatalf("RM_FREE: %v", e)
	}
	return rm.U32(out, rm.FreeStatus)
}

func (u *user) control(object, c uint32, params []byte) uint32 {
	u.t.Helper()
	out := make([]byte, rm.ControlSize)
	rm.PutU32(out, rm.ControlClient, u.client)
	rm.PutU32(out, rm.ControlObject, object)
	rm.PutU32(out, rm.ControlCmd, c)
	rm.PutU32(out, rm.ControlParamsSize, uint32(len(params)))
	if e := u.call(rm.EscControl, out, rm.ControlParams, params); e != 0 {
		u.t.Fatalf("RM_CONTROL %#x: %v", c, e)
	}
	return rm.U32(out, rm.ControlStatus)
}

func (u *user) dup(srcClient, srcObject uint32) (uint32, uint32) {
	u.t.Helper()
	out := make([]byte, rm.DupSize)
	rm.PutU32(out, rm.DupClient, u.client)
	rm.PutU32(out, rm.DupParent, u.dev)
	rm.PutU32(out, rm.DupClientSrc, srcClient)
	rm.PutU32(out, rm.DupObjectSrc, srcObject)
	if e := u.call(rm.EscDupObject, out, 0, nil); e != 0 {
		u.t.Fatalf("RM_DUP_OBJECT: %v", e)
	}
	return rm.U32(out, rm.DupObject), rm.U32(out, rm.DupStatus)
}

func (u *user) shareWithUser() {
	p := make([]byte, rm.SharePolicySize)
	p[rm.SharePolicyType], p[rm.SharePolicyAccess] = shareToken, accessDup
	if st := u.control(u.client, 0xd04, p); st != 0 {
		u.t.Fatalf("share policy: status %#x", st)
	}
}

func (u *user) export(key int32, object uint32) uint32 {
	p := make([]byte, 24)
	rm.PutU32(p, rm.ExportFDObject+rm.ExportObjectType, 1)
	rm.PutU32(p, rm.ExportFDObject+rm.ExportObjectHandle, object)
	rm.PutU32(p, rm.ExportFDFD, uint32(key))
	return u.control(u.client, 0x3d05, p)
}

func (u *user) imported(key int32) (uint32, uint32) {
	p := make([]byte, 20)
	rm.PutU32(p, rm.ImportFDFD, uint32(key))
	rm.PutU32(p, rm.ImportFDObject+rm.ExportObjectType, 1)
	rm.PutU32(p, rm.ImportFDObject+rm.ExportObjectParent, u.dev)
	st := u.control(u.client, 0x3d06, p)
	return rm.U32(p, rm.ImportFDObject+rm.ExportObjectHandle), st
}

// wantUsed compares the memory of GPU 0.
func wantUsed(t *testing.T, d *Driver, want quota.Bytes) {
	t.Helper()
	if got := d.Snapshot().GPUs[0].Used; got != want {
		t.Fatalf("used %v, want %v", got, want)
	}
}
