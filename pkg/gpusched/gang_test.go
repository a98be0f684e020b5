// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/peerpage"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// TestGangOf: a number for the same shared GPUs in any order.
func TestGangOf(t *testing.T) {
	gpus := func(uuids ...string) (list []guardcfg.GPU) {
		for _, uuid := range uuids {
			list = append(list, guardcfg.GPU{GPU: device.GPU{UUID: uuid}})
		}
		return list
	}
	whole := append(gpus("a", "b", "c"), guardcfg.GPU{GPU: device.GPU{UUID: "d"}, Native: true})
	ab := gang(gpus("a", "b"))
	if ab == 0 || ab != gang(gpus("b", "a")) || ab == gang(gpus("a", "b", "c")) || gang(whole) != gang(gpus("a", "b", "c")) {
		t.Error("not the same for the same GPUs")
	}
	if gang(gpus("a")) != 0 || gang(nil) != 0 || gang(whole[2:]) != 0 {
		t.Error("a gang of one GPU")
	}
}

// TestGangSlots: a gang's slots are kept where the rows of all GPUs have the same, but for those on which the container has no work, and
// caps in any case.
func TestGangSlots(t *testing.T) {
	c := newFakeContainer(t, 2)
	for _, x := range c.gpus {
		x.active.Store(true)
		x.joinPage(peerpage.Join)
		x.step(c.Now())
	}
	off := sched.Slot{Start: 59 * time.Second, On: time.Second, Cycle: time.Minute}
	if on, until := off.Phase(c.Now()); on || until-c.Now() < 10*time.Second {
		off.Start = 20 * time.Second
	}
	other := off
	other.On /= 2
	for _, test := range []struct {
		what  string
		slots [2]sched.Slot
		gang  [2]bool
		busy  [2]int
		off   [2]bool
		kept  bool
	}{
		{"the same", [2]sched.Slot{off, off}, [2]bool{true, true}, [2]int{1, 1}, [2]bool{true, true}, true},
		{"none on one", [2]sched.Slot{off, {}}, [2]bool{true, false}, [2]int{1, 1}, [2]bool{}, false},
		{"another", [2]sched.Slot{off, other}, [2]bool{true, true}, [2]int{1, 1}, [2]bool{}, false},
		{"no work on one", [2]sched.Slot{off, {}}, [2]bool{true, false}, [2]int{1, 0}, [2]bool{true, false}, true},
		{"no gang's", [2]sched.Slot{off, {}}, [2]bool{}, [2]int{1, 1}, [2]bool{true, false}, true},
		{"beside no gang's", [2]sched.Slot{off, off}, [2]bool{true, false}, [2]int{1, 1}, [2]bool{false, true}, false},
	} {
		for i, uuid := range []string{"GPU-0", "GPU-1"} {
			p, err := peerpage.Open(c.Config.RunDir, uuid)
			if err != nil {
				t.Fatal(err)
			}
			guests := p.Guests(nil)
			if len(guests) != 1 || guests[0].Gang.GPUs == 0 {
				t.Fatalf("%s: %+v", uuid, guests)
			}
			p.Put(guests[0], &sched.Verdict{Row: sched.Row{Slice: time.Millisecond, Slot: test.slots[i]}, Until: c.Now() + time.Hour,
				Adopted: guests[0].Adopted, Busy: test.busy[i], Gang: test.gang[i]}, false)
			p.Close()
		}
		c.agree(c.Now())
		for _, uuid := range []string{"GPU-0", "GPU-1"} {
			p, err := peerpage.Open(c.Config.RunDir, uuid)
			if err != nil {
				t.Fatal(err)
			}
			if g := p.Guests(nil)[0].Gang; g.Kept != test.kept {
				t.Errorf("%s: the arbiter of %s is told %+v", test.what, uuid, g)
			}
			p.Close()
		}
		for i, x := range c.gpus {
			if got, _ := x.wanted(c.Now()); got != test.off[i] {
				t.Errorf("%s: off on GPU %d: %v, want %v", test.what, i, got, test.off[i])
			}
		}
	}
}
