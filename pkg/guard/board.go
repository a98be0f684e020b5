package guard

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

// board is a page of memory that the guards of one GPU share: each writes in its own entry how much work its container has,
// and all read it. Timeslices of one container depend on who else has work, and there is no daemon to ask. A change wakes the
// others, who wait in futex(2); nobody looks while nothing happens.
//
// Guards trust each other, containers cannot reach the file (/run/cgpu/board/UUID). A guard that was killed leaves its entry
// behind: readers skip it when its owner is gone, and writers reuse it.
type board struct {
	mem    []byte
	own    int // entry
	owners [boardEntries + 1]owner
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
func (b *board) owned(i int) bool {
	e := i * boardEntry
	pid, start := int(b.u32(e+boardOwner).Load()), b.u64(e+boardStart).Load()
	if pid == 0 || unix.Kill(pid, 0) == unix.ESRCH {
		return false
	}
	o, now := &b.owners[i], monotonic()
	if o.pid != pid || o.start != start || now >= o.until {
		s, err := ledger.ProcStart(pid)
		*o = owner{pid, start, now + ownerTime, err == nil && s == start}
	}
	return o.alive
}

// Layout: a header of one entry's size, then the entries. All words are little-endian and aligned.
const (
	boardEntries = 255
	boardEntry   = 64
	boardSize    = (boardEntries + 1) * boardEntry
	boardFormat  = 0x63677531 // changes with the layout

	// Header.
	boardMagic      = 0
	boardGeneration = 4 // futex word

	// Entry.
	boardOwner    = 0  // pid of the guard; 0: free
	boardBusy     = 4  // channel groups with work
	boardWeight   = 8  // ≥ 1
	boardPercent  = 12 // as asked; 0: none
	boardPriority = 16
	boardPressing = 20 // pressing… bits
	boardStart    = 24 // u64: start time of the guard (/proc/PID/stat)
	boardChannels = 32 // channels on the engine where the container has most
)

const (
	pressingNow  = 1 << 0
	pressingMuch = 1 << 1
	lingering    = 1 << 2
)

// place is the number of the guard's own entry.
func (b *board) place() int { return b.own / boardEntry }

// openBoard maps the board of a GPU and takes an entry.
func openBoard(runDir, uuid string) (*board, error) {
	dir := filepath.Join(runDir, "board")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("board of GPU %s: %w", uuid, err)
	}
	f, err := os.OpenFile(filepath.Join(dir, filepath.Base(uuid)), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("board of GPU %s: %w", uuid, err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return nil, fmt.Errorf("lock the board of GPU %s: %w", uuid, err)
	}
	// The mapping keeps the file open, and with it the lock.
	defer func() { _ = unix.Flock(int(f.Fd()), unix.LOCK_UN) }()
	if err := f.Truncate(boardSize); err != nil {
		return nil, fmt.Errorf("board of GPU %s: %w", uuid, err)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, boardSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the board of GPU %s: %w", uuid, err)
	}
	b := &board{mem: mem}
	if magic := b.u32(boardMagic); magic.Load() != boardFormat {
		clear(mem) // new, or of another version, whose guards then lose sight of each other
		magic.Store(boardFormat)
	}
	if err := b.claim(); err != nil {
		_ = unix.Munmap(mem)
		return nil, fmt.Errorf("board of GPU %s: %w", uuid, err)
	}
	return b, nil
}

func (b *board) u32(off int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&b.mem[off])) }
func (b *board) u64(off int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&b.mem[off])) }

// claim takes an entry that nobody has. The file is locked.
func (b *board) claim() error {
	self := os.Getpid()
	start, err := ledger.ProcStart(self)
	if err != nil {
		return err
	}
	for i := 1; i <= boardEntries; i++ {
		e := i * boardEntry
		if pid := int(b.u32(e + boardOwner).Load()); pid != 0 {
			if s, err := ledger.ProcStart(pid); err == nil && s == b.u64(e+boardStart).Load() {
				continue
			}
		}
		clear(b.mem[e : e+boardEntry])
		b.u64(e + boardStart).Store(start)
		b.u32(e + boardOwner).Store(uint32(self))
		b.own = e
		return nil
	}
	return errors.New("all places are taken")
}

// publish writes the guard's own entry, and wakes the others if that changes anything for them.
func (b *board) publish(t sched.Tenant) {
	changed := false
	put := func(off, n int) {
		changed = b.u32(b.own+off).Swap(uint32(n)) != uint32(n) || changed
	}
	put(boardBusy, t.Busy)
	put(boardWeight, t.Weight)
	put(boardPercent, t.Percent)
	put(boardPriority, int(t.Priority))
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
	put(boardPressing, pressing)
	if changed {
		b.u32(boardGeneration).Add(1)
		b.futex(futexWake, math.MaxInt32, nil)
	}
}

// others reads what the other containers' guards say.
func (b *board) others() []sched.Tenant {
	var list []sched.Tenant
	for i := 1; i <= boardEntries; i++ {
		e := i * boardEntry
		if e == b.own || !b.owned(i) {
			continue
		}
		pressing := b.u32(e + boardPressing).Load()
		t := sched.Tenant{Place: i, Share: sched.Share{Weight: int(b.u32(e + boardWeight).Load()), Percent: int(b.u32(e + boardPercent).Load()),
			Priority: quota.Priority(b.u32(e + boardPriority).Load())}, Busy: int(b.u32(e + boardBusy).Load()), Pressing: pressing&pressingNow != 0, Saturating: pressing&pressingMuch != 0, Lingers: pressing&lingering != 0}
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

func (b *board) futex(op, n int, timeout *unix.Timespec) {
	// #nosec: the word lives in the shared mapping, which is never unmapped while the guard runs
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&b.mem[boardGeneration])), uintptr(op), uintptr(n),
		uintptr(unsafe.Pointer(timeout)), 0, 0)
}

// generation changes with every change of an entry.
func (b *board) generation() uint32 { return b.u32(boardGeneration).Load() }

// await waits until the generation is not seen any more.
func (b *board) await(seen uint32) {
	for b.generation() == seen {
		b.futex(futexWait, int(seen), nil)
	}
}

// leave frees the entry and wakes everybody.
func (b *board) leave() {
	b.publish(sched.Tenant{})
	b.u32(b.own + boardOwner).Store(0)
	b.u32(boardGeneration).Add(1)
	b.futex(futexWake, math.MaxInt32, nil)
}

// monotonic is the machine's clock that all guards agree on.
func monotonic() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return time.Duration(ts.Nano())
}
