// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"sync/atomic"
	"time"
)

// clock holds a moment, for readers in other goroutines. It keeps the monotonic reading: setting the node's clock makes
// nothing late.
type clock struct{ at atomic.Pointer[time.Time] }

func (c *clock) Store(t time.Time) { c.at.Store(&t) }

// Load returns the moment; the zero time before the first Store.
func (c *clock) Load() time.Time {
	if t := c.at.Load(); t != nil {
		return *t
	}
	return time.Time{}
}
