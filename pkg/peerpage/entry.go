// SPDX-License-Identifier: Apache-2.0

package peerpage

import (
	"fmt"
	"math"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// MaxPIDs is how many processes with contexts a guard can name. The contexts of others are nobody's.
const MaxPIDs = 128

const (
	guardWords = 15 + MaxPIDs/2
	rowWords   = 25
	// Of guards that do not know of it the record is never written, so the format stays the same.
	settingWords = 3
)

// Guard is what a guard says of its vGPU.
type Guard struct {
	sched.Plan               // but for Effective
	Adopted    time.Duration // when the plan came in force, on CLOCK_MONOTONIC: which of two is the newer
	Contexts   int           // channel groups on the graphics engine
	Pressing   bool          // of high priority: it has work now, or had a moment ago
	PIDs       []int         // by which the driver names its contexts, MaxPIDs of them at most
}

func (g *Guard) words() (w [guardWords]uint64) {
	pids := g.PIDs[:min(len(g.PIDs), MaxPIDs)]
	copy(w[:], []uint64{uint64(g.Card.Policy), uint64(g.Card.MaxInst), uint64(g.Card.PrioRatio),
		uint64(g.Share.Weight), uint64(g.Share.Percent),
		uint64(g.Share.Priority), uint64(g.Cap), uint64(g.Slot.Start), uint64(g.Slot.On), uint64(g.Slot.Cycle), bit(g.Suspended),
		uint64(g.Adopted), uint64(g.Contexts), bit(g.Pressing), uint64(len(pids))})
	for i, pid := range pids {
		w[15+i/2] |= uint64(uint32(pid)) << (32 * (i % 2))
	}
	return w
}

// guardOf reads words that anybody may have written: what comes out is in bounds.
func guardOf(w *[guardWords]uint64) Guard {
	g := Guard{Plan: sched.Plan{
		Card: sched.Card{Policy: sched.Policy(within(w[0], 0, uint64(sched.PolicyNative))), MaxInst: within(w[1], 1, sched.MaxMaxInst),
			PrioRatio: within(w[2], sched.MinPrioRatio, sched.MaxPrioRatio)},
		Share: sched.Share{Weight: within(w[3], 1, quota.MaxWeight), Percent: within(w[4], 0, 100),
			Priority: quota.Priority(within(w[5], uint64(quota.PriorityBestEffort), uint64(quota.PriorityHigh)))},
		Cap: sched.Permille(within(w[6], 0, uint64(sched.Whole))), Slot: slotOf(w[7:10]), Suspended: w[10] != 0,
	}, Adopted: time.Duration(w[11]), Contexts: within(w[12], 0, maxContexts), Pressing: w[13] != 0}
	for i := range within(w[14], 0, MaxPIDs) {
		g.PIDs = append(g.PIDs, int(uint32(w[15+i/2]>>(32*(i%2)))))
	}
	return g
}

const (
	maxContexts = 1 << 16
)

func within(x uint64, least, most uint64) int { return int(min(max(x, least), most)) }

// slotOf is a slot that can be asked for its phase, or none.
func slotOf(w []uint64) sched.Slot {
	s := sched.Slot{Start: time.Duration(w[0]), On: time.Duration(w[1]), Cycle: time.Duration(w[2])}
	if s.Start < 0 || s.On <= 0 || s.Cycle <= 0 || s.Start > s.Cycle || s.On > s.Cycle || s.Cycle > time.Minute {
		return sched.Slot{}
	}
	return s
}

func bit(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

// wordsOf is a row as it is written, for who has the entry.
func wordsOf(r *sched.Verdict, holder uint64) [rowWords]uint64 {
	return [rowWords]uint64{holder,
		uint64(r.Slice), uint64(r.Slot.Start), uint64(r.Slot.On), uint64(r.Slot.Cycle),
		uint64(r.At), uint64(r.Until), uint64(r.Adopted), uint64(r.Busy), bit(r.Exact), bit(r.Look) | bit(r.Gang)<<1,
		uint64(r.Lately), uint64(r.Entitled),
		uint64(r.UpTo), uint64(r.GPUTime), uint64(r.Waiting), uint64(r.Granted), r.Switches, r.Preemptions,
		bit(r.On), uint64(r.Since), uint64(r.PID), uint64(r.Context), bit(r.Resting), uint64(r.Open)}
}

func rowOf(w *[rowWords]uint64) (v sched.Verdict) {
	v.Slice, v.Slot = time.Duration(min(w[1], uint64(time.Minute))), slotOf(w[2:5])
	v.At, v.Until, v.Adopted = time.Duration(w[5]), time.Duration(w[6]), time.Duration(w[7])
	v.Busy, v.Exact, v.Look = within(w[8], 0, maxContexts), w[9] != 0, w[10]&1 != 0
	v.Gang = w[10]&2 != 0 // only of guards that say which GPUs they have
	v.Lately = sched.Permille(within(w[11], 0, uint64(sched.Whole)))
	v.Entitled = sched.Permille(within(w[12], 0, uint64(sched.Whole)))
	v.UpTo, v.GPUTime, v.Waiting, v.Granted = time.Duration(w[13]), time.Duration(w[14]), time.Duration(w[15]), time.Duration(w[16])
	v.Switches, v.Preemptions = w[17], w[18]
	v.Resident = sched.Resident{On: w[19] != 0, Since: time.Duration(w[20]), PID: int(uint32(w[21])),
		Context: uint32(w[22]), Resting: w[23] != 0}
	v.Open = time.Duration(w[24])
	return v
}

func (p *Page) guard(i int) record { return record{p, i*entrySize + offGuard, guardWords} }
func (p *Page) row(i int) record   { return record{p, i*entrySize + offRow, rowWords} }
func (p *Page) setting(i int) record {
	return record{p, i*entrySize + offSetting, settingWords}
}

// Tell writes the guard's part, and wakes the arbiter if it is another one.
func (e *Entry) Tell(g Guard) {
	if w := g.words(); w != e.last {
		e.guard(e.Place()).write(w[:])
		e.last = w
		e.Wake()
	}
}

// TellSetting says which timeslices were set, on CLOCK_MONOTONIC. It wakes nobody.
func (e *Entry) TellSetting(s sched.Setting) {
	e.setting(e.Place()).write([]uint64{uint64(s.Slice), uint64(s.From), uint64(s.To)})
}

// Setting is what a guest's guard said last of its timeslices, until a time that is now. False: nothing, or it is written all the time.
func (p *Page) Setting(g Guest, now time.Duration) (sched.Setting, bool) {
	var w [settingWords]uint64
	n, ok := p.setting(g.Place).read(w[:])
	const none = uint64(math.MaxInt64)
	return sched.Setting{Slice: time.Duration(min(w[0], uint64(time.Minute))), From: min(time.Duration(min(w[1], none)), now),
		To: min(time.Duration(min(w[2], none)), now)}, ok && n > 0 && p.holder(g.Place) == g.holder
}

// Row is what the arbiter wrote last. False: nothing, or it is written all the time.
func (e *Entry) Row() (sched.Verdict, bool) { return e.RowOf(e.Place()) }

// RowOf is the row of an entry. False: there is none for who has the entry, or it is written all the time.
func (p *Page) RowOf(i int) (sched.Verdict, bool) {
	var w [rowWords]uint64
	_, ok := p.row(i).read(w[:])
	return rowOf(&w), ok && w[0] == p.holder(i)
}

// holder tells who has an entry: pid and start time.
func (p *Page) holder(i int) uint64 {
	e := i * entrySize
	return p.u64(e+offStart).Load() ^ uint64(p.u32(e+offOwner).Load())<<40
}

// Guest is an entry as the arbiter reads it.
type Guest struct {
	Place   int
	ID      string // of the vGPU: another one with every guard that takes the entry
	Version uint64 // of Guard
	Gang    sched.Gang
	holder  uint64
	Guard
}

// Guests reads the entries of guards that live and have said something. What was read before saves the reading of what is the same.
func (p *Page) Guests(before []Guest) (list []Guest) {
	var old [Entries + 1]*Guest
	for i := range before {
		old[before[i].Place] = &before[i]
	}
	for i := 1; i <= p.used(); i++ {
		if !p.owned(i) {
			continue
		}
		n := p.u64(i*entrySize + offGuard).Load()
		was, holder := old[i], p.holder(i)
		if was != nil && was.holder != holder {
			was = nil
		}
		switch {
		case n == 0:
			continue
		case was != nil && was.Version == n:
			list = append(list, *was)
			list[len(list)-1].Gang = p.gang(i)
			continue
		}
		var w [guardWords]uint64
		if n, ok := p.guard(i).read(w[:]); ok {
			list = append(list, Guest{i, fmt.Sprintf("%d/%x", i, holder), n, p.gang(i), holder, guardOf(&w)})
		} else if was != nil {
			list = append(list, *was)
		}
	}
	return list
}

// gang is which GPUs the container of an entry has. Its guard is one process for all of them.
func (p *Page) gang(i int) sched.Gang {
	w := p.u64(i*entrySize + offGang).Load()
	return sched.Gang{GPUs: w &^ gangKept, Order: p.holder(i), Kept: w&gangKept != 0}
}

// Put writes a guest's row; ring wakes its guard. Should another guard have taken the entry meanwhile, that one does not believe it.
func (p *Page) Put(g Guest, v *sched.Verdict, ring bool) {
	w := wordsOf(v, g.holder)
	p.row(g.Place).write(w[:])
	if ring {
		p.ring(g.Place*entrySize + offRing)
	}
}
