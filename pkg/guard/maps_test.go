package guard

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// somewhere and elsewhere are addresses that nothing else is at, nor the race detector's memory.
const (
	somewhere = 0x100000000000
	elsewhere = somewhere + 1<<42
)

// mapAt maps shared memory at an address that is its offset, as UVM's mappings are.
func mapAt(base uintptr, length int) error { return mapMany(base, length, 1) }

// mapMany makes n of them, with gaps as long as they are.
func mapMany(base uintptr, length, n int) error {
	fd, err := unix.MemfdCreate("", unix.MFD_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for range n {
		at, _, e := unix.Syscall6(unix.SYS_MMAP, base, uintptr(length), unix.PROT_NONE,
			unix.MAP_SHARED|unix.MAP_FIXED_NOREPLACE, uintptr(fd), base)
		if e != 0 || at != base {
			return fmt.Errorf("mapped at %#x: %w", at, e)
		}
		base += 2 * uintptr(length)
	}
	return nil
}

func unmap(base uintptr, length int) error {
	if _, _, e := unix.Syscall(unix.SYS_MUNMAP, base, uintptr(length), 0); e != 0 {
		return e
	}
	return nil
}

// childMap BASE LENGTH [N]
func childMap(_ *childState, a []int) (string, error) {
	return "", mapMany(uintptr(a[0]), a[1], append(a, 1)[2])
}

// childUnmap BASE LENGTH
func childUnmap(_ *childState, a []int) (string, error) { return "", unmap(uintptr(a[0]), a[1]) }

// childKill PID OTHERS…: as a guard kills a process of a container of these
func childKill(_ *childState, a []int) (string, error) {
	g := &Guard{log: slog.New(slog.NewTextHandler(os.Stderr, nil)), account: newAccount(nil), logged: map[string]map[string]bool{}}
	g.gpuTime = newScheduler(g)
	g.managed.pids = func() []int { return a }
	g.killProcess(a[0])
	return "", nil
}

// childTrace PID: be its tracer for as long as both live, by a thread that is not the first
func childTrace(_ *childState, a []int) (string, error) {
	return "", onThread(func() error {
		if _, _, e := unix.Syscall6(unix.SYS_PTRACE, ptraceSeize, uintptr(a[0]), 0, 0, 0, 0); e != 0 {
			return e
		}
		return nil
	})
}

// childPrivate: others of its user cannot look at it
func childPrivate(*childState, []int) (string, error) {
	return "", unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

// childApart FD: one thread alone has the descriptor, in a table of its own
func childApart(_ *childState, a []int) (string, error) {
	if err := onThread(func() error { return unix.Unshare(unix.CLONE_FILES) }); err != nil {
		return "", err
	}
	return "", unix.Close(a[0])
}

// onThread calls f on a thread that is not the first, and stays.
func onThread(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			result <- onThread(f)
		} else {
			result <- f()
		}
		select {}
	}()
	return <-result
}

// childEndFirst: the first thread ends, the others stay
func childEndFirst(*childState, []int) (string, error) {
	fmt.Println("ok")
	_, _, _ = unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
	return "", nil
}

// childHigh moves a descriptor to a number as high as it may.
func childHigh(_ *childState, a []int) (string, error) {
	number := uint64(1<<16 + 10)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: number + 1, Max: number + 1}); err != nil {
		var limit unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			return "", err
		}
		number = min(number, limit.Cur-1)
	}
	if err := unix.Dup3(a[0], int(number), 0); err != nil {
		return "", err
	}
	return "", unix.Close(a[0])
}

// headless ends the first thread of a child; others go on.
func (c *child) headless() {
	c.t.Helper()
	c.do("endfirst")
	eventually(c.t, "the first thread is a zombie", func() bool {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.pid()))
		return strings.Contains(string(b), ") Z ")
	})
}

// startPlain runs a child without a filter.
func startPlain(t testing.TB, options ...func(*exec.Cmd)) *child {
	t.Helper()
	c := &child{t: t, cmd: exec.Command("/proc/self/exe"), out: make(chan string, 16)}
	c.cmd.Env = append(os.Environ(), childEnv+"=plain")
	c.cmd.Stderr = os.Stderr
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range options {
		o(c.cmd)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.kill)
	go func() {
		s := bufio.NewScanner(out)
		for s.Scan() {
			c.out <- s.Text()
		}
		close(c.out)
	}()
	return c
}

func (c *child) pid() int { return c.cmd.Process.Pid }

func TestParseUVMMap(t *testing.T) {
	for _, c := range []struct {
		name, line string
		base, end  uint64
	}{
		{"managed memory", "7fa2e6000000-7fa2f6000000 rw-s 7fa2e6000000 00:06 144                        /dev/nvidia-uvm\n",
			0x7fa2e6000000, 0x7fa2f6000000},
		{"without a name", "200000000-200200000 ---s 200000000 00:06 144", 0x200000000, 0x200200000},
		{"low, padded with zeroes", "00010000-00020000 rw-s 00010000 00:06 144 /x", 0x10000, 0x20000},
		{"private", "7fa2e6000000-7fa2f6000000 rw-p 7fa2e6000000 00:06 144 /dev/nvidia-uvm", 0, 0},
		{"another offset", "7fa2e6000000-7fa2f6000000 rw-s 00000000 00:06 144 /dev/nvidiactl", 0, 0},
		{"an offset that begins alike", "7fa2e6000000-7fa2f6000000 rw-s 7fa2e60000000 00:06 144 /x", 0, 0},
		{"the address in the name", "7fa2e6000000-7fa2f6000000 rw-s 00000000 00:06 144 rw-s 7fa2e6000000", 0, 0},
		{"at zero", "00000000-00010000 rw-s 00000000 00:06 144 /x", 0, 0},
		{"backwards", "00020000-00010000 rw-s 00020000 00:06 144 /x", 0, 0},
		{"no number", "xyz-00010000 rw-s xyz 00:06 144 /x", 0, 0},
		{"too large a number", "fffffffffffffffff-1 rw-s fffffffffffffffff 00:06 144 /x", 0, 0},
		{"the kernel's own", "ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]", 0, 0},
		{"cut off after the flags", "7fa2e6000000-7fa2f6000000 rw-s", 0, 0},
		{"cut off in the flags", "7fa2e6000000-7fa2f6000000 rw", 0, 0},
		{"only the addresses", "7fa2e6000000-7fa2f6000000", 0, 0},
		{"a dash", "-", 0, 0},
		{"nothing", "", 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			base, end, ok := parseUVMMap([]byte(c.line))
			if want := c.end != 0; ok != want || ok && (base != c.base || end != c.end) {
				t.Errorf("%#x-%#x %v, want %#x-%#x", base, end, ok, c.base, c.end)
			}
		})
	}
}

// TestParseMaps: no line hides those behind it, however long it is or however many there are.
func TestParseMaps(t *testing.T) {
	const one = "200000000-200200000 rw-s 200000000 00:06 144 /dev/nvidia-uvm\n"
	other := "100000000-100001000 r--p 00000000 08:01 7 /"
	for _, n := range []int{0, 4096, 64<<10 - len(other) - 1, 64<<10 - len(other), 64 << 10, 128<<10 - len(other), 1 << 20} {
		list, _ := parseMaps(strings.NewReader(other + strings.Repeat("x", n) + "\n" + one))
		if len(list) != 1 || list[0].base != 0x200000000 {
			t.Errorf("behind a path of %d bytes: %+v", n, list)
		}
	}
	// A path may look like a line, where the buffer ends.
	trick := other + strings.Repeat("y", 64<<10-len(other)) + strings.TrimSuffix(one, "\n") + "\n"
	if list, _ := parseMaps(strings.NewReader(trick)); len(list) != 0 {
		t.Errorf("a path counts: %+v", list)
	}
	if list, _ := parseMaps(strings.NewReader(strings.TrimSuffix(one, "\n"))); len(list) != 1 {
		t.Errorf("without a last newline: %+v", list)
	}
	var b strings.Builder
	for i := range maxSpans + 10 {
		base := uint64(i+1) << 20
		fmt.Fprintf(&b, "%08x-%08x rw-s %08x 00:06 144\n", base, base+4096, base)
	}
	list, _ := parseMaps(strings.NewReader(b.String()))
	if len(list) != 1 || totalSize(list) != (maxSpans+10)*4*quota.KiB {
		t.Errorf("%d ranges of %v", len(list), totalSize(list))
	}
}

// TestSpansOfProcess reads the maps of a real one.
func TestSpansOfProcess(t *testing.T) {
	c := startPlain(t)
	c.do("map", somewhere, 8<<20)
	if list, _ := uvmSpans(c.pid()); len(list) != 1 {
		t.Fatalf("%+v", list)
	}
	c.do("map", somewhere+16<<20, 4<<20)
	c.do("unmap", somewhere+2<<20, 1<<20) // a hole makes two of one
	want := []span{{base: somewhere, end: somewhere + 2<<20}, {base: somewhere + 3<<20, end: somewhere + 8<<20},
		{base: somewhere + 16<<20, end: somewhere + 20<<20}}
	if got, _ := uvmSpans(c.pid()); !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	// The kernel shows no maps by the number of a process whose first thread has ended.
	c.headless()
	if got, _ := uvmSpans(c.pid()); !slices.Equal(got, want) {
		t.Errorf("without its first thread: %+v, want %+v", got, want)
	}
	other := startPlain(t)
	other.headless()
	var spaces []int
	if sharesMaps(c.pid(), &spaces) != 0 || sharesMaps(other.pid(), &spaces) != 0 {
		t.Error("two processes without their first threads count as one")
	}
	c.kill()
	if got, _ := uvmSpans(c.pid()); got != nil {
		t.Errorf("of a process that is gone: %+v", got)
	}
}

// TestLongPath: a file deep in folders, mapped at a low address, hides nothing: its line in the maps is longer than any buffer.
func TestLongPath(t *testing.T) {
	dir, err := unix.Open(t.TempDir(), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	name := strings.Repeat("d", 255)
	for range 400 {
		if err := unix.Mkdirat(dir, name, 0o755); err != nil {
			t.Skip(err)
		}
		next, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		unix.Close(dir)
		if dir = next; err != nil {
			t.Skip(err)
		}
	}
	fd, err := unix.Openat(dir, "file", unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	unix.Close(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	const low = somewhere - 1<<30
	if _, _, e := unix.Syscall6(unix.SYS_MMAP, low, 4096, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_FIXED_NOREPLACE, uintptr(fd), 0); e != 0 {
		t.Fatal(e)
	}
	defer unmap(low, 4096)
	if err := mapAt(somewhere, 4<<20); err != nil {
		t.Fatal(err)
	}
	defer unmap(somewhere, 4<<20)
	if got, _ := uvmSpans(os.Getpid()); len(got) != 1 || got[0].base != somewhere {
		t.Errorf("%+v", got)
	}
}

// siblings is a program that maps managed memory, and has processes with the same address space and with a copy of it.
const siblings = `
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
static char stack[65536];
static int wait_forever(void *unused) { (void)unused; for (;;) pause(); }
int main(void)
{
	void *at = (void *)0x100000000000;
	if (mmap(at, 8 << 20, PROT_NONE, MAP_SHARED | MAP_FIXED, memfd_create("x", 0), (off_t)at) != at)
		return 1;
	int same = clone(wait_forever, stack + sizeof stack, CLONE_VM, 0);
	int copy = fork();
	if (copy == 0)
		return wait_forever(0);
	printf("%d %d\n", same, copy);
	fflush(stdout);
	getchar();
	return 0;
}
`

func startSiblings(t *testing.T) []int {
	t.Helper()
	dir := t.TempDir()
	src, bin := filepath.Join(dir, "x.c"), filepath.Join(dir, "x")
	if err := os.WriteFile(src, []byte(siblings), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("gcc", "-o", bin, src).CombinedOutput(); err != nil {
		t.Skipf("no C compiler: %v %s", err, out)
	}
	cmd := exec.Command(bin)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pids := []int{cmd.Process.Pid, 0, 0}
	if _, err := fmt.Fscan(out, &pids[1], &pids[2]); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		in.Close()
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait()
	})
	return pids
}

// TestSharesMaps: an address space counts once, a copy of it again.
func TestSharesMaps(t *testing.T) {
	pids := startSiblings(t)
	var spaces []int
	for i, want := range []int{0, pids[0], 0} {
		if got := sharesMaps(pids[i], &spaces); got != want {
			t.Errorf("process %d shares with %d, want %d", i, got, want)
		}
	}
	if other := startPlain(t); sharesMaps(other.pid(), &spaces) != 0 || sharesMaps(other.pid(), &spaces) != other.pid() {
		t.Error("a process on its own")
	}
	if sharesMaps(1<<30, &spaces) != 0 {
		t.Error("a process that is not there")
	}
	// One that ends leads no search astray.
	for range 8 {
		c := startPlain(t)
		c.do("pid")
		sharesMaps(c.pid(), &spaces)
		if len(spaces)%2 == 0 {
			c.kill()
		}
	}
	if got := sharesMaps(pids[1], &spaces); got != pids[0] {
		t.Errorf("later: %d of %v", got, spaces)
	}
}

func TestCPUUsage(t *testing.T) {
	for _, c := range []struct {
		name, file, text string
		want             time.Duration
		ok               bool
	}{
		{"v1", "cpuacct.usage", "1234567890\n", 1234567890, true},
		{"v1, damaged", "cpuacct.usage", "\n", 0, false},
		{"v2", "cpu.stat", "usage_usec 1500\nuser_usec 1000\nsystem_usec 500\n", 1500 * time.Microsecond, true},
		{"v2, elsewhere in the file", "cpu.stat", "core_sched.force_idle_usec 1\nusage_usec 7\n", 7 * time.Microsecond, true},
		{"v2, damaged", "cpu.stat", "usage_usec x\n", 0, false},
		{"v2, without it", "cpu.stat", "user_usec 1\n", 0, false},
		{"neither", "other", "", 0, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, c.file), []byte(c.text), 0o644); err != nil {
				t.Fatal(err)
			}
			if got, ok := cpuUsage(dir); ok != c.ok || ok && got != c.want {
				t.Errorf("%v %v, want %v %v", got, ok, c.want, c.ok)
			}
		})
	}
	if c := cgroupsOf(1 << 30); c != (cgroups{}) || len(c.processes()) > 0 {
		t.Errorf("of a process that is not there: %+v", c)
	}
}

// TestManyProcesses: a container cannot hide a process behind others.
func TestManyProcesses(t *testing.T) {
	dir := t.TempDir()
	var text []byte
	for pid := range 5000 {
		text = fmt.Appendln(text, pid+1)
	}
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	if list := (cgroups{procs: dir}).processes(); len(list) != 5000 {
		t.Errorf("%d of 5000 processes", len(list))
	}
}

// TestHeadlessMember: cgroup v1 shows a process whose first thread has ended in the root.
func TestHeadlessMember(t *testing.T) {
	c := startPlain(t)
	c.do("pid")
	inCgroup(t, "devices", c.pid())
	g := &Guard{cgroups: cgroupsOf(c.pid())}
	c.headless()
	if !g.inCgroup(c.pid()) || len(g.cgroups.processes()) != 1 {
		t.Error("it is not the container's any more")
	}
	c.kill() // or its cgroup stays
}

// inCgroup puts a process into a cgroup of its own in a v1 hierarchy.
func inCgroup(t *testing.T, controller string, pid int) {
	t.Helper()
	dir := fmt.Sprintf("/sys/fs/cgroup/%s/cgpu-test-%d", controller, pid)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		// Empty only when the process is gone, and the kernel takes a moment.
		for range 100 {
			if os.Remove(dir) == nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Append(nil, pid), 0); err != nil {
		t.Skip(err)
	}
}

// TestCgroup: the processes and the CPU time of a real cgroup.
func TestCgroup(t *testing.T) {
	for _, controller := range []string{"cpuacct", "devices"} {
		if _, err := os.Stat("/sys/fs/cgroup/" + controller + "/cgroup.procs"); err != nil {
			t.Skip("no cgroup v1: ", err)
		}
	}
	pids := make([]int, 2)
	cmds := make([]*exec.Cmd, 2)
	for i := range cmds {
		cmds[i] = sleeper(t, 0)
		pids[i] = cmds[i].Process.Pid
	}
	inCgroup(t, "cpuacct", pids[0])
	inCgroup(t, "devices", pids[0])
	c := cgroupsOf(pids[0])
	used, ok := cpuUsage(c.cpu)
	if !ok || used < 0 {
		t.Errorf("CPU time %v %v", used, ok)
	}
	for tries := 100; ; tries-- { // it may still be starting
		time.Sleep(10 * time.Millisecond)
		again, _ := cpuUsage(c.cpu)
		if again == used {
			break
		}
		if used = again; tries == 0 {
			t.Fatalf("a process that sleeps uses time: %v", used)
		}
	}
	if got := c.processes(); !slices.Equal(got, pids[:1]) {
		t.Errorf("processes %v, want %v", got, pids[:1])
	}
	for _, cmd := range cmds {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

// nobody runs a command as a user without any rights but, with trace, that to trace everybody: as a guard is.
func nobody(uid uint32, trace bool) func(*exec.Cmd) {
	return func(c *exec.Cmd) {
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid, NoSetGroups: true}}
		if trace {
			c.SysProcAttr.AmbientCaps = []uintptr{unix.CAP_SYS_PTRACE}
		}
	}
}

// ended waits for a child's end, which closes its output.
func (c *child) ended(within time.Duration) bool {
	late := time.After(within)
	for {
		select {
		case _, more := <-c.out:
			if !more {
				return true
			}
		case <-late:
			return false
		}
	}
}

// TestKillProcess kills another user's processes with CAP_SYS_PTRACE alone.
func TestKillProcess(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root for processes of other users")
	}
	killer := func(t *testing.T) *child { return startPlain(t, nobody(65533, true)) }
	target := func(t *testing.T) *child {
		c := startPlain(t, nobody(65534, false))
		c.do("pid")
		return c
	}
	t.Run("another user's", func(t *testing.T) {
		k := killer(t)
		for range 5 {
			c := target(t)
			if k.do("kill", c.pid()); !c.ended(10 * time.Second) {
				t.Fatal("it lives")
			}
		}
		k.do("pid") // nothing happened to the one that traced it
	})
	t.Run("without the right", func(t *testing.T) {
		c := target(t)
		if startPlain(t, nobody(65533, false)).do("kill", c.pid()); c.ended(300 * time.Millisecond) {
			t.Fatal("the test does not test")
		}
		c.kill()
	})
	t.Run("its first thread has ended", func(t *testing.T) {
		c := target(t)
		c.headless()
		if killer(t).do("kill", c.pid()); !c.ended(10 * time.Second) {
			t.Fatal("it lives")
		}
	})
	t.Run("the first of its namespaces", func(t *testing.T) {
		root := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 65534, Size: 1}}
		c := startPlain(t, func(c *exec.Cmd) {
			c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWPID, UidMappings: root, GidMappings: root}
		})
		c.do("private")
		if killer(t).do("kill", c.pid()); !c.ended(10 * time.Second) {
			t.Fatal("it lives")
		}
	})
	t.Run("it has a tracer", func(t *testing.T) {
		c := target(t)
		c.headless()
		tracer := startPlain(t, nobody(65532, true))
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", c.pid()))
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range threads {
			if x.Name() != strconv.Itoa(c.pid()) {
				tracer.do("trace", x.Name())
			}
		}
		if got := tracerOf(c.pid()); got != tracer.pid() {
			t.Fatalf("tracer %d, want %d", got, tracer.pid())
		}
		k := killer(t)
		if k.do("kill", c.pid(), tracer.pid()); !tracer.ended(10 * time.Second) {
			t.Fatal("the tracer lives")
		}
		tracer.kill() // its output is closed before it lets go
		if k.do("kill", c.pid(), tracer.pid()); !c.ended(10 * time.Second) {
			t.Fatal("it lives")
		}
	})
	t.Run("its tracer is not in the container", func(t *testing.T) {
		c := target(t)
		tracer := startPlain(t, nobody(65532, true))
		threads, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", c.pid()))
		for _, x := range threads {
			tracer.do("trace", x.Name())
		}
		killer(t).do("kill", c.pid())
		tracer.do("pid")
	})
	t.Run("another container's", func(t *testing.T) {
		c := target(t)
		d := answering(0, nil)
		g := withClient(newFakeGuard(t, d))
		g.managed.pids = func() []int { return []int{os.Getpid()} }
		file, err := os.OpenFile(fakeControl, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		f, err := g.followFile(int(file.Fd()), node{nodeControl, 0})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := g.tasks.acquire(os.Getpid()); err != nil {
			t.Fatal(err)
		}
		g.account.addClient(fakeClient, os.Getpid(), f)
		g.killProcess(c.pid())
		c.do("pid")
		if len(d.calls) > 0 {
			t.Error("the container's clients were freed for a process that is gone")
		}
	})
}

// TestOwnThread: a thread of a function of its own is none that goes on.
func TestOwnThread(t *testing.T) {
	seen := map[int]bool{}
	for range 20 {
		var tid int
		if err := onOwnThread(func() error { tid = unix.Gettid(); return unix.EPERM }); !errors.Is(err, unix.EPERM) {
			t.Fatal(err)
		}
		if tid == os.Getpid() {
			t.Error("the main thread")
		}
		seen[tid] = true
		eventually(t, "the thread ends", func() bool { return unix.Tgkill(os.Getpid(), tid, 0) == unix.ESRCH })
	}
}

// endless is a process that maps memory as fast as its maps are read.
type endless struct{ lines int }

func (e *endless) Read(b []byte) (n int, err error) {
	if e.lines > 2*maxMapLines { // so that a reader without a bound ends too
		return 0, io.EOF
	}
	const line = "7fa2e6000000-7fa2e6001000 rw-p 00000000 00:00 0\n"
	for ; len(b)-n >= len(line); e.lines++ {
		n += copy(b[n:], line)
	}
	return n, nil
}

func TestEndlessMaps(t *testing.T) {
	e := new(endless)
	if list, err := parseMaps(e); !errors.Is(err, errEndless) || e.lines > maxMapLines+64<<10 {
		t.Errorf("%d ranges, %v, after %d lines", len(list), err, e.lines)
	}
}
