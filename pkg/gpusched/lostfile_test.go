// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"testing"
	"time"
)

// TestLostFile: a client whose file is not found is off until it is, also over a pause of the container.
func TestLostFile(t *testing.T) {
	const other = fakeClient + 1
	c := newFakeContainer(t, 1)
	lost := c.client(other)
	seen, hidden := c.channels(fakeClient, workGroup, 0x5c000200, 2), c.channels(other, workGroup, 0x5c000300, 3)
	x := c.gpu()
	look := func() { x.apply(c.Groups(0), true) }
	look()
	c.isOff()
	c.mu.Lock()
	c.hidden[lost] = true
	c.mu.Unlock()
	look()
	c.isOff() // its process may just be ending
	now := c.Now()
	x.step(now)
	if _, set, verify := x.follow(now, c.Groups(0)); !set || verify {
		t.Errorf("it is not looked for before timeslices are read back: %v, %v", set, verify)
	}
	time.Sleep(absentAfter)
	look()
	c.isOff(hidden)
	if n := c.noted(0); n != 3 {
		t.Errorf("the rescuer knows of %d channels", n)
	}
	c.turn(x, true)
	c.isOff(seen, hidden)
	c.turn(x, false)
	c.isOff(hidden)
	c.mu.Lock()
	delete(c.hidden, lost)
	c.mu.Unlock()
	eventually(t, "it is found", func() bool {
		look()
		return c.d.offNow() == 0
	})
	if n := c.noted(0); n != 0 {
		t.Errorf("the rescuer thinks that %d channels are off", n)
	}
}
