package gpusched

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
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// peerPage is a page of memory that the guards of one GPU share: each writes in its own entry how much work its container has,
// and all read it. Timeslices of one container depend on who else has work, and there is no daemon to ask. A change wakes the
// others, who wait in futex(2); nobody looks while nothing happens.
//
// Guards trust each other, containers cannot reach the file (/run/cgpu/board/UUID). A guard that was killed leaves its entry
// behind: readers skip it when its owner is gone, and writers reuse it.
type peerPage struct {
	mem    []byte
	own    int // entry
	owners [pageEntries + 1]owner
}

// owner is who was found to be an entry's, for a while.
type owner struct {
	pid   int
	start uint64
	until time.Duration
	alive bool
}

// ownerTime is how long an answer about an owner is good for. Its process is asked for every time, its start not: the number may be
// another process' by now.
const ownerTime = 10 * time.Second

// owned reports that the guard that wrote an entry lives.
func (p *peerPage) owned(i int) bool {
	e := i * pageEntry
	pid, start := int(p.u32(e+pageOwner).Load()), p.u64(e+pageStart).Load()
	if pid == 0 || unix.Kill(pid, 0) == unix.ESRCH {
		return false
	}
	o, now := &p.owners[i], Monotonic()
	if o.pid != pid || o.start != start || now >= o.until {
		s, err := ledger.ProcStart(pid)
		*o = owner{pid, start, now + ownerTime, err == nil && s == start}
	}
	return o.alive
}

// Layout: a header of one entry's size, then the entries. All words are little-endian and aligned.
const (
	pageEntries = 255
	pageEntry   = 64
	pageSize    = (pageEntries + 1) * pageEntry
	pageFormat  = 0x63677531 // changes with the layout

	// Header.
	pageMagic      = 0
	pageGeneration = 4 // futex word

	// Entry.
	pageOwner    = 0  // pid of the guard; 0: free
	pageBusy     = 4  // channel groups with work
	pageWeight   = 8  // ≥ 1
	pagePercent  = 12 // as asked; 0: none
	pagePriority = 16
	pagePressing = 20 // pressing… bits
	pageStart    = 24 // u64: start time of the guard (/proc/PID/stat)
	pageChannels = 32 // channels on the engine where the container has most
)

const (
	pressingNow  = 1 << 0
	pressingMuch = 1 << 1
	lingering    = 1 << 2
)

// place is the number of the guard's own entry.
func (p *peerPage) place() int { return p.own / pageEntry }

// openPeerPage maps the peer page of a GPU and takes an entry.
func openPeerPage(runDir, uuid string) (*peerPage, error) {
	dir := filepath.Join(runDir, "board")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("peer page of GPU %s: %w", uuid, err)
	}
	f, err := os.OpenFile(filepath.Join(dir, filepath.Base(uuid)), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("peer page of GPU %s: %w", uuid, err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return nil, fmt.Errorf("lock the peer page of GPU %s: %w", uuid, err)
	}
	// The mapping keeps the file open, and with it the lock.
	defer func() { _ = unix.Flock(int(f.Fd()), unix.LOCK_UN) }()
	if err := f.Truncate(pageSize); err != nil {
		return nil, fmt.Errorf("peer page of GPU %s: %w", uuid, err)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the peer page of GPU %s: %w", uuid, err)
	}
	p := &peerPage{mem: mem}
	if magic := p.u32(pageMagic); magic.Load() != pageFormat {
		clear(mem) // new, or of another version, whose guards then lose sight of each other
		magic.Store(pageFormat)
	}
	if err := p.claim(); err != nil {
		_ = unix.Munmap(mem)
		return nil, fmt.Errorf("peer page of GPU %s: %w", uuid, err)
	}
	return p, nil
}

func (p *peerPage) u32(off int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&p.mem[off])) }
func (p *peerPage) u64(off int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&p.mem[off])) }

// claim takes an entry that nobody has. The file is locked.
func (p *peerPage) claim() error {
	self := os.Getpid()
	start, err := ledger.ProcStart(self)
	if err != nil {
		return err
	}
	for i := 1; i <= pageEntries; i++ {
		e := i * pageEntry
		if pid := int(p.u32(e + pageOwner).Load()); pid != 0 {
			if s, err := ledger.ProcStart(pid); err == nil && s == p.u64(e+pageStart).Load() {
				continue
			}
		}
		clear(p.mem[e : e+pageEntry])
		p.u64(e + pageStart).Store(start)
		p.u32(e + pageOwner).Store(uint32(self))
		p.own = e
		return nil
	}
	return errors.New("all places are taken")
}

// publish writes the guard's own entry, and wakes the others if that changes anything for them.
func (p *peerPage) publish(t sched.Tenant) {
	changed := false
	put := func(off, n int) {
		changed = p.u32(p.own+off).Swap(uint32(n)) != uint32(n) || changed
	}
	put(pageBusy, t.Busy)
	put(pageWeight, t.Weight)
	put(pagePercent, t.Percent)
	put(pagePriority, int(t.Priority))
	pressing := 0
	if t.Pressing {
		pressing |= pressingNow
	}
	if t.Saturating {
		pressing |= pressingMuch
	}
	if t.Lingers {
		pressing |= lingering
	}
	put(pagePressing, pressing)
	if changed {
		p.u32(pageGeneration).Add(1)
		p.futex(futexWake, math.MaxInt32, nil)
	}
}

// others reads what the other containers' guards say.
func (p *peerPage) others() []sched.Tenant {
	var list []sched.Tenant
	for i := 1; i <= pageEntries; i++ {
		e := i * pageEntry
		if e == p.own || !p.owned(i) {
			continue
		}
		pressing := p.u32(e + pagePressing).Load()
		t := sched.Tenant{Place: i, Share: sched.Share{Weight: int(p.u32(e + pageWeight).Load()), Percent: int(p.u32(e + pagePercent).Load()),
			Priority: quota.Priority(p.u32(e + pagePriority).Load())}, Busy: int(p.u32(e + pageBusy).Load()), Pressing: pressing&pressingNow != 0, Saturating: pressing&pressingMuch != 0, Lingers: pressing&lingering != 0}
		if t.Weight > 0 {
			list = append(list, t)
		}
	}
	return list
}

const (
	futexWait = 0 // FUTEX_WAIT, not private: the word is shared among processes
	futexWake = 1 // FUTEX_WAKE
)

func (p *peerPage) futex(op, n int, timeout *unix.Timespec) {
	// #nosec: the word lives in the shared mapping, which is never unmapped while the guard runs
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&p.mem[pageGeneration])), uintptr(op), uintptr(n),
		uintptr(unsafe.Pointer(timeout)), 0, 0)
}

// generation changes with every change of an entry.
func (p *peerPage) generation() uint32 { return p.u32(pageGeneration).Load() }

// await waits until the generation is not seen any more.
func (p *peerPage) await(seen uint32) {
	for p.generation() == seen {
		p.futex(futexWait, int(seen), nil)
	}
}

// leave frees the entry and wakes everybody.
func (p *peerPage) leave() {
	p.publish(sched.Tenant{})
	p.u32(p.own + pageOwner).Store(0)
	p.u32(pageGeneration).Add(1)
	p.futex(futexWake, math.MaxInt32, nil)
}

// otherChannels is how many channels the other containers have, at most. A guard's number may be another process' by now: then its
// channels count until its entry is used again.
func (p *peerPage) otherChannels() int {
	sum := 0
	for i := 1; i <= pageEntries; i++ {
		e := i * pageEntry
		if n := p.u32(e + pageChannels).Load(); n > 0 && e != p.own {
			if pid := int(p.u32(e + pageOwner).Load()); pid != 0 && unix.Kill(pid, 0) != unix.ESRCH {
				sum += int(n)
			}
		}
	}
	return sum
}
