// SPDX-License-Identifier: Apache-2.0

package peerpage

import (
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func openHolders(t *testing.T, dir string) *Holders {
	t.Helper()
	h, err := OpenHolders(dir, testGPU)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.page.Close)
	return h
}

// TestHoldersAge: who asks, and who goes by what another one was told.
func TestHoldersAge(t *testing.T) {
	dir, first, second := t.TempDir(), []Holder{{7, 70}, {8, 80}}, []Holder{{9, 90}}
	a, b := openHolders(t, dir), openHolders(t, dir)
	asked := 0
	answer := func(list []Holder, ok bool) func() ([]Holder, bool) {
		return func() ([]Holder, bool) { asked++; return list, ok }
	}
	at := time.Hour
	for _, c := range []struct {
		what  string
		of    *Holders
		after time.Duration
		says  []Holder
		ok    bool
		want  []Holder
		asked int
	}{
		{"nobody has asked, and the driver refuses", a, 0, nil, false, nil, 1},
		{"the first", a, 0, first, true, first, 2},
		{"another guard, at once", b, time.Millisecond, second, true, first, 2},
		{"another guard, which read the clock before", b, -2 * time.Millisecond, second, true, first, 2},
		{"as old as it may be", b, time.Second + time.Millisecond, second, true, first, 2},
		{"older", b, time.Millisecond, second, true, second, 3},
		{"the first again", a, 0, first, true, second, 3},
		{"from before a reboot", a, -time.Minute, first, true, first, 4},
	} {
		at += c.after
		got, ok := c.of.Get(at, time.Second, answer(c.says, c.ok))
		if !slices.Equal(got, c.want) || ok != (c.want != nil) || asked != c.asked {
			t.Errorf("%s: %v, %v, asked %d times; want %v, %d times", c.what, got, ok, asked, c.want, c.asked)
		}
	}
}

// TestHoldersAsking: while one asks others do not wait and do not ask; one that never comes back holds nobody up for long.
func TestHoldersAsking(t *testing.T) {
	dir := t.TempDir()
	a, b := openHolders(t, dir), openHolders(t, dir)
	old, lost, fresh := []Holder{{1, 1}}, []Holder{{2, 2}}, []Holder{{3, 3}}
	at := time.Hour
	a.Get(at, time.Second, func() ([]Holder, bool) { return old, true })
	at += 2 * time.Second
	got, _ := a.Get(at, time.Second, func() ([]Holder, bool) {
		never := func() ([]Holder, bool) { t.Error("two ask at once"); return nil, false }
		if got, ok := b.Get(at+time.Second, time.Second, never); !ok || !slices.Equal(got, old) {
			t.Errorf("while another one asks: %v, %v", got, ok)
		}
		if got, _ := b.Get(at+longestAnswer, time.Second, func() ([]Holder, bool) { return fresh, true }); !slices.Equal(got, fresh) {
			t.Errorf("another one asks for too long: %v", got)
		}
		return lost, true
	})
	if !slices.Equal(got, lost) {
		t.Errorf("who asked has %v", got)
	}
	if got, _ := b.Get(at+longestAnswer, time.Second, nil); !slices.Equal(got, fresh) {
		t.Errorf("an answer that came late took the place of a newer one: %v", got)
	}
}

// TestHoldersAtOnce: what many read while it is written is what somebody wrote, whole.
func TestHoldersAtOnce(t *testing.T) {
	dir := t.TempDir()
	var asked atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		h := openHolders(t, dir)
		wg.Go(func() {
			for i := range 60 {
				got, ok := h.Get(time.Hour+time.Duration(i)*time.Millisecond, 0, func() ([]Holder, bool) {
					n := asked.Add(1)
					return slices.Repeat([]Holder{{int(n), uint64(n)}}, int(n%MaxHolders)+1), true
				})
				for _, x := range got {
					if x != got[0] || uint64(x.PID) != x.Start || len(got) != x.PID%MaxHolders+1 {
						t.Errorf("%d processes, %v and %v among them", len(got), got[0], x)
						return
					}
				}
				_ = ok
			}
		})
	}
	wg.Wait()
	if asked.Load() == 0 {
		t.Error("nobody has asked")
	}
}

// TestHoldersBounds: whatever the words are, what comes out is in bounds.
func TestHoldersBounds(t *testing.T) {
	h := openHolders(t, t.TempDir())
	for range 100 {
		words := make([]uint64, holdersWords)
		for i := range words {
			words[i] = rand.Uint64() >> rand.IntN(64)
		}
		words[0] = uint64(time.Hour)
		record{h.page, offHolders, holdersWords}.write(words)
		got, ok := h.Get(time.Hour, time.Second, nil)
		if !ok || len(got) > MaxHolders {
			t.Fatalf("%d processes, %v", len(got), ok)
		}
		for _, x := range got {
			if x.PID < 0 || x.PID > 1<<31-1 {
				t.Fatal(x)
			}
		}
	}
}
