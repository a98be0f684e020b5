// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// outsideGuard is a guard whose container has one process, and a driver that names pids.
func outsideGuard(t *testing.T, container *stranger, pids ...int) *Guard {
	t.Helper()
	g := newFakeGuard(t, answering(0, nil))
	g.cfg.RunDir = t.TempDir()
	g.sentFDs.inCgroup = func(tgid int) bool { return tgid == container.pid() }
	g.managed.pids = func() []int { return []int{container.pid()} }
	g.sentFDs.pids = func() []int { return pids }
	return g
}

// lookAround looks at all processes, as the one does who looks for all guards, and at whom that found.
func lookAround(t *testing.T, g *Guard) {
	t.Helper()
	if g.sentFDs.lookouts == nil {
		g.sentFDs.lookouts = g.joinLookouts()
	}
	for _, x := range g.sentFDs.lookouts {
		if !x.elected() {
			t.Fatal("another guard looks")
		}
		x.everywhere = time.Time{}
		g.lookForAll(x)
	}
	g.checkOutsiders()
}

// TestOutside: who was sent the container's files is ended, as soon as the driver names him; all others are let be.
func TestOutside(t *testing.T) {
	container := newStranger(t, true, fakeControl)
	gpuOnly := newStranger(t, true, "/dev/zero") // the container's too, with another node
	passed := container.file()
	thief := newStranger(t, true, "", passed)
	thief2 := newStranger(t, true, fakeControl, gpuOnly.file()) // with a nvidiactl of its own
	own := newStranger(t, true, fakeControl)
	host := newStranger(t, false, fakeControl, passed)
	none := newStranger(t, true, "")
	g := outsideGuard(t, container, container.pid(), thief.pid(), thief2.pid(), own.pid(), host.pid(), none.pid(), 1<<30)
	g.sentFDs.inCgroup = func(tgid int) bool { return tgid == container.pid() || tgid == gpuOnly.pid() }
	g.managed.pids = func() []int { return []int{container.pid(), gpuOnly.pid()} }
	g.checkOutsiders()
	if !thief.ended() || !thief2.ended() {
		t.Error("a process with the container's files lives")
	}
	if !own.lives() || !host.lives() || !none.lives() {
		t.Error("a process without the container's files, or of the host, was ended")
	}
	if !container.ended() {
		t.Error("what the thief has made lives on in the container's file")
	}
	if n := g.stats.processesKilled.Load(); n < 2 {
		t.Errorf("counted %d", n)
	}
}

// TestOutsideStale: what a look goes by may be old when it comes to a process. A mount of the container is gone, and its number has become
// that of another container's; or the container has made a mount namespace since.
func TestOutsideStale(t *testing.T) {
	container, neighbour := newStranger(t, true, fakeControl), newStranger(t, true, fakeControl)
	child := newStranger(t, true, "", container.file())
	g := outsideGuard(t, container)
	stale := g.findBelongings(false)
	stale.mounts[mountOf(int(neighbour.file().Fd()))] = true
	start, err := ledger.ProcStart(neighbour.pid())
	if err != nil {
		t.Fatal(err)
	}
	if v := g.checkOutsider(outsider{PID: neighbour.pid(), Start: start}, stale); v != outsiderUnclear || !neighbour.lives() {
		t.Errorf("a neighbour with a number that was the container's: %v", v)
	}
	first := newStranger(t, true, "")
	other := joining(t, first, container.file())
	g.sentFDs.inCgroup = func(tgid int) bool { return tgid == container.pid() || tgid == first.pid() }
	g.managed.pids = func() []int { return []int{container.pid(), first.pid()} }
	if start, err = ledger.ProcStart(other.pid()); err != nil {
		t.Fatal(err)
	}
	if v := g.checkOutsider(outsider{PID: other.pid(), Start: start}, stale); v != outsiderClean || !other.lives() {
		t.Errorf("a process of the container in a new mount namespace: %v", v)
	}
	if start, err = ledger.ProcStart(child.pid()); err != nil {
		t.Fatal(err)
	}
	if v := g.checkOutsider(outsider{PID: child.pid(), Start: start}, stale); v != outsiderGuilty || !child.ended() {
		t.Errorf("who has a file of the container: %v", v)
	}
}

// TestOutsideSilent: a holder that the driver does not name is found by a look at all processes, now and then.
func TestOutsideSilent(t *testing.T) {
	container, neighbour := newStranger(t, true, fakeControl), newStranger(t, true, fakeControl)
	thief := newStranger(t, true, "", container.file())
	g := outsideGuard(t, container, neighbour.pid())
	g.checkOutsiders()
	if !thief.lives() {
		t.Fatal("the test does not test")
	}
	lookAround(t, g)
	if !thief.ended() || !neighbour.lives() {
		t.Error("the wrong one lives")
	}
}

// TestOutsideGivenAway: who has the GPU and no file has given it away.
func TestOutsideGivenAway(t *testing.T) {
	container := newStranger(t, true, fakeControl)
	middle, thief := newStranger(t, true, ""), newStranger(t, true, "", container.file())
	g := outsideGuard(t, container, middle.pid())
	g.checkOutsiders()
	if !thief.ended() || !middle.lives() {
		t.Error("the wrong one lives")
	}
}

// TestOutsideGuarded: who is in a container with a guard of its own is that guard's, until ours is over.
func TestOutsideGuarded(t *testing.T) {
	container := newStranger(t, true, fakeControl)
	other := newStranger(t, true, fakeControl, container.file())
	g := outsideGuard(t, container, other.pid())
	start, err := ledger.ProcStart(other.pid())
	if err != nil {
		t.Fatal(err)
	}
	reserveOther(t, g, ledger.Record{Socket: "s", InitPID: other.pid(), InitStart: start})
	g.checkOutsiders()
	if !other.lives() {
		t.Error("another guard's container was touched")
	}
}

// TestOutsideAfter: the container is gone, and its file is held.
func TestOutsideAfter(t *testing.T) {
	container := newStranger(t, true, fakeControl)
	passed := container.file()
	thief, own := newStranger(t, true, "", passed), newStranger(t, true, fakeControl)
	g := outsideGuard(t, container)
	if _, err := g.followFile(int(passed.Fd()), node{nodeControl, 0}); err != nil {
		t.Fatal(err)
	}
	g.sentFDs.inCgroup = func(int) bool { return false }
	g.managed.pids = func() []int { return nil }
	_ = container.cmd.Process.Kill()
	container.ended()
	if n := g.endOutsiders(); n != 1 || !thief.ended() || !own.lives() {
		t.Errorf("%d ended", n)
	}
	passed.Close()
	g.sweep()
	if n := g.files.count(); n != 0 {
		t.Errorf("%d files are still held", n)
	}
}

// TestOutsideKnown: who was found to be clean is not looked at again, but another process with its number is.
func TestOutsideKnown(t *testing.T) {
	container, own := newStranger(t, true, fakeControl), newStranger(t, true, fakeControl)
	g := outsideGuard(t, container, own.pid())
	g.checkOutsiders()
	start, _ := ledger.ProcStart(own.pid())
	if who := (outsider{PID: own.pid(), Start: start}); len(g.sentFDs.clean) != 1 || !g.sentFDs.clean[who] {
		t.Errorf("clean: %v", g.sentFDs.clean)
	}
	thief := newStranger(t, true, "", container.file())
	g.sentFDs.pids = func() []int { return []int{thief.pid()} }
	g.sentFDs.clean = map[outsider]bool{{PID: thief.pid(), Start: 1}: true}
	g.checkOutsiders()
	if !thief.ended() {
		t.Error("it passes for a process that is gone")
	}
}

// hider is a process with a mount namespace of its own and the container's file as descriptor 3.
func hider(t *testing.T, passed *os.File) *child {
	return startPlain(t, func(c *exec.Cmd) {
		c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
		c.ExtraFiles = []*os.File{passed}
	})
}

// TestOutsideHidden: where a holder has the file, and which of its threads live, does not hide it.
func TestOutsideHidden(t *testing.T) {
	for name, hide := range map[string]func(c *child){
		"at a high number":           func(c *child) { c.do("high", 3) },
		"its first thread has ended": (*child).headless,
	} {
		t.Run(name, func(t *testing.T) {
			container := newStranger(t, true, fakeControl)
			passed := container.file()
			thief := hider(t, passed)
			hide(thief)
			g := outsideGuard(t, container, thief.pid())
			if !hasFile(os.Getpid(), thief.pid(), int(passed.Fd()), &g.nodes) {
				t.Error("it would not be found in the container")
			}
			if g.checkOutsiders(); !thief.ended(patience) {
				t.Error("it lives")
			}
		})
	}
	t.Run("the container's first thread has ended", func(t *testing.T) {
		first := newStranger(t, true, fakeControl)
		container := hider(t, first.file())
		container.headless()
		g := outsideGuard(t, first)
		g.managed.pids = func() []int { return []int{container.pid()} }
		g.sentFDs.inCgroup = func(tgid int) bool { return tgid == container.pid() }
		if b := g.findBelongings(false); len(b.namespaces) != 1 || len(b.mounts) == 0 {
			t.Errorf("its mounts are not known: %+v", b)
		}
	})
}

// TestFindApart: a client's file is found where only one thread has it, also when the first thread of that process has ended.
func TestFindApart(t *testing.T) {
	if fd, err := unix.PidfdOpen(unix.Gettid(), pidfdThread); err != nil {
		testenv.Lacks(t, "before Linux 6.9: %v", err)
	} else {
		_ = unix.Close(fd)
	}
	g := newFakeGuard(t, answering(0, nil))
	passed, err := os.OpenFile(fakeControl, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer passed.Close()
	f, err := g.followFile(int(passed.Fd()), node{nodeControl, 0})
	if err != nil {
		t.Fatal(err)
	}
	c := startPlain(t, func(c *exec.Cmd) { c.ExtraFiles = []*os.File{passed} })
	for _, change := range []func(){func() {}, func() { c.do("apart", 3) }, c.headless} {
		change()
		fd, at := findFile(g.files.self, c.pid(), f, &g.nodes)
		if fd < 0 {
			t.Fatal("not found")
		}
		_ = unix.Close(fd)
		if fd = g.fileAt(at, f); fd < 0 {
			t.Fatalf("%+v is not where it was found", at)
		}
		_ = unix.Close(fd)
	}
}

// TestOutsideAsleep: what a container sent before it went to sleep can be received long after.
func TestOutsideAsleep(t *testing.T) {
	container := newStranger(t, true, fakeControl)
	g := outsideGuard(t, container)
	g.cgroups.cpu = t.TempDir()
	if err := os.WriteFile(filepath.Join(g.cgroups.cpu, "cpu.stat"), []byte("usage_usec 0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	lookAround(t, g) // it has run before, and may just have sent it
	lookAround(t, g)
	thief := newStranger(t, true, "", container.file())
	lookAround(t, g)
	if !thief.lives() {
		t.Fatal("the test does not test")
	}
	x := g.sentFDs.lookouts[0]
	if d := time.Until(x.asleep); d <= 0 || d > time.Hour {
		t.Errorf("the next look is in %v", d)
	}
	x.asleep = time.Time{}
	lookAround(t, g)
	if !thief.ended() {
		t.Error("it lives")
	}
}

// TestRest: tenants can make a look take long. That must not keep the next one off for hours, nor a CPU busy.
func TestRest(t *testing.T) {
	for _, c := range []struct{ took, want time.Duration }{
		{0, everywhereLook},
		{60 * time.Millisecond, everywhereLook},
		{200 * time.Millisecond, 100 * time.Second},
		{5 * time.Second, longestLook},
		{time.Minute, 20 * time.Minute},
	} {
		if got := pauseAfter(everywhereLook, c.took); got != c.want {
			t.Errorf("after %v: %v, want %v", c.took, got, c.want)
		}
	}
}

// TestOutsideGuards: another guard copies what its container was sent. It is not ended, nor are processes of the node.
func TestOutsideGuards(t *testing.T) {
	container := newStranger(t, true, fakeControl)
	guard := newStranger(t, true, "", container.file()) // of an engine with a mount namespace of its own
	g := outsideGuard(t, container, guard.pid())
	start, err := ledger.ProcStart(guard.pid())
	if err != nil {
		t.Fatal(err)
	}
	reserveOther(t, g, ledger.Record{GuardPID: guard.pid(), GuardStart: start})
	g.checkOutsiders()
	g.endOutsiders()
	if !guard.lives() {
		t.Error("another guard was ended")
	}
	if namespace, ok := mountNamespace(1); ok && !g.findBelongings(false).host[namespace] {
		t.Error("the node's first process is not the host's")
	}
}

// reserveOther puts another container into the ledger.
func reserveOther(t *testing.T, g *Guard, r ledger.Record) {
	t.Helper()
	x := g.cfg.GPUs[0]
	r.ID, r.Nonce, r.VGPUs = "other", "other", []ledger.VGPU{{UUID: x.UUID, Slice: quota.Slice{Limit: quota.GiB,
		Share: quota.Share{Weight: 1}}}}
	_, err := ledger.Open(g.cfg.RunDir).Reserve(ledger.Request{
		Record: r, GPUs: []ledger.GPU{{UUID: x.UUID, Memory: x.Memory}},
		Card: sched.Card{Policy: sched.PolicyFair, MaxInst: 20, PrioRatio: sched.DefaultPrioRatio},
	})
	if err != nil {
		t.Fatal(err)
	}
}

// BenchmarkEverywhere looks at all processes of this machine.
func BenchmarkEverywhere(b *testing.B) {
	g := newFakeGuard(b, answering(0, nil))
	g.cfg.RunDir = b.TempDir()
	g.sentFDs.inCgroup = func(int) bool { return false }
	g.managed.pids = func() []int { return nil }
	belongings := g.findBelongings(false)
	belongings.host = nil // or they are the host's, and cost less
	for b.Loop() {
		g.checkAllProcesses(belongings)
	}
	names, _ := os.ReadDir("/proc")
	b.ReportMetric(float64(len(names)), "entries")
}
