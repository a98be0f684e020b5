// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"math/rand/v2"
	"sync/atomic"
	"testing"
)

func newJournal(t testing.TB) *Journal {
	t.Helper()
	j, err := New(new(atomic.Uint32))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(j.Close)
	return j
}

func (j *Journal) bytes(t testing.TB) []byte {
	t.Helper()
	b := make([]byte, j.at)
	if _, err := j.files[j.active.Load()].ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	return b
}

// TestAnyByte: whatever byte a file ends at, what comes out is what some commit has left, whole.
func TestAnyByte(t *testing.T) {
	j := newJournal(t)
	r := rand.New(rand.NewPCG(1, 2))
	states := []map[Key][]byte{{}}
	var ends []int64
	for range 60 {
		ops := randomOps(r)
		if err := j.Commit(ops, nil); err != nil {
			t.Fatal(err)
		}
		states = append(states, after(states[len(states)-1], ops))
		ends = append(ends, j.at)
	}
	b := j.bytes(t)
	commits := 0
	for n := range len(b) + 1 {
		if commits < len(ends) && int64(n) == ends[commits] {
			commits++
		}
		got, end, last, err := Parse(b[:n])
		if err != nil || last != uint64(commits) || commits > 0 && end != ends[commits-1] || !maps.EqualFunc(got, states[commits], bytes.Equal) {
			t.Fatalf("%d bytes: %d commits, to %d, %v; want %d", n, last, end, err, commits)
		}
	}
}

func randomOps(r *rand.Rand) (ops []Op) {
	for range r.IntN(4) {
		op := Op{Key: Key{uint8(r.IntN(3)), uint64(r.IntN(9))}}
		if r.IntN(3) > 0 {
			op.Value = []byte(fmt.Sprint(r.Uint64()))[:r.IntN(3)]
		}
		ops = append(ops, op)
	}
	return ops
}

func after(before map[Key][]byte, ops []Op) map[Key][]byte {
	m := maps.Clone(before)
	for _, op := range ops {
		if op.Value == nil {
			delete(m, op.Key)
		} else {
			m[op.Key] = op.Value
		}
	}
	return m
}

// TestCompact: a file does not grow with what was once in it, and nothing that is valid is lost; also where the process ends while the
// valid entries are being copied.
func TestCompact(t *testing.T) {
	j := newJournal(t)
	want := map[Key][]byte{}
	value := bytes.Repeat([]byte("x"), 1000)
	for i := range 20_000 {
		ops := []Op{{Key{1, uint64(i % 50)}, fmt.Appendf(nil, "%d%s", i, value)}, {Key{2, uint64(i)}, value}, {Key{2, uint64(i) - 1}, nil}}
		number := uint64(0)
		if err := j.Commit(ops, func(n uint64) { number = n }); err != nil || number != uint64(i+1) {
			t.Fatal(number, err)
		}
		want = after(want, ops)
		if j.at > 2*leastRoom {
			t.Fatalf("after %d commits the file has %d bytes", i, j.at)
		}
	}
	got, last, err := Read(j.files[j.active.Load()])
	if err != nil || last != 20_000 || !maps.EqualFunc(got, want, bytes.Equal) {
		t.Fatalf("%d entries after %d commits, %v; want %d", len(got), last, err, len(want))
	}
}

// TestFull: a journal that cannot take a commit takes no later one, which would leave a gap.
func TestFull(t *testing.T) {
	j := newJournal(t)
	j.at = MaxSize - 20
	if err := j.Commit([]Op{{Key{1, 1}, []byte("too long")}}, nil); err == nil {
		t.Fatal("it was taken")
	}
	j.at = 0
	if err := j.Commit(nil, nil); err == nil || j.last != 0 {
		t.Errorf("commit %d after one that failed: %v", j.last, err)
	}
}

// FuzzParse: whatever a file holds, it is read or refused.
func FuzzParse(f *testing.F) {
	f.Add(appendCommit(nil, 1, []Op{{Key{1, 1}, []byte("a")}, {Key{1, 2}, nil}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		_, end, _, err := Parse(b)
		if end > int64(len(b)) || err != nil && !errors.Is(err, ErrDamaged) {
			t.Error(end, err)
		}
	})
}

// TestDamaged: what adds up and makes no sense is an error, and no end.
func TestDamaged(t *testing.T) {
	for _, inside := range []string{"short", "\x01\x01\x00\x00\x00\x00\x00\x00\x00\xff\x00\x00\x00x"} {
		b := appendCommit(nil, 1, nil)
		b = append(b, inside...)
		b[0] = byte(len(inside))
		sum := appendSum(b)
		if _, _, _, err := Parse(sum); !errors.Is(err, ErrDamaged) {
			t.Errorf("%q: %v", inside, err)
		}
	}
}

// appendSum makes the sum of a commit right.
func appendSum(b []byte) []byte {
	binary.LittleEndian.PutUint32(b[4:], crc32.Checksum(b[8:], sums))
	return b
}

// BenchmarkCommit is what a settled call that made an object pays.
func BenchmarkCommit(b *testing.B) {
	j := newJournal(b)
	ops := []Op{{Key{1, 1}, bytes.Repeat([]byte("o"), 200)}, {Key{2, 1}, bytes.Repeat([]byte("c"), 60)}}
	for i := 0; b.Loop(); i++ {
		ops[0].ID, ops[1].ID = uint64(i%1000), uint64(i%1000)
		if err := j.Commit(ops, nil); err != nil {
			b.Fatal(err)
		}
	}
}
