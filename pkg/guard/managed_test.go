// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"github.com/opencgpu/cgpu/pkg/sched"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// managedGuard is a guard over a fake driver whose container has the given processes. Nobody looks at maps but the test.
func managedGuard(t testing.TB, policy string, pids ...int) *Guard {
	t.Helper()
	g := newFakeGuard(t, answering(0, nil))
	g.cfg.Settings.Managed = policy
	g.managed.watching = true
	g.managed.pids = func() []int { return pids }
	return g
}

// look does what the guard does once a second.
func (g *Guard) look() {
	g.managed.mu.Lock()
	defer g.managed.mu.Unlock()
	g.scanMaps()
	g.enforceManaged()
}

// managedUse checks the account and the sum that the guard keeps of its lists.
func managedUse(t *testing.T, g *Guard, want quota.Bytes) {
	t.Helper()
	u := g.account.usage(0)
	if u.managed != want || u.used < want {
		t.Errorf("managed %v, used %v; want %v", u.managed, u.used, want)
	}
	g.managed.mu.Lock()
	defer g.managed.mu.Unlock()
	n, sum := 0, quota.Bytes(0)
	for _, list := range g.managed.procs {
		n += len(list)
		sum += totalSize(list)
	}
	if n != g.managed.spans || sum != want {
		t.Errorf("%d ranges of %v, counted as %d; want %v", n, sum, g.managed.spans, want)
	}
}

// TestSpans compares the lists with a bitmap of pages.
func TestSpans(t *testing.T) {
	for seed := range uint64(30) {
		r := rand.New(rand.NewPCG(seed, 3))
		const pages = 64
		var list []span
		var model [pages]int // 0: nothing, 1: there, 2: agreed
		for step := range 400 {
			base := r.Uint64N(pages)
			end := base + 1 + r.Uint64N(pages-base)
			held, all := 0, true
			for _, m := range model[base:end] {
				held += min(m, 1)
				all = all && m == 2
			}
			if got := overlapSize(list, base, end); got != quota.Bytes(held) {
				t.Fatalf("seed %d, step %d: %d-%d overlap %d, want %d: %+v", seed, step, base, end, got, held, list)
			}
			if got := agreedBefore(list, base, end); got != all {
				t.Fatalf("seed %d, step %d: %d-%d agreed %v: %+v", seed, step, base, end, got, list)
			}
			what := r.IntN(3)
			switch what {
			case 0:
				list = cutRange(list, base, end)
			default:
				list = insertSpan(list, span{base: base, end: end, agreed: what == 2})
			}
			for i := base; i < end; i++ {
				model[i] = what
			}
			last := uint64(0)
			sum := 0
			for _, s := range list {
				if s.base < last || s.end <= s.base {
					t.Fatalf("seed %d, step %d: not in order: %+v", seed, step, list)
				}
				last = s.end
				for i := s.base; i < s.end; i++ {
					if sum++; s.agreed != (model[i] == 2) || model[i] == 0 {
						t.Fatalf("seed %d, step %d: page %d is %d: %+v", seed, step, i, model[i], list)
					}
				}
			}
			for _, m := range model {
				sum -= min(m, 1)
			}
			if sum != 0 || totalSize(list) != overlapSize(list, 0, pages) {
				t.Fatalf("seed %d, step %d: %d pages too many: %+v", seed, step, sum, list)
			}
		}
	}
}

func TestCoarse(t *testing.T) {
	list := oneSpan([]span{{base: 1, end: 5}, {base: 10, end: 1 << 47}})
	if totalSize(list) != 1<<47-6 || overlapSize(list, 0, lastAddress) != 0 || totalSize(cutRange(list, 0, ^uint64(0))) != 0 {
		t.Errorf("%+v", list)
	}
}

// TestReserveManaged: what the limiter asks, and what it is answered.
func TestReserveManaged(t *testing.T) {
	const mib = uint64(1 << 20)
	type ask struct {
		cmd          uint32
		base, length uint64
		status       uint32
		used         quota.Bytes // after it
	}
	reserve, release := uint32(page.ReserveManaged), uint32(page.ReleaseManaged)
	limit := uint64(testLimit)
	for _, c := range []struct {
		name   string
		policy string
		asks   []ask
		denied uint64
	}{
		{"there and back", device.ManagedLimit, []ask{
			{reserve, somewhere, 4 * mib, 0, 4 * quota.MiB},
			{release, somewhere, 4 * mib, 0, 0}}, 0},
		{"the whole limit, and no more", device.ManagedLimit, []ask{
			{reserve, somewhere, limit, 0, testLimit},
			{reserve, somewhere + limit, 4096, rm.StatusNoMemory, testLimit},
			{reserve, somewhere, limit, 0, testLimit}, // the same again: the caller was interrupted
			{release, somewhere, limit, 0, 0},
			{reserve, somewhere + limit, 4096, 0, 4096}}, 1},
		{"a page too many", device.ManagedLimit, []ask{
			{reserve, somewhere, limit + 4096, rm.StatusNoMemory, 0}}, 1},
		{"over another one", device.ManagedLimit, []ask{
			{reserve, somewhere, 4 * mib, 0, 4 * quota.MiB},
			{reserve, somewhere + 2*mib, 4 * mib, 0, 6 * quota.MiB},
			{release, somewhere + mib, 2 * mib, 0, 4 * quota.MiB},
			{release, somewhere, 100 * mib, 0, 0}}, 0},
		{"what was never reserved", device.ManagedLimit, []ask{
			{reserve, somewhere, 4 * mib, 0, 4 * quota.MiB},
			{release, somewhere + 4*mib, 4 * mib, 0, 4 * quota.MiB},
			{release, somewhere - 4*mib, 4 * mib, 0, 4 * quota.MiB},
			{release, 1, somewhere - 1, 0, 4 * quota.MiB}}, 0},
		{"everything", device.ManagedLimit, []ask{
			{reserve, 1, lastAddress - 1, rm.StatusNoMemory, 0},
			{reserve, 1, lastAddress, rm.StatusInvalidArgument, 0},
			{reserve, 0, ^uint64(0), rm.StatusInvalidArgument, 0},
			{reserve, ^uint64(0), ^uint64(0), rm.StatusInvalidArgument, 0},
			{reserve, lastAddress, 4096, rm.StatusInvalidArgument, 0},
			{reserve, somewhere, 0, rm.StatusInvalidArgument, 0},
			{release, ^uint64(0), 2, rm.StatusInvalidArgument, 0}}, 1},
		{"refused by policy", device.ManagedDeny, []ask{
			{reserve, somewhere, 4096, rm.StatusNoMemory, 0},
			{release, somewhere, 4096, 0, 0}}, 1},
		{"not looked at", device.ManagedAllow, []ask{
			{reserve, somewhere, 1 << 40, 0, 0},
			{release, somewhere, 4096, 0, 0}}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := managedGuard(t, c.policy)
			f := newFakeCall(t, g, fakeUVM)
			for i, a := range c.asks {
				o := make([]byte, managedCallSize)
				rm.PutU64(o, managedCallBase, a.base)
				rm.PutU64(o, managedCallLength, a.length)
				rm.PutU32(o, managedCallStatus, 0xdead)
				if rep := f.do(a.cmd, o); rep != replyDone || rm.U32(o, managedCallStatus) != a.status {
					t.Fatalf("ask %d: %+v %s, want %s", i, rep, rm.StatusName(rm.U32(o, managedCallStatus)), rm.StatusName(a.status))
				}
				if rm.U64(o, managedCallBase) != a.base || rm.U64(o, managedCallLength) != a.length {
					t.Error("the question was changed")
				}
				managedUse(t, g, a.used)
			}
			if got := g.stats.denied.Load(); got != c.denied {
				t.Errorf("%d denied, want %d", got, c.denied)
			}
			if len(g.driver.(*fakeDriver).calls) > 0 {
				t.Error("the driver was asked")
			}
			g.managedGone(os.Getpid())
			managedUse(t, g, 0)
		})
	}
}

// TestReserveManagedBesideMemory: both are of one limit, and on each sliced GPU.
func TestReserveManagedBesideMemory(t *testing.T) {
	g := withClient(managedGuard(t, device.ManagedLimit)) // 8 MiB
	g.account.gpus = append(g.account.gpus, gpuAccount{limit: 16 * quota.MiB}, gpuAccount{native: true})
	if g.reserveManaged(1, somewhere, somewhere+17<<20) {
		t.Error("more than the second GPU's limit")
	}
	if !g.reserveManaged(1, somewhere, somewhere+16<<20) {
		t.Error("refused")
	}
	wantUsage(t, g.account, 0, 24*quota.MiB)
	wantUsage(t, g.account, 1, 16*quota.MiB)
	wantUsage(t, g.account, 2, 0)
	if g.account.reserve(cost{gpu: 1, size: 1}, true) {
		t.Error("device memory in place of managed memory")
	}
	g.releaseManaged(1, somewhere, somewhere+16<<20)
	wantUsage(t, g.account, 0, 8*quota.MiB)
	wantUsage(t, g.account, 1, 0)
}

// TestManyRanges: a container that reserves page by page meets a bound, and each costs little.
func TestManyRanges(t *testing.T) {
	g := managedGuard(t, device.ManagedLimit)
	g.account.gpus[0].limit = quota.GiB * 1024
	n := 0
	for tgid := 1; tgid <= 3 && n <= maxSpans; tgid++ {
		for i := range uint64(maxSpans / 2) {
			if !g.reserveManaged(tgid, somewhere+i<<13, somewhere+i<<13+4096) {
				break
			}
			n++
		}
	}
	if n < maxSpans-2 || n > maxSpans {
		t.Errorf("%d ranges, want %d", n, maxSpans)
	}
	managedUse(t, g, quota.Bytes(n)*4096)
	// Cutting one out of the middle of another must not help either.
	for i := range uint64(100) {
		g.reserveManaged(1, somewhere+1<<40, somewhere+1<<40+1<<30)
		g.reserveManaged(1, somewhere+1<<40+i<<13, somewhere+1<<40+i<<13+4096)
	}
	if g.managed.spans > maxSpans {
		t.Errorf("%d ranges", g.managed.spans)
	}
}

// TestRefusalsAreCheap: asking for what does not fit has the maps read now and then, not each time.
func TestRefusalsAreCheap(t *testing.T) {
	looks := 0
	g := managedGuard(t, device.ManagedLimit)
	g.managed.pids = func() []int { looks++; time.Sleep(time.Millisecond); return nil }
	begin := time.Now()
	for range 200 {
		if g.reserveManaged(1, somewhere, somewhere+1<<40) {
			t.Fatal("granted")
		}
	}
	if most := 2 + int(time.Since(begin)/(backgroundShare*time.Millisecond)); looks == 0 || looks > most {
		t.Errorf("%d looks in %v, want at most %d", looks, time.Since(begin), most)
	}
	if u := g.account.usage(0); u.denied != 200 {
		t.Errorf("%d denied", u.denied)
	}
}

// TestScan follows what a real process maps and unmaps without a word.
func TestScan(t *testing.T) {
	c := startPlain(t)
	g := managedGuard(t, device.ManagedLimit, c.pid(), os.Getpid(), 1<<30)
	g.look()
	managedUse(t, g, 0)
	c.do("map", somewhere, 64<<20)
	g.look()
	managedUse(t, g, 64*quota.MiB)
	c.do("map", somewhere+1<<30, 64<<20)
	c.do("unmap", somewhere+8<<20, 8<<20)
	g.look()
	managedUse(t, g, 120*quota.MiB)
	if g.managed.over {
		t.Error("GPU work is paused")
	}
	c.do("unmap", somewhere, 64<<20)
	g.look()
	managedUse(t, g, 64*quota.MiB)
	c.kill()
	g.look()
	managedUse(t, g, 0)
}

// TestScanFindsRoom: what is gone unnoticed makes room at once.
func TestScanFindsRoom(t *testing.T) {
	c := startPlain(t)
	g := managedGuard(t, device.ManagedLimit, c.pid())
	c.do("map", somewhere, int(testLimit))
	g.look()
	managedUse(t, g, testLimit)
	if c.do("unmap", somewhere, int(testLimit)); !g.reserveManaged(c.pid(), elsewhere, elsewhere+1<<20) {
		// The look before was a moment ago.
		eventually(t, "the mapping is seen to be gone", func() bool { return g.reserveManaged(c.pid(), elsewhere, elsewhere+1<<20) })
	}
	managedUse(t, g, quota.MiB)
}

// TestClaims: what was announced counts until it is mapped, but not for long if it never is.
func TestClaims(t *testing.T) {
	c := startPlain(t)
	c.do("pid")
	g := managedGuard(t, device.ManagedLimit, c.pid())
	if _, err := g.tasks.acquire(c.pid()); err != nil {
		t.Fatal(err)
	}
	if !g.reserveManaged(c.pid(), somewhere, somewhere+64<<20) {
		t.Fatal("refused")
	}
	g.look()
	managedUse(t, g, 64*quota.MiB)
	c.do("map", somewhere, 64<<20)
	g.look()
	managedUse(t, g, 64*quota.MiB) // and not twice
	c.do("unmap", somewhere, 64<<20)
	g.look()
	managedUse(t, g, 0) // it was seen, so it is no claim any more
	if !g.reserveManaged(c.pid(), somewhere, somewhere+64<<20) {
		t.Fatal("refused")
	}
	g.managed.procs[c.pid()][0].announced = time.Now().Add(-claimTime)
	g.look()
	managedUse(t, g, 0)

	// Part of it is mapped, then its process ends.
	if !g.reserveManaged(c.pid(), somewhere, somewhere+64<<20) {
		t.Fatal("refused")
	}
	c.do("map", somewhere+8<<20, 8<<20)
	g.look()
	managedUse(t, g, 64*quota.MiB)
	g.tasks.dropProcess(g.tasks.byHostPid(c.pid()))
	g.look()
	managedUse(t, g, 8*quota.MiB)
}

// TestReserveHereMapThere: one process announces, another maps. The announcement is worth nothing to it.
func TestReserveHereMapThere(t *testing.T) {
	a, b := startPlain(t), startPlain(t)
	g := managedGuard(t, device.ManagedLimit, a.pid(), b.pid())
	a.do("pid")
	if _, err := g.tasks.acquire(a.pid()); err != nil {
		t.Fatal(err)
	}
	g.reserveManaged(a.pid(), somewhere, somewhere+768<<20)
	b.do("map", somewhere, 768<<20)
	g.look()
	managedUse(t, g, 1536*quota.MiB)
	if !g.managed.over {
		t.Error("GPU work goes on")
	}
	g.managed.procs[a.pid()][0].announced = time.Time{} // it is past
	g.look()
	managedUse(t, g, 768*quota.MiB)
	if g.managed.over || g.stats.processesKilled.Load() != 0 {
		t.Error("not within the limit again")
	}
	b.do("pid")
}

// TestSharedMaps: an address space of two processes counts once, whichever announces; a copy of it counts again.
func TestSharedMaps(t *testing.T) {
	pids := startSiblings(t)
	g := managedGuard(t, device.ManagedLimit, pids...)
	for _, pid := range pids {
		if _, err := g.tasks.acquire(pid); err != nil {
			t.Fatal(err)
		}
	}
	g.look()
	managedUse(t, g, 16*quota.MiB)
	if !g.reserveManaged(pids[1], somewhere+1<<30, somewhere+1<<30+4<<20) || !g.reserveManaged(pids[1], somewhere, somewhere+8<<20) {
		t.Fatal("refused")
	}
	g.look()
	managedUse(t, g, 20*quota.MiB)
	if len(g.managed.procs[pids[1]]) != 0 || len(g.managed.procs[pids[0]]) != 2 {
		t.Errorf("%+v", g.managed.procs)
	}
}

// TestListedTwice: what a process has, and has announced, counts once also where it is listed twice.
func TestListedTwice(t *testing.T) {
	c := startPlain(t)
	c.do("map", somewhere, 64<<20)
	g := managedGuard(t, device.ManagedLimit, c.pid(), c.pid())
	if _, err := g.tasks.acquire(c.pid()); err != nil {
		t.Fatal(err)
	}
	if !g.reserveManaged(c.pid(), somewhere+1<<30, somewhere+1<<30+4<<20) {
		t.Fatal("refused")
	}
	for range 2 {
		g.look()
		managedUse(t, g, 68*quota.MiB)
	}
}

// TestPools: as many small mappings as there are channel groups are CUDA's own and not counted, unless they were announced.
func TestPools(t *testing.T) {
	c := startPlain(t)
	g := managedGuard(t, device.ManagedLimit, c.pid())
	for i := range uintptr(4) {
		c.do("map", somewhere+i<<30, int(poolSize))
	}
	c.do("map", elsewhere, int(poolSize)+4096)
	g.look()
	managedUse(t, g, 5*poolSize+4096)
	g.releaseManaged(c.pid(), 0, lastAddress)
	g.account.gpus[0].tsgs = 3
	g.look()
	managedUse(t, g, 2*poolSize+4096)
	for i := range uint64(4) {
		g.reserveManaged(c.pid(), somewhere+i<<30, somewhere+i<<30+uint64(poolSize))
	}
	g.look()
	managedUse(t, g, 5*poolSize+4096)
}

// TestTooManyRanges: beyond the bound the sum still counts, and a process over the limit is still found out.
func TestTooManyRanges(t *testing.T) {
	const n = 40000
	a, b := startPlain(t), startPlain(t)
	g := managedGuard(t, device.ManagedLimit, a.pid(), b.pid())
	a.do("map", somewhere, 4096, n)
	b.do("map", somewhere, 4096, n)
	for range 2 {
		begin := time.Now()
		g.look()
		t.Logf("%d mappings looked at in %v", 2*n, time.Since(begin))
		managedUse(t, g, 2*n*4096)
	}
	if g.managed.spans != n+1 {
		t.Errorf("%d ranges are remembered", g.managed.spans)
	}
	if g.managed.over {
		t.Error("paused within the limit")
	}
	b.do("map", elsewhere, int(testLimit))
	g.look()
	g.look()
	if !b.ended(patience) {
		t.Error("it lives")
	}
	a.do("pid")
}

// TestJudge: over the limit the container's GPU work is paused, then its process is killed, then the work goes on.
func TestJudge(t *testing.T) {
	paused := func(g *Guard) bool {
		return g.gpuTime.Plan(0).Suspended
	}
	for _, c := range []struct {
		name   string
		policy string
		size   int
	}{{"beyond the limit", device.ManagedLimit, int(testLimit) + 4<<20}, {"none is allowed", device.ManagedDeny, 4 << 20}} {
		t.Run(c.name, func(t *testing.T) {
			good, bad := startPlain(t), startPlain(t)
			g := managedGuard(t, c.policy, good.pid(), bad.pid())
			told := news(t, g)
			if c.policy == device.ManagedLimit {
				good.do("map", somewhere, 512<<20)
				g.look()
			}
			if paused(g) {
				t.Fatal("paused for nothing")
			}
			bad.do("map", somewhere, c.size)
			if g.look(); !paused(g) || !g.managed.over {
				t.Fatal("not paused")
			}
			bad.do("pid") // it has half a second
			for range 3 {
				g.look()
			}
			if !bad.ended(patience) {
				t.Fatal("it lives")
			}
			if g.stats.processesKilled.Load() != 1 {
				t.Errorf("%d processes killed", g.stats.processesKilled.Load())
			}
			if g.look(); paused(g) || g.managed.over {
				t.Error("still paused")
			}
			good.do("pid")
			events := told()
			for _, want := range []string{"held ×1: GPU work paused", "killed ×1: ", "let ×1: "} {
				if !strings.Contains(events, want) {
					t.Errorf("told\n%s\nwant %s", events, want)
				}
			}
		})
	}
	t.Run("it unmaps in time", func(t *testing.T) {
		c := startPlain(t)
		g := managedGuard(t, device.ManagedLimit, c.pid())
		c.do("map", somewhere, int(testLimit)+4096)
		g.look()
		c.do("unmap", somewhere, 4096)
		if g.look(); paused(g) || g.stats.processesKilled.Load() != 0 {
			t.Error("not forgiven")
		}
		// What it kept is agreed to from now on: less limit does not kill it.
		g.account.setLimits(0, quota.MiB, 0)
		g.look()
		if g.look(); paused(g) {
			t.Error("paused because the limit was made less")
		}
		c.do("pid")
	})
	t.Run("paused by somebody else too", func(t *testing.T) {
		c := startPlain(t)
		g := managedGuard(t, device.ManagedLimit, c.pid())
		g.gpuTime.Adopt(0, sched.Plan{Suspended: true})
		c.do("map", somewhere, int(testLimit)+4096)
		g.look()
		c.do("unmap", somewhere, 4096)
		if g.look(); !paused(g) {
			t.Error("cgpu pause was undone")
		}
	})
}

// TestScanOrder: what one process gave back is there for another, in whatever order they are looked at.
func TestScanOrder(t *testing.T) {
	for range 5 {
		a, b := startPlain(t), startPlain(t)
		g := managedGuard(t, device.ManagedLimit, a.pid(), b.pid())
		a.do("map", somewhere, int(testLimit))
		g.look()
		a.do("unmap", somewhere, int(testLimit))
		b.do("map", somewhere, int(testLimit))
		g.look()
		managedUse(t, g, testLimit)
		if u := g.account.usage(0); g.managed.over || u.peak != testLimit {
			t.Errorf("over %v, peak %v", g.managed.over, u.peak)
		}
	}
}

// TestClientMade does not wait for a look at the maps: its caller has a file locked, which the look may want.
func TestClientMade(t *testing.T) {
	g := managedGuard(t, device.ManagedLimit)
	g.managed.watching = false
	g.managed.mu.Lock()
	done := make(chan struct{})
	go func() { g.clientMade(); close(done) }()
	select {
	case <-done:
	case <-time.After(patience):
		t.Error("it waits")
	}
	g.managed.mu.Unlock()
	eventually(t, "somebody looks", func() bool {
		g.managed.mu.Lock()
		defer g.managed.mu.Unlock()
		return g.managed.watching
	})
	close(g.done)
}

// TestMappers: a process that has made driver calls is looked at wherever it is.
func TestMappers(t *testing.T) {
	g := newFakeGuard(t, answering(0, nil))
	g.managed.pids = nil
	if got := g.containerPIDs(); len(got) != 0 {
		t.Errorf("%v", got)
	}
	if _, err := g.tasks.acquire(os.Getpid()); err != nil {
		t.Fatal(err)
	}
	if got := g.containerPIDs(); !slices.Equal(got, []int{os.Getpid()}) {
		t.Errorf("%v", got)
	}
}

// BenchmarkScan is a look at a process with many mappings.
func BenchmarkScan(b *testing.B) {
	for _, n := range []int{10, 1000, 60000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			c := startPlain(b)
			c.do("map", somewhere, 4096, n)
			g := managedGuard(b, device.ManagedLimit, c.pid())
			for b.Loop() {
				g.look()
			}
		})
	}
}

// BenchmarkReserveManaged is what a page costs the guard when there are many already.
func BenchmarkReserveManaged(b *testing.B) {
	g := managedGuard(b, device.ManagedLimit)
	for i := range uint64(maxSpans - 4) {
		g.reserveManaged(1, somewhere+i<<13, somewhere+i<<13+4096)
	}
	for b.Loop() {
		g.reserveManaged(1, somewhere-4096, somewhere)
		g.releaseManaged(1, somewhere-4096, somewhere)
	}
}
