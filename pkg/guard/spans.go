// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// span is a range of addresses of managed memory.
type span struct {
	base, end uint64
	// agreed: it fit into the limit when it was announced or found.
	agreed bool
	// announced is when the limiter said that it is about to be mapped; zero once it was found in the maps.
	announced time.Time
}

func (s span) size() quota.Bytes { return quota.Bytes(s.end - s.base) }

// oneSpan stands for ranges that are too many to remember: one of their size, at an address that none of them has.
func oneSpan(list []span) []span {
	return []span{{base: lastAddress, end: lastAddress + uint64(totalSize(list))}}
}

// overlapping is which spans of a list a range has something of.
func overlapping(list []span, base, end uint64) (from, to int) {
	from, _ = slices.BinarySearchFunc(list, base, func(s span, at uint64) int {
		if s.end <= at {
			return -1
		}
		return 1
	})
	for to = from; to < len(list) && list[to].base < end; to++ {
	}
	return from, to
}

// overlapSize is how much of a range a list holds.
func overlapSize(list []span, base, end uint64) quota.Bytes {
	var n uint64
	from, to := overlapping(list, base, end)
	for _, s := range list[from:to] {
		n += min(s.end, end) - max(s.base, base)
	}
	return quota.Bytes(n)
}

// agreedBefore reports that a range was agreed to as a whole before.
func agreedBefore(list []span, base, end uint64) bool {
	var n uint64
	from, to := overlapping(list, base, end)
	for _, s := range list[from:to] {
		if s.agreed {
			n += min(s.end, end) - max(s.base, base)
		}
	}
	return n == end-base
}

func agreeAll(list []span) {
	for i := range list {
		list[i].agreed = true
	}
}

func totalSize(list []span) quota.Bytes {
	var n quota.Bytes
	for _, s := range list {
		n += s.size()
	}
	return n
}

// cutRange takes a range out of a list.
func cutRange(list []span, base, end uint64) []span { return replaceRange(list, base, end) }

// insertSpan puts a range into a list, in place of what was there.
func insertSpan(list []span, s span) []span { return replaceRange(list, s.base, s.end, s) }

// replaceRange takes a range out of a list and puts others, of that range, in its place. It may change the list.
func replaceRange(list []span, base, end uint64, by ...span) []span {
	from, to := overlapping(list, base, end)
	if from < to {
		if first := list[from]; first.base < base {
			by = append([]span{{first.base, base, first.agreed, first.announced}}, by...)
		}
		if last := list[to-1]; last.end > end {
			by = append(by, span{end, last.end, last.agreed, last.announced})
		}
	}
	return slices.Replace(list, from, to, by...)
}
