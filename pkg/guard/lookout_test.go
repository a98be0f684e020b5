// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/peerpage"
)

// watchers are guards of one GPU, each with how often it asked the driver and how often it was woken.
type watchers struct {
	t      *testing.T
	guards []*Guard
	asked  []int
	rung   []uint32
	pids   []int // who has the GPU
}

func newWatchers(t *testing.T, n int) *watchers {
	w := &watchers{t: t, asked: make([]int, n), rung: make([]uint32, n)}
	dir := t.TempDir()
	for i := range n {
		g := newFakeGuard(t, answering(0, nil))
		g.cfg.RunDir, g.cfg.Nonce, g.cgroups.cpu = dir, fmt.Sprint("n", i), t.TempDir()
		g.sentFDs.inCgroup = func(int) bool { return false }
		g.sentFDs.pids = func() []int { w.asked[i]++; return w.pids }
		w.guards = append(w.guards, g)
		w.run(i, 0)
		g.sentFDs.lookouts = g.joinLookouts()
	}
	return w
}

func (w *watchers) lookout(i int) *lookout { return w.guards[i].sentFDs.lookouts[0] }

// run has a container use CPU time.
func (w *watchers) run(i, until int) {
	w.t.Helper()
	if err := os.WriteFile(filepath.Join(w.guards[i].cgroups.cpu, "cpu.stat"),
		fmt.Append(nil, "usage_usec ", until, "\n"), 0o600); err != nil {
		w.t.Fatal(err)
	}
}

// look has each guard do what it does when it is its turn, so many times. It returns how many looked, and how often each was woken.
func (w *watchers) look(times int) (lookers int, woken []int) {
	looked := map[int]bool{}
	for range times {
		for i, g := range w.guards {
			x := w.lookout(i)
			if !x.elected() {
				continue
			}
			looked[i] = true
			x.ask, x.rest = time.Time{}, time.Time{} // or nobody would be asked: all is at rest, and no second goes by
			x.everywhere = time.Now().Add(time.Hour)
			g.lookForAll(x)
			x.promise(time.Minute)
		}
	}
	for i := range w.guards {
		rung := w.lookout(i).page.Rung()
		woken = append(woken, int(rung-w.rung[i]))
		w.rung[i] = rung
	}
	return len(looked), woken
}

func (w *watchers) want(what string, times, each int) {
	w.t.Helper()
	lookers, woken := w.look(times)
	for i, n := range woken {
		if n != each {
			w.t.Errorf("%s: guard %d was woken %d times, want %d", what, i, n, each)
		}
	}
	if lookers != 1 {
		w.t.Errorf("%s: %d guards looked", what, lookers)
	}
}

// TestAtRest: of many guards at rest one asks the driver, and the others do nothing at all. What is new wakes each of them once.
func TestAtRest(t *testing.T) {
	const n = 12
	w := newWatchers(t, n)
	own := newStranger(t, true, fakeControl)
	w.pids = []int{own.pid(), os.Getpid()}
	w.want("somebody outside has the GPU", 1, 1)
	w.want("at rest", 50, 0)
	if w.asked[0] == 0 || w.asked[0] > 51 {
		t.Errorf("who looks asked %d times", w.asked[0])
	}
	for i, asked := range w.asked[1:] {
		if asked != 0 {
			t.Errorf("guard %d asked %d times", i+1, asked)
		}
	}
	w.pids = append(w.pids, newStranger(t, true, "").pid())
	time.Sleep(holdersAge) // an answer is shared for so long
	w.want("another one has it", 10, 1)
	w.pids = w.pids[:1]
	time.Sleep(holdersAge)
	w.want("one has it no more", 10, 0)
}

// TestLookerGone: who takes over tells all guards anew what there is, as the one before may have ended before he did.
func TestLookerGone(t *testing.T) {
	w := newWatchers(t, 3)
	w.pids = []int{newStranger(t, true, fakeControl).pid()}
	w.want("the first", 5, 1)
	w.lookout(0).leave()
	w.guards = append(w.guards[1:], w.guards[0])
	w.rung[0], w.rung[1], w.rung[2] = w.rung[1], w.rung[2], w.lookout(2).page.Rung()
	if _, woken := w.look(5); woken[0] != 2 || woken[1] != 2 { // by the one who resigns, too
		t.Errorf("woken %v", woken)
	}
}

// TestRan: a guard that waits for it is told when its container has used CPU time, once; another one is not.
func TestRan(t *testing.T) {
	w := newWatchers(t, 3)
	for i := range w.guards {
		w.lookout(i).page.AwaitRan()
	}
	w.want("what was used before is not known", 3, 1)
	w.lookout(1).page.AwaitRan()
	w.lookout(2).page.AwaitRan()
	w.want("all sleep", 10, 0)
	w.run(0, 7)
	w.run(1, 7)
	if _, woken := w.look(10); woken[0] != 0 || woken[1] != 1 || woken[2] != 0 {
		t.Errorf("woken %v", woken)
	}
	if err := os.Remove(filepath.Join(w.guards[2].cgroups.cpu, "cpu.stat")); err != nil {
		t.Fatal(err)
	}
	w.lookout(0).usage[w.lookout(2).page.Place()].close()
	if _, woken := w.look(10); woken[2] != 1 {
		t.Errorf("of one of which nobody can tell: woken %v", woken)
	}
}

// TestSilentDriver: where the one that looks gets no answer the others are woken, to ask themselves.
func TestSilentDriver(t *testing.T) {
	w := newWatchers(t, 3)
	w.guards[0].sentFDs.pids, w.lookout(0).gpu = nil, 7 // its client has no such GPU
	w.want("no answer", 4, 4)
	w.guards[1].checkOutsiders()
	if w.asked[1] == 0 {
		t.Error("another guard did not ask")
	}
}

// TestSheltered: that a process of a container's has the GPU now wakes nobody.
func TestSheltered(t *testing.T) {
	w := newWatchers(t, 3)
	inside := newStranger(t, true, fakeControl)
	start, err := ledger.ProcStart(inside.pid())
	if err != nil {
		t.Fatal(err)
	}
	reserveOther(t, w.guards[0], ledger.Record{Socket: "s", InitPID: inside.pid(), InitStart: start})
	w.pids = []int{inside.pid(), newStranger(t, false, fakeControl).pid()}
	w.want("processes of a container and of the host", 5, 0)
}

// TestMapsAtRest: while its container uses no CPU time a guard does not look at memory maps, and each time that it is told of some it does.
func TestMapsAtRest(t *testing.T) {
	w := newWatchers(t, 1)
	g, page := w.guards[0], w.lookout(0).page
	looks := make(chan struct{}, 100)
	g.cfg.Settings.Managed = device.ManagedLimit
	g.cgroups.cpu = "" // not told: each look reads the maps
	g.managed.watching, g.managed.ran = true, make(chan struct{}, 1)
	g.managed.procs = map[int][]span{1: nil}
	g.managed.pids = func() []int { looks <- struct{}{}; return nil }
	g.account.clients[1] = &client{}
	g.managed.looker.Store(page)
	ended := make(chan struct{})
	go func() { g.watchMaps(); close(ended) }()
	go g.hear(w.lookout(0))
	for range 3 {
		eventually(t, "it waits to be told", func() bool {
			for m := range page.Members() {
				return m.Awaits
			}
			return false
		})
		if len(looks) != 0 {
			t.Fatal("it looks without a reason")
		}
		page.Wake(page.Place(), peerpage.Ran)
		select {
		case <-looks:
		case <-time.After(patience):
			t.Fatal("it does not look")
		}
	}
	close(g.done)
	w.lookout(0).leave()
	<-ended
}

// TestSlowLook: however long a look takes, the next second guards are told that their containers have run.
func TestSlowLook(t *testing.T) {
	w := newWatchers(t, 2)
	looked := make(chan struct{})
	var once sync.Once
	w.guards[0].sentFDs.pids = func() []int {
		once.Do(func() {
			for begin := threadTime(); threadTime()-begin < 300*time.Millisecond; { // a hundred times as long are 30 s
			}
			close(looked)
		})
		return nil
	}
	x := w.lookout(0)
	if !x.elected() {
		t.Fatal("not elected")
	}
	go w.guards[0].keepLookout(x)
	defer close(w.guards[0].done)
	<-looked
	p := w.lookout(1).page
	w.run(1, 1000)
	p.AwaitRan()
	for begin := time.Now(); p.News()&peerpage.Ran == 0; time.Sleep(10 * time.Millisecond) {
		if time.Since(begin) > 15*time.Second {
			t.Fatal("not told")
		}
	}
}
