// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// coversOf computes smallest exact covers for the set of trapped numbers.
func coversOf(set []uint8) covers {
	var stopped []cube
	for _, nr := range set {
		stopped = append(stopped, cube{rm.TrapMask(nr), uint32(nr)})
	}
	allow := others(stopped)
	return covers{stop: smallestCover(others(allow)), allow: smallestCover(allow)}
}

// others are the largest cubes that have nothing of cubes: from all numbers one cube after the other is taken away, and what is left
// of each that it touches are the halves on the other side of its bits.
func others(cubes []cube) []cube {
	prime := []cube{{}}
	for _, c := range cubes {
		var left []cube
		for _, p := range prime {
			if (p.value^c.value)&p.mask&c.mask != 0 {
				left = append(left, p)
				continue
			}
			for b := c.mask &^ p.mask; b != 0; b &= b - 1 {
				bit := b & -b
				left = append(left, cube{p.mask | bit, p.value | ^c.value&bit})
			}
		}
		slices.SortFunc(left, func(a, b cube) int {
			return cmp.Or(bits.OnesCount32(a.mask)-bits.OnesCount32(b.mask), cmp.Compare(a.mask, b.mask), cmp.Compare(a.value, b.value))
		})
		prime = nil
		for _, c := range left {
			if !slices.ContainsFunc(prime, func(p cube) bool { return c.mask&p.mask == p.mask && p.has(c.value) }) {
				prime = append(prime, c)
			}
		}
	}
	return prime
}

// smallestCover chooses the fewest of prime that have every number that one of them has: the two-level minimisation of Quine and McCluskey.
// A branch and bound of so many steps may not find the least, but always finds the same.
func smallestCover(prime []cube) []cube {
	s := search{columns: len(prime), steps: 2000}
	s.descend(rowsOf(prime), nil)
	var best []cube
	for _, i := range s.best {
		best = append(best, prime[i])
	}
	slices.SortFunc(best, func(a, b cube) int { return cmp.Or(cmp.Compare(a.mask, b.mask), cmp.Compare(a.value, b.value)) })
	return best
}

// rowsOf says for every number which cubes have it, once for all numbers for which that is the same.
func rowsOf(prime []cube) (rows []set) {
	seen := map[string]bool{}
	var walk func(bit uint32, live []int)
	walk = func(bit uint32, live []int) {
		if len(live) == 0 {
			return
		}
		for bit != 0 && !slices.ContainsFunc(live, func(i int) bool { return prime[i].mask&bit != 0 }) {
			bit <<= 1
		}
		if bit == 0 {
			if key := fmt.Sprint(live); !seen[key] {
				seen[key] = true
				row := newSet(len(prime))
				for _, i := range live {
					row.add(i)
				}
				rows = append(rows, row)
			}
			return
		}
		for _, value := range []uint32{0, bit} {
			var l []int
			for _, i := range live {
				if prime[i].mask&bit == 0 || prime[i].value&bit == value {
					l = append(l, i)
				}
			}
			walk(bit<<1, l)
		}
	}
	all := make([]int, len(prime))
	for i := range all {
		all[i] = i
	}
	walk(1, all)
	return leastOf(rows)
}

// set is one of small numbers.
type set []uint64

func newSet(size int) set    { return make(set, (size+63)/64) }
func (s set) add(i int)      { s[i>>6] |= 1 << (i & 63) }
func (s set) remove(i int)   { s[i>>6] &^= 1 << (i & 63) }
func (s set) has(i int) bool { return s[i>>6]>>(i&63)&1 == 1 }
func (s set) inside(o set) bool {
	for i := range s {
		if s[i]&^o[i] != 0 {
			return false
		}
	}
	return true
}
func (s set) meets(o set) bool {
	for i := range s {
		if s[i]&o[i] != 0 {
			return true
		}
	}
	return false
}
func (s set) list() (l []int) {
	for i, word := range s {
		for ; word != 0; word &= word - 1 {
			l = append(l, i<<6+bits.TrailingZeros64(word))
		}
	}
	return l
}
func (s set) len() (n int) {
	for _, word := range s {
		n += bits.OnesCount64(word)
	}
	return n
}

// leastOf leaves out rows that are covered whenever another one is; the shortest come first.
func leastOf(rows []set) (least []set) {
	slices.SortStableFunc(rows, func(a, b set) int { return a.len() - b.len() })
	for _, r := range rows {
		if !slices.ContainsFunc(least, func(l set) bool { return l.inside(r) }) {
			least = append(least, r)
		}
	}
	return least
}

type search struct {
	columns, steps int
	best           []int
}

// descend covers rows, of which leastOf has left nothing out.
func (s *search) descend(rows []set, chosen []int) {
	// A column whose rows all are another one's is of no use.
	for changed := true; changed; {
		changed = false
		with := make([]set, s.columns)
		used := newSet(s.columns)
		for k, r := range rows {
			for _, i := range r.list() {
				if with[i] == nil {
					with[i] = newSet(len(rows))
				}
				with[i].add(k)
				used.add(i)
			}
		}
		list := used.list()
		for _, i := range list {
			for _, j := range list {
				if i != j && used.has(j) && with[i].inside(with[j]) {
					used.remove(i)
					changed = true
					break
				}
			}
		}
		if changed {
			left := make([]set, len(rows))
			for k, r := range rows {
				left[k] = newSet(s.columns)
				for _, i := range r.list() {
					if used.has(i) {
						left[k].add(i)
					}
				}
			}
			rows = leastOf(left)
		}
	}
	if len(rows) == 0 {
		if s.best == nil || len(chosen) < len(s.best) {
			s.best = slices.Clone(chosen)
		}
		return
	}
	// Rows of which no two have a column in common need one each.
	var apart []set
	for _, r := range rows {
		if !slices.ContainsFunc(apart, r.meets) {
			apart = append(apart, r)
		}
	}
	if s.best != nil && (len(chosen)+len(apart) >= len(s.best) || s.steps <= 0) {
		return
	}
	s.steps--
	count := make([]int, s.columns)
	for _, r := range rows {
		for _, i := range r.list() {
			count[i]++
		}
	}
	options := rows[0].list()
	slices.SortStableFunc(options, func(a, b int) int { return count[b] - count[a] })
	for _, i := range options {
		var left []set
		for _, r := range rows {
			if !r.has(i) {
				left = append(left, r)
			}
		}
		s.descend(left, append(chosen, i))
	}
}

// checkExact fails unless c splits the numbers as set says.
func checkExact(t *testing.T, c covers, set []uint8) {
	t.Helper()
	for x := range uint32(1 << 15) { // bit 14 is the highest that counts
		has := func(c cube) bool { return c.has(x) }
		want := slices.ContainsFunc(set, func(nr uint8) bool { return x&rm.TrapMask(nr) == uint32(nr) })
		if got := slices.ContainsFunc(c.stop, has); got != want {
			t.Errorf("%#02x: notify %v, want %v", x, got, want)
		}
		if got := slices.ContainsFunc(c.allow, has); got == want {
			t.Errorf("%#02x: allow %v, want %v", x, got, !want)
		}
	}
}

func TestTrapped(t *testing.T) {
	checkExact(t, trapped, rm.TrappedNRs[:])
	want := coversOf(rm.TrappedNRs[:])
	checkExact(t, want, rm.TrappedNRs[:])
	if len(trapped.stop) != len(want.stop) || len(trapped.allow) != len(want.allow) {
		t.Errorf("have %d + %d cubes, smallest are %d + %d:\n%s", len(trapped.stop), len(trapped.allow), len(want.stop), len(want.allow), want)
	}
}

// String writes c as Go source.
func (c covers) String() string {
	var b strings.Builder
	for _, list := range []struct {
		name  string
		cubes []cube
	}{{"stop", c.stop}, {"allow", c.allow}} {
		fmt.Fprintf(&b, "\t%s: []cube{\n", list.name)
		for _, c := range list.cubes {
			fmt.Fprintf(&b, "\t\t{%#02x, %#02x},\n", c.mask, c.value)
		}
		b.WriteString("\t},\n")
	}
	return b.String()
}

// TestCoverSizes compares with the sizes in oci-shim.md section 4.2, which were swept call by call in containers.
func TestCoverSizes(t *testing.T) {
	for _, test := range []struct {
		set   []uint8
		allow int
	}{
		{[]uint8{0x2b}, 8},
		{[]uint8{0x2b, 0x27}, 8},
		{[]uint8{0x2b, 0xd3}, 8},
		{[]uint8{0x2b, 0x27, 0xd3}, 9},
		{[]uint8{0x2b, 0x27, 0x4a, 0xd3}, 10},
	} {
		c := coversOf(test.set)
		checkExact(t, c, test.set)
		if len(c.allow) != test.allow {
			t.Errorf("% x: %d allow cubes, want %d", test.set, len(c.allow), test.allow)
		}
	}
}
