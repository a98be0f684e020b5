// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"slices"
	"time"
)

// Shrink leaves operations out of a list for as long as it fails without them, in ever smaller pieces (delta debugging), and returns the
// shortest one found in the time given. The list itself is taken to fail.
func Shrink(ops []Op, limit time.Duration, fails func([]Op) bool) []Op {
	deadline := time.Now().Add(limit)
	for piece := (len(ops) + 1) / 2; piece > 0; {
		shorter := false
		// From the end: what came last depends on the rest.
		for at := len(ops) - piece; at > -piece; at -= piece {
			if time.Now().After(deadline) {
				return ops
			}
			from, to := max(at, 0), min(max(at, 0)+piece, len(ops))
			if try := slices.Delete(slices.Clone(ops), from, to); len(try) > 0 && fails(try) {
				ops, shorter = try, true
			}
		}
		if !shorter || piece > 1 {
			piece = min(piece/2, len(ops))
		}
	}
	return ops
}

// UpTo is the part of a list that was done when something was seen to be wrong after a step, or in the middle of the next one.
func UpTo(ops []Op, step int) []Op {
	next := slices.IndexFunc(ops, func(o Op) bool { return o.Step > step })
	if next < 0 {
		return ops
	}
	last := ops[next].Step
	if end := slices.IndexFunc(ops, func(o Op) bool { return o.Step > last }); end >= 0 {
		return ops[:end]
	}
	return ops
}
