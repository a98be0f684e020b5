// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Memory is what a guard and the next one have in common: a file in memory that both map. Nothing in it is believed beyond its bounds.
type Memory struct {
	file *os.File
	mem  []byte
}

// The first page. Words are little-endian, as the machines are that this runs on.
const (
	magic      = 0x6b656570 // "keep"
	atMagic    = 0
	atActive   = 4  // which file of the journal is valid
	atEnded    = 8  // not 0: nobody is to go on
	atFiles    = 12 // descriptors of the journal
	atDied     = 48 // when the guard has ended (CLOCK_MONOTONIC)
	atRights   = 64 // entries of rights that are open for a moment
	atHandle   = 24 // the last handle of its own that the guard has made up
	atRestarts = 32 // when guards were started anew (CLOCK_MONOTONIC, s), the last ones
	headSize   = 64 << 10
	rightSize  = 16
	// MaxRights is how many rights on objects can be open at once.
	MaxRights = 1024
)

// MaxFlights is how many calls can be under way at once. FlightSize is what one has: a page for what it is, and the worker's own memory.
const (
	MaxFlights = 256
	FlightHead = 4 << 10
	FlightBody = 1 << 20
	FlightSize = FlightHead + FlightBody
	memorySize = headSize + MaxFlights*FlightSize
)

// A guard is started anew so often in a time; then it stays away: what ends it may be something that its container can bring about.
const (
	maxRestarts = 3
	restartTime = time.Hour
)

// NewMemory makes one.
func NewMemory() (*Memory, error) {
	fd, err := unix.MemfdCreate(Name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	m := &Memory{file: os.NewFile(uintptr(fd), Name)}
	if err := m.file.Truncate(memorySize); err != nil {
		return nil, err
	}
	if err := m.mmap(); err != nil {
		return nil, err
	}
	m.word(atMagic).Store(magic)
	return m, nil
}

// OpenMemory takes up that of a guard that was killed.
func OpenMemory(fd int) (*Memory, error) {
	m := &Memory{file: os.NewFile(uintptr(fd), Name)}
	info, err := m.file.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() != memorySize {
		return nil, fmt.Errorf("it has %d bytes: want %d", info.Size(), memorySize)
	}
	if err := m.mmap(); err != nil {
		return nil, err
	}
	if m.word(atMagic).Load() != magic {
		return nil, errors.New("it is not a guard's")
	}
	return m, nil
}

func (m *Memory) mmap() (err error) {
	m.mem, err = unix.Mmap(int(m.file.Fd()), 0, memorySize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return os.NewSyscallError("mmap", err)
}

// Close lets go of it.
func (m *Memory) Close() {
	_ = unix.Munmap(m.mem)
	m.file.Close()
}

// FD is its file's.
func (m *Memory) FD() int { return int(m.file.Fd()) }

// died is where the keeper says when the guard has ended, which Died tells.
func (m *Memory) died() *unix.Timespec { return (*unix.Timespec)(unsafe.Pointer(&m.mem[atDied])) }

// Died is when that was, by CLOCK_MONOTONIC.
func (m *Memory) Died() time.Duration { return time.Duration(m.died().Nano()) }

func (m *Memory) word(off int) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&m.mem[off])) }

// Active says which file of the journal is valid.
func (m *Memory) Active() *atomic.Uint32 { return m.word(atActive) }

// Ended is set when nobody is to go on.
func (m *Memory) Ended() *atomic.Uint32 { return m.word(atEnded) }

// Handle is the last handle of its own that the guard has made up.
func (m *Memory) Handle() *atomic.Uint32 { return m.word(atHandle) }

// SetFiles notes the descriptors of the journal.
func (m *Memory) SetFiles(fds [2]int) {
	for i, fd := range fds {
		m.word(atFiles + 4*i).Store(uint32(fd))
	}
}

// Files are those of SetFiles.
func (m *Memory) Files() (fds [2]int) {
	for i := range fds {
		fds[i] = int(m.word(atFiles + 4*i).Load())
	}
	return fds
}

// Restarted notes that a guard is started anew. False: it was too often of late.
func (m *Memory) Restarted(now time.Duration) bool {
	var last []uint32
	for i := range maxRestarts {
		last = append(last, m.word(atRestarts+4*i).Load())
	}
	seconds := uint32(now/time.Second) + 1
	oldest := slices.Min(last)
	if oldest > 0 && seconds-oldest < uint32(restartTime/time.Second) {
		return false
	}
	m.word(atRestarts + 4*slices.Index(last, oldest)).Store(seconds)
	return true
}

// CopyRestarts has those of another one count.
func (m *Memory) CopyRestarts(from *Memory) {
	for i := range maxRestarts {
		m.word(atRestarts + 4*i).Store(from.word(atRestarts + 4*i).Load())
	}
}

// Flight is the memory of a call.
func (m *Memory) Flight(i int) []byte {
	at := headSize + i*FlightSize
	return m.mem[at : at+FlightSize : at+FlightSize]
}

// Right is an object that is open for everybody, for the moment of a call.
type Right struct{ Client, Object, Access uint32 }

// SetRight notes a right before it is given, at a place that is free; -1: there is none. With ClearRight it is over.
func (m *Memory) SetRight(r Right) int {
	for i := range MaxRights {
		at := atRights + rightSize*i
		if m.word(at).CompareAndSwap(0, 1) {
			m.word(at + 4).Store(r.Client)
			m.word(at + 8).Store(r.Object)
			m.word(at + 12).Store(r.Access)
			m.word(at).Store(2)
			return i
		}
	}
	return -1
}

// ClearRight frees a place.
func (m *Memory) ClearRight(i int) { m.word(atRights + rightSize*i).Store(0) }

// Rights are those that were open.
func (m *Memory) Rights() (list []Right) {
	for i := range MaxRights {
		at := atRights + rightSize*i
		if m.word(at).Load() == 2 {
			list = append(list, Right{m.word(at + 4).Load(), m.word(at + 8).Load(), m.word(at + 12).Load()})
		}
	}
	return list
}
