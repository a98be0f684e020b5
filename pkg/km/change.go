// SPDX-License-Identifier: Apache-2.0

package km

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// MaxWrite bounds what is written at once; cGPU takes 15 characters of a memsize, and fewer elsewhere.
const MaxWrite = 15

// ErrReadOnly says that a file cannot be written to.
var ErrReadOnly = errors.New("it can be read only")

// Change is what a text that is written asks of the ledger: of a GPU's card, or of a slice.
type Change struct {
	Slice Slice
	Card  func(*sched.Card) // nil: Settings
	ledger.Settings
}

// Request is the part of the ledger's request that the text decides.
func (c Change) Request() ledger.ChangeRequest {
	return ledger.ChangeRequest{Only: []string{c.Slice.GPU}, Settings: c.Settings}
}

// Change reads what was written to a file: a plain number, with or without a newline. Whether the change fits beside other
// containers is for the ledger to say.
func (f File) Change(text []byte) (Change, error) {
	c := Change{Slice: f.Slice}
	if f.Kind.Mode()&0o222 == 0 {
		return c, ErrReadOnly
	}
	if len(text) > MaxWrite {
		return c, fmt.Errorf("%d characters: want a number of %d at most", len(text), MaxWrite)
	}
	number := func(low, high uint64) (uint64, error) {
		word := strings.TrimSpace(strings.TrimRight(string(text), "\x00"))
		n, err := strconv.ParseUint(word, 10, 64)
		if err != nil || n < low || n > high {
			return 0, fmt.Errorf("%q: want a number from %d to %d", word, low, high)
		}
		return n, nil
	}
	card := func(low, high int, set func(*sched.Card, int)) (Change, error) {
		n, err := number(uint64(low), uint64(high))
		c.Card = func(card *sched.Card) { set(card, int(n)) }
		return c, err
	}
	switch f.Kind {
	case MaxInst:
		return card(1, sched.MaxMaxInst, func(c *sched.Card, n int) { c.MaxInst = n })
	case Policy:
		return card(int(sched.PolicyFair), int(sched.PolicyNative), func(c *sched.Card, n int) { c.Policy = sched.Policy(n) })
	case PrioRatio:
		return card(sched.MinPrioRatio, sched.MaxPrioRatio, func(c *sched.Card, n int) { c.PrioRatio = n })
	case MemSize:
		n, err := number(uint64(quota.MiB), 1<<50)
		limit := quota.Bytes(n)
		c.Limit = &limit
		return c, err
	case Weight:
		n, err := number(1, quota.MaxWeight)
		weight := int(n)
		c.Weight = &weight
		return c, err
	}
	return c, ErrReadOnly
}
