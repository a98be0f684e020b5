// SPDX-License-Identifier: Apache-2.0

package guard

import (
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
	"github.com/opencgpu/cgpu/pkg/testenv"
)

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
		testenv.Lacks(t, "cannot make a cgroup: %v", err)
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
				lookAround(t, g)
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
	lookAround(t, g)
	for range 1000 {
		if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", orphan)); err != nil || strings.Contains(string(stat), ") Z ") {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("it lives")
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
