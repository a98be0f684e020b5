// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"slices"
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestTrouble: a GPU reports Xids, is lost to whoever uses it, and comes back with what it had; another is not concerned.
func TestTrouble(t *testing.T) {
	_, path := startServer(t)
	c := dial(t, path, 0, 1)
	u := newGPUUser(t, c, 1)
	h, _, st := u.memory(2 << 20)
	if st != 0 {
		t.Fatalf("%#x", st)
	}
	trouble := func(x Trouble) {
		t.Helper()
		if err := c.Trouble(x); err != nil {
			t.Fatal(err)
		}
	}
	trouble(Trouble{GPU: 0, Xids: []uint64{31, 79}, Lost: new(true)})
	s, err := c.Snapshot()
	if g := s.GPUs; err != nil || !slices.Equal(g[0].Xids, []uint64{31, 79}) || !g[0].Lost || g[1].Xids != nil || g[1].Lost {
		t.Errorf("%v %+v", err, s.GPUs)
	}
	if _, _, st := u.memory(2 << 20); st != rm.StatusGPUIsLost {
		t.Errorf("an allocation: %#x", st)
	}
	if st := u.control(u.subd, 0x20800110, make([]byte, 68)); st != rm.StatusGPUIsLost {
		t.Errorf("a control: %#x", st)
	}
	trouble(Trouble{GPU: 0, Lost: new(false)})
	if _, _, st := u.memory(2 << 20); st != 0 {
		t.Errorf("back: %#x", st)
	}
	if st := u.free(h); st != 0 {
		t.Errorf("what it had: %#x", st)
	}
	if err := c.Trouble(Trouble{GPU: 7}); err == nil {
		t.Error("there is no GPU 7")
	}
	if err := c.Trouble(Trouble{Xids: make([]uint64, maxXids)}); err == nil {
		t.Error("Xids without an end")
	}
}
