// SPDX-License-Identifier: Apache-2.0

package page

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/atomicfile"
)

// Sizes of the two kinds of pages: with a guard one memory page, in preload mode with room for the slots.
const (
	sizeGuard   = 4096
	sizePreload = (int(unsafe.Sizeof(Header{})+MaxVGPUs*unsafe.Sizeof(VGPU{})+MaxProcesses*unsafe.Sizeof(Slot{})) + 4095) / 4096 * 4096
)

// Page is a page, mapped (Open) or copied (Read).
type Page struct{ b []byte }

// File is where the page of a reservation is kept below the run directory: in a folder with all that is its container's alone.
func File(runDir, nonce string) string { return filepath.Join(folder(runDir, nonce), "vgpu") }

func folder(runDir, nonce string) string { return filepath.Join(runDir, "page", nonce) }

// Bundle is the folder of the config.json that the low-level runtime gets in the place of the engine's. It stays until that runtime
// deletes the container, which may be long after the reservation's end: crun starts a container's last hooks in it.
func Bundle(runDir, nonce string) string { return filepath.Join(runDir, "bundle", nonce) }

// RemoveBundle deletes the folder of Bundle with what hooks may have left there; none is no error.
func RemoveBundle(runDir, nonce string) error { return os.RemoveAll(Bundle(runDir, nonce)) }

// PreloadFile is where the container's /etc/ld.so.preload is kept, beside its page.
func PreloadFile(page string) string { return filepath.Join(filepath.Dir(page), "ld.so.preload") }

// LimiterFile is where the container's own copy of the limiter is kept in preload mode, beside its page.
func LimiterFile(page string) string { return filepath.Join(filepath.Dir(page), "libcgpu.so") }

// tmpfsOptions bound what Confine mounts: page, limiter and ld.so.preload (spec: 64 KiB at most) take less than half of it. Others than
// root pass, because a container with root of another user may have to.
const tmpfsOptions = "mode=711,size=512k,nr_inodes=16"

// Confine gives the folder of a page in preload mode a file system of its own: a tenant who may write his page may also grow it and make it
// set-uid, and on the host's /run the one would take memory of the node and the other could count. Not noexec: the limiter lies there too.
// What a killed process leaves is undone by Remove.
func Confine(page string) error {
	dir := filepath.Dir(page)
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return fmt.Errorf("page: %w", err)
	}
	if err := unix.Mount("cgpu", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, tmpfsOptions); err != nil {
		return fmt.Errorf("page: mount a tmpfs on %s: %w", dir, err)
	}
	return nil
}

// Create makes the file of a page: complete, under a temporary name, then in its place. Device numbers, flags and the vGPUs
// are the caller's; the rest is filled in here. mode is 0444, or 0666 in preload mode, where every user of the container
// keeps account in it.
func Create(path string, h Header, vgpus []VGPU) error {
	if len(vgpus) > MaxVGPUs {
		return fmt.Errorf("page: %d GPUs: a vGPU page has room for %d", len(vgpus), MaxVGPUs)
	}
	size, mode := sizeGuard, os.FileMode(0o444)
	h.Magic, h.Version, h.VGPUs = Magic, Version, uint32(len(vgpus))
	if h.Flags&FlagPreload != 0 {
		size, mode, h.Processes = sizePreload, 0o666, MaxProcesses
	}
	h.Size = uint32(size)
	b := make([]byte, size)
	p := &Page{b}
	*p.Header() = h
	for i, v := range vgpus {
		*p.VGPU(i) = v
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o711); err != nil {
		return fmt.Errorf("page: %w", err)
	}
	if err := atomicfile.Write(path, b, mode); err != nil {
		return fmt.Errorf("page: %w", err)
	}
	return nil
}

// Open maps a page for its guard. Not for pages in preload mode: a tenant could make their file shorter, and whoever looks at
// what is missing is killed (SIGBUS).
func Open(path string) (*Page, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("page: open %s: %w", path, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("page: stat %s: %w", path, err)
	}
	if st.Size != int64(sizeGuard) {
		return nil, fmt.Errorf("page: %s: has %d bytes, want %d", path, st.Size, sizeGuard)
	}
	b, err := unix.Mmap(fd, 0, sizeGuard, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("page: map %s: %w", path, err)
	}
	p := &Page{b}
	if err := p.check(path); err != nil {
		return nil, errors.Join(err, unix.Munmap(b))
	}
	return p, nil
}

// noWait opens a page that a tenant may hold a lease on (F_SETLEASE): an open without it waits until he gives way, for 45 seconds
// (/proc/sys/fs/lease-break-time); with it, it fails at once with EAGAIN.
const noWait = unix.O_NONBLOCK

// Read copies a page. That of a container in preload mode is in the tenant's hands: no number in it is to be believed beyond
// being shown.
func Read(path string) (*Page, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|noWait, 0)
	if err != nil {
		return nil, fmt.Errorf("page: %w", err)
	}
	defer f.Close()
	b := make([]byte, sizePreload)
	n, err := io.ReadFull(f, b)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, fmt.Errorf("page: read %s: %w", path, err)
	}
	if n < sizeGuard {
		return nil, fmt.Errorf("page: %s: has %d bytes, want %d or %d", path, n, sizeGuard, sizePreload)
	}
	p := &Page{b[:n]}
	return p, p.check(path)
}

// Update changes what the host sets in a page of preload mode: flags, and limit, weight and timeslice of its vGPUs.
func Update(path string, change func(*Page)) error {
	p, err := Read(path)
	if err != nil {
		return err
	}
	change(p)
	p.Header().Change++
	f, err := os.OpenFile(path, os.O_WRONLY|noWait, 0)
	if err != nil {
		return fmt.Errorf("page: %w", err)
	}
	defer f.Close()
	if _, err := f.WriteAt(p.b[:unsafe.Sizeof(Header{})+MaxVGPUs*unsafe.Sizeof(VGPU{})], 0); err != nil {
		return fmt.Errorf("page: write %s: %w", path, err)
	}
	return nil
}

func (p *Page) check(path string) error {
	h := p.Header()
	if h.Magic != Magic || h.Version != Version || h.VGPUs > MaxVGPUs || h.Processes > p.slots() {
		return fmt.Errorf("page: %s: is no vGPU page of version %d", path, Version)
	}
	return nil
}

// Close unmaps a page of Open.
func (p *Page) Close() {
	if p.b != nil {
		_ = unix.Munmap(p.b)
		p.b = nil
	}
}

// Header is the page's beginning, in the page.
func (p *Page) Header() *Header { return (*Header)(unsafe.Pointer(&p.b[0])) }

// VGPU is the i-th vGPU, in the page.
func (p *Page) VGPU(i int) *VGPU {
	return (*VGPU)(unsafe.Pointer(&p.b[unsafe.Sizeof(Header{})+uintptr(i)*unsafe.Sizeof(VGPU{})]))
}

func (p *Page) slots() uint32 {
	if len(p.b) < sizePreload {
		return 0
	}
	return MaxProcesses
}

// Slot is the i-th process slot, in the page.
func (p *Page) Slot(i int) *Slot {
	return (*Slot)(unsafe.Pointer(&p.b[unsafe.Sizeof(Header{})+MaxVGPUs*unsafe.Sizeof(VGPU{})+uintptr(i)*unsafe.Sizeof(Slot{})]))
}

// Changed tells limiters that something that the host sets is different now.
func (p *Page) Changed() { atomic.AddUint32(&p.Header().Change, 1) }

// SlotUse sums what the container's processes have taken of a vGPU, in preload mode.
func (p *Page) SlotUse(vgpu int) (used, managed uint64, processes int) {
	for i := range int(p.slots()) {
		s := p.Slot(i)
		if atomic.LoadUint64(&s.Owner) == 0 {
			continue
		}
		processes++
		used += atomic.LoadUint64(&s.Used[vgpu])
		managed += atomic.LoadUint64(&s.Managed)
	}
	return used, managed, processes
}

// Remove deletes the page of a reservation and what lies beside it; none is no error. It takes root for a page of Confine.
func Remove(runDir, nonce string) error {
	dir := folder(runDir, nonce)
	// EINVAL: nothing is mounted there, or in another mount namespace: then it goes with the folder (rmdir(2) detaches it since Linux 3.18).
	err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err == unix.EPERM && mounted(dir) { // to a guard: it could empty it, and then it would be as new to Sweep
		return fmt.Errorf("page: unmount %s: %w", dir, unix.EBUSY)
	}
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("page: unmount %s: %w", dir, err)
	}
	file := File(runDir, nonce)
	// ENOTDIR: a page of an older version, which had no folder, but a file beside it.
	for _, path := range []string{file, file + atomicfile.TempSuffix, PreloadFile(file), LimiterFile(file), dir + ".preload", dir} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
			return fmt.Errorf("page: %w", err)
		}
	}
	return nil
}

// mounted says whether a folder is a file system's own.
func mounted(dir string) bool {
	var here, above unix.Stat_t
	return unix.Lstat(dir, &here) == nil && unix.Lstat(filepath.Dir(dir), &above) == nil && here.Dev != above.Dev
}

// Pipes is the folder of the MPS server of a trust domain on a GPU; its members have Members below it, with the server's socket.
func Pipes(runDir, uuid, domain string) string { return filepath.Join(runDir, "mps", uuid, domain) }

// Members and Daemon are in the folder of Pipes: what the domain's members get, and what the daemon has to itself. A member sees its Seat
// of the first at PipesPath; the server has all of the folder there.
const (
	Members   = "seats"
	Daemon    = "daemon"
	Ended     = "ended" // a file of the daemon's: why the server ended, in its own words
	Parts     = "parts" // a file of root's: each seat's part of the multiprocessors in percent, a byte each; 0: nobody sits there
	PipesPath = "/run/cgpu/mps"
)

// Seat is the folder of one member, 1 to Seats, whose mount nobody else has: by which folder it comes says who comes. 0 is for root, who
// looks whether the server answers, and gives it the sockets of the others.
func Seat(members string, number int) string { return filepath.Join(members, strconv.Itoa(number)) }

// Seats is how many members a domain has on a GPU at most: as many as containers can share one.
const Seats = 64

// AllParts is all of the multiprocessors, in percent.
const AllParts = 100
