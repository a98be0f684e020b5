// SPDX-License-Identifier: Apache-2.0

package exporter

import (
	"io"
	"sync"
	"testing"
	"time"
)

// TestAgain: what was made a moment ago is not made again, however many ask, and they may read it at once.
func TestAgain(t *testing.T) {
	c := full(t)
	now := time.Now()
	c.now = func() time.Time { return now }
	first, err := c.Gather()
	must(t, err)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			if err := c.Text(io.Discard); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	again, err := c.Gather()
	must(t, err)
	if len(first) == 0 || first[0] != again[0] {
		t.Error("all series were made again")
	}
}
