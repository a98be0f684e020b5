// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/handover"
	"github.com/opencgpu/cgpu/pkg/guard/journal"
	"github.com/opencgpu/cgpu/test/walk"
)

// bookTest compares what a guard knows with what its books say.
type bookTest struct {
	r       *rig
	journal *journal.Journal
	active  atomic.Uint32
	lost    atomic.Pointer[error]
	rand    *rand.Rand
	seen    int // comparisons
	pieces  int // of a journal that were revived
	commits int // after which the books were read
}

func (r *rig) keepBooks(seed uint64) *bookTest {
	r.t.Helper()
	if err := letInterrupt(); err != nil {
		r.t.Fatal(err)
	}
	b := &bookTest{r: r, rand: rand.New(rand.NewPCG(seed, 0))}
	var err error
	if b.journal, err = journal.New(&b.active); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(b.journal.Close)
	r.guard.keepBooks(b.journal, func(err error) { b.lost.Store(&err) })
	return b
}

// entries are those of the journal as it is now; of its first bytes if whole is false.
func (b *bookTest) entries(whole bool) (map[journal.Key][]byte, error) {
	fd := b.journal.Descriptors()[b.active.Load()&1]
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	text := make([]byte, st.Size)
	if _, err := unix.Pread(fd, text, 0); err != nil {
		return nil, err
	}
	if _, first, _, _ := journal.Parse(text[:0]); !whole && len(text) > 0 {
		text = text[:int(first)+b.rand.IntN(len(text)+1)]
	}
	entries, _, _, err := journal.Parse(text)
	return entries, err
}

func (b *bookTest) revive(whole bool) (*Guard, error) {
	entries, err := b.entries(whole)
	if err != nil {
		return nil, err
	}
	if len(entries) == 0 { // it ends before the first commit
		return nil, nil
	}
	withSockets(entries)
	v, err := ReadBooks(entries)
	if err != nil {
		return nil, err
	}
	g, err := Revive(v, b.r.guard.driver.(*inProcess).another(), b.r.guard.log)
	if g != nil {
		g.gpuTime.StartRescuer = noRescuer
	}
	return g, err
}

// compare is called while the container makes no calls; what the guard does by itself it waits for.
func (b *bookTest) compare() error {
	if err := b.lost.Load(); err != nil {
		return *err
	}
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		err := b.tryCompare()
		if err == nil || !errors.Is(err, errBusy) || time.Now().After(deadline) {
			return err
		}
	}
}

func (b *bookTest) tryCompare() error {
	g := b.r.guard
	filters := g.parkAll()
	defer func() {
		for _, l := range filters {
			l.unpark()
		}
	}()
	for _, l := range filters {
		if !l.awaitIdle(time.Now().Add(200 * time.Millisecond)) {
			return busy("a call")
		}
	}
	if !g.work.TryLock() {
		return busy("work")
	}
	defer g.work.Unlock()
	if g.pendingRoots.Load() > 0 {
		return busy("a root alloc")
	}
	inOrder(g)
	s, err := g.snapshot()
	if err != nil {
		return busy(err.Error())
	}
	next, err := b.revive(true)
	if err != nil {
		return err
	}
	defer letGo(next)
	inOrder(next)
	again, err := next.snapshot()
	if err != nil {
		return err
	}
	want, got := onlyBooked(s), onlyBooked(again)
	for i := range min(len(want), len(got)) {
		if want[i] != got[i] {
			around := func(s string) string { return s[max(0, i-200):min(len(s), i+200)] }
			return fmt.Errorf("the books say\n…%s\nthe guard knows\n…%s", around(got), around(want))
		}
	}
	if b.seen++; len(want) != len(got) {
		return fmt.Errorf("the books say\n%s\nthe guard knows\n%s", got, want)
	}
	for range 3 { // a guard that was killed at any earlier moment leaves one that goes on, too
		piece, err := b.revive(false)
		if err != nil {
			return fmt.Errorf("of a piece of the journal: %w", err)
		}
		letGo(piece)
		b.pieces++
	}
	return nil
}

// watchCommits commits all the time what is noted, until it is stopped, and has the books checked each time: a guard may be killed there.
func (b *books) watchCommits(check func() error) (stop func() error) {
	end, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-end:
				ended <- nil
				return
			default:
			}
			b.commit(nil)
			b.commits.Lock() // the journal stays as it is, and what it names stays open
			err := check()
			b.commits.Unlock()
			if err != nil {
				ended <- err
				return
			}
		}
	}()
	return func() error {
		close(end)
		return <-ended
	}
}

// readable says why no guard could go on with the books as they are.
func (b *bookTest) readable() error {
	b.commits++
	entries, err := b.entries(true)
	if err != nil {
		return err
	}
	withSockets(entries)
	v, err := ReadBooks(entries)
	if err != nil {
		return err
	}
	return (&Fallen{Revived: v}).checkDescriptors()
}

// letGo ends the thread and the goroutine of a guard that serves nobody: thousands of them are made.
func letGo(g *Guard) {
	if g == nil {
		return
	}
	close(g.monitor.seen)
	now, err := unix.Eventfd(1, unix.EFD_CLOEXEC)
	if err != nil {
		panic(err)
	}
	ended := make(chan struct{})
	if err := g.watch.watch(now, unix.EPOLLIN, func() { close(ended); runtime.Goexit() }); err != nil {
		panic(err)
	}
	<-ended
	_, _ = unix.Close(now), unix.Close(g.watch.epfd)
}

// inOrder sorts what has no order.
func inOrder(g *Guard) {
	g.account.mu.Lock()
	defer g.account.mu.Unlock()
	slices.SortFunc(g.account.loose, func(v, w *window) int {
		return cmp.Or(cmp.Compare(v.handle, w.handle), cmp.Compare(v.file.epfd, w.file.epfd))
	})
}

// onlyBooked is what the books are for of a state, as text.
func onlyBooked(s *handover.State) string {
	s.Config, s.Tasks, s.Outside, s.Bill, s.GPUTime, s.Rescuer = Config{}, nil, handover.Outside{}, handover.Bill{}, nil, nil
	s.Managed.Over, s.Managed.Last, s.Managed.CPU = false, 0, 0
	p := &s.Process
	p.Listeners, p.Counts, p.Instances, p.Buffers, p.AuditUntil, p.WindowsRest, p.Record = nil, nil, nil, nil, 0, 0, nil
	if p.RM == nil && len(p.OldRM) > 0 { // it keeps that for the windows
		p.RM, p.OldRM = &p.OldRM[0], nil
	}
	if p.BAR1 = nil; p.RM != nil {
		p.RM.Next = 0
	}
	for i := range s.Account.Windows {
		s.Account.Windows[i].Own = 0
	}
	for i := range s.Account.GPUs {
		s.Account.GPUs[i].Peak, s.Account.GPUs[i].Denied = 0, 0
	}
	for i := range s.Account.Clients {
		s.Account.Clients[i].Seen = [3]int{}
	}
	a := &s.Account
	a.HostUsed -= a.PoolTaken // a piece may be kept for what comes next
	a.PoolTaken = 0
	for i := range s.Files {
		s.Files[i].Closed = false
	}
	return string(encoded(s))
}

// TestWalkBooks: after each step of a walk the books say what the guard knows, and what they said at any moment before made a guard.
func TestWalkBooks(t *testing.T) {
	seed, limit := uint64(time.Now().UnixNano()), 15*time.Second
	if d, err := time.ParseDuration(os.Getenv(walkForEnv)); err == nil {
		limit = d
	}
	if testing.Short() {
		limit = 2 * time.Second
	}
	if n, err := strconv.ParseUint(os.Getenv(walkEnv), 0, 64); err == nil {
		seed = n
	}
	w := newWalker(t, walkPatience)
	w.booked = w.keepBooks(seed)
	w.jitter.Store(int64(200 * time.Microsecond)) // the driver takes its time
	stop := w.guard.books.watchCommits(w.booked.readable)
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); seed++ {
		ops := walk.Generate(seed, walk.Kind{Steps: walkSteps, Procs: 3, Limit: uint64(testLimit), Malformed: seed%4 != 3})
		if step, err := w.run(ops); err != nil {
			t.Fatalf("seed %#x, step %d: %v", seed, step, err)
		}
	}
	if err := stop(); err != nil {
		t.Error("after a commit:", err)
	}
	if err := w.over(); err != nil {
		t.Error(err)
	}
	t.Logf("%d comparisons, %d pieces, %d commits", w.booked.seen, w.booked.pieces, w.booked.commits)
	if w.booked.seen < 10 {
		t.Errorf("only %d comparisons", w.booked.seen)
	}
}

// endsMeanwhile refers to another entity, and both end while its image is made: of a commit, in which they have been noted.
type endsMeanwhile struct {
	entry
	of *endsMeanwhile
}

func (*endsMeanwhile) bookKind() uint8 { return bookMap }

func (x *endsMeanwhile) image(b *books) any {
	if x.of == nil {
		return nil
	}
	b.end(x)
	b.end(x.of)
	return bookRef(b, x.of)
}

// TestBooksEndedMeanwhile: what has ended is not in the books again because what referred to it was about to be written.
func TestBooksEndedMeanwhile(t *testing.T) {
	r := newRig(t)
	b := r.keepBooks(0)
	x := &endsMeanwhile{of: new(endsMeanwhile)}
	for _, e := range []*endsMeanwhile{x.of, x} {
		r.guard.books.note(e)
		r.guard.books.commit(nil)
	}
	entries, err := b.entries(true)
	if err != nil {
		t.Fatal(err)
	}
	for key, text := range entries {
		if key.Kind == bookMap {
			t.Errorf("entry %d is left: %s", key.ID, text)
		}
	}
}
