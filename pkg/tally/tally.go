// SPDX-License-Identifier: Apache-2.0

// Package tally keeps what a container has had and was refused in memory that it shares with a file, so that it is known when the
// container's guard is gone, however it ended, and that of the node when all are (Read).
//
// A guard has its counters in that memory, so counting costs no more than it does anywhere. Its lock on the file says that it lives, and
// the kernel drops that with the process. Fold adds the files of guards that are gone to one file for the node.
package tally

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// MaxGPUs is for how many GPUs of a container there is room.
const MaxGPUs = 32

const (
	folder = "counters"
	magic  = 0x63677563
	// version changes with the layout: a file of another one is not counted.
	version = 1
	size    = 4096
)

// Page is what a guard counts, from its start on.
type Page struct {
	magic, version, gpus uint32
	_                    uint32
	// Calls are trapped calls, FreedClients RM clients that were freed for memory that was not charged, KilledProcesses those that were
	// killed for what they had. CPU is what the guard has used itself, in nanoseconds.
	Calls, FreedClients, KilledProcesses, CPU atomic.Uint64
	_                                         [2]uint64
	GPUs                                      [MaxGPUs]GPU   // On
	waits                                     [MaxGPUs]Waits // Waits; a guard of before has zeros there
}

// GPU is what is counted of one GPU.
type GPU struct {
	uuid [40]byte
	// Time is on the engine, in nanoseconds; it counts only where Exact is not 0, which the driver's switch records make it.
	Exact, Time, Denied atomic.Uint64
	_                   [2]uint64
}

// Waits are further times of one GPU, in nanoseconds, that count where GPU.Exact is not 0.
type Waits struct {
	// Waiting is from the end of a turn in the middle of work to the next one, Throttled with work while the container was off, Entitled what
	// its share was.
	Waiting, Throttled, Entitled atomic.Uint64
	_                            uint64
}

var _ [size - unsafe.Sizeof(Page{})]byte // it fits

// On are the counters of the container's i-th GPU. A page with a file has no more than MaxGPUs, and what one without counts nobody reads.
func (p *Page) On(i int) *GPU { return &p.GPUs[i%MaxGPUs] }

// Waits are more of the container's i-th GPU, as On.
func (p *Page) Waits(i int) *Waits { return &p.waits[i%MaxGPUs] }

// Raise sets a counter that is measured elsewhere, and never back.
func Raise(c *atomic.Uint64, to uint64) {
	for {
		was := c.Load()
		if to <= was || c.CompareAndSwap(was, to) {
			return
		}
	}
}

func file(runDir, nonce string) string { return filepath.Join(runDir, folder, nonce) }

// File is a page that a file is.
type File struct {
	*Page
	f *os.File // with the lock
}

// Create makes the counters of a container, for its guard. Release ends them; so does the end of the process.
func Create(runDir, nonce string, uuids []string) (*File, error) {
	if len(uuids) > MaxGPUs {
		return nil, fmt.Errorf("tally: %d GPUs: want at most %d", len(uuids), MaxGPUs)
	}
	if err := os.MkdirAll(filepath.Join(runDir, folder), 0o700); err != nil {
		return nil, fmt.Errorf("tally: %w", err)
	}
	f, err := claim(file(runDir, nonce))
	if err != nil {
		return nil, fmt.Errorf("tally: %w", err)
	}
	// Not a hole: to write there where the file system is full would kill the guard.
	if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil {
		f.Close()
		return nil, fmt.Errorf("tally: %w", err)
	}
	mem, err := syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("tally: map %s: %w", f.Name(), err)
	}
	p := (*Page)(unsafe.Pointer(&mem[0]))
	p.version, p.gpus = version, uint32(len(uuids))
	for i, uuid := range uuids {
		copy(p.GPUs[i].uuid[:], uuid)
	}
	p.magic = magic
	return &File{p, f}, nil
}

// FD is the file's descriptor, on which the lock is, for who goes on in this process' place (Resume).
func (c *File) FD() int { return int(c.f.Fd()) }

// Resume goes on with a file that another program of this process had, and its lock.
func Resume(f *os.File) (*File, error) {
	if info, err := f.Stat(); err != nil || info.Size() != size {
		return nil, errors.Join(errForeign, err)
	}
	mem, err := syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("tally: map %s: %w", f.Name(), err)
	}
	p := (*Page)(unsafe.Pointer(&mem[0]))
	if p.magic != magic || p.version != version {
		return nil, errors.Join(errForeign, syscall.Munmap(mem))
	}
	return &File{p, f}, nil
}

// claim makes a file and locks it. Fold may have taken an empty file for that of a guard that is gone, and removed it: then once more.
func claim(path string) (*os.File, error) {
	const tries = 100
	for range tries {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, err
		}
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		held, err := f.Stat()
		if err != nil {
			f.Close()
			return nil, err
		}
		if named, err := os.Stat(path); err == nil && os.SameFile(held, named) {
			return f, nil
		}
		f.Close()
	}
	return nil, fmt.Errorf("%s is removed again and again", path)
}

// Release gives up the lock, after which Fold takes the file. The page stays mapped: what is still counted there is lost, and no fault.
func (c *File) Release() {
	_ = syscall.Flock(int(c.f.Fd()), syscall.LOCK_UN) // the mapping would keep it
	c.f.Close()
}

// errForeign is of a file that is none of ours, or of another version's.
var errForeign = errors.New("tally: not of this version")

// values copies a file's counters.
func values(f *os.File) (v Values, err error) {
	info, err := f.Stat()
	if err != nil {
		return v, err
	}
	if info.Size() != size {
		return v, errForeign
	}
	mem, err := syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		return v, err
	}
	defer func() { _ = syscall.Munmap(mem) }()
	p := (*Page)(unsafe.Pointer(&mem[0]))
	if p.magic != magic || p.version != version || p.gpus > MaxGPUs {
		return v, errForeign
	}
	v = Values{Calls: p.Calls.Load(), FreedClients: p.FreedClients.Load(), KilledProcesses: p.KilledProcesses.Load(), CPU: p.CPU.Load(),
		GPUs: map[string]GPUValues{}}
	for i := range p.GPUs[:p.gpus] {
		g, w := &p.GPUs[i], &p.waits[i]
		uuid, _, _ := bytes.Cut(g.uuid[:], []byte{0})
		v.GPUs[string(uuid)] = GPUValues{Exact: g.Exact.Load() != 0, Time: g.Time.Load(), Denied: g.Denied.Load(),
			Waiting: w.Waiting.Load(), Throttled: w.Throttled.Load(), Entitled: w.Entitled.Load()}
	}
	return v, nil
}
