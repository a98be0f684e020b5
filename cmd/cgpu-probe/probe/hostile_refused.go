// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

func sleep10ms() { time.Sleep(10 * time.Millisecond) }

// hostileXfer hides calls behind XFER: refused, or as good as the call itself.
func hostileXfer(c *client, _ hostileOptions) error {
	wrap := func(depth int) caller {
		return func(fd int, cmd uintptr, arg unsafe.Pointer) syscall.Errno {
			outer := make([][]byte, depth)
			for i := range outer {
				b := make([]byte, rm.XferSize)
				rm.PutU32(b, rm.XferCmd, uint32(cmd&0xff))
				rm.PutU32(b, rm.XferLength, uint32(cmd>>16&0x3fff))
				rm.PutU64(b, rm.XferPtr, uint64(uintptr(arg)))
				outer[i] = b
				cmd, arg = cmdOf(rm.EscXferCmd, rm.XferSize), unsafe.Pointer(&b[0])
			}
			errno := patient(fd, cmd, arg)
			runtime.KeepAlive(outer)
			return errno
		}
	}
	for depth := 1; depth <= 2; depth++ {
		if err := c.holds(fmt.Sprintf("xfer_%d", depth), c.via(wrap(depth))); err != nil {
			return err
		}
		o := c.as(c.handle)
		o.call, o.device, o.subdevice = wrap(depth), c.device, c.subdevice
		_, _, err := o.usage()
		print("xfer_control_%d=%s", depth, describe(err))
		if total, _, want := c.usage(); want == nil && err == nil {
			if t, _, _ := o.usage(); t != total {
				return fmt.Errorf("XFER shows %v of memory, the plain call %v", t, total)
			}
		}
	}
	// An inner length that does not fit its number.
	out := make([]byte, rm.XferSize)
	rm.PutU32(out, rm.XferCmd, rm.EscControl)
	rm.PutU32(out, rm.XferLength, 1<<31)
	rm.PutU64(out, rm.XferPtr, uint64(uintptr(unsafe.Pointer(&out[0]))))
	errno := c.call.escape(c.fd, rm.EscXferCmd, out)
	if errno == 0 {
		return fmt.Errorf("XFER of 2 GiB was accepted")
	}
	return nil
}

// hostileVersion says again and again that it is of a version that the driver is not: the driver would write five lines to the
// kernel log for each. It is told the driver's version, as by the driver.
func hostileVersion(c *client, _ hostileOptions) error {
	ask := func(call caller, cmd uint32, said string) (string, syscall.Errno) {
		p := make([]byte, rm.CheckVersionSize)
		rm.PutU32(p, rm.CheckVersionCmd, cmd)
		copy(p[rm.CheckVersionString:], said)
		errno := call.escape(c.fd, rm.EscCheckVersion, p)
		told, _, _ := strings.Cut(string(p[rm.CheckVersionString:]), "\x00")
		return told, errno
	}
	own, errno := ask(patient, rm.CheckVersionQuery, "")
	if errno != 0 {
		return fmt.Errorf("ask for the version: %w", errno)
	}
	print("driver=%s", own)
	if told, errno := ask(patient, 0, own); errno != 0 || told != own {
		return fmt.Errorf("the driver's own version: %q, %v", told, errno)
	}
	for i := range 1000 {
		if told, errno := ask(patient, uint32(i%3)*rm.CheckVersionRelaxed, strings.Repeat("x", i%65)); errno != syscall.EINVAL || told != own {
			return fmt.Errorf("a wrong version: %q, %v; want %q and EINVAL", told, errno, own)
		}
	}
	return nil
}

// hostileMknod makes device nodes of its own and opens them.
func hostileMknod(hostileOptions) error {
	visible := nodes()
	dir, err := os.MkdirTemp("", "probe")
	if err != nil {
		return skip("no folder to write to")
	}
	defer os.RemoveAll(dir)
	for _, minor := range []int{0, 1, 2, 3, 4, 5, 6, 7, 254} { // 254: nvidia-modeset
		path := filepath.Join(dir, fmt.Sprint("node", minor))
		err := syscall.Mknod(path, syscall.S_IFCHR|0o666, 195<<8|minor)
		print("mknod_%d=%v", minor, err)
		if err != nil {
			continue
		}
		fd, err := syscall.Open(path, syscall.O_RDWR, 0)
		print("open_%d=%v", minor, err)
		if err != nil {
			continue
		}
		syscall.Close(fd)
		if !slices.Contains(visible, minor) {
			return fmt.Errorf("opened GPU node 195:%d, which the container was not given", minor)
		}
	}
	return nil
}

// hostileNodes opens every node of NVIDIA's that is there.
func hostileNodes(c *client, _ hostileOptions) error {
	paths, _ := filepath.Glob("/dev/nvidia*")
	dri, _ := filepath.Glob("/dev/dri/*")
	caps, _ := filepath.Glob("/dev/nvidia-caps/*")
	for _, p := range slices.Concat(paths, dri, caps) {
		if st, err := os.Stat(p); err != nil || st.IsDir() {
			continue
		}
		fd, err := syscall.Open(p, syscall.O_RDWR|syscall.O_CLOEXEC, 0)
		print("open_%s=%v", p, err)
		if err != nil {
			continue
		}
		syscall.Close(fd)
		name := strings.TrimPrefix(p, "/dev/")
		known := name == "nvidiactl" || name == "nvidia-uvm" || slices.ContainsFunc(c.gpus,
			func(g card) bool { return name == fmt.Sprint("nvidia", g.minor) })
		if !known {
			return fmt.Errorf("%s can be opened; a sliced container must not have it", p)
		}
	}
	return nil
}

// timeslice reads the timeslice of a channel group.
func (c *client) timeslice(tsg uint32) (uint64, error) {
	p := make([]byte, 8)
	err := c.control(tsg, ctrlGetTimeslice, p)
	return rm.U64(p, 0), err
}

func hostileTimeslice(c *client, _ hostileOptions) error {
	tsg, err := c.group(1)
	if err != nil {
		return skip("no channel group: " + err.Error())
	}
	for _, steal := range []uint64{stolenUs, 0, 1, 1<<64 - 1} {
		p := make([]byte, 8)
		rm.PutU64(p, 0, steal)
		if err := c.control(tsg, ctrlSetTimeslice, p); err != nil {
			return fmt.Errorf("set a timeslice, as libcuda does: %w", err)
		}
		us, err := c.timeslice(tsg)
		if err != nil {
			return err
		}
		print("timeslice_us=%d", us)
		if us == steal {
			return fmt.Errorf("the timeslice is %d µs: a container set its own", us)
		}
	}
	for property := range uint32(4) {
		p := make([]byte, 16)
		rm.PutU32(p, 0, tsg)
		rm.PutU32(p, 4, property)
		rm.PutU64(p, 8, 1_000_000)
		if err := mustRefuse(fmt.Sprint("property_", property), c.control(c.device, 0x80170f, p)); err != nil {
			return err
		}
	}
	return nil
}

// hostilePause starts and stops channels, its own and guessed ones of others.
func hostilePause(c *client, _ hostileOptions) error {
	// A channel of its own, where the driver makes one of so little; else something that is none.
	own := uint32(firstProbeHandle)
	if tsg, err := c.group(rm.ChannelEngineTypeGR); err == nil {
		if ch, err := c.channel(tsg, rm.ChannelEngineTypeGR); err == nil {
			own = ch
		}
	}
	for _, cl := range []uint32{c.handle, c.handle - 1, c.handle + 1, 0xc1d00000} {
		for _, off := range []bool{false, true} {
			if err := mustRefuse(fmt.Sprintf("disable_%v_%#x", off, cl), c.disable(cl, own, off)); err != nil {
				return err
			}
		}
	}
	for _, ctl := range []struct {
		cmd  uint32
		size int
	}{{0x2080111a, 520}, {0x20801121, 24}, {0x20801123, 1552}, {0x20801124, 1540}, {0x20801115, 8}, {0x20801110, 8}} {
		if err := mustRefuse(fmt.Sprintf("%#x", ctl.cmd), c.control(c.subdevice, ctl.cmd, make([]byte, ctl.size))); err != nil {
			return err
		}
	}
	for _, cmd := range []uint32{0xa06f0109, 0xa06f0111} {
		if err := mustRefuse(fmt.Sprintf("%#x", cmd), c.control(own, cmd, make([]byte, 4))); err != nil {
			return err
		}
	}
	for _, cmd := range []uint32{0x801711, 0x801712, 0x801714} {
		if err := mustRefuse(fmt.Sprintf("%#x", cmd), c.control(c.device, cmd, make([]byte, 16396))); err != nil {
			return err
		}
	}
	idle := make([]byte, 56)
	rm.PutU32(idle, 0, c.handle)
	rm.PutU32(idle, 4, c.device)
	if errno := c.call.escape(c.fd, rm.EscIdleChannels, idle); errno == 0 && rm.U32(idle, 48) == rm.StatusOK {
		return fmt.Errorf("IDLE_CHANNELS succeeded: want a refusal")
	}
	return nil
}

func hostilePreempt(c *client, _ hostileOptions) error {
	tsg, err := c.group(1)
	if err != nil {
		return skip("no channel group: " + err.Error())
	}
	if err := mustRefuse("preempt", c.control(c.device, ctrlPreempt, make([]byte, 8))); err != nil { // its own group gives its turn away
		return err
	}
	for _, cmd := range []uint32{0xa06c0107, 0xa06c0110} {
		if err := mustRefuse(fmt.Sprintf("%#x", cmd), c.control(tsg, cmd, make([]byte, 4))); err != nil {
			return err
		}
	}
	// Without compute preemption a long kernel keeps the GPU beyond its timeslice.
	for _, mode := range []uint32{rm.PreemptModeWFI, rm.PreemptModeCTA, 3} {
		p := make([]byte, 32)
		rm.PutU32(p, rm.PreemptFlags, 1)
		rm.PutU32(p, rm.PreemptChannel, tsg)
		rm.PutU32(p, rm.PreemptCILP, mode)
		if err := mustRefuse(fmt.Sprint("preemption_mode_", mode), c.control(c.subdevice, 0x20801210, p)); err != nil {
			return err
		}
	}
	return nil
}

// hostileFINN sets the flags that say the parameters are serialised, where a size could hide.
func hostileFINN(c *client, _ hostileOptions) error {
	for _, flags := range []uint32{1, 2, 1 << 31} {
		out := make([]byte, allocSize)
		params := make([]byte, 128)
		c.fillMemoryAlloc(out, params, c.newHandle(), uint64(2*quota.MiB))
		rm.PutU32(out, 36, flags)
		if err := mustRefuse(fmt.Sprint("alloc_flags_", flags), c.allocRaw(out, params)); err != nil {
			return err
		}
	}
	for _, flags := range []uint32{1, 2, 4, 7} {
		out := make([]byte, rm.ControlSize)
		rm.PutU32(out, rm.ControlClient, c.handle)
		rm.PutU32(out, rm.ControlObject, c.handle)
		rm.PutU32(out, rm.ControlCmd, 0x201)
		rm.PutU32(out, rm.ControlFlags, flags)
		rm.PutU32(out, rm.ControlParamsSize, 128)
		if err := mustRefuse(fmt.Sprint("control_flags_", flags), c.controlRaw(out, make([]byte, 128))); err != nil {
			return err
		}
	}
	return nil
}

// hostileHeap allocates by the old heap call, with each of its three functions.
func hostileHeap(c *client, _ hostileOptions) error {
	for _, fn := range []uint32{rm.HeapFnAllocSize, rm.HeapFnAllocSizeRange, rm.HeapFnAllocTiled} {
		err := c.holds(fmt.Sprint("heap_", fn), func(size uint64) (uint32, error) {
			b := make([]byte, rm.HeapSize)
			h := c.newHandle()
			rm.PutU32(b, rm.HeapFunction, fn)
			rm.PutU32(b, 40, 0x63677075) // owner
			rm.PutU32(b, rm.HeapAllocMemory, h)
			rm.PutU32(b, rm.HeapAllocFlags, 0x4000) // MEMORY_HANDLE_PROVIDED
			const attr = 3 << 27
			switch fn {
			case rm.HeapFnAllocSize:
				rm.PutU32(b, rm.HeapAllocAttr, attr)
				rm.PutU64(b, rm.HeapAllocSize, size)
			case rm.HeapFnAllocSizeRange:
				rm.PutU32(b, rm.HeapAllocAttr, attr)
				rm.PutU64(b, rm.HeapAllocRangeSize, size)
			case rm.HeapFnAllocTiled:
				rm.PutU32(b, rm.HeapTiledHeight, uint32(size>>16))
				rm.PutU32(b, rm.HeapTiledPitch, 1<<16)
				rm.PutU32(b, rm.HeapTiledAttr, attr)
				rm.PutU64(b, rm.HeapAllocSize, 65536) // a lie: the driver multiplies
			}
			return h, c.heapCall(b)
		})
		if err != nil {
			return err
		}
	}
	for _, fn := range []uint32{rm.HeapFnHWAlloc, rm.HeapFnAllocOSDescriptor, 99} {
		b := make([]byte, rm.HeapSize)
		rm.PutU32(b, rm.HeapFunction, fn)
		if err := mustRefuse(fmt.Sprint("heap_", fn), c.heapCall(b)); err != nil {
			return err
		}
	}
	return nil
}

func hostileAllocMem(c *client, total, _ quota.Bytes, _ hostileOptions) error {
	for _, class := range []uint32{classMemory, classRegisters, 0x81, 0x82, 0x83, 0xc2} {
		for _, handle := range []uint32{c.newHandle(), 0} {
			limit, err := c.allocMemory(class, handle)
			print("class_%#x_name_%#x=%s", class, handle, rm.StatusName(statusOf(err)))
			if err != nil {
				continue
			}
			// Graphics libraries ask for the first two by the way. They get a name with nothing behind it, if they say which.
			if handle == 0 || class != classMemory && class != classRegisters || class == classMemory && limit >= uint64(total) {
				return fmt.Errorf("RM_ALLOC_MEMORY of class %#x succeeded under the name %#x; limit says %d", class, handle, limit)
			}
			if fd, _, err := c.mapMemory(handle, 0, 4096); err == nil {
				syscall.Close(fd)
				return fmt.Errorf("what RM_ALLOC_MEMORY of class %#x gave can be mapped", class)
			}
			if err := c.free(handle); err != nil {
				return err
			}
		}
	}
	return nil
}

// classRegisters is NV01_MEMORY_LOCAL_PRIVILEGED: all of the GPU's.
const classRegisters = 0x3f

// allocMemory is RM_ALLOC_MEMORY of 2 MiB. It returns the limit in the answer.
func (c *client) allocMemory(class, handle uint32) (limit uint64, err error) {
	b := make([]byte, rm.AllocMemorySize)
	rm.PutU32(b, rm.AllocMemoryRoot, c.handle)
	rm.PutU32(b, rm.AllocMemoryParent, c.device)
	rm.PutU32(b, rm.AllocMemoryObject, handle)
	rm.PutU32(b, rm.AllocMemoryClass, class)
	rm.PutU64(b, rm.AllocMemoryLimit, 2<<20-1)
	rm.PutU32(b, rm.AllocMemoryStatus, 0xbad)
	rm.PutU32(b, rm.AllocMemoryFD, 0xffffffff)
	errno := c.call.escape(c.gpuFDs[0], rm.EscAllocMemory, b)
	if st := rm.U32(b, rm.AllocMemoryStatus); errno != 0 || st != rm.StatusOK {
		return 0, &rmError{what: fmt.Sprintf("RM_ALLOC_MEMORY of class %#x", class), errno: errno, status: st}
	}
	return rm.U64(b, rm.AllocMemoryLimit), nil
}

// mustFail issues an escape and fails if it went well; statusOff tells where the status is.
func (c *client) mustFail(what string, nr uint32, b []byte, statusOff int) error {
	rm.PutU32(b, statusOff, 0xbad)
	errno := c.call.escape(c.fd, nr, b)
	st := rm.U32(b, statusOff)
	print("%s=errno %d, %s", what, int(errno), rm.StatusName(st))
	if errno == 0 && st == rm.StatusOK {
		return fmt.Errorf("%s succeeded: want a refusal", what)
	}
	return nil
}

func hostileLegacy28(c *client, _ hostileOptions) error {
	for _, class := range []uint32{0x40, 0x41, 0x2080} {
		b := make([]byte, rm.AllocObjectSize)
		rm.PutU32(b, 0, c.handle)
		rm.PutU32(b, 4, c.device)
		rm.PutU32(b, 8, c.newHandle())
		rm.PutU32(b, 12, class)
		if err := c.mustFail(fmt.Sprintf("alloc_object_%#x", class), rm.EscAllocObject, b, rm.AllocObjectStatus); err != nil {
			return err
		}
	}
	return nil
}

func hostileUnknownClass(c *client, _ hostileOptions) error {
	for _, class := range []uint32{0xdead, 0xffffffff, 0x2082, 0x82, 0x83, 0xc2, 0x5080, 0x90cd, 0xb1, 0xe0, 0x40 | 1<<16} {
		_, err := c.alloc(c.device, c.newHandle(), class, memoryParams(uint64(2*quota.MiB)))
		if err := mustRefuse(fmt.Sprintf("class_%#x", class), err); err != nil {
			return err
		}
	}
	return nil
}

func hostileUnknownControl(c *client, _ hostileOptions) error {
	for _, cmd := range []uint32{0x2080ffff, 0xffffffff, 0x20801231, 0x20801238, 0x20800122, 0x20801116} {
		if err := mustRefuse(fmt.Sprintf("control_%#x", cmd), c.control(c.subdevice, cmd, make([]byte, 256))); err != nil {
			return err
		}
	}
	for _, cmd := range []uint32{0x13d, 0x278, 0x901, 0x902, 0xb03, 0xb04} {
		if err := mustRefuse(fmt.Sprintf("control_%#x", cmd), c.control(c.handle, cmd, make([]byte, 256))); err != nil {
			return err
		}
	}
	return nil
}

func hostileRegistry(c *client, _ hostileOptions) error {
	name := []byte("RmValidateClientData\x00")
	for _, access := range []uint32{1, 2, 3, 4} {
		b := make([]byte, 72)
		rm.PutU32(b, 0, c.handle)
		rm.PutU32(b, 4, c.device)
		rm.PutU32(b, 8, access)
		rm.PutU32(b, 24, uint32(len(name)))
		putPtr(b, 32, name)
		if err := c.mustFail(fmt.Sprint("registry_", access), rm.EscAccessRegistry, b, 64); err != nil {
			return err
		}
	}
	i2c := make([]byte, 32)
	rm.PutU32(i2c, 0, c.handle)
	o := &client{call: c.call, fd: c.gpuFDs[0]}
	return o.mustFail("i2c", rm.EscI2CAccess, i2c, 24)
}

func hostileHugeParams(c *client, _ hostileOptions) error {
	for _, size := range []uint32{1 << 31, 0xffffffff, 1 << 20, 1} {
		params := make([]byte, 4096)
		// The driver takes the size from the class and ignores the caller's: refused or charged.
		err := c.holds(fmt.Sprintf("alloc_params_%#x", size), func(bytes uint64) (uint32, error) {
			out := make([]byte, allocSize)
			h := c.newHandle()
			c.fillMemoryAlloc(out, params, h, bytes)
			rm.PutU32(out, 32, size)
			return h, c.allocRaw(out, params)
		})
		if err != nil {
			return err
		}
		ctl := make([]byte, rm.ControlSize)
		rm.PutU32(ctl, rm.ControlClient, c.handle)
		rm.PutU32(ctl, rm.ControlObject, c.subdevice)
		rm.PutU32(ctl, rm.ControlCmd, 0x20801303)
		rm.PutU32(ctl, rm.ControlParamsSize, size)
		if err := mustRefuse(fmt.Sprintf("control_params_%#x", size), c.controlRaw(ctl, params)); err != nil {
			return err
		}
	}
	// A list longer than its block.
	p := make([]byte, c.fbInfo.Load())
	rm.PutU32(p, 0, 0xffffffff)
	if err := mustRefuse("list_v2", c.control(c.subdevice, 0x20801303, p)); err != nil {
		return err
	}
	p = make([]byte, 16)
	rm.PutU32(p, 0, 0x7fffffff)
	list := make([]byte, 64)
	putPtr(p, 8, list)
	err := c.control(c.subdevice, 0x20801301, p)
	runtime.KeepAlive(list)
	return mustRefuse("list_v1", err)
}

// hostileBadPointers passes addresses that cannot be read or written, in full or in part.
func hostileBadPointers(c *client, _ hostileOptions) error {
	mem, err := pages(8192)
	if err != nil {
		return err
	}
	if err := syscall.Mprotect(mem[4096:], syscall.PROT_NONE); err != nil {
		return err
	}
	ro, err := pages(4096)
	if err != nil {
		return err
	}
	base := uintptr(unsafe.Pointer(&mem[0]))
	bad := map[string]uintptr{
		"null": 0, "one": 1, "protected": base + 4096, "crossing": base + 4096 - 8, "kernel": 0xffff888000000000,
		"noncanonical": 1 << 60, "top": ^uintptr(0) - 16, "user_top": 1<<47 - 8,
	}
	for name, addr := range bad {
		for _, nr := range []uint32{rm.EscAlloc, rm.EscFree, rm.EscControl, rm.EscDupObject, rm.EscVidHeapControl, rm.EscCardInfo,
			rm.EscXferCmd} {
			size := map[uint32]int{rm.EscAlloc: allocSize, rm.EscFree: rm.FreeSize, rm.EscControl: rm.ControlSize, rm.EscDupObject: rm.DupSize,
				rm.EscVidHeapControl: rm.HeapSize, rm.EscCardInfo: 32 * rm.CardInfoSize, rm.EscXferCmd: rm.XferSize}[nr]
			_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(c.fd), cmdOf(nr, size), addr)
			if errno == 0 {
				return fmt.Errorf("escape %#x with a structure at %s (%#x): no error", nr, name, addr)
			}
		}
		if name == "null" {
			continue // some parameters are optional
		}
		out := make([]byte, allocSize)
		params := make([]byte, 128)
		c.fillMemoryAlloc(out, params, c.newHandle(), uint64(2*quota.MiB))
		rm.PutU64(out, rm.AllocParams, uint64(addr))
		if err := mustRefuse("alloc_params_"+name, c.allocRaw(out, nil)); err != nil {
			return err
		}
		ctl := make([]byte, rm.ControlSize)
		rm.PutU32(ctl, rm.ControlClient, c.handle)
		rm.PutU32(ctl, rm.ControlObject, c.handle)
		rm.PutU32(ctl, rm.ControlCmd, 0x201)
		rm.PutU32(ctl, rm.ControlParamsSize, 128)
		rm.PutU64(ctl, rm.ControlParams, uint64(addr))
		if err := mustRefuse("control_params_"+name, c.controlRaw(ctl, nil)); err != nil {
			return err
		}
		v1 := make([]byte, 16)
		rm.PutU32(v1, 0, 8)
		rm.PutU64(v1, 8, uint64(addr))
		if err := mustRefuse("list_"+name, c.control(c.subdevice, 0x20801301, v1)); err != nil {
			return err
		}
	}
	// Read only: the answer cannot be written. The memory that was allocated must not be lost to the account.
	_, before, err := c.usage()
	if err != nil {
		return err
	}
	h := c.newHandle()
	params := ro[1024 : 1024+128]
	c.fillMemoryAlloc(ro[:allocSize], params, h, uint64(2*quota.MiB))
	if err := syscall.Mprotect(ro, syscall.PROT_READ); err != nil {
		return err
	}
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(c.fd), cmdOf(rm.EscAlloc, allocSize), uintptr(unsafe.Pointer(&ro[0])))
	print("read_only=errno %d", int(errno))
	print("read_only_free=%s", describe(c.free(h))) // made or undone: both are in order
	return c.expectFree("end", before, 0)
}

// hostileOtherDevice allocates devices of every other instance number; only those of the container's GPUs may work.
func hostileOtherDevice(c *client, _ hostileOptions) error {
	var worked int
	for instance := range uint32(32) {
		dev := make([]byte, 56)
		rm.PutU32(dev, rm.DeviceID, instance)
		h, err := c.alloc(c.handle, c.newHandle(), classDevice, dev)
		if err == nil {
			worked++
			print("device_%d=ok", instance)
			if err := c.free(h); err != nil {
				return err
			}
		}
	}
	if worked > len(c.gpus) {
		return fmt.Errorf("%d devices can be allocated, but the container has %d GPUs", worked, len(c.gpus))
	}
	return nil
}

// hostileOtherGPU uses memory of one GPU of the container as the other's: the driver would map what is at its address there.
func hostileOtherGPU(c *client, _ hostileOptions) error {
	if len(c.gpus) < 2 {
		return skip("needs two GPUs")
	}
	memory, size, err := c.memory(2 * quota.MiB)
	if err != nil {
		return err
	}
	first := c.device
	c.gpus = c.gpus[1:]
	if c.device, _, err = c.newDevice(0); err != nil {
		return err
	}
	own, _, err := c.memory(size)
	if err != nil {
		return err
	}
	if _, _, err := c.mapMemory(own, 0, size); err != nil {
		return fmt.Errorf("the second GPU's own memory: %w", err)
	}
	_, _, err = c.mapMemory(memory, 0, size)
	print("window=%s", describe(err))
	if err == nil {
		return fmt.Errorf("memory of the first GPU was mapped as the second's")
	}
	again, err := c.dup(c.handle, memory)
	print("dup=%s", describe(err)) // a name for it there is nothing yet
	if err == nil {
		_, _, err = c.mapMemory(again, 0, size)
		if err := mustAnswer("window_of_dup", err, rm.StatusInvalidDevice); err != nil {
			return err
		}
	}
	addresses, err := c.virtual(0, 1<<30, rm.MemoryFlagLazy)
	if err != nil {
		return err
	}
	err = c.mapDMA(addresses, memory, 0, uint64(size))
	print("dma=%s", describe(err))
	if err == nil {
		return fmt.Errorf("memory of the first GPU was mapped into the second's addresses")
	}
	return c.foreignNotifiers(first, memory)
}

// foreignNotifiers has a channel of the client's GPU write its errors to memory below another GPU's device.
func (c *client) foreignNotifiers(first, memory uint32) error {
	notified := func(what string, ofGroup, ofChannel uint32) error {
		p := make([]byte, 20)
		rm.PutU32(p, rm.TSGNotifiers[0], ofGroup)
		rm.PutU32(p, rm.TSGEngineType, rm.ChannelEngineTypeCopy0)
		group, err := c.alloc(c.device, c.newHandle(), classGroup, p)
		if err != nil {
			return fmt.Errorf("%s: a channel group: %w", what, err)
		}
		p = make([]byte, channelSize)
		rm.PutU32(p, rm.ChannelNotifiers[0], ofChannel)
		rm.PutU32(p, rm.ChannelEngineType, rm.ChannelEngineTypeCopy0)
		_, err = c.alloc(group, c.newHandle(), classChannel, p)
		return mustAnswer(what, err, rm.StatusInvalidDevice)
	}
	contextDMA := func(subdevice uint32) (uint32, error) {
		p := make([]byte, 32)
		rm.PutU32(p, rm.ContextDMASubdevice, subdevice)
		rm.PutU32(p, rm.ContextDMAFlags, rm.ContextDMAFlagNoHash)
		rm.PutU32(p, rm.ContextDMAMemory, memory)
		rm.PutU64(p, rm.ContextDMALimit, 4095)
		return c.alloc(first, c.newHandle(), classContextDMA, p)
	}
	_, err := contextDMA(c.device)
	if err := mustAnswer("context_dma", err, rm.StatusInvalidDevice); err != nil {
		return err
	}
	dma, err := contextDMA(0)
	if err != nil {
		return fmt.Errorf("a context DMA of the memory's own GPU: %w", err)
	}
	// The guard judges a context DMA by its memory, which it would not know of a duplicate.
	if _, err = c.dup(c.handle, dma); err == nil {
		return errors.New("a context DMA was duplicated")
	}
	print("dup_of_context_dma=%s", describe(err))
	return errors.Join(notified("channel", 0, memory), notified("group", memory, 0), notified("by_context_dma", 0, dma))
}
