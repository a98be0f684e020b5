// SPDX-License-Identifier: Apache-2.0

package peerpage

import (
	"math/rand/v2"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
)

func joinAs(t *testing.T, dir string, member uint64, folder string) *Lookout {
	t.Helper()
	l, err := JoinLookout(dir, testGPU, member, folder)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return l
}

// nobody is the number of no process.
const nobody = 1<<31 - 2

// TestElect: who looks, and who takes over from whom.
func TestElect(t *testing.T) {
	dir := t.TempDir()
	a, b := joinAs(t, dir, 1, "/a"), joinAs(t, dir, 2, "/b")
	now := time.Hour
	for _, c := range []struct {
		what   string
		before func()
		of     *Lookout
		want   bool
	}{
		{"the first", func() {}, a, true},
		{"the same once more", func() {}, a, true},
		{"another one at once", func() {}, b, false},
		{"another one while the first is in time", func() { a.Looks(now + 3*time.Second); now += 3*time.Second + lookGrace - 1 }, b, false},
		{"the first is late", func() { now++ }, b, true},
		{"the first comes back", func() {}, a, false},
		{"the second has resigned", b.Resign, a, true},
		{"the first has ended", func() { a.Looks(now + time.Minute); a.store32(offLeader, nobody) }, b, true},
		{"what another process with its number had said", func() { b.Looks(now + time.Minute); b.store64(offSince, 1) }, a, true},
		{"a promise from before a reboot", func() { a.Looks(now + longestPause) }, b, true},
	} {
		c.before()
		if got, err := c.of.Elect(now); err != nil || got != c.want || c.of.Leads() != c.want {
			t.Errorf("%s: %v, %v, leads %v; want %v", c.what, got, err, c.of.Leads(), c.want)
		}
	}
}

// TestElectAtOnce: of many that find nobody exactly one looks.
func TestElectAtOnce(t *testing.T) {
	dir, results := t.TempDir(), make(chan bool)
	for i := range 16 {
		l := joinAs(t, dir, uint64(i), "")
		go func() {
			mine, err := l.Elect(time.Hour)
			if err != nil {
				t.Error(err)
			}
			results <- mine
		}()
	}
	n := 0
	for range 16 {
		if <-results {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d look", n)
	}
}

// TestLookoutPlaces: the program that goes on in the place of another one of the same process has its guard's place; of two guards each
// has its own.
func TestLookoutPlaces(t *testing.T) {
	dir := t.TempDir()
	a, b := joinAs(t, dir, 1, "/a"), joinAs(t, dir, 2, "/b")
	again := joinAs(t, dir, 1, "/c")
	if a.Place() == b.Place() || again.Place() != a.Place() {
		t.Errorf("places %d, %d, again %d", a.Place(), b.Place(), again.Place())
	}
	folders := ""
	for m := range b.Members() {
		folders += m.Folder
	}
	if folders != "/c/b" {
		t.Errorf("the members' folders are %q", folders)
	}
	if _, err := JoinLookout(dir, testGPU, 3, strings.Repeat("x", maxFolder+1)); err == nil {
		t.Error("a name that has no room is cut")
	}
}

// TestTurns: however many guards there are, and whenever they begin to wait, in each lookTurn one has its turn.
func TestTurns(t *testing.T) {
	dir := t.TempDir()
	var all []*Lookout
	for i := range uint64(7) {
		all = append(all, joinAs(t, dir, i, ""))
	}
	all[3].Leave()
	all = append(all[:3], all[4:]...)
	now, turns := time.Hour+rand.N(time.Minute), map[time.Duration]int{}
	for i, l := range all {
		from := now + time.Duration(i)*time.Millisecond
		turn := l.Turn(from)
		if turn <= 0 || turn > time.Duration(len(all))*lookTurn {
			t.Errorf("turn in %v", turn)
		}
		turns[(from+turn)/lookTurn%time.Duration(len(all))]++
		if again := l.Turn(from + turn); again != time.Duration(len(all))*lookTurn {
			t.Errorf("the next one in %v", again)
		}
	}
	if len(turns) != len(all) {
		t.Errorf("turns %v", turns)
	}
}

// TestLookerUnreaped: one that has ended and that nobody has waited for looks no more, whatever it has promised.
func TestLookerUnreaped(t *testing.T) {
	dir := t.TempDir()
	a, b := joinAs(t, dir, 1, "/a"), joinAs(t, dir, 2, "/b")
	now := time.Hour
	if _, err := a.Elect(now); err != nil {
		t.Fatal(err)
	}
	c := exec.Command("sleep", "100")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Wait() }()
	start, err := ledger.ProcStart(c.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	a.Looks(now + 10*time.Minute)
	a.store64(offSince, start)
	a.store32(offLeader, uint32(c.Process.Pid))
	if mine, err := b.Elect(now); mine || err != nil {
		t.Fatalf("elected beside one that lives: %v", err)
	}
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Waitid(unix.P_PID, c.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	if mine, err := b.Elect(now); !mine || err != nil {
		t.Errorf("not elected: %v", err)
	}
}

// TestKilledMembers: places of guards that were killed have no turn, and are told nothing.
func TestKilledMembers(t *testing.T) {
	dir := t.TempDir()
	a, gone := joinAs(t, dir, 1, "/a"), joinAs(t, dir, 2, "/b")
	gone.store64(gone.at+offStart, 1) // another process' by now
	places := 0
	for range a.Members() {
		places++
	}
	if turn := a.Turn(time.Hour); places != 1 || turn > lookTurn {
		t.Errorf("%d members, turn in %v", places, turn)
	}
}

// TestNews: who is told what, and how often.
func TestNews(t *testing.T) {
	dir := t.TempDir()
	a, b := joinAs(t, dir, 1, ""), joinAs(t, dir, 2, "")
	awaits := func() (of string) {
		for m := range a.Members() {
			of += map[bool]string{true: "x", false: "-"}[m.Awaits]
		}
		return of
	}
	b.AwaitRan()
	if got := awaits(); got != "-x" {
		t.Errorf("who waits: %s", got)
	}
	before, other := b.Rung(), a.Rung()
	a.Wake(b.Place(), Ran)
	if awaits() != "--" || b.Rung() == before || a.Rung() != other {
		t.Errorf("who waits when he was told: %s", awaits())
	}
	a.WakeAll(Outsiders)
	if got := b.News(); got != Ran|Outsiders {
		t.Errorf("news %b", got)
	}
	if a.News() != Outsiders || a.News() != 0 || b.News() != 0 {
		t.Error("news are not told once")
	}
}

// TestLookoutBounds: whatever the words are, what comes out is in bounds.
func TestLookoutBounds(t *testing.T) {
	l := joinAs(t, t.TempDir(), 1, "/a")
	for range 100 {
		for off := entrySize; off < 8*entrySize; off += 8 {
			l.u64(off).Store(rand.Uint64() >> rand.IntN(64))
		}
		l.u32(offUsed).Store(rand.Uint32())
		for m := range l.Members() {
			if m.Place < 1 || m.Place > Entries || len(m.Folder) > maxFolder {
				t.Fatalf("%d, %d bytes", m.Place, len(m.Folder))
			}
		}
		if turn := l.Turn(time.Hour); turn <= 0 || turn > Entries*lookTurn {
			t.Fatal(turn)
		}
	}
}
