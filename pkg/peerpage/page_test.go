// SPDX-License-Identifier: Apache-2.0

package peerpage

import (
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

const testGPU = "GPU-0"

func join(t testing.TB, dir string) *Entry {
	t.Helper()
	done := make(chan *Entry, 1)
	go func() {
		e, err := Join(dir, testGPU)
		if err != nil {
			t.Error(err)
		}
		done <- e
	}()
	select {
	case e := <-done:
		if t.Failed() {
			t.FailNow()
		}
		return e
	case <-time.After(time.Minute):
		t.Fatal("no place on the page: the file is locked")
		return nil
	}
}

func open(t testing.TB, dir string) *Page {
	t.Helper()
	p, err := Open(dir, testGPU)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// ended is the number of a process that is gone.
func ended(t *testing.T) int {
	t.Helper()
	cmd := exec.Command("true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	return cmd.Process.Pid
}

func someGuard(weight int) Guard {
	return Guard{Plan: sched.Plan{Card: sched.Card{Policy: sched.PolicySoft, MaxInst: 7, PrioRatio: 80},
		Share: sched.Share{Weight: weight, Percent: 40, Priority: quota.PriorityHigh}, Cap: 400,
		Slot: sched.Slot{Start: 1, On: 2, Cycle: 3}, Suspended: true}, Adopted: 99, Contexts: 7, Pressing: true, PIDs: []int{1, 4711, 1 << 22}}
}

func someVerdict() sched.Verdict {
	return sched.Verdict{Row: sched.Row{Slice: 1, Slot: sched.Slot{Start: 2, On: 3, Cycle: 4}}, At: 5, Until: 1<<63 - 1, Adopted: 7, Busy: 8,
		Exact: true, Look: true, Gang: true,
		Lately: 9, Entitled: 10, Open: 11, Account: sched.Account{UpTo: 12,
			Usage:   sched.Usage{GPUTime: 13, Waiting: 14, Switches: 15, Preemptions: 16},
			Granted: 17, Resident: sched.Resident{On: true, PID: 18, Context: 19, Since: 20, Resting: true}}}
}

// TestPage: what a guard says comes to the arbiter, a row to its guard, each field of both.
func TestPage(t *testing.T) {
	dir := t.TempDir()
	a, b, arbiter := join(t, dir), join(t, dir), open(t, dir)
	if a.Place() == b.Place() || arbiter.Living() != 2 || len(arbiter.Guests(nil)) != 0 {
		t.Fatalf("places %d and %d, %d live", a.Place(), b.Place(), arbiter.Living())
	}
	want := someGuard(3)
	b.TellGang(4711, false)
	b.Tell(want)
	guests := arbiter.Guests(nil)
	if g := guests[0].Gang; g.GPUs != 4711 || g.Order == 0 {
		t.Errorf("gang %+v", g)
	}
	for _, kept := range []bool{true, false} {
		b.TellGang(4711, kept)
		if g := arbiter.Guests(guests)[0].Gang; g.GPUs != 4711 || g.Kept != kept {
			t.Errorf("gang %+v, kept %v", g, kept)
		}
	}
	if len(guests) != 1 || !reflect.DeepEqual(guests[0].Guard, want) || guests[0].Place != b.Place() {
		t.Fatalf("%+v, want %+v", guests, want)
	}
	if _, ok := b.Row(); ok {
		t.Error("a row before there was one")
	}
	row := someVerdict()
	seen := b.Rung()
	if arbiter.Put(guests[0], &row, false); b.Rung() != seen {
		t.Error("a guard is woken by what is nothing new")
	}
	if arbiter.Put(guests[0], &row, true); b.Rung() == seen {
		t.Error("a guard is not woken")
	}
	if got, ok := b.Row(); !ok || !reflect.DeepEqual(got, row) {
		t.Errorf("%+v, want %+v", got, row)
	}
	if _, ok := a.Row(); ok {
		t.Error("another guard has it too")
	}
	if pid, at, ok := arbiter.Leader(); ok {
		t.Errorf("%d leads since %v", pid, at)
	}
	if err := arbiter.Lead(); err != nil {
		t.Fatal(err)
	}
	arbiter.Stepped(5, Found{Pace: 6, Ahead: 7, Amiss: 8})
	if pid, at, ok := a.Leader(); !ok || pid != os.Getpid() || at != 5 || a.Found() != (Found{Pace: 6, Ahead: 7, Amiss: 8}) {
		t.Errorf("%d at %v, %v, %+v", pid, at, ok, a.Found())
	}
	st, err := os.Stat(filepath.Join(dir, "board", testGPU+".2"))
	if err != nil || st.Mode().Perm() != 0o600 || st.Size() != pageSize {
		t.Errorf("%v, %v", st, err)
	}
}

// TestWakes: a change wakes who waits, and what is none does not.
func TestWakes(t *testing.T) {
	dir := t.TempDir()
	e, arbiter := join(t, dir), open(t, dir)
	g := someGuard(1)
	e.Tell(g)
	seen := arbiter.Generation()
	if e.Tell(g); arbiter.Generation() != seen {
		t.Error("woken by nothing")
	}
	rung := e.Rung()
	for what, c := range map[string]struct{ wait, change func() }{
		"a guard's part": {func() { arbiter.Await(seen) }, func() { g.Contexts++; e.Tell(g) }},
		"a row": {func() { e.AwaitRing(rung) }, func() {
			v := someVerdict()
			arbiter.Put(arbiter.Guests(nil)[0], &v, true)
		}},
	} {
		woken := make(chan struct{})
		go func() {
			c.wait()
			close(woken)
		}()
		select {
		case <-woken:
			t.Errorf("%s: it does not wait", what)
		case <-time.After(2 * time.Millisecond): // it most likely sleeps by now
		}
		c.change()
		select {
		case <-woken:
		case <-time.After(time.Minute):
			t.Errorf("%s wakes nobody", what)
		}
		c.wait() // what has been is not waited for
	}
	seen = arbiter.Generation()
	if e.Leave(); arbiter.Generation() == seen {
		t.Error("who leaves wakes nobody")
	}
}

// TestOfTheDead: who is gone is not seen, his place is used again, and what was meant for him is not believed.
func TestOfTheDead(t *testing.T) {
	for name, kill := range map[string]func(b *Entry){
		"he ended":                  func(b *Entry) { b.u32(b.at + offOwner).Store(uint32(ended(t))) },
		"his number is another's":   func(b *Entry) { b.u64(b.at + offStart).Add(1) },
		"he left":                   func(b *Entry) { b.Leave() },
		"his number is out of mind": func(b *Entry) { b.u32(b.at + offOwner).Store(1 << 31) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			a, b, arbiter := join(t, dir), join(t, dir), open(t, dir)
			a.Tell(someGuard(1))
			b.Tell(someGuard(5))
			guests := arbiter.Guests(nil)
			was := guests[1]
			was.holder++ // of another start time: in this test all are one process
			kill(b)
			if guests = arbiter.Guests(guests); len(guests) != 1 || guests[0].Place != a.Place() {
				t.Fatalf("%+v", guests)
			}
			c := join(t, dir)
			if c.Place() != b.Place() {
				t.Errorf("place %d is taken although %d is free", c.Place(), b.Place())
			}
			row := someVerdict()
			arbiter.Put(was, &row, true)
			if _, ok := c.Row(); ok {
				t.Error("the new one believes what the old one was told")
			}
			if guests = arbiter.Guests(guests); len(guests) != 1 {
				t.Errorf("the new one says what the old one said: %+v", guests)
			}
		})
	}
}

// TestFull: the last place can be had, and then none until somebody leaves.
func TestFull(t *testing.T) {
	dir := t.TempDir()
	first := join(t, dir)
	for i := 2; i <= Entries; i++ {
		if e := join(t, dir); e.Place() != i {
			t.Fatalf("place %d", e.Place())
		}
	}
	if e, err := Join(dir, testGPU); err == nil {
		t.Fatalf("place %d", e.Place())
	}
	first.Leave()
	if e := join(t, dir); e.Place() != 1 {
		t.Errorf("place %d", e.Place())
	}
}

// TestBroken: a file that is none of ours, or of which the making was broken off, is begun anew.
func TestBroken(t *testing.T) {
	for name, text := range map[string][]byte{"empty": nil, "another version": slices.Repeat([]byte{7}, pageSize), "short": {1, 2, 3}} {
		dir := t.TempDir()
		if err := os.MkdirAll(filepath.Join(dir, "board"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(Path(dir, testGPU), text, 0o600); err != nil {
			t.Fatal(err)
		}
		e := join(t, dir)
		e.Tell(someGuard(1))
		if guests := e.Guests(nil); e.Place() != 1 || len(guests) != 1 {
			t.Errorf("%s: place %d, %+v", name, e.Place(), guests)
		}
	}
}

// TestOtherChannels: nobody counts himself, or who is gone.
func TestOtherChannels(t *testing.T) {
	dir := t.TempDir()
	a, b := join(t, dir), join(t, dir)
	a.TellChannels(7)
	b.TellChannels(9)
	if n := a.OtherChannels(); n != 9 {
		t.Errorf("%d", n)
	}
	b.Leave()
	if n := a.OtherChannels(); n != 0 {
		t.Errorf("%d of who has left", n)
	}
}

// TestKilledWhileWriting: whoever is killed after any store, what is read is what was written before or after it, whole.
func TestKilledWhileWriting(t *testing.T) {
	dir := t.TempDir()
	e, arbiter := join(t, dir), open(t, dir)
	type killed struct{}
	dies := func(p *Page, after int, write func()) (died bool) {
		n := 0
		p.Stored = func() {
			if n++; n == after {
				panic(killed{})
			}
		}
		defer func() {
			p.Stored = nil
			if died = recover() != nil; !died && after > 0 && n >= after {
				t.Error("it lives")
			}
		}()
		write()
		return false
	}
	old, fresh := someGuard(1), someGuard(2)
	fresh.PIDs, fresh.Contexts = []int{9, 8, 7, 6, 5}, 99
	e.Tell(old)
	guest := arbiter.Guests(nil)[0]
	for n := 1; ; n++ {
		died := dies(e.Page, n, func() { e.Tell(fresh) })
		if got := arbiter.Guests(nil)[0].Guard; !reflect.DeepEqual(got, old) && !reflect.DeepEqual(got, fresh) {
			t.Fatalf("killed after %d stores: %+v", n, got)
		}
		if !died {
			break
		}
		e.Tell(Guard{}) // of a successor
		e.Tell(old)
	}
	before, after := someVerdict(), someVerdict()
	after.GPUTime, after.UpTo, after.Slot.Cycle, after.PID = 1<<40, 1<<41, 1<<20, 1
	for n := 1; ; n++ {
		arbiter.Put(guest, &before, false)
		died := dies(arbiter, n, func() { arbiter.Put(guest, &after, false) })
		if got, ok := e.Row(); !ok || !reflect.DeepEqual(got, before) && !reflect.DeepEqual(got, after) {
			t.Fatalf("killed after %d stores: %v, %+v", n, ok, got)
		}
		if !died {
			break
		}
	}
	set, next := sched.Setting{Slice: 1, From: 2, To: 3}, sched.Setting{Slice: 4, From: 5}
	for n := 1; ; n++ {
		e.TellSetting(set)
		died := dies(e.Page, n, func() { e.TellSetting(next) })
		if got, ok := arbiter.Setting(guest, time.Hour); !ok || got != set && got != next {
			t.Fatalf("killed after %d stores: %v, %+v", n, ok, got)
		}
		if !died {
			return
		}
	}
}

// TestSetting: what is read of timeslices is what the guest's guard said, within bounds, and no times to come.
func TestSetting(t *testing.T) {
	dir := t.TempDir()
	e, arbiter := join(t, dir), open(t, dir)
	e.Tell(someGuard(1))
	guest := arbiter.Guests(nil)[0]
	if s, ok := arbiter.Setting(guest, time.Hour); ok {
		t.Errorf("of who has said nothing: %+v", s)
	}
	for _, c := range []struct{ said, want sched.Setting }{
		{sched.Setting{Slice: 5, From: 6, To: 7}, sched.Setting{Slice: 5, From: 6, To: 7}},
		{sched.Setting{Slice: time.Hour, From: 2 * time.Hour, To: 3 * time.Hour},
			sched.Setting{Slice: time.Minute, From: time.Hour, To: time.Hour}},
		{sched.Setting{Slice: -1, From: -1, To: -1}, sched.Setting{Slice: time.Minute, From: time.Hour, To: time.Hour}},
	} {
		e.TellSetting(c.said)
		if s, ok := arbiter.Setting(guest, time.Hour); !ok || s != c.want {
			t.Errorf("%+v: %v, %+v, want %+v", c.said, ok, s, c.want)
		}
	}
	guest.holder++
	if s, ok := arbiter.Setting(guest, time.Hour); ok {
		t.Errorf("of another guard: %+v", s)
	}
}

// TestReadWhileWritten: readers beside a writer never see half of one and half of the other.
func TestReadWhileWritten(t *testing.T) {
	dir := t.TempDir()
	e, arbiter := join(t, dir), open(t, dir)
	e.Tell(someGuard(1))
	guest := arbiter.Guests(nil)[0]
	var done sync.WaitGroup
	done.Add(1)
	go func() {
		defer done.Done()
		for i := range 5000 {
			n := time.Duration(i)
			v := sched.Verdict{At: n, Account: sched.Account{UpTo: n, Usage: sched.Usage{GPUTime: n, Switches: uint64(i)}, Granted: n}, Open: n}
			arbiter.Put(guest, &v, false)
		}
	}()
	for range 5000 {
		if v, ok := e.Row(); ok && (v.At != v.UpTo || v.At != v.GPUTime || v.At != v.Granted || v.At != v.Open || uint64(v.At) != v.Switches) {
			t.Fatalf("%+v", v)
		}
	}
	done.Wait()
}

// TestAnything: whatever stands in an entry, what is read is in bounds: a slot has a phase, a weight is one.
func TestAnything(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		var g [guardWords]uint64
		for i := range g {
			if g[i] = rnd.Uint64() >> rnd.IntN(64); rnd.IntN(3) == 0 {
				g[i] = uint64(rnd.IntN(5))
			}
		}
		x := guardOf(&g)
		if err := x.Card.Validate(); err != nil || x.Share.Weight < 1 || x.Share.Percent > 100 || x.Contexts < 0 || len(x.PIDs) > MaxPIDs {
			t.Fatalf("%+v: %v", x, err)
		}
		if x.Slot.Cycle > 0 {
			if _, until := x.Slot.Phase(time.Hour); until <= time.Hour {
				t.Fatalf("%+v", x.Slot)
			}
		}
	}
}
