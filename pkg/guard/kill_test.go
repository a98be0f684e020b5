// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/testenv"
	"golang.org/x/sys/unix"
)

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
	testenv.NeedsRoot(t, "processes of other users")
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
			if k.do("kill", c.pid()); !c.ended(patience) {
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
		if killer(t).do("kill", c.pid()); !c.ended(patience) {
			t.Fatal("it lives")
		}
	})
	t.Run("the first of its namespaces", func(t *testing.T) {
		root := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 65534, Size: 1}}
		c := startPlain(t, func(c *exec.Cmd) {
			c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWPID, UidMappings: root, GidMappings: root}
		})
		c.do("private")
		if killer(t).do("kill", c.pid()); !c.ended(patience) {
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
		if k.do("kill", c.pid(), tracer.pid()); !tracer.ended(patience) {
			t.Fatal("the tracer lives")
		}
		tracer.kill() // its output is closed before it lets go
		if k.do("kill", c.pid(), tracer.pid()); !c.ended(patience) {
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
