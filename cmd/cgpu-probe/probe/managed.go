// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// Of UVM_VALIDATE_VA_RANGE_PARAMS (kernel-open/nvidia-uvm/uvm_ioctl.h).
const (
	validateSize   = 24
	validateStatus = 16
)

// uvmSpace is an open nvidia-uvm, of which managed memory is mapped.
type uvmSpace struct {
	fd     int // of the node, for ioctls
	mapFD  int // what is mapped: the node, or a stand-in for it
	on     string
	by     mapper
	call   caller
	ranges []managedRange
}

type managedRange struct{ base, length uintptr }

// openUVM opens nvidia-uvm and makes its address space. Where the node of the simulated driver cannot be mapped a memory
// file stands in for it: managed memory is recognised by the offset of its mappings.
func openUVM(by mapper, call caller) (*uvmSpace, error) {
	fd, err := syscall.Open("/dev/nvidia-uvm", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/nvidia-uvm: %w", err)
	}
	// The simulated driver does not know the call; on the real one a mapping fails without it.
	init := make([]byte, rm.UVMInitializeSize)
	_ = call(fd, rm.UVMInitialize, unsafe.Pointer(unsafe.SliceData(init)))
	runtime.KeepAlive(init)
	return &uvmSpace{fd: fd, mapFD: fd, on: "node", by: by, call: call}, nil
}

// reserve finds free addresses for a mapping, as CUDA does.
func (u *uvmSpace) reserve(size quota.Bytes) (managedRange, error) {
	length := uintptr(size+4095) &^ 4095
	const flags = syscall.MAP_PRIVATE | syscall.MAP_ANONYMOUS | syscall.MAP_NORESERVE
	base, errno := bySyscall.mmap(0, length, syscall.PROT_NONE, flags, -1, 0)
	if errno != 0 {
		return managedRange{}, fmt.Errorf("reserve %v of addresses: %w", size, errno)
	}
	return managedRange{base, length}, nil
}

// mapAt puts managed memory at a reserved range.
func (u *uvmSpace) mapAt(r managedRange) error {
	const prot, flags = syscall.PROT_READ | syscall.PROT_WRITE, syscall.MAP_SHARED | syscall.MAP_FIXED
	at, errno := u.by.mmap(r.base, r.length, prot, flags, u.mapFD, r.base)
	if errno == syscall.ENODEV && u.mapFD == u.fd {
		fd, err := unix.MemfdCreate("managed", unix.MFD_CLOEXEC)
		if err != nil {
			return fmt.Errorf("memfd_create: %w", err)
		}
		u.mapFD, u.on = fd, "memfd"
		at, errno = u.by.mmap(r.base, r.length, prot, flags, fd, r.base)
	}
	if errno == 0 && at != r.base {
		return fmt.Errorf("mapped at %#x: want %#x", at, r.base)
	}
	if errno != 0 {
		return &rmError{what: fmt.Sprintf("map %v of managed memory", quota.Bytes(r.length)), errno: errno}
	}
	u.ranges = append(u.ranges, r)
	return nil
}

// validate asks UVM whether a range is one, as CUDA does after a mapping.
func (u *uvmSpace) validate(r managedRange) (uint32, syscall.Errno) {
	p := make([]byte, validateSize)
	rm.PutU64(p, 0, uint64(r.base))
	rm.PutU64(p, 8, uint64(r.length))
	errno := u.call(u.fd, rm.UVMValidateVARange, unsafe.Pointer(unsafe.SliceData(p)))
	runtime.KeepAlive(p)
	return rm.U32(p, validateStatus), errno
}

// announce tells the guard of a range, as the limiter does: cmd is page.ReserveManaged or page.ReleaseManaged.
func (u *uvmSpace) announce(cmd uintptr, base, length uint64) error {
	p := page.ManagedCall{Base: base, Length: length, Status: 0xbad}
	errno := u.call(u.fd, cmd, unsafe.Pointer(&p))
	if errno != 0 || p.Status != rm.StatusOK {
		return &rmError{what: fmt.Sprintf("announce %#x bytes at %#x", length, base), errno: errno, status: p.Status}
	}
	return nil
}

func (u *uvmSpace) unmapAll() (sum quota.Bytes, err error) {
	for _, r := range u.ranges {
		if errno := u.by.munmap(r.base, r.length); errno != 0 {
			return sum, fmt.Errorf("unmap %#x: %w", r.base, errno)
		}
		sum += quota.Bytes(r.length)
	}
	u.ranges = nil
	return sum, nil
}

func cmdManaged(args []string) error {
	var texts []string
	for len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		texts, args = append(texts, args[0]), args[1:]
	}
	fs := flag.NewFlagSet("managed", flag.ExitOnError)
	hold := fs.String("hold", "", "keep it for so many seconds; 0: until a signal")
	free := fs.Bool("free", false, "unmap it then, and wait for a signal")
	announce := fs.Bool("announce", false, "tell the guard before each mapping and after each end")
	hostile := fs.Bool("hostile", false, "by plain system calls, whatever libraries there are")
	_ = fs.Parse(args)
	texts = append(texts, fs.Args()...)
	if len(texts) == 0 {
		return fmt.Errorf("want a size, such as 500MiB")
	}
	by, call := byProgram, caller(patient)
	if *hostile {
		by, call = bySyscall, rawIoctl
	}
	// A process without an RM client has no GPU, so nobody need look at its mappings.
	c, err := openGPU(patient)
	if err != nil {
		return err
	}
	defer c.close()
	u, err := openUVM(by, call)
	if err != nil {
		return err
	}
	print("pid=%d", os.Getpid())
	var sum quota.Bytes
	var refused error
	for _, text := range texts {
		size, err := parseSize(text)
		if err != nil {
			return err
		}
		got, err := u.mapManaged(size, *announce)
		if err != nil {
			print("refused=%d\nstatus=%s", size, describe(err))
			refused = err
			continue
		}
		sum += got
	}
	print("mapped=%d\nmapped_mib=%d\non=%s", sum, sum/quota.MiB, u.on)
	if *hold == "" {
		return refused
	}
	if *hold == "0" {
		*hold = ""
	}
	if err := wait(*hold); err != nil || !*free {
		return err
	}
	ranges := u.ranges
	gone, err := u.unmapAll()
	if err != nil {
		return err
	}
	for _, r := range ranges {
		if *announce {
			if err := u.announce(page.ReleaseManaged, uint64(r.base), uint64(r.length)); err != nil {
				return err
			}
		}
	}
	print("freed=%d", gone)
	return wait("")
}

// mapManaged maps managed memory as CUDA does: a refusal shows in the mapping itself, or in UVM's answer about it.
func (u *uvmSpace) mapManaged(size quota.Bytes, announce bool) (quota.Bytes, error) {
	r, err := u.reserve(size)
	if err != nil {
		return 0, err
	}
	if announce {
		if err := u.announce(page.ReserveManaged, uint64(r.base), uint64(r.length)); err != nil {
			return 0, err
		}
	}
	if err := u.mapAt(r); err != nil {
		return 0, err
	}
	status, errno := u.validate(r)
	if errno == 0 && status != rm.StatusOK {
		return 0, &rmError{what: "UVM_VALIDATE_VA_RANGE", status: status}
	}
	print("range=%#x+%#x", r.base, r.length)
	return quota.Bytes(r.length), nil
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// libraries are the names of the shared libraries in this process.
func libraries() ([]string, error) {
	maps, err := os.ReadFile("/proc/self/maps")
	var names []string
	for line := range strings.Lines(string(maps)) {
		name := filepath.Base(strings.TrimSpace(line))
		if strings.Contains(name, ".so") && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names, err
}

// pageWritable reports whether the vGPU page can be written, and how it was tried.
func pageWritable() (how string, writable bool) {
	if fd, err := syscall.Open(page.Path, syscall.O_RDWR|syscall.O_CLOEXEC, 0); err == nil {
		syscall.Close(fd)
		return "open", true
	}
	fd, err := syscall.Open(page.Path, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return "", false
	}
	defer syscall.Close(fd)
	at, errno := bySyscall.mmap(0, 4096, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED, fd, 0)
	if errno == 0 {
		bySyscall.munmap(at, 4096)
		return "mmap", true
	}
	at, errno = bySyscall.mmap(0, 4096, syscall.PROT_READ, syscall.MAP_SHARED, fd, 0)
	if errno != 0 {
		return "", false
	}
	defer bySyscall.munmap(at, 4096)
	_, _, errno = syscall.Syscall(syscall.SYS_MPROTECT, at, 4096, syscall.PROT_READ|syscall.PROT_WRITE)
	return "mprotect", errno == 0
}

func cmdPage([]string) error {
	p, err := page.Read(page.Path)
	if err != nil {
		return err
	}
	h := p.Header()
	print("flags=%#x\nchange=%d\nvgpus=%d", h.Flags, h.Change, h.VGPUs)
	for i := range int(h.VGPUs) {
		v := p.VGPU(i)
		used, managed, processes := p.SlotUse(i)
		if h.Flags&page.FlagPreload == 0 {
			used, managed = v.Used, v.Managed
		}
		print("vgpu%d_flags=%#x\nvgpu%d_minor=%d", i, v.Flags, i, v.Minor)
		print("vgpu%d_limit=%d\nvgpu%d_used=%d\nvgpu%d_managed=%d", i, v.Limit, i, used, i, managed)
		print("vgpu%d_spill=%d\nvgpu%d_spilled=%d\nvgpu%d_processes=%d", i, v.Spill, i, v.Spilled, i, processes)
	}
	how, writable := pageWritable()
	print("writable=%s", yesNo(writable))
	if writable && h.Flags&page.FlagGuard != 0 {
		return fmt.Errorf("%s can be written (by %s), but the guard's word must stand there", page.Path, how)
	}
	return nil
}
