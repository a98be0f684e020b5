// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"github.com/opencgpu/cgpu/pkg/proc"
	"github.com/opencgpu/cgpu/pkg/testenv"

	"golang.org/x/sys/unix"
)

// childCycle ROUNDS: a child of the child whose first thread has ended, and each other one ends as soon as it has made the next → its pid
func childCycle(_ *childState, a []int) (string, error) {
	code, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return "", err
	}
	copy(code, []byte{
		0xbb, 0, 0, 0, 0, // mov ebx, ROUNDS
		0xff, 0xcb, // again: dec ebx
		0x74, 0x1a, // jz end
		0xb8, 56, 0, 0, 0, // mov eax, SYS_clone
		0xbf, 0x00, 0x0f, 0x05, 0x00, // mov edi, CLONE_VM|CLONE_FS|CLONE_FILES|CLONE_SIGHAND|CLONE_THREAD|CLONE_SYSVSEM
		0x31, 0xf6, 0x31, 0xd2, 0x45, 0x31, 0xd2, 0x45, 0x31, 0xc0, // xor esi, edx, r10d, r8d: on the same stack, which nobody uses
		0x0f, 0x05, // syscall
		0x85, 0xc0, // test eax, eax
		0x7e, 0xe2, // jle again: the new one, or it could not be made
		0xb8, 60, 0, 0, 0, // end: mov eax, SYS_exit
		0x31, 0xff, // xor edi, edi
		0x0f, 0x05, // syscall
	})
	binary.LittleEndian.PutUint32(code[1:], uint32(a[0]))
	entry := &code[0]
	pointer := unsafe.Pointer(&entry)
	run := *(*func())(unsafe.Pointer(&pointer))
	pid, _, e := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	switch {
	case e != 0:
		return "", e
	case pid == 0:
		run()
	}
	return fmt.Sprint(pid), nil
}

// elusive starts such a process, which has mapped managed memory behind others' mappings; it ends by itself after a while.
func elusive(t *testing.T, c *child) int {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		testenv.Skip(t, "not on amd64: the child is machine code of amd64")
	}
	pid := c.do("cycle", 1<<19)[0]
	eventually(t, "its first thread has ended", func() bool { return !hasNamespace(pid) })
	return pid
}

// TestElusive: threads that end as soon as they are looked at hide nothing.
func TestElusive(t *testing.T) {
	c := startPlain(t, nobody(65534, false))
	c.do("map", somewhere, 8<<20)
	pid := elusive(t, c)
	unseen := 0
	for range 200 {
		list, seen := uvmSpans(pid)
		if seen && !slices.Equal(list, []span{{base: somewhere, end: somewhere + 8<<20}}) {
			t.Fatalf("%+v of a process that goes on", list)
		}
		if !seen {
			unseen++
		}
	}
	t.Log("not read:", unseen, "of 200")
	if !goesOn(pid) {
		t.Fatal("the test does not test")
	}
	startPlain(t, nobody(65533, true)).do("kill", pid)
	eventually(t, "it ends", func() bool { return !goesOn(pid) })
}

// TestElusiveEnds: whoever makes that his maps take longer to read than his threads live is killed, and keeps what he has until then.
func TestElusiveEnds(t *testing.T) {
	c := startPlain(t)
	c.do("map", somewhere, 4096, 10000)
	g := newFakeGuard(t, answering(0, nil))
	var pid int
	g.managed.pids = func() []int { return []int{pid} }
	// On a busy machine a look may see all of it all the same, or find it at its end.
	for range 20 {
		g.managed.setSpans(pid, nil)
		pid = elusive(t, c)
		g.managed.setSpans(pid, []span{{base: somewhere, end: somewhere + 8<<20, agreed: true}})
		if g.scanMaps(); g.stats.processesKilled.Load() > 0 {
			break
		}
	}
	if n := g.stats.processesKilled.Load(); n != 1 || g.managed.spans != 1 {
		t.Errorf("%d killed, %d ranges", n, g.managed.spans)
	}
	eventually(t, "it ends", func() bool { return !goesOn(pid) })
	if g.scanMaps(); g.managed.spans != 0 || g.stats.processesKilled.Load() != 1 {
		t.Errorf("after its end: %d killed, %d ranges", g.stats.processesKilled.Load(), g.managed.spans)
	}
}

// goesOn says whether a process has a thread that has not ended. The kernel skips one now and then that is about to end.
func goesOn(tgid int) bool {
	for range 20 {
		for tid := range proc.Threads(tgid) {
			if tid != tgid || hasNamespace(tid) {
				return true
			}
		}
	}
	return false
}
