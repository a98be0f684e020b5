// SPDX-License-Identifier: Apache-2.0

package rmclient

import (
	"fmt"
	"strings"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// Client is an RM client of our own, with a device and a subdevice of each of some GPUs.
type Client struct {
	driver  Driver
	abi     *rm.ABI
	control string // nvidiactl
	file    Target
	handle  uint32
	devices []uint32 // in the order of the GPUs
	subs    []uint32 // subdevices
	next    atomic.Uint32
	last    atomic.Pointer[atomic.Uint32] // told, see Tell; nil: nobody is
}

// Classes of a client's objects.
const (
	ClassClient    = 0x41
	ClassDevice    = 0x80
	ClassSubdevice = 0x2080
)

// FirstHandle is below all handles of ours.
const FirstHandle = 0xcaf10000

// Of NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2, which tells a GPU's device instance.
const (
	ControlGetIDInfoV2 = 0x205
	IDInfoSize         = 32
	IDInfoInstance     = 8
)

const (
	controlAttachIDs = 0x215 // NV0000_CTRL_CMD_GPU_ATTACH_IDS
	attachIDsSize    = 132
	deviceSize       = 56 // NV0080_ALLOC_PARAMETERS
)

// Address is where a GPU is on the PCI bus.
type Address struct{ Domain, Bus, Slot uint32 }

// ParseAddress parses a PCI address as NVML writes it.
func ParseAddress(busID string) (a Address, err error) {
	address, _, _ := strings.Cut(busID, ".")
	if n, err := fmt.Sscanf(address, "%x:%x:%x", &a.Domain, &a.Bus, &a.Slot); n != 3 || err != nil {
		return a, fmt.Errorf("bus id %q: want a PCI address such as 0000:01:00.0", busID)
	}
	return a, nil
}

// ID is how RM names the GPU (gpumgr, gpuGenerate32BitId).
func (a Address) ID() uint32 { return a.Domain<<16 | a.Bus<<8 | a.Slot }

// New makes a client on a file of its own, for GPUs by their IDs. It costs 0.7 ms for each GPU (H200).
func New(d Driver, abi *rm.ABI, control string, gpus []uint32) (_ *Client, err error) {
	c := &Client{driver: d, abi: abi, control: control}
	c.next.Store(FirstHandle)
	if c.file, err = d.Open(control); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil { // the client goes with its file
			c.Close()
			if c.file.File != 0 {
				d.CloseFile(c.file.File)
			}
		}
	}()
	if c.handle, err = c.AllocAs(0, 0, ClassClient, make([]byte, 4)); err != nil {
		return nil, err
	}
	ids := make([]byte, attachIDsSize)
	for i := range rm.GPUIDListLen {
		id := uint32(rm.GPUIDUnused)
		if i < len(gpus) {
			id = gpus[i]
		}
		rm.PutU32(ids, 4*i, id)
	}
	_, _ = c.Control(c.handle, controlAttachIDs, ids) // fails when they are attached already
	for _, id := range gpus {
		if err := c.addGPU(id); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// State is a Client as a process hands it over, with its file, to the program that goes on in its place.
type State struct {
	FD         int    // of the file
	File       uint32 // the same with the simulated driver
	Handle     uint32
	Devices    []uint32
	Subdevices []uint32
	Next       uint32
}

// State tells what Resume needs.
func (c *Client) State() State {
	return State{max(c.file.FD, 0), c.file.File, c.handle, c.devices, c.subs, c.next.Load()}
}

// Resume goes on with a client that another program of this process made.
func Resume(d Driver, abi *rm.ABI, control string, s State) *Client {
	c := &Client{driver: d, abi: abi, control: control, file: Target{FD: -1, File: s.File}, handle: s.Handle, devices: s.Devices,
		subs: s.Subdevices}
	if s.FD > 0 {
		c.file.FD = s.FD
	}
	c.next.Store(max(s.Next, FirstHandle))
	return c
}

// addGPU makes a device and a subdevice.
func (c *Client) addGPU(id uint32) error {
	info := make([]byte, IDInfoSize)
	rm.PutU32(info, 0, id)
	if s, e := c.Control(c.handle, ControlGetIDInfoV2, info); e != 0 || s != rm.StatusOK {
		return fmt.Errorf("identify GPU %#x: %s", id, rm.StatusName(s))
	}
	params := make([]byte, deviceSize)
	rm.PutU32(params, rm.DeviceID, rm.U32(info, IDInfoInstance))
	dev, err := c.Alloc(c.handle, ClassDevice, params)
	if err != nil {
		return err
	}
	sub, err := c.Alloc(dev, ClassSubdevice, make([]byte, 4))
	if err != nil {
		return err
	}
	c.devices, c.subs = append(c.devices, dev), append(c.subs, sub)
	return nil
}

// Close closes the client's file, with which the driver frees all that the client has.
func (c *Client) Close() { c.file.Done() }

// Handle is the client's own.
func (c *Client) Handle() uint32 { return c.handle }

// File is what the client lives on.
func (c *Client) File() Target { return c.file }

// Device is that of a GPU by its place among those of New.
func (c *Client) Device(gpu int) uint32 { return c.devices[gpu] }

// Subdevice is that of a GPU.
func (c *Client) Subdevice(gpu int) uint32 { return c.subs[gpu] }

// Subdevices are those of all GPUs.
func (c *Client) Subdevices() []uint32 { return c.subs }

// Tell has the last handle that was made up told before it is used, for who goes on with the client should this process be killed.
func (c *Client) Tell(last *atomic.Uint32) {
	c.last.Store(last)
	last.Store(c.next.Load())
}

// NewHandle makes up a name for a new object.
func (c *Client) NewHandle() uint32 {
	n := c.next.Add(1)
	if last := c.last.Load(); last != nil {
		for old := last.Load(); old < n && !last.CompareAndSwap(old, n); old = last.Load() {
		}
	}
	return n
}

// Control makes a control on an object of the client.
func (c *Client) Control(object, cmd uint32, params []byte) (status uint32, errno syscall.Errno) {
	return Control(c.driver, c.file, c.handle, object, cmd, params)
}

// Free frees an object of the client.
func (c *Client) Free(handle uint32) (status uint32, errno syscall.Errno) {
	return Free(c.driver, c.file, c.handle, handle)
}

// Alloc makes an object of the client.
func (c *Client) Alloc(parent, class uint32, params []byte) (handle uint32, err error) {
	return c.AllocAs(c.NewHandle(), parent, class, params)
}

// AllocAs is Alloc with a handle that was made up before.
func (c *Client) AllocAs(handle, parent, class uint32, params []byte) (uint32, error) {
	form, ok := c.abi.AllocForm(48)
	if !ok {
		form, _ = c.abi.AllocForm(32)
	}
	outer := make([]byte, form.Size)
	rm.PutU32(outer, rm.AllocRoot, c.handle)
	rm.PutU32(outer, rm.AllocParent, parent)
	rm.PutU32(outer, rm.AllocObject, handle)
	rm.PutU32(outer, rm.AllocClass, class)
	call := rm.Call{Cmd: 3<<30 | uint32(form.Size)<<16 | 'F'<<8 | rm.EscAlloc, Outer: outer}
	if len(params) > 0 {
		call.Blocks = []rm.Block{{In: -1, Off: rm.AllocParams, Data: params}}
	}
	e := c.driver.Exec(c.file, &call)
	if s := rm.U32(outer, form.StatusOff); e != 0 || s != rm.StatusOK {
		return 0, fmt.Errorf("allocate %s: %s, errno %d", rm.ClassName(class), rm.StatusName(s), e)
	}
	return rm.U32(outer, rm.AllocObject), nil
}

// Dup makes a handle of our own on somebody else's object.
func (c *Client) Dup(parent, client, object uint32) (handle, status uint32, errno unix.Errno) {
	handle = c.NewHandle()
	status, errno = c.DupAs(handle, parent, client, object)
	return handle, status, errno
}

// DupAs is Dup with a handle that was made up before.
func (c *Client) DupAs(handle, parent, client, object uint32) (status uint32, errno unix.Errno) {
	o := make([]byte, rm.DupSize)
	rm.PutU32(o, rm.DupClient, c.handle)
	rm.PutU32(o, rm.DupParent, parent)
	rm.PutU32(o, rm.DupObject, handle)
	rm.PutU32(o, rm.DupClientSrc, client)
	rm.PutU32(o, rm.DupObjectSrc, object)
	e := c.driver.Exec(c.file, &rm.Call{Cmd: 3<<30 | uint32(rm.DupSize)<<16 | 'F'<<8 | rm.EscDupObject, Outer: o})
	return rm.U32(o, rm.DupStatus), e
}

// Map maps an object of the client's, read-only (NV_ESC_RM_MAP_MEMORY and mmap on a file made for it): of device memory on a GPU's
// node, of other memory on nvidiactl's, for which node is empty.
func (c *Client) Map(device, memory uint32, offset, length uint64, node string) ([]byte, error) {
	if node == "" {
		node = c.control
	}
	fd, err := unix.Open(node, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", node, err)
	}
	defer unix.Close(fd) // the mapping keeps the file
	o := make([]byte, rm.MapMemorySize)
	rm.PutU32(o, rm.MapMemoryClient, c.handle)
	rm.PutU32(o, rm.MapMemoryDevice, device)
	rm.PutU32(o, rm.MapMemoryMemory, memory)
	rm.PutU64(o, rm.MapMemoryOffset, offset)
	rm.PutU64(o, rm.MapMemoryLength, length)
	rm.PutU32(o, rm.MapMemoryFlags, 1) // NVOS33_FLAGS_ACCESS_READ_ONLY
	rm.PutU32(o, rm.MapMemoryFD, uint32(fd))
	call := rm.Call{Cmd: 3<<30 | uint32(rm.MapMemorySize)<<16 | 'F'<<8 | rm.EscMapMemory, Outer: o}
	if e := c.driver.Exec(c.file, &call); e != 0 || rm.U32(o, rm.MapMemoryStatus) != rm.StatusOK {
		return nil, fmt.Errorf("map an object of %d bytes: %s, errno %d", length, rm.StatusName(rm.U32(o, rm.MapMemoryStatus)), e)
	}
	mem, err := unix.Mmap(fd, 0, int(length), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap %s: %w", node, err)
	}
	return mem, nil
}

// OpenEvent opens a file that the driver can wake (NV_ESC_ALLOC_OS_EVENT).
func (c *Client) OpenEvent() (fd int, err error) {
	if fd, err = unix.Open(c.control, unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		return -1, fmt.Errorf("open %s: %w", c.control, err)
	}
	p := make([]byte, 16) // nv_ioctl_alloc_os_event_t: client, device, fd, status
	rm.PutU32(p, 0, c.handle)
	rm.PutU32(p, 8, uint32(fd))
	call := rm.Call{Cmd: 3<<30 | 16<<16 | 'F'<<8 | rm.EscAllocOSEvent, Outer: p}
	if e := c.driver.Exec(Target{FD: fd}, &call); e != 0 || rm.U32(p, 12) != rm.StatusOK {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("allocate an OS event: %s, errno %d", rm.StatusName(rm.U32(p, 12)), e)
	}
	return fd, nil
}
