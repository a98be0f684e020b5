// SPDX-License-Identifier: Apache-2.0

// Package journal keeps what a guard knows where the guard's death does not reach: in memory files that another process has open, too
// (docs/adr/0015-keeper.md). It is a set of entries, each with a key and a text. A Commit changes some of them, all or none, whatever
// moment the process is killed at. What the entries mean is package guard's.
//
// There are two files. Commits are added to the end of one; when that has grown to several times of what is valid in it, the valid entries
// are copied into the other, which takes its place by one store into a page that both processes map (Page).
package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Key names an entry.
type Key struct {
	Kind uint8
	ID   uint64
}

// Op sets an entry, or with no value takes it away.
type Op struct {
	Key
	Value []byte
}

// MaxSize bounds a file, and with it what is read.
const MaxSize = 256 << 20

// leastRoom is how long a file may become in any case before the valid entries are copied, growth how many times what is valid.
const (
	leastRoom = 1 << 20
	growth    = 4
)

// ErrDamaged is of a file that does not hold what Commit writes.
var ErrDamaged = errors.New("the journal is damaged")

// A commit in the file: its length without this header, the sum over all that follows the sum, its number, its entries. An entry: kind, ID,
// length of the value (gone: there is none), the value.
const (
	headerSize = 16 // length, sum, number
	entrySize  = 13 // kind, ID, length
	gone       = ^uint32(0)
)

var sums = crc32.MakeTable(crc32.Castagnoli)

// Journal is written by one process at a time.
type Journal struct {
	active *atomic.Uint32 // which of the files is valid
	files  [2]*os.File

	mu    sync.Mutex
	at    int64 // the end of the valid one
	room  int64 // where its valid entries are copied
	last  uint64
	buf   []byte
	wrong error // a commit has failed: what is in the files is not what is so
}

// New makes an empty one. active is four bytes that outlive the process.
func New(active *atomic.Uint32) (*Journal, error) {
	j := &Journal{active: active, room: leastRoom}
	for i := range j.files {
		fd, err := unix.MemfdCreate("cgpu-journal", unix.MFD_CLOEXEC)
		if err != nil {
			j.Close()
			return nil, fmt.Errorf("make a journal: %w", os.NewSyscallError("memfd_create", err))
		}
		j.files[i] = os.NewFile(uintptr(fd), "journal")
	}
	active.Store(0)
	return j, nil
}

// Descriptors are those of the files.
func (j *Journal) Descriptors() [2]int { return [2]int{int(j.files[0].Fd()), int(j.files[1].Fd())} }

// Close closes the files.
func (j *Journal) Close() {
	for _, f := range j.files {
		if f != nil {
			f.Close()
		}
	}
}

// Commit makes changes. before, if not nil, is told the number that they have, when nothing is written yet. After an error nothing more is
// taken: what the files hold is no longer what the caller knows.
func (j *Journal) Commit(ops []Op, before func(number uint64)) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.wrong != nil {
		return j.wrong
	}
	if before != nil {
		before(j.last + 1)
	}
	j.buf = appendCommit(j.buf[:0], j.last+1, ops)
	if err := j.write(j.files[j.active.Load()&1], j.buf); err != nil {
		j.wrong = fmt.Errorf("write the journal: %w", err)
		return j.wrong
	}
	j.last++
	if cap(j.buf) > leastRoom {
		j.buf = nil
	}
	if j.at > j.room {
		if err := j.compact(); err != nil {
			j.wrong = err
		}
	}
	return j.wrong
}

func (j *Journal) write(f *os.File, b []byte) error {
	if j.at+int64(len(b)) > MaxSize {
		return fmt.Errorf("it would have %d bytes, %d are the most", j.at+int64(len(b)), MaxSize)
	}
	if _, err := f.WriteAt(b, j.at); err != nil {
		return err
	}
	j.at += int64(len(b))
	return nil
}

// compact copies the valid entries into the other file. Should this process be killed meanwhile, this one is valid.
func (j *Journal) compact() error {
	from := j.active.Load() & 1
	entries, last, err := Read(j.files[from])
	if err != nil {
		return err
	}
	ops := make([]Op, 0, len(entries))
	for k, v := range entries {
		ops = append(ops, Op{k, v})
	}
	to := j.files[1-from]
	if err := to.Truncate(0); err != nil {
		return fmt.Errorf("empty the journal: %w", err)
	}
	j.at = 0
	if err := j.write(to, appendCommit(nil, last, ops)); err != nil {
		return fmt.Errorf("write the journal: %w", err)
	}
	j.active.Store(1 - from)
	j.room = max(leastRoom, growth*j.at)
	if err := j.files[from].Truncate(0); err != nil {
		return fmt.Errorf("empty the journal: %w", err)
	}
	return nil
}

func appendCommit(b []byte, number uint64, ops []Op) []byte {
	start := len(b)
	b = binary.LittleEndian.AppendUint64(b, 0) // length, sum
	b = binary.LittleEndian.AppendUint64(b, number)
	for _, op := range ops {
		b = append(b, op.Kind)
		b = binary.LittleEndian.AppendUint64(b, op.ID)
		n := uint32(len(op.Value))
		if op.Value == nil {
			n = gone
		}
		b = append(binary.LittleEndian.AppendUint32(b, n), op.Value...)
	}
	binary.LittleEndian.PutUint32(b[start:], uint32(len(b)-start-headerSize))
	binary.LittleEndian.PutUint32(b[start+4:], crc32.Checksum(b[start+8:], sums))
	return b
}

// Read reads a file up to where its last whole commit ends, and says that one's number.
func Read(f *os.File) (entries map[Key][]byte, last uint64, err error) {
	info, err := f.Stat()
	if err != nil {
		return nil, 0, fmt.Errorf("read the journal: %w", err)
	}
	if info.Size() > MaxSize {
		return nil, 0, fmt.Errorf("%w: it has %d bytes, %d are the most", ErrDamaged, info.Size(), MaxSize)
	}
	b := make([]byte, info.Size())
	if _, err := f.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		return nil, 0, fmt.Errorf("read the journal: %w", err)
	}
	entries, _, last, err = Parse(b)
	return entries, last, err
}

// Parse is Read of what a file has; end is how much of it counts. A piece of a commit at the end is none; a whole one that does not add up
// is an error.
func Parse(b []byte) (entries map[Key][]byte, end int64, last uint64, err error) {
	entries = map[Key][]byte{}
	for rest := b; len(rest) >= headerSize; {
		n := int64(binary.LittleEndian.Uint32(rest))
		if n > int64(len(rest)-headerSize) ||
			crc32.Checksum(rest[8:headerSize+n], sums) != binary.LittleEndian.Uint32(rest[4:]) {
			break // the process was killed in the middle of it
		}
		last = binary.LittleEndian.Uint64(rest[8:])
		if !apply(entries, rest[headerSize:headerSize+n]) {
			return nil, 0, 0, ErrDamaged
		}
		end += headerSize + n
		rest = rest[headerSize+n:]
	}
	return entries, end, last, nil
}

func apply(entries map[Key][]byte, b []byte) bool {
	for len(b) > 0 {
		if len(b) < entrySize {
			return false
		}
		k, n := Key{b[0], binary.LittleEndian.Uint64(b[1:])}, binary.LittleEndian.Uint32(b[9:])
		b = b[entrySize:]
		switch {
		case n == gone:
			delete(entries, k)
			continue
		case int64(n) > int64(len(b)):
			return false
		}
		entries[k] = b[:n:n]
		b = b[n:]
	}
	return true
}
