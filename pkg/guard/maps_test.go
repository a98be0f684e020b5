// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/testenv"
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
			t.Fatal(err)
		}
		next, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		unix.Close(dir)
		if dir = next; err != nil {
			t.Fatal(err)
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
		testenv.Lacks(t, "no C compiler: %v %s", err, out)
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
