package spec

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// coversOf computes smallest exact covers for the set of trapped numbers.
func coversOf(set []uint8) covers {
	var in [256]bool
	for _, nr := range set {
		in[nr] = true
	}
	return covers{
		stop:  smallestCover(func(x uint8) bool { return in[x] }),
		allow: smallestCover(func(x uint8) bool { return !in[x] }),
	}
}

// smallestCover finds the fewest cubes whose union is exactly the set: the two-level minimisation of Quine and
// McCluskey, the choice among the prime implicants by branch and bound.
func smallestCover(in func(uint8) bool) []cube {
	var cubes []cube // every cube inside the set
	for mask := range 256 {
		for value := range 256 {
			c := cube{uint32(mask), uint32(value)}
			if c.value&^c.mask != 0 {
				continue
			}
			inside := true
			for x := range 256 {
				if c.has(uint32(x)) && !in(uint8(x)) {
					inside = false
					break
				}
			}
			if inside {
				cubes = append(cubes, c)
			}
		}
	}
	prime := slices.DeleteFunc(slices.Clone(cubes), func(c cube) bool {
		for b := c.mask; b != 0; b &= b - 1 {
			bit := b & -b
			if slices.Contains(cubes, cube{c.mask &^ bit, c.value &^ bit}) {
				return true
			}
		}
		return false
	})
	slices.SortStableFunc(prime, func(a, b cube) int { return bits.OnesCount32(a.mask) - bits.OnesCount32(b.mask) })
	var left set256
	for x := range 256 {
		if in(uint8(x)) {
			left.add(uint8(x))
		}
	}
	s := search{prime: prime}
	for _, c := range prime {
		var m set256
		for x := range 256 {
			if c.has(uint32(x)) {
				m.add(uint8(x))
			}
		}
		s.members = append(s.members, m)
	}
	s.best = s.greedy(left)
	s.descend(left, nil)
	best := make([]cube, 0, len(s.best))
	for _, i := range s.best {
		best = append(best, prime[i])
	}
	slices.SortFunc(best, func(a, b cube) int { return int(a.mask)<<8 + int(a.value) - int(b.mask)<<8 - int(b.value) })
	return best
}

type set256 [4]uint64

func (s *set256) add(x uint8)     { s[x>>6] |= 1 << (x & 63) }
func (s set256) has(x uint8) bool { return s[x>>6]>>(x&63)&1 == 1 }
func (s set256) minus(o set256) set256 {
	return set256{s[0] &^ o[0], s[1] &^ o[1], s[2] &^ o[2], s[3] &^ o[3]}
}
func (s set256) and(o set256) set256 {
	return set256{s[0] & o[0], s[1] & o[1], s[2] & o[2], s[3] & o[3]}
}
func (s set256) len() int {
	return bits.OnesCount64(s[0]) + bits.OnesCount64(s[1]) + bits.OnesCount64(s[2]) + bits.OnesCount64(s[3])
}

type search struct {
	prime   []cube
	members []set256
	best    []int
	steps   int
}

func (s *search) greedy(left set256) []int {
	var chosen []int
	for left.len() > 0 {
		pick, most := 0, -1
		for i, m := range s.members {
			if n := m.and(left).len(); n > most {
				pick, most = i, n
			}
		}
		chosen = append(chosen, pick)
		left = left.minus(s.members[pick])
	}
	return chosen
}

// hardest is the byte of a set that the fewest cubes cover.
func (s *search) hardest(of set256) uint8 {
	hardest, fewest := 0, 1<<30
	for x := range 256 {
		if !of.has(uint8(x)) {
			continue
		}
		n := 0
		for _, m := range s.members {
			if m.has(uint8(x)) {
				n++
			}
		}
		if n < fewest {
			hardest, fewest = x, n
		}
	}
	return uint8(hardest)
}

// descend branches on the byte that the fewest cubes cover.
func (s *search) descend(left set256, chosen []int) {
	s.steps++
	if left.len() == 0 {
		if len(chosen) < len(s.best) {
			s.best = slices.Clone(chosen)
		}
		return
	}
	// A lower bound: bytes of which no two are in one cube need a cube each.
	rest, bound := left, 0
	for rest.len() > 0 && len(chosen)+bound < len(s.best) {
		hardest := s.hardest(rest)
		for _, m := range s.members {
			if m.has(hardest) {
				rest = rest.minus(m)
			}
		}
		bound++
	}
	if len(chosen)+bound >= len(s.best) {
		return
	}
	hardest := s.hardest(left)
	var options []int
	for i, m := range s.members {
		if m.has(hardest) {
			options = append(options, i)
		}
	}
	slices.SortFunc(options, func(a, b int) int {
		return s.members[b].and(left).len() - s.members[a].and(left).len()
	})
	for _, i := range options {
		s.descend(left.minus(s.members[i]), append(chosen, i))
	}
}

// checkExact fails unless c splits the 256 values as set says.
func checkExact(t *testing.T, c covers, set []uint8) {
	t.Helper()
	for x := range 256 {
		has := func(c cube) bool { return c.has(uint32(x)) }
		want := slices.Contains(set, uint8(x))
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
