// SPDX-License-Identifier: Apache-2.0

// Package peerpage is the memory that the guards of one GPU share with its arbiter (pkg/arbiter): each guard says in its own entry what
// its container may have and wants, and the arbiter writes beside it what the container is to have, and the account of its GPU time.
// Who waits does so in futex(2); nobody looks while nothing happens.
//
// Guards and arbiters trust each other to write where they should, containers cannot reach the file (board/UUID.2 in the run dir). Anybody
// may be killed at any instruction: what is written becomes valid by its last store (record), an entry whose guard is gone is skipped,
// and taken by the next.
package peerpage

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// Layout: a header of an entry's size, then the entries. All words are little-endian and aligned.
const (
	Entries   = 255
	entrySize = 2048
	pageSize  = (Entries + 1) * entrySize
	// format changes with the layout, and with it the file's name: the guards of another version go on with theirs.
	format = 2
	magic  = 0x63677500 + format

	// Header.
	offMagic      = 0
	offGeneration = 4  // futex word: guards wake the arbiter
	offUsed       = 8  // entries above have never been taken
	offLeader     = 12 // pid of the arbiter
	offSince      = 16 // u64: its start time (/proc/PID/stat)
	offStepped    = 24 // u64: when it decided last, CLOCK_MONOTONIC
	offPace       = 32 // u64: for its successor, as Found
	offAhead      = 40 // u64
	offAmiss      = 48 // u64
	offUpTo       = 56 // u64

	// Entry.
	offOwner    = 0  // pid of the guard; 0: free
	offChannels = 4  // channels on the engine where the container has most
	offStart    = 8  // u64: start time of the guard
	offRing     = 16 // futex word: the arbiter wakes the guard
	offGang     = 24 // u64: Gang.GPUs, and gangKept
	offGuard    = 64
	offRow      = offGuard + 8 + 2*8*guardWords
	offSetting  = offRow + 8 + 2*8*rowWords
)

// Path is where the page of a GPU is.
func Path(runDir, uuid string) string {
	return filepath.Join(runDir, "board", fmt.Sprintf("%s.%d", filepath.Base(uuid), format))
}

// Page is the page of a GPU.
type Page struct {
	mem    []byte
	owners [Entries + 1]owner
	Stored func() // told of every store, for tests; nil: nobody
}

// Open maps the page of a GPU, which is made if there is none.
func Open(runDir, uuid string) (*Page, error) {
	p := &Page{}
	err := p.locked(runDir, uuid, func() error { return nil })
	return p, err
}

// locked maps the page and calls f while no other process does the same.
func (p *Page) locked(runDir, uuid string, f func() error) error {
	if err := p.mapFile(Path(runDir, uuid), pageSize, magic, f); err != nil {
		return fmt.Errorf("peer page of GPU %s: %w", uuid, err)
	}
	return nil
}

// mapFile maps a file of that size, which is emptied unless its first word is magic, and calls f while no other process does the same.
func (p *Page) mapFile(path string, size int64, magic uint32, f func() error) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	// The mapping keeps the file open, and with it the lock.
	defer func() { _ = unix.Flock(int(file.Fd()), unix.LOCK_UN) }()
	// Not a hole: to write there where the file system is full would kill who does.
	if err := unix.Fallocate(int(file.Fd()), 0, 0, size); err != nil {
		return fmt.Errorf("allocate: %w", err)
	}
	if p.mem, err = unix.Mmap(int(file.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return fmt.Errorf("map: %w", err)
	}
	if p.u32(offMagic).Load() != magic {
		clear(p.mem)
		p.u32(offMagic).Store(magic)
	}
	if err := f(); err != nil {
		p.Close()
		return err
	}
	return nil
}

// Close unmaps the page. Nobody may wait on it.
func (p *Page) Close() {
	_ = unix.Munmap(p.mem)
	p.mem = nil
}

func (p *Page) u32(off int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&p.mem[off])) }
func (p *Page) u64(off int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&p.mem[off])) }

func (p *Page) store32(off int, v uint32) {
	p.u32(off).Store(v)
	if p.Stored != nil {
		p.Stored()
	}
}

func (p *Page) store64(off int, v uint64) {
	p.u64(off).Store(v)
	if p.Stored != nil {
		p.Stored()
	}
}

// used is how many entries were ever taken.
func (p *Page) used() int { return min(int(p.u32(offUsed).Load()), Entries) }

// owner is who was found to be an entry's, for a while.
type owner struct {
	pid   int
	start uint64
	until time.Time
	alive bool
}

// ownerTime is how long an answer about an owner is good for. Its process is asked for every time, its start not: the number may be
// another process' by now.
const ownerTime = 10 * time.Second

// owned reports that the guard that has an entry lives.
func (p *Page) owned(i int) bool {
	e := i * entrySize
	pid, start := int(p.u32(e+offOwner).Load()), p.u64(e+offStart).Load()
	if !runs(pid) {
		return false
	}
	o, now := &p.owners[i], time.Now()
	if o.pid != pid || o.start != start || now.After(o.until) {
		*o = owner{pid, start, now.Add(ownerTime), started(pid, start)}
	}
	return o.alive
}

// runs reports that there is a process of that number.
func runs(pid int) bool { return pid > 0 && pid <= math.MaxInt32 && unix.Kill(pid, 0) != unix.ESRCH }

// started reports that a process is the one that was started then.
func started(pid int, start uint64) bool {
	s, err := ledger.ProcStart(pid)
	return err == nil && s == start
}

// Living counts the guards that live.
func (p *Page) Living() (n int) {
	for i := 1; i <= p.used(); i++ {
		if p.owned(i) {
			n++
		}
	}
	return n
}

// Leader is the arbiter that decided last, and when, on CLOCK_MONOTONIC. False: it is gone, or there never was one.
func (p *Page) Leader() (pid int, stepped time.Duration, ok bool) {
	pid = int(p.u32(offLeader).Load())
	return pid, time.Duration(p.u64(offStepped).Load()), runs(pid) && started(pid, p.u64(offSince).Load())
}

// LeaderFile is a pidfd of the arbiter that decided last, for AwaitEnd; nil: it is not to be had. False: the arbiter is gone, or there
// never was one.
func (p *Page) LeaderFile() (*os.File, bool) {
	fd, err := unix.PidfdOpen(int(p.u32(offLeader).Load()), unix.PIDFD_NONBLOCK)
	// The start time is compared after: the number may have been another process' before. One that nobody has waited for has both still.
	if _, _, ok := p.Leader(); !ok || err == nil && isOver(fd) {
		if err == nil {
			_ = unix.Close(fd)
		}
		return nil, false
	}
	if err != nil {
		return nil, true
	}
	return os.NewFile(uintptr(fd), "arbiter"), true
}

// isOver reports that the process of a pidfd has.
func isOver(fd int) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	return err == nil && n > 0
}

// AwaitEnd waits until the process of a pidfd has ended, or the file is closed. It costs no thread.
func AwaitEnd(pidfd *os.File) error {
	conn, err := pidfd.SyscallConn()
	if err != nil {
		return err
	}
	return conn.Read(func(fd uintptr) bool { return isOver(int(fd)) })
}

// Lead says that this process is the arbiter.
func (p *Page) Lead() error {
	start, err := ledger.ProcStart(os.Getpid())
	if err != nil {
		return err
	}
	p.store64(offSince, start)
	p.store32(offLeader, uint32(os.Getpid()))
	return nil
}

// Reach says up to which time of the GPU's clock the accounts go that are about to be written.
func (p *Page) Reach(upTo time.Duration) { p.store64(offUpTo, uint64(upTo)) }

// Found is what an arbiter knows that rows do not say.
type Found struct {
	Pace  time.Duration  // sched.State.Pace
	Ahead time.Duration  // by how much the GPU's clock is ahead of CLOCK_MONOTONIC; 0: not known
	Amiss sched.Permille // sched.State.Amiss
	UpTo  time.Duration  // no account on the page goes further: Reach
}

// Stepped says when the arbiter decided last, and what it found, with which a successor goes on.
func (p *Page) Stepped(now time.Duration, f Found) {
	p.store64(offPace, uint64(f.Pace))
	p.store64(offAhead, uint64(f.Ahead))
	p.store64(offAmiss, uint64(f.Amiss))
	p.store64(offStepped, uint64(now))
}

// Found is what the last arbiter found.
func (p *Page) Found() Found {
	return Found{time.Duration(p.u64(offPace).Load()), time.Duration(p.u64(offAhead).Load()), sched.Permille(p.u64(offAmiss).Load()),
		time.Duration(p.u64(offUpTo).Load())}
}

const (
	futexWait = 0 // FUTEX_WAIT, not private: the word is shared among processes
	futexWake = 1 // FUTEX_WAKE
)

func (p *Page) futex(off, op, n int) {
	// #nosec: the word lives in the shared mapping, which is not unmapped while somebody waits
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&p.mem[off])), uintptr(op), uintptr(n), 0, 0, 0)
}

// ring wakes those who wait on a word.
func (p *Page) ring(off int) {
	p.store32(off, p.u32(off).Load()+1)
	p.futex(off, futexWake, math.MaxInt32)
}

// await waits until a word is not what was seen.
func (p *Page) await(off int, seen uint32) {
	for p.u32(off).Load() == seen {
		p.futex(off, futexWait, int(int32(seen)))
	}
}

// Generation changes when a guard came, went, or says something new.
func (p *Page) Generation() uint32 { return p.u32(offGeneration).Load() }

// Await waits until the generation is not what was seen.
func (p *Page) Await(seen uint32) { p.await(offGeneration, seen) }

// Wake has Await return.
func (p *Page) Wake() {
	p.u32(offGeneration).Add(1)
	p.futex(offGeneration, futexWake, math.MaxInt32)
}

// Entry is a guard's own.
type Entry struct {
	*Page
	at   int
	last [guardWords]uint64
}

// Join maps the page of a GPU and takes an entry.
func Join(runDir, uuid string) (*Entry, error) {
	e := &Entry{Page: &Page{}}
	return e, e.locked(runDir, uuid, e.claim)
}

// claim takes an entry that nobody has. The file is locked.
func (e *Entry) claim() error {
	start, err := ledger.ProcStart(os.Getpid())
	if err != nil {
		return err
	}
	for i := 1; i <= Entries; i++ {
		at := i * entrySize
		if pid := int(e.u32(at + offOwner).Load()); pid != 0 && started(pid, e.u64(at+offStart).Load()) {
			continue
		}
		e.store32(at+offOwner, 0)
		ring := e.u32(at + offRing).Load()
		clear(e.mem[at : at+entrySize])
		e.store32(at+offRing, ring)
		e.store64(at+offStart, start)
		e.store32(offUsed, uint32(max(i, e.used())))
		e.store32(at+offOwner, uint32(os.Getpid()))
		e.at = at
		return nil
	}
	return errors.New("all places are taken")
}

// Rejoin maps the page of a GPU for the program that goes on in the place of another one of the same process. It keeps the entry, and the
// account in it, if that is the process' own.
func Rejoin(runDir, uuid string, place int) (*Entry, error) {
	e := &Entry{Page: &Page{}}
	return e, e.locked(runDir, uuid, func() error {
		start, err := ledger.ProcStart(os.Getpid())
		at := place * entrySize
		if err == nil && place >= 1 && place <= e.used() && int(e.u32(at+offOwner).Load()) == os.Getpid() && e.u64(at+offStart).Load() == start {
			e.at = at
			return nil
		}
		return e.claim()
	})
}

// Place is the number of the entry.
func (e *Entry) Place() int { return e.at / entrySize }

// Leave frees the entry, and wakes the arbiter and who waits for a row.
func (e *Entry) Leave() {
	e.store32(e.at+offOwner, 0)
	e.Wake()
	e.ring(e.at + offRing)
}

// Rung changes when the arbiter has written another row.
func (e *Entry) Rung() uint32 { return e.u32(e.at + offRing).Load() }

// AwaitRing waits until Rung is not what was seen.
func (e *Entry) AwaitRing(seen uint32) { e.await(e.at+offRing, seen) }

// TellChannels says how many channels the container has on the engine where it has most.
func (e *Entry) TellChannels(n int) { e.store32(e.at+offChannels, uint32(n)) }

// gangKept is Gang.Kept, in the word of Gang.GPUs.
const gangKept = 1 << 63

// TellGang says which GPUs the container shares, before the first Tell, and whether it keeps a gang's slots, whenever that changes. It
// wakes nobody.
func (e *Entry) TellGang(gpus uint64, kept bool) {
	e.store64(e.at+offGang, gpus&^gangKept|bit(kept)*gangKept)
}

// OtherChannels is how many channels the other containers have, at most. A guard's number may be another process' by now: then its
// channels count until its entry is used again.
func (e *Entry) OtherChannels() int {
	sum := 0
	for i := 1; i <= e.used(); i++ {
		at := i * entrySize
		if n := e.u32(at + offChannels).Load(); n > 0 && at != e.at && runs(int(e.u32(at+offOwner).Load())) {
			sum += int(n)
		}
	}
	return sum
}
