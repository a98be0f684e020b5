// SPDX-License-Identifier: Apache-2.0

package arbiter

import (
	"encoding/binary"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// fakeRing is a ring as the driver fills it.
type fakeRing struct {
	*fecsBuffer
	at    uint32
	seqno uint16
}

func newFakeRing() *fakeRing {
	return &fakeRing{fecsBuffer: &fecsBuffer{head: make([]byte, fecsHeadPages), ring: make([]byte, fecsRecords*fecsRecord)}}
}

// write adds a record.
func (r *fakeRing) write(tag byte, pid int, context uint32, at time.Duration) {
	b := r.ring[r.at*fecsRecord:][:fecsRecord]
	clear(b)
	b[fecsTag] = tag
	binary.LittleEndian.PutUint16(b[fecsSeqno:], r.seqno)
	rm.PutU32(b, fecsContext, context)
	rm.PutU32(b, fecsPID, uint32(pid))
	rm.PutU64(b, fecsTime, uint64(at))
	r.seqno++
	r.at = (r.at + 1) % fecsRecords
	rm.PutU32(r.head, fecsHeadPut, r.at)
}

func (r *fakeRing) wants(t *testing.T, lost bool, want ...sched.Switch) {
	t.Helper()
	got, l := r.Read(nil)
	if !slices.Equal(got, want) || l != lost {
		t.Errorf("%+v, lost %v; want %+v, lost %v", got, l, want, lost)
	}
}

func TestFecsRecords(t *testing.T) {
	r := newFakeRing()
	r.wants(t, false)
	// A time as cards tell it, ns since 1970.
	const at = 1763700000 * time.Second
	r.write(fecsTagStart, 4711, 0x17, at)
	r.write(fecsTagEnd, 4711, 0x17, at+10)
	on, off := sched.Switch{At: at, PID: 4711, Context: 0x17, On: true}, sched.Switch{At: at + 10, PID: 4711, Context: 0x17}
	r.wants(t, false, on, off)
	r.wants(t, false)
	for tag := range 256 {
		if tag != fecsTagStart && tag != fecsTagEnd {
			r.write(byte(tag), 1, 1, at)
		}
	}
	r.write(fecsTagStart, 4711, 0x17, at)
	r.wants(t, false, on) // what is not known is passed over, and is no gap

	first := sched.Switch{PID: 1}
	if got, _ := func() ([]sched.Switch, bool) {
		r.write(fecsTagEnd, 4711, 0x17, at+10)
		return r.Read([]sched.Switch{first})
	}(); !slices.Equal(got, []sched.Switch{first, off}) {
		t.Errorf("records are not appended: %+v", got)
	}
}

// TestFecsWraps: the ring and the numbers of its records begin anew.
func TestFecsWraps(t *testing.T) {
	r := newFakeRing()
	n, at := 0, time.Duration(0)
	for n < 1<<17 { // the numbers, twice
		var want []sched.Switch
		for range 1 + n%1000 {
			r.write(fecsTagStart, n, 0, at)
			want = append(want, sched.Switch{At: at, PID: n, On: true})
			n, at = n+1, at+1
		}
		if got, lost := r.Read(nil); lost || !slices.Equal(got, want) {
			t.Fatalf("after %d: %d records, want %d; lost %v", n, len(got), len(want), lost)
		}
	}
}

// TestFecsLost: a gap is told, once. The first record ever seen is none.
func TestFecsLost(t *testing.T) {
	r := newFakeRing()
	rec := func(pid int) sched.Switch { return sched.Switch{PID: pid, On: true} }
	r.seqno = 77
	r.write(fecsTagStart, 1, 0, 0)
	r.wants(t, false, rec(1))
	r.seqno += 5
	r.write(fecsTagStart, 2, 0, 0)
	r.wants(t, true, rec(2))
	r.write(fecsTagStart, 3, 0, 0)
	r.wants(t, false, rec(3))
	r.seqno++
	r.write(0, 4, 0, 0) // a gap before what is not known is one all the same
	r.wants(t, true)
	// More than the ring holds: the newest are there.
	for i := range fecsRecords + 10 {
		r.write(fecsTagStart, i, 0, 0)
	}
	got, lost := r.Read(nil)
	if n := len(got); !lost || n != fecsRecords-1 || got[0].PID != 11 || got[n-1].PID != fecsRecords+9 {
		t.Errorf("%d records, lost %v", n, lost)
	}
	r.write(fecsTagStart, 5, 0, 0)
	r.wants(t, false, rec(5))
}

// TestFecsStandby: who reads for the first time gets all that is still there.
func TestFecsStandby(t *testing.T) {
	for _, n := range []int{1, 100, fecsRecords - 1, fecsRecords, 3*fecsRecords + 7} {
		r := newFakeRing()
		for i := range n {
			r.write(fecsTagStart, i, 0, time.Duration(i))
		}
		got, lost := r.Read(nil)
		if want := min(n, fecsRecords-1); lost || len(got) != want || got[want-1].PID != n-1 || got[0].PID != n-want {
			t.Errorf("of %d: %d records, lost %v", n, len(got), lost)
		}
	}
}

// TestFecsPut: where the driver is said to be must be in the ring.
func TestFecsPut(t *testing.T) {
	r := newFakeRing()
	r.write(fecsTagStart, 1, 0, 0)
	for _, put := range []uint32{fecsRecords, fecsRecords + 1, 1 << 31, 0xffffffff} {
		rm.PutU32(r.head, fecsHeadPut, put)
		r.wants(t, true)
	}
	rm.PutU32(r.head, fecsHeadPut, 1)
	r.wants(t, false, sched.Switch{PID: 1, On: true})
}

// FuzzFecs reads whatever stands in the ring, twice, and has it counted. Nothing panics, and no more records come out than are
// in the ring.
func FuzzFecs(f *testing.F) {
	r := newFakeRing()
	for i := range 4 {
		r.write(byte(fecsTagStart+i%2), 1, uint32(i), time.Duration(i)*time.Second)
	}
	f.Add(r.ring[:4*fecsRecord], uint32(4), uint32(2), uint32(0))
	f.Add(r.ring[:4*fecsRecord], uint32(fecsRecords-1), uint32(fecsRecords), uint32(1))
	old := slices.Clone(r.ring[:2*fecsRecord])
	rm.PutU64(old, fecsTime, 1<<63)
	rm.PutU64(old[fecsRecord:], fecsTime, 1<<63+1e9)
	f.Add(old, uint32(2), uint32(0), uint32(7))
	old = slices.Clone(old)
	rm.PutU64(old, fecsTime, 1<<63-1)
	rm.PutU64(old[fecsRecord:], fecsTime, 1<<62)
	f.Add(old, uint32(2), uint32(0), uint32(0))
	ring := make([]byte, fecsRecords*fecsRecord)
	f.Fuzz(func(t *testing.T, records []byte, put, again, get uint32) {
		clear(ring)
		copy(ring, records)
		b := &fecsBuffer{head: make([]byte, fecsHeadPages), ring: ring, get: get % fecsRecords}
		observer, now := sched.NewObserver(), time.Duration(0)
		for _, at := range []uint32{put, again} {
			rm.PutU32(b.head, fecsHeadPut, at)
			got, lost := b.Read(nil)
			if len(got) >= fecsRecords || b.get >= fecsRecords || at < fecsRecords && b.get != at || at >= fecsRecords && (!lost || len(got) > 0) {
				t.Fatalf("%d records up to %d, at %d, lost %v", len(got), at, b.get, lost)
			}
			for _, s := range got {
				if s.At < 0 || s.PID < 0 {
					t.Fatalf("%+v", s)
				}
			}
			now += sched.Tick
			observer.Add(got, now, func(pid int) string { return strconv.Itoa(pid & 1) }, lost)
			observer.Seen("1", 200*time.Millisecond)
		}
	})
}
