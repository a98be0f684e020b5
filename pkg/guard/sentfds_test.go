package guard

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// stranger is a process with a mount namespace of its own, as a container's has, or without, as the host's.
type stranger struct {
	t    *testing.T
	cmd  *exec.Cmd
	gone chan struct{}
}

// newStranger starts one that opens a node, if any, as descriptor 5, and has files from 3 on.
func newStranger(t *testing.T, apart bool, opens string, files ...*os.File) *stranger {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root for mount namespaces")
	}
	script := strangerScript
	if opens != "" {
		script = "exec 5<>" + opens + "; " + script
	}
	cmd := exec.Command("sh", "-c", script)
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if apart {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNS
	}
	return startStranger(t, cmd, files)
}

const strangerScript = "echo ready; exec sleep 100"

func startStranger(t *testing.T, cmd *exec.Cmd, files []*os.File) *stranger {
	t.Helper()
	s := &stranger{t: t, cmd: cmd, gone: make(chan struct{})}
	s.cmd.ExtraFiles = files
	out, err := s.cmd.StdoutPipe()
	if err == nil {
		err = s.cmd.Start()
	}
	if err != nil {
		t.Skip("cannot start a process with a mount namespace of its own: ", err)
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = s.cmd.Wait()
		close(s.gone)
	}()
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		<-s.gone
	})
	return s
}

// joining is one in the mount namespace of another.
func joining(t *testing.T, other *stranger, files ...*os.File) *stranger {
	t.Helper()
	return startStranger(t, exec.Command("nsenter", "--mount=/proc/"+strconv.Itoa(other.pid())+"/ns/mnt", "sh", "-c", strangerScript), files)
}

func (s *stranger) pid() int { return s.cmd.Process.Pid }

func (s *stranger) ended() bool {
	select {
	case <-s.gone:
		return true
	case <-time.After(10 * time.Second):
		return false
	}
}

func (s *stranger) lives() bool {
	select {
	case <-s.gone:
		return false
	case <-time.After(200 * time.Millisecond):
		return true
	}
}

// file copies descriptor 5, as a process does that was sent it.
func (s *stranger) file() *os.File {
	s.t.Helper()
	pidfd, err := unix.PidfdOpen(s.pid(), 0)
	if err != nil {
		s.t.Fatal(err)
	}
	defer unix.Close(pidfd)
	fd, err := unix.PidfdGetfd(pidfd, 5, 0)
	if err != nil {
		s.t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "passed")
	s.t.Cleanup(func() { f.Close() })
	return f
}

// outsideGuard is a guard whose container has one process, and a driver that names pids.
func outsideGuard(t *testing.T, container *stranger, pids ...int) *Guard {
	t.Helper()
	g := newFakeGuard(t, answering(0, nil))
	g.cfg.RunDir = t.TempDir()
	g.sentFDs.inCgroup = func(tgid int) bool { return tgid == container.pid() }
	g.managed.pids = func() []int { return []int{container.pid()} }
	g.sentFDs.pids = func() []int { return pids }
	g.sentFDs.everywhere = time.Now().Add(time.Hour)
	return g
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
	g.checkGPUHolders()
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
	if v := g.checkOutsider(outsider{neighbour.pid(), start}, stale); v != outsiderUnclear || !neighbour.lives() {
		t.Errorf("a neighbour with a number that was the container's: %v", v)
	}
	first := newStranger(t, true, "")
	other := joining(t, first, container.file())
	g.sentFDs.inCgroup = func(tgid int) bool { return tgid == container.pid() || tgid == first.pid() }
	g.managed.pids = func() []int { return []int{container.pid(), first.pid()} }
	if start, err = ledger.ProcStart(other.pid()); err != nil {
		t.Fatal(err)
	}
	if v := g.checkOutsider(outsider{other.pid(), start}, stale); v != outsiderClean || !other.lives() {
		t.Errorf("a process of the container in a new mount namespace: %v", v)
	}
	if start, err = ledger.ProcStart(child.pid()); err != nil {
		t.Fatal(err)
	}
	if v := g.checkOutsider(outsider{child.pid(), start}, stale); v != outsiderGuilty || !child.ended() {
		t.Errorf("who has a file of the container: %v", v)
	}
}

// TestOutsideSilent: a holder that the driver does not name is found by a look at all processes, now and then.
func TestOutsideSilent(t *testing.T) {
	container, neighbour := newStranger(t, true, fakeControl), newStranger(t, true, fakeControl)
	thief := newStranger(t, true, "", container.file())
	g := outsideGuard(t, container, neighbour.pid())
	g.checkGPUHolders()
	if !thief.lives() {
		t.Fatal("the test does not test")
	}
	g.sentFDs.everywhere, g.sentFDs.awake = time.Time{}, true
	g.checkGPUHolders()
	if !thief.ended() || !neighbour.lives() {
		t.Error("the wrong one lives")
	}
}

// TestOutsideGivenAway: who has the GPU and no file has given it away.
func TestOutsideGivenAway(t *testing.T) {
	container := newStranger(t, true, fakeControl)
	middle, thief := newStranger(t, true, ""), newStranger(t, true, "", container.file())
	g := outsideGuard(t, container, middle.pid())
	g.checkGPUHolders()
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
	g.checkGPUHolders()
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
	g.checkGPUHolders()
	start, _ := ledger.ProcStart(own.pid())
	if who := (outsider{own.pid(), start}); len(g.sentFDs.clean) != 1 || !g.sentFDs.clean[who] {
		t.Errorf("clean: %v", g.sentFDs.clean)
	}
	thief := newStranger(t, true, "", container.file())
	g.sentFDs.pids = func() []int { return []int{thief.pid()} }
	g.sentFDs.clean = map[outsider]bool{{thief.pid(), 1}: true}
	g.checkGPUHolders()
	if !thief.ended() {
		t.Error("it passes for a process that is gone")
	}
}

// newCgroup makes a cgroup below another one, "" is the root, and returns its folder.
func newCgroup(t *testing.T, below, name string) string {
	t.Helper()
	if below == "" {
		below = "/sys/fs/cgroup/devices"
		if _, err := os.Stat(below); err != nil {
			below = "/sys/fs/cgroup"
		}
	}
	dir := filepath.Join(below, name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skip("cannot make a cgroup: ", err)
	}
	t.Cleanup(func() {
		for range 100 { // its processes have ended, and the kernel takes a moment
			if os.Remove(dir) == nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("%s stays", dir)
	})
	return dir
}

func (s *stranger) moveTo(cgroup string) {
	s.t.Helper()
	if err := os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), fmt.Append(nil, s.pid()), 0); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { // before the cgroup is removed
		_ = s.cmd.Process.Kill()
		<-s.gone
	})
}

// TestOutsideMembers: who is the container's is told by its filter, its mount namespaces and its own cgroup. To be below that is not
// enough, since whoever starts a container may choose that (docker run --cgroup-parent).
func TestOutsideMembers(t *testing.T) {
	for _, c := range []struct {
		name   string
		cgroup string // the holder's: "own" is the container's, "below" it, or "other"
		with   bool   // in the mount namespace of the container's first process
		filter string // "holder": has made a trapped call; "sibling": another in its mount namespace has
		moved  bool   // the container's first process has moved itself further down, as systemd does
		over   bool   // the container is over
		ended  bool
	}{
		{name: "started in the container", cgroup: "own", with: true},
		{name: "with a mount namespace of its own", cgroup: "own"},
		{name: "further down", cgroup: "below", with: true},
		{name: "further down, beside systemd", cgroup: "below", with: true, moved: true},
		{name: "further down, with a mount namespace of its own and the filter", cgroup: "below", filter: "holder"},
		{name: "further down, in the mount namespace of one with the filter", cgroup: "below", filter: "sibling"},
		{name: "moved away by root", cgroup: "other", with: true},
		{name: "another container", cgroup: "other", ended: true},
		{name: "another container below", cgroup: "below", ended: true},
		{name: "another container below, and systemd", cgroup: "below", moved: true, ended: true},
		{name: "another container below, later", cgroup: "below", over: true, ended: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			own := newCgroup(t, "", fmt.Sprintf("cgpu-test-members-%d", os.Getpid()))
			cgroups := map[string]string{"own": own, "below": newCgroup(t, own, "below"),
				"other": newCgroup(t, "", fmt.Sprintf("cgpu-test-other-%d", os.Getpid()))}
			container := newStranger(t, true, fakeControl)
			container.moveTo(own)
			g := outsideGuard(t, container)
			g.sentFDs.inCgroup, g.managed.pids = nil, nil
			g.initPID, g.cgroups = container.pid(), cgroupsOf(container.pid())
			g.initStart, _ = ledger.ProcStart(container.pid())
			if g.cgroups.procs != own {
				t.Fatalf("the container's cgroup is %q, want %q", g.cgroups.procs, own)
			}
			filtered := func(s *stranger) {
				pidfd, err := unix.PidfdOpen(s.pid(), 0)
				if err != nil {
					t.Fatal(err)
				}
				g.tasks.procs[s.pid()] = &process{tgid: s.pid(), pidfd: pidfd}
				t.Cleanup(func() { _ = unix.Close(pidfd) })
			}
			var holder *stranger
			passed := container.file()
			switch {
			case c.with:
				holder = joining(t, container, passed)
			case c.filter == "sibling":
				sibling := newStranger(t, true, "")
				sibling.moveTo(cgroups[c.cgroup])
				filtered(sibling)
				holder = joining(t, sibling, passed)
			default:
				holder = newStranger(t, true, "", passed)
			}
			holder.moveTo(cgroups[c.cgroup])
			if c.filter == "holder" {
				filtered(holder)
			}
			if c.moved {
				container.moveTo(newCgroup(t, own, "init.scope"))
			}
			if c.over {
				if _, err := g.followFile(int(passed.Fd()), node{nodeControl, 0}); err != nil {
					t.Fatal(err)
				}
				_ = container.cmd.Process.Kill()
				container.ended()
				g.endOutsiders()
			} else {
				g.sentFDs.everywhere, g.sentFDs.awake = time.Time{}, true
				g.checkGPUHolders()
			}
			if c.ended && !holder.ended() || !c.ended && !holder.lives() {
				t.Errorf("lives: %v", !c.ended)
			}
			if !c.ended && !container.lives() {
				t.Error("the container's process was ended")
			}
		})
	}
}

// TestOutsidePidNamespace: who is started into the container's pid namespace (docker run --pid=container:ID), and below its cgroup, is not
// the container's; nor is what becomes a child of the container's first process there.
func TestOutsidePidNamespace(t *testing.T) {
	own := newCgroup(t, "", fmt.Sprintf("cgpu-test-pids-%d", os.Getpid()))
	below := newCgroup(t, own, "below")
	first := exec.Command("sh", "-c", "exec 5<>"+fakeControl+"; "+strangerScript)
	first.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID}
	container := startStranger(t, first, nil)
	container.moveTo(own)
	join := exec.Command("nsenter", "--pid=/proc/"+strconv.Itoa(container.pid())+"/ns/pid", "sh", "-c", "sleep 100 & echo ready; wait")
	join.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	parent := startStranger(t, join, []*os.File{container.file()})
	parent.moveTo(below)
	child := func(of int) int {
		list, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", of))
		pid, err := strconv.Atoi(strings.TrimSpace(string(list)))
		if err != nil {
			t.Fatalf("the children of %d are %q", of, list)
		}
		if err := os.WriteFile(filepath.Join(below, "cgroup.procs"), fmt.Append(nil, pid), 0); err != nil {
			t.Fatal(err)
		}
		return pid
	}
	shell := child(parent.pid())
	orphan := child(shell)
	_ = unix.Kill(shell, unix.SIGKILL)
	parent.ended()
	if text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", orphan)); !strings.Contains(string(text),
		fmt.Sprintf("PPid:\t%d\n", container.pid())) {
		t.Fatalf("it is not the container's child: %s", text)
	}
	g := outsideGuard(t, container)
	g.sentFDs.inCgroup, g.managed.pids = nil, nil
	g.initPID, g.cgroups = container.pid(), cgroupsOf(container.pid())
	g.initStart, _ = ledger.ProcStart(container.pid())
	g.sentFDs.everywhere, g.sentFDs.awake = time.Time{}, true
	g.checkGPUHolders()
	for range 1000 {
		if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", orphan)); err != nil || strings.Contains(string(stat), ") Z ") {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("it lives")
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
			if g.checkGPUHolders(); !thief.ended(10 * time.Second) {
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
		t.Skip("before Linux 6.9: ", err)
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
	thief := newStranger(t, true, "", container.file())
	g := outsideGuard(t, container)
	g.cgroups.cpu = t.TempDir()
	if err := os.WriteFile(filepath.Join(g.cgroups.cpu, "cpu.stat"), []byte("usage_usec 0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	g.sentFDs.asleep = time.Now().Add(time.Hour)
	if g.sentFDs.everywhere = (time.Time{}); !g.sentFDs.awake {
		g.checkGPUHolders()
	}
	if !thief.lives() {
		t.Fatal("the test does not test")
	}
	g.sentFDs.everywhere, g.sentFDs.asleep = time.Time{}, time.Time{}
	g.checkGPUHolders()
	if !thief.ended() {
		t.Error("it lives")
	}
	if d := time.Until(g.sentFDs.asleep); d <= 0 || d > time.Hour {
		t.Errorf("the next look is in %v", d)
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
	g.checkGPUHolders()
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
	r.ID, r.Nonce, r.VGPUs = "other", "other", []ledger.VGPU{{UUID: x.UUID, Limit: quota.GiB, Weight: 1}}
	_, err := ledger.Open(g.cfg.RunDir).Reserve(ledger.Request{
		Record: r, GPUs: []ledger.GPU{{UUID: x.UUID, Memory: x.Memory}},
		Card: sched.Card{Policy: sched.PolicyFair, MaxInst: 20, PrioRatio: sched.DefaultPrioRatio},
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestMountOf: a mount is of one namespace.
func TestMountOf(t *testing.T) {
	container, other := newStranger(t, true, fakeControl), newStranger(t, true, fakeControl)
	mounts := map[int]bool{}
	for _, id := range mountsOf(container.pid()) {
		mounts[id] = true
	}
	if len(mounts) == 0 || !mounts[mountOf(int(container.file().Fd()))] || mounts[mountOf(int(other.file().Fd()))] {
		t.Errorf("%v", mounts)
	}
	if got := mountOf(1 << 20); got != -1 {
		t.Errorf("of no file: %s", strconv.Itoa(got))
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
