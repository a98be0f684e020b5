// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Classes that the probe allocates.
const (
	classRootClient  = 0x41
	classMemory      = 0x40
	classDevice      = 0x80
	classSubdevice   = 0x2080
	classVASpace     = 0x90f1
	classGroup       = 0xa06c
	firstProbeHandle = 0x5c000001 // as libcuda's
)

// allocSize is NVOS64_PARAMETERS since 535.
const allocSize = 48

// client is an RM client on its own nvidiactl file.
type client struct {
	call    caller
	fd      int
	handle  uint32
	next    atomic.Uint32
	fbInfo  atomic.Int64 // size of FB_GET_INFO_V2's parameters that this driver takes
	gpus    []card
	gpuFDs  []int
	closing sync.Once
	// The first GPU's objects; zero in a bare client.
	device, subdevice uint32
}

// card is one element of CARD_INFO.
type card struct {
	id     uint32
	minor  uint32
	domain uint32
	bus    byte
	slot   byte
}

// open makes a client on a new file.
func open(call caller) (*client, error) {
	fd, err := syscall.Open("/dev/nvidiactl", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/nvidiactl: %w: is this a GPU container?", err)
	}
	c := &client{call: call, fd: fd}
	c.next.Store(firstProbeHandle)
	c.fbInfo.Store(1028)
	// As NVIDIA's libraries begin. The answer does not matter.
	version := make([]byte, rm.CheckVersionSize)
	rm.PutU32(version, rm.CheckVersionCmd, rm.CheckVersionQuery)
	_ = call.escape(fd, rm.EscCheckVersion, version)
	out := make([]byte, allocSize)
	rm.PutU32(out, rm.AllocClass, classRootClient)
	if err := c.allocRaw(out, nil); err != nil {
		syscall.Close(fd)
		return nil, err
	}
	c.handle = rm.U32(out, rm.AllocObject)
	return c, nil
}

// openGPU makes a client with device and subdevice of the first GPU, as every user of a GPU does.
func openGPU(call caller) (*client, error) {
	c, err := open(call)
	if err != nil {
		return nil, err
	}
	if err := c.attach(); err != nil {
		c.close()
		return nil, err
	}
	return c, nil
}

// openCounted is openGPU, with what the GPU has before anything else: in all, and free.
func openCounted(call caller) (c *client, total, free quota.Bytes, err error) {
	if c, err = openGPU(call); err != nil {
		return nil, 0, 0, err
	}
	if total, free, err = c.usage(); err != nil {
		c.close()
	}
	return c, total, free, err
}

// withGPU does something with a client of the first GPU.
func withGPU(f func(*client) error) error {
	c, err := openGPU(patient)
	if err != nil {
		return err
	}
	defer c.close()
	return f(c)
}

// onGPU makes a command or a case of what it does with a client of the first GPU.
func onGPU[A any](run func(*client, A) error) func(A) error {
	return func(args A) error { return withGPU(func(c *client) error { return run(c, args) }) }
}

// counted is onGPU, with what the GPU has before anything else.
func counted[A any](run func(c *client, total, before quota.Bytes, args A) error) func(A) error {
	return func(args A) error {
		c, total, before, err := openCounted(patient)
		if err != nil {
			return err
		}
		defer c.close()
		return run(c, total, before, args)
	}
}

func (c *client) attach() error {
	return c.attachBy(func(path string) (int, error) { return syscall.Open(path, syscall.O_RDWR|syscall.O_CLOEXEC, 0) })
}

// attachBy is attach with another way to have GPUs' nodes open; those that answer ENXIO are left out.
func (c *client) attachBy(open func(path string) (int, error)) error {
	var err error
	if c.gpus, err = c.cardInfo(); err != nil {
		return err
	}
	if len(c.gpus) == 0 {
		return fmt.Errorf("CARD_INFO shows no GPU: does the container have one?")
	}
	all := c.gpus
	c.gpus = nil
	for _, g := range all {
		path := fmt.Sprintf("/dev/nvidia%d", g.minor)
		fd, err := open(path)
		if errors.Is(err, syscall.ENXIO) || errors.Is(err, syscall.ENOENT) {
			continue // not the container's: without the guard the driver lists all
		}
		c.gpus = append(c.gpus, g)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		c.gpuFDs = append(c.gpuFDs, fd)
		ctl := make([]byte, rm.RegisterFDSize)
		rm.PutU32(ctl, rm.RegisterFDFD, uint32(c.fd))
		if errno := c.call.escape(fd, rm.EscRegisterFD, ctl); errno != 0 {
			return &rmError{what: "REGISTER_FD on " + path, errno: errno}
		}
	}
	if len(c.gpus) == 0 {
		return errors.New("no node of a GPU is open")
	}
	ids := make([]byte, rm.GPUIDFailedID+4)
	for i := range rm.GPUIDListLen {
		rm.PutU32(ids, 4*i, rm.GPUIDUnused)
	}
	for i, g := range c.gpus {
		rm.PutU32(ids, 4*i, g.id)
	}
	if err := c.control(c.handle, 0x215, ids); err != nil {
		return err
	}
	var instance uint32
	if c.device, instance, err = c.newDevice(0); err != nil {
		return err
	}
	sub := make([]byte, 4)
	rm.PutU32(sub, rm.SubdeviceID, instance)
	c.subdevice, err = c.alloc(c.device, c.newHandle(), classSubdevice, sub)
	return err
}

// newDevice makes a device of the first GPU, which uses the address space of a client (0: the global one).
func (c *client) newDevice(share uint32) (device, subInstance uint32, err error) {
	info := make([]byte, 32)
	rm.PutU32(info, 0, c.gpus[0].id)
	if err := c.control(c.handle, 0x205, info); err != nil {
		return 0, 0, err
	}
	dev := make([]byte, 56)
	rm.PutU32(dev, rm.DeviceID, rm.U32(info, 8))
	rm.PutU32(dev, rm.DeviceClientShare, share)
	device, err = c.alloc(c.handle, c.newHandle(), classDevice, dev)
	return device, rm.U32(info, 12), err
}

func (c *client) cardInfo() ([]card, error) {
	b := make([]byte, rm.CardInfoSize*rm.GPUIDListLen)
	if errno := c.call.escape(c.fd, rm.EscCardInfo, b); errno != 0 {
		return nil, &rmError{what: "CARD_INFO", errno: errno}
	}
	var list []card
	for off := 0; off < len(b); off += rm.CardInfoSize {
		if e := b[off:]; e[rm.CardInfoValid] != 0 {
			list = append(list, card{id: rm.U32(e, rm.CardInfoGPUID), minor: rm.U32(e, rm.CardInfoMinor),
				domain: rm.U32(e, rm.CardInfoDomain), bus: e[rm.CardInfoBus], slot: e[rm.CardInfoSlot]})
		}
	}
	return list, nil
}

func (c *client) newHandle() uint32 { return c.next.Add(1) - 1 }

// close closes the files; the driver frees everything.
func (c *client) close() {
	c.closing.Do(func() {
		for _, fd := range c.gpuFDs {
			syscall.Close(fd)
		}
		syscall.Close(c.fd)
	})
}

// allocRaw issues RM_ALLOC with the outer structure out (NVOS64) and the parameter block.
func (c *client) allocRaw(out, params []byte) error {
	putPtr(out, rm.AllocParams, params)
	rm.PutU32(out, 40, 0xbad) // status: the driver must write it
	errno := c.call.escape(c.fd, rm.EscAlloc, out)
	runtime.KeepAlive(params)
	what := fmt.Sprintf("RM_ALLOC class %#x", rm.U32(out, rm.AllocClass))
	if st := rm.U32(out, 40); errno != 0 || st != rm.StatusOK {
		return &rmError{what: what, errno: errno, status: st}
	}
	return nil
}

func (c *client) alloc(parent, handle, class uint32, params []byte) (uint32, error) {
	out := make([]byte, allocSize)
	rm.PutU32(out, rm.AllocRoot, c.handle)
	rm.PutU32(out, rm.AllocParent, parent)
	rm.PutU32(out, rm.AllocObject, handle)
	rm.PutU32(out, rm.AllocClass, class)
	if err := c.allocRaw(out, params); err != nil {
		return 0, err
	}
	return rm.U32(out, rm.AllocObject), nil
}

// memoryParams asks for device memory as the CUDA driver does for plain buffers: handle given, no mapping needed, pages
// need not be contiguous (NVOS32_ALLOC_FLAGS_* and NVOS32_ATTR_* in src/common/sdk/nvidia/inc/nvos.h).
func memoryParams(size uint64) []byte {
	const (
		flags = 0x1 | 0x4000 | 0x8000 // IGNORE_BANK_PLACEMENT, MEMORY_HANDLE_PROVIDED, MAP_NOT_REQUIRED
		attr  = 3 << 27               // PHYSICALITY_ALLOW_NONCONTIGUOUS; LOCATION_VIDMEM is 0
	)
	p := make([]byte, 128)
	rm.PutU32(p, rm.MemoryOwner, 0x63677075)
	rm.PutU32(p, rm.MemoryFlags, flags)
	rm.PutU32(p, rm.MemoryAttr, attr)
	rm.PutU64(p, rm.MemorySize, size)
	return p
}

// memory allocates device memory and returns its handle and the size granted.
func (c *client) memory(size quota.Bytes) (uint32, quota.Bytes, error) {
	p := memoryParams(uint64(size))
	h, err := c.alloc(c.device, c.newHandle(), classMemory, p)
	return h, quota.Bytes(rm.U64(p, rm.MemorySize)), err
}

// free frees an object. RM says OK for one that is not there too.
func (c *client) free(object uint32) error {
	out := make([]byte, rm.FreeSize)
	rm.PutU32(out, rm.FreeRoot, c.handle)
	rm.PutU32(out, rm.FreeObject, object)
	rm.PutU32(out, rm.FreeStatus, 0xbad)
	errno := c.call.escape(c.fd, rm.EscFree, out)
	if st := rm.U32(out, rm.FreeStatus); errno != 0 || st != rm.StatusOK {
		return &rmError{what: fmt.Sprintf("RM_FREE of %#x", object), errno: errno, status: st}
	}
	return nil
}

func (c *client) control(object, cmd uint32, params []byte) error {
	out := make([]byte, rm.ControlSize)
	rm.PutU32(out, rm.ControlClient, c.handle)
	rm.PutU32(out, rm.ControlObject, object)
	rm.PutU32(out, rm.ControlCmd, cmd)
	rm.PutU32(out, rm.ControlParamsSize, uint32(len(params)))
	return c.controlRaw(out, params)
}

func (c *client) controlRaw(out, params []byte) error {
	putPtr(out, rm.ControlParams, params)
	rm.PutU32(out, rm.ControlStatus, 0xbad)
	errno := c.call.escape(c.fd, rm.EscControl, out)
	runtime.KeepAlive(params)
	if st := rm.U32(out, rm.ControlStatus); errno != 0 || st != rm.StatusOK {
		return &rmError{what: fmt.Sprintf("RM_CONTROL %#x", rm.U32(out, rm.ControlCmd)), errno: errno, status: st}
	}
	return nil
}

// dup duplicates an object of another client under the device.
func (c *client) dup(srcClient, srcObject uint32) (uint32, error) {
	out := make([]byte, rm.DupSize)
	rm.PutU32(out, rm.DupClient, c.handle)
	rm.PutU32(out, rm.DupParent, c.device)
	rm.PutU32(out, rm.DupObject, c.newHandle())
	rm.PutU32(out, rm.DupClientSrc, srcClient)
	rm.PutU32(out, rm.DupObjectSrc, srcObject)
	rm.PutU32(out, rm.DupStatus, 0xbad)
	errno := c.call.escape(c.fd, rm.EscDupObject, out)
	if st := rm.U32(out, rm.DupStatus); errno != 0 || st != rm.StatusOK {
		return 0, &rmError{what: fmt.Sprintf("RM_DUP_OBJECT of %#x/%#x", srcClient, srcObject), errno: errno, status: st}
	}
	return rm.U32(out, rm.DupObject), nil
}

// exists reports whether the client has an object with device memory of this handle.
func (c *client) exists(object uint32) bool {
	d, err := c.dup(c.handle, object)
	return err == nil && c.free(d) == nil
}

// fbSizes are the sizes of FB_GET_INFO_V2's parameters, newest driver first.
var fbSizes = [...]int{1028, 460, 444, 436}

// fb asks FB_GET_INFO_V2 for the values of some indices.
func (c *client) fb(indices ...uint32) ([]quota.Bytes, error) {
	known := int(c.fbInfo.Load())
	var err error
	for _, size := range slices.Concat([]int{known}, fbSizes[:]) {
		p := make([]byte, size)
		rm.PutU32(p, rm.FBInfoCount, uint32(len(indices)))
		for i, x := range indices {
			rm.PutU32(p, rm.FBInfoList+rm.FBInfoEntry*i, x)
		}
		if err = c.control(c.subdevice, 0x20801303, p); err == nil {
			c.fbInfo.Store(int64(size))
			v := make([]quota.Bytes, len(indices))
			for i := range v {
				v[i] = quota.Bytes(rm.U32(p, rm.FBInfoList+rm.FBInfoEntry*i+4)) * quota.KiB
			}
			return v, nil
		}
	}
	return nil, err
}

// usage is total and free memory as cudaMemGetInfo and nvidia-smi take them.
func (c *client) usage() (total, free quota.Bytes, err error) {
	v, err := c.fb(rm.FBIndexTotalRAMSize, rm.FBIndexHeapFree)
	if err != nil {
		return 0, 0, err
	}
	return v[0], v[1], nil
}

// nodes lists the GPU nodes in /dev by minor.
func nodes() []int {
	paths, _ := filepath.Glob("/dev/nvidia[0-9]*")
	var list []int
	for _, p := range paths {
		if n, err := strconv.Atoi(strings.TrimPrefix(p, "/dev/nvidia")); err == nil {
			list = append(list, n)
		}
	}
	slices.Sort(list)
	return list
}

// parseSize reads 6GiB, 64MiB, 64KiB or bytes.
func parseSize(s string) (quota.Bytes, error) {
	unit := quota.Bytes(1)
	num := s
	for _, u := range []struct {
		suffix string
		unit   quota.Bytes
	}{{"KiB", quota.KiB}, {"MiB", quota.MiB}, {"GiB", quota.GiB}} {
		if v, ok := strings.CutSuffix(s, u.suffix); ok {
			num, unit = v, u.unit
		}
	}
	n, err := strconv.ParseUint(num, 0, 64)
	if err != nil || n > uint64(^quota.Bytes(0)/unit) {
		return 0, fmt.Errorf("size %q: want a number of bytes, or a size such as 64MiB or 6GiB", s)
	}
	return quota.Bytes(n) * unit, nil
}

// handleArg reads a handle in decimal or 0x form.
func handleArg(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 0, 32)
	if err != nil {
		return 0, fmt.Errorf("handle %q: want a number such as 0xc1d00000", s)
	}
	return uint32(n), nil
}

func print(format string, args ...any) { fmt.Fprintf(os.Stdout, format+"\n", args...) }
