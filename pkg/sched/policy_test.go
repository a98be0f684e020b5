// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"strconv"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
)

func TestParsePolicy(t *testing.T) {
	for i, name := range PolicyNames() {
		want := Policy(i)
		for _, s := range []string{name, strconv.Itoa(i)} {
			if got, err := ParsePolicy(s); err != nil || got != want {
				t.Errorf("%q: got %v, %v; want %v", s, got, err, want)
			}
		}
		if want.String() != name {
			t.Errorf("policy %d is called %q, want %q", i, want, name)
		}
	}
	if got, err := ParsePolicy("weight"); err != nil || got != PolicyWeight {
		t.Errorf("weight: got %v, %v", got, err)
	}
	for _, s := range []string{"", "6", "-1", "01", " 1", "Fair", "weight-preempt ", "average"} {
		if got, err := ParsePolicy(s); err == nil || !strings.Contains(err.Error(), strconv.Quote(s)) {
			t.Errorf("%q: got %v, %v; want an error that quotes it", s, got, err)
		}
	}
	if got := Policy(6).String() + Policy(-1).String(); got != "6-1" {
		t.Errorf("policies that are none are called %s", got)
	}
}

func TestPolicyNames(t *testing.T) {
	PolicyNames()[0] = "mine"
	if got := PolicyFair.String(); got != "fair" {
		t.Errorf("a caller changed the name of fair to %s", got)
	}
}

func TestValidate(t *testing.T) {
	for _, c := range []struct {
		card Card
		want string // "": good
	}{
		{Card{PolicyFair, 1, 20}, ""},
		{Card{PolicyNative, 64, 99}, ""},
		{Card{Policy: 6, MaxInst: 1, PrioRatio: 99}, `policy "6"`},
		{Card{Policy: -1, MaxInst: 1, PrioRatio: 99}, `policy "-1"`},
		{Card{PolicyFair, 0, 99}, "max-inst 0: want 1 to 64"},
		{Card{PolicyFair, 65, 99}, "max-inst 65"},
		{Card{PolicyFair, 1, 19}, "prio-ratio 19: want 20 to 99 percent"},
		{Card{PolicyFair, 1, 100}, "prio-ratio 100"},
	} {
		err := c.card.Validate()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: got %v, want %q", c.card, err, c.want)
		}
	}
}

func TestEffective(t *testing.T) {
	ones, three := []Share{{Weight: 1}, {Weight: 1}}, []Share{{Weight: 1}, {Weight: 3}}
	for p := PolicyFair; p <= PolicyNative; p++ {
		c := Card{p, 20, 99}
		want := p
		if got := c.Effective(ones); got != want {
			t.Errorf("%v with weights of 1: %v", p, got)
		}
		if p == PolicyPreempt {
			want = PolicyWeight
		}
		if got := c.Effective(three); got != want {
			t.Errorf("%v with a weight of 3: %v, want %v", p, got, want)
		}
		if got := c.Effective(nil); got != p {
			t.Errorf("%v without containers: %v", p, got)
		}
	}
	// A weight is no more than cGPU's rule looks at.
	if got := (Card{PolicyPreempt, 20, 99}).Effective([]Share{{Weight: 1, Percent: 50, Priority: quota.PriorityHigh}}); got != PolicyPreempt {
		t.Errorf("preempt with a percentage and a high priority: %v", got)
	}
}
