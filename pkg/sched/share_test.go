// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"errors"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
)

func card(p Policy, maxInst int) Card { return Card{p, maxInst, DefaultPrioRatio} }

func weighing(n int) Share { return Share{Weight: n, Priority: quota.PriorityDefault} }
func asking(percent int) Share {
	return Share{Weight: 1, Percent: percent, Priority: quota.PriorityDefault}
}

func high(s Share) Share {
	s.Priority = quota.PriorityHigh
	return s
}

func low(s Share) Share {
	s.Priority = quota.PriorityBestEffort
	return s
}

func TestCap(t *testing.T) {
	const none = Permille(0)
	for _, c := range []struct {
		name  string
		card  Card
		share Share
		want  Permille // none: no cap; Whole: none either, but all of the GPU is promised
	}{
		{"fair: a place", card(PolicyFair, 20), weighing(1), 50},
		{"fair: a weight is ignored", card(PolicyFair, 20), weighing(7), 50},
		{"fair: places of 1/64", card(PolicyFair, 64), weighing(1), 15},
		{"fair: places of a third", card(PolicyFair, 3), weighing(1), 333},
		{"fair: one place", card(PolicyFair, 1), weighing(1), Whole},
		{"fair: less than a place", card(PolicyFair, 4), asking(10), 100},
		{"fair: high", card(PolicyFair, 20), high(weighing(1)), none},
		{"fair: high with a percentage", card(PolicyFair, 4), high(asking(10)), 100},
		{"fair: best effort", card(PolicyFair, 20), low(weighing(1)), 50},

		{"fixed: percentage", card(PolicyFixed, 20), asking(30), 300},
		{"fixed: percentage beats weight", card(PolicyFixed, 20), Share{Weight: 8, Percent: 30, Priority: quota.PriorityDefault}, 300},
		{"fixed: weight", card(PolicyFixed, 20), weighing(3), 150},
		{"fixed: weight of a third", card(PolicyFixed, 3), weighing(2), 666},
		{"fixed: weight of all", card(PolicyFixed, 20), weighing(20), Whole},
		{"fixed: more weight than there is", card(PolicyFixed, 20), weighing(64), Whole},
		{"fixed: 100 %", card(PolicyFixed, 20), asking(100), Whole},
		{"fixed: 1 %", card(PolicyFixed, 20), asking(1), 10},
		{"fixed: high", card(PolicyFixed, 20), high(weighing(3)), none},
		{"fixed: high with a percentage", card(PolicyFixed, 20), high(asking(30)), 300},

		{"preempt", card(PolicyPreempt, 20), weighing(1), none},
		{"preempt: percentage", card(PolicyPreempt, 20), asking(40), 400},
		{"preempt: 100 %", card(PolicyPreempt, 20), asking(100), Whole},
		{"weight-preempt", card(PolicyWeight, 20), weighing(20), none},
		{"weight-preempt: percentage", card(PolicyWeight, 20), Share{Weight: 5, Percent: 40, Priority: quota.PriorityDefault}, 400},
		{"weight-preempt: high with a percentage", card(PolicyWeight, 20), high(asking(40)), 400},

		{"soft", card(PolicySoft, 20), weighing(3), none},
		{"soft: percentage", card(PolicySoft, 20), asking(40), none},
		{"soft: 100 %", card(PolicySoft, 20), asking(100), none},
		{"native", card(PolicyNative, 20), weighing(3), none},
		{"native: percentage", card(PolicyNative, 20), asking(40), none},
	} {
		got, capped := c.card.Cap(c.share)
		if want := c.want != none && c.want != Whole; got != c.want || capped != want {
			t.Errorf("%s: got %v, %v; want %v, %v", c.name, got, capped, c.want, want)
		}
	}
}

func TestAdmit(t *testing.T) {
	many := func(n int, s Share) []Share {
		list := make([]Share, n)
		for i := range list {
			list[i] = s
		}
		return list
	}
	for _, c := range []struct {
		name    string
		card    Card
		others  []Share
		share   Share
		refused string // "": admitted
	}{
		{"fair: the last place", card(PolicyFair, 64), many(63, weighing(1)), weighing(1), ""},
		{"fair: a percentage of a place", card(PolicyFair, 4), nil, asking(25), ""},
		{"fair: of more than a place", card(PolicyFair, 4), nil, asking(26),
			"26 % of the GPU's time, but under policy fair each of its 4 places has 25 %"},
		{"fair: of more than a third", card(PolicyFair, 3), nil, asking(34), "each of its 3 places has 33.3 %"},
		{"fair: high asks for more than a place", card(PolicyFair, 4), nil, high(asking(26)), "under policy fair"},
		{"fair: high beside all others", card(PolicyFair, 2), many(2, weighing(1)), high(weighing(1)), ""},
		{"fair: one place", card(PolicyFair, 1), nil, weighing(1), ""},
		{"fair: one place, taken", card(PolicyFair, 1), many(1, weighing(1)), weighing(1), "asked for 100 % of the GPU's time, but 0 % are free"},

		{"fixed: all percentages", card(PolicyFixed, 20), []Share{asking(30), asking(50)}, asking(20), ""},
		{"fixed: one percent too many", card(PolicyFixed, 20), []Share{asking(30), asking(50)}, asking(21),
			"asked for 21 % of the GPU's time, but 20 % are free"},
		{"fixed: weights", card(PolicyFixed, 8), []Share{weighing(5)}, weighing(3), ""},
		{"fixed: one weight too many", card(PolicyFixed, 8), []Share{weighing(5)}, weighing(4),
			"asked for 50 % of the GPU's time, but 37.5 % are free"},
		{"fixed: weights and percentages", card(PolicyFixed, 20), []Share{weighing(10)}, asking(51), "51 %"},
		{"fixed: all of it, alone", card(PolicyFixed, 20), nil, weighing(20), ""},
		{"fixed: all of it, by weight", card(PolicyFixed, 20), []Share{asking(1)}, weighing(20),
			"asked for 100 % of the GPU's time, but 99 % are free"},
		{"fixed: all of it, by percentage", card(PolicyFixed, 20), []Share{asking(1)}, asking(100), "asked for 100 %"},
		{"fixed: beside all of it, by weight", card(PolicyFixed, 20), []Share{weighing(20)}, asking(1),
			"asked for 1 % of the GPU's time, but 0 % are free"},
		{"fixed: beside more than all of it", card(PolicyFixed, 20), []Share{weighing(64)}, asking(1), "0 % are free"},
		{"fixed: beside promises that are too many already", card(PolicyFixed, 2), many(5, weighing(1)), weighing(1), "0 % are free"},
		{"fixed: high without a percentage promises nothing", card(PolicyFixed, 20), []Share{asking(100), high(weighing(5))},
			high(weighing(20)), ""},
		{"fixed: high with a percentage", card(PolicyFixed, 20), []Share{asking(60)}, high(asking(41)), "40 % are free"},

		{"preempt: percentages", card(PolicyPreempt, 20), []Share{asking(60), weighing(1)}, asking(40), ""},
		{"preempt: too many", card(PolicyPreempt, 20), []Share{asking(60), weighing(1)}, asking(41), "40 % are free"},
		{"preempt: 100 % beside one", card(PolicyPreempt, 20), []Share{asking(1)}, asking(100), "99 % are free"},
		{"preempt: one beside 100 %", card(PolicyPreempt, 20), []Share{asking(100)}, asking(1), "0 % are free"},
		{"preempt: without a percentage, beside 100 %", card(PolicyPreempt, 20), []Share{asking(100)}, weighing(1), ""},
		{"weight-preempt: weights are no promises", card(PolicyWeight, 2), many(9, weighing(64)), weighing(64), ""},
		{"weight-preempt: percentages are", card(PolicyWeight, 2), []Share{asking(70)}, asking(31), "30 % are free"},

		{"soft: percentages are no promises", card(PolicySoft, 20), []Share{asking(70), asking(100)}, asking(70), ""},
		{"native: weights", card(PolicyNative, 20), many(9, weighing(9)), weighing(9), ""},
		{"native: a percentage", card(PolicyNative, 20), nil, asking(1), "its policy is native, which enforces no share"},
	} {
		err := c.card.Admit(c.others, c.share)
		if c.refused == "" {
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			continue
		}
		r, ok := errors.AsType[*Reason](err)
		if !ok || !strings.Contains(r.Reason, c.refused) || r.Remedy == "" || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: got %v, want a Reason with %q", c.name, err, c.refused)
		}
	}
}

// TestAdmitOneByOne: whoever was admitted one after the other has caps that fit into the GPU.
func TestAdmitOneByOne(t *testing.T) {
	for p := PolicyFair; p <= PolicyFixed; p++ {
		c := card(p, 7)
		var in []Share
		for i := range 200 {
			s := Share{Weight: 1 + i*5%9, Percent: max(0, i*13%40-20), Priority: quota.Priority(i % 3)}
			if c.Admit(in, s) == nil {
				in = append(in, s)
			}
		}
		sum := Permille(0)
		for _, s := range in {
			n, _ := c.Cap(s)
			sum += n
		}
		if sum > Whole || p != PolicyPreempt && sum < 900 {
			t.Errorf("%v: caps of %v in all", p, sum)
		}
	}
}

func TestPermille(t *testing.T) {
	for p, want := range map[Permille]string{0: "0 %", 15: "1.5 %", 125: "12.5 %", 333: "33.3 %", 300: "30 %", Whole: "100 %"} {
		if got := p.String(); got != want {
			t.Errorf("%d: %q, want %q", int(p), got, want)
		}
	}
}
