// SPDX-License-Identifier: Apache-2.0

package peerpage

import (
	"fmt"
	"path/filepath"
	"time"
)

// Holders is who has a GPU, as the driver said: memory that the guards of the GPU share, so that one of them asks for all. A question takes
// the driver's locks, and each guard wants the answer once a second (at rest 5 ms of processor time, 20 containers on an H200).
type Holders struct{ page *Page }

// Holder is a process, whose number may be another's later.
type Holder struct {
	PID   int
	Start uint64 // /proc/PID/stat
}

// MaxHolders is as many as the driver names: NV2080_CTRL_GPU_GET_PIDS_MAX_COUNT (ctrl2080gpu.h).
const MaxHolders = 950

const (
	holdersMagic = 0x63676801

	// Layout, after the magic. The record has when the driver was asked, how many there are, and their numbers and start times.
	offAsking     = 8 // u64: since when somebody asks, CLOCK_MONOTONIC; 0: nobody does
	offHolders    = 16
	holdersWords  = 2 + 2*MaxHolders
	holdersSize   = offHolders + 8 + 2*8*holdersWords
	longestAnswer = 2 * time.Second // who asks for longer is taken to be gone
)

// OpenHolders maps what the guards of a GPU know of it.
func OpenHolders(runDir, uuid string) (*Holders, error) { return mapHolders(runDir, uuid, ".holders") }

// OpenSuspects maps which processes a look at all of them found outside of all containers with a file of the driver.
func OpenSuspects(runDir, uuid string) (*Holders, error) {
	return mapHolders(runDir, uuid, ".suspects")
}

func mapHolders(runDir, uuid, suffix string) (*Holders, error) {
	h := &Holders{&Page{}}
	path := filepath.Join(filepath.Dir(Path(runDir, uuid)), filepath.Base(uuid)+suffix)
	if err := h.page.mapFile(path, holdersSize, holdersMagic, func() error { return nil }); err != nil {
		return nil, fmt.Errorf("%s of GPU %s: %w", suffix[1:], uuid, err)
	}
	return h, nil
}

// Put says who it was at a moment; of more than MaxHolders so many.
func (h *Holders) Put(now time.Duration, list []Holder) {
	list = list[:min(len(list), MaxHolders)]
	words := make([]uint64, holdersWords)
	words[0], words[1] = uint64(now), uint64(len(list))
	for i, x := range list {
		words[2+2*i], words[3+2*i] = uint64(x.PID), x.Start
	}
	record{h.page, offHolders, holdersWords}.write(words)
}

// Last is who it was when Put was last called, and when that was; 0: never, or it is written just now.
func (h *Holders) Last() (list []Holder, at time.Duration) {
	words := make([]uint64, holdersWords)
	if _, whole := (record{h.page, offHolders, holdersWords}).read(words); !whole {
		return nil, 0
	}
	return holdersOf(words), time.Duration(words[0])
}

// Get is who had the GPU at most maxAge before now, CLOCK_MONOTONIC. It calls ask where nobody has asked since, unless somebody else does
// so at this moment: then it is who had it before. False: ask has failed, or nobody has asked before.
func (h *Holders) Get(now, maxAge time.Duration, ask func() ([]Holder, bool)) ([]Holder, bool) {
	words := make([]uint64, holdersWords)
	r := record{h.page, offHolders, holdersWords}
	_, whole := r.read(words)
	age := now - time.Duration(words[0])
	known := whole && words[0] != 0 && age >= -maxAge // a moment after now, if another guard has asked meanwhile; later: before a reboot
	if known && age <= maxAge || !h.claim(now) {
		return holdersOf(words), known
	}
	list, ok := ask()
	asking := h.page.u64(offAsking)
	if ok && asking.Load() == uint64(now) { // else it took so long that another guard asks, and writes
		h.Put(now, list)
	}
	asking.CompareAndSwap(uint64(now), 0)
	return list, ok
}

// claim reports that it is for this guard to ask.
func (h *Holders) claim(now time.Duration) bool {
	word := h.page.u64(offAsking)
	since := word.Load()
	if age := now - time.Duration(since); since != 0 && age > -longestAnswer && age < longestAnswer {
		return false
	}
	return word.CompareAndSwap(since, uint64(now))
}

// holdersOf reads words that anybody may have written: what comes out is in bounds.
func holdersOf(w []uint64) (list []Holder) {
	for i := range within(w[1], 0, MaxHolders) {
		list = append(list, Holder{within(w[2+2*i], 0, 1<<31-1), w[3+2*i]})
	}
	return list
}
