// SPDX-License-Identifier: Apache-2.0

package peerpage

import (
	"testing"

	"github.com/opencgpu/cgpu/pkg/sched"
)

// TestRejoin: the program that goes on in the place of another one of the same process has its entry, with what stands there; another
// process' entry, or none, it does not get.
func TestRejoin(t *testing.T) {
	dir := t.TempDir()
	first, err := Join(dir, "GPU-1")
	if err != nil {
		t.Fatal(err)
	}
	first.Tell(Guard{Plan: sched.Plan{Share: sched.Share{Weight: 7}}, Contexts: 3})
	first.TellChannels(5)
	again, err := Rejoin(dir, "GPU-1", first.Place())
	if err != nil || again.Place() != first.Place() {
		t.Fatalf("place %d, want %d: %v", again.Place(), first.Place(), err)
	}
	if list := again.Guests(nil); len(list) != 1 || list[0].Share.Weight != 7 || list[0].Contexts != 3 {
		t.Errorf("%+v", list)
	}
	for _, place := range []int{-1, 0, 200, Entries + 1} {
		if e, err := Rejoin(dir, "GPU-1", place); err != nil || e.Place() == first.Place() || e.Place() < 1 {
			t.Errorf("place %d: %d, %v", place, e.Place(), err)
		}
	}
	first.store32(first.at+offOwner, 1) // somebody else's, who is gone
	if e, err := Rejoin(dir, "GPU-1", first.Place()); err != nil || len(e.Guests(nil)) != 0 {
		t.Errorf("what stood there for another process: %+v, %v", e.Guests(nil), err)
	}
}
