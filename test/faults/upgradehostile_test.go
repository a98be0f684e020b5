// SPDX-License-Identifier: Apache-2.0

//go:build integration && amd64

package faults

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// inode is what differs between two descriptors of one kind.
var inode = regexp.MustCompile(`:\[\d+\]`)

// traits is what a guard's process has of the kernel that its next program must have too, by name.
func traits(pid int) (map[string]string, error) {
	at := func(name string) string { return fmt.Sprintf("/proc/%d/%s", pid, name) }
	has := map[string]string{}
	for _, name := range []string{"limits", "oom_score_adj", "cgroup", "coredump_filter", "timerslack_ns", "status"} {
		text, err := os.ReadFile(at(name))
		if err != nil {
			return nil, err
		}
		has[name] = string(text)
	}
	for line := range strings.Lines(has["status"]) {
		switch name, value, _ := strings.Cut(line, ":"); name {
		case "Name", "Umask", "TracerPid", "Uid", "Gid", "Groups", "NSpid", "NSsid", "ShdPnd", "SigBlk", "SigIgn", "CapInh",
			"CapPrm", "CapEff", "CapBnd",
			"CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters", "THP_enabled", "Cpus_allowed", "Mems_allowed":
			has[name] = value
		}
	}
	delete(has, "status")
	stat, err := os.ReadFile(at("stat"))
	if fields := strings.Fields(string(stat)); err == nil && len(fields) > 40 {
		has["nice and policy"] = fields[18] + fields[40]
	}
	for _, name := range []string{"cwd", "root", "ns/mnt", "ns/pid", "ns/net", "ns/user", "ns/cgroup"} {
		has[name], _ = os.Readlink(at(name))
	}
	var memory unix.Stat_t // of one that is dumpable it belongs to the user
	if err := unix.Stat(at("environ"), &memory); err == nil {
		has["owner"] = fmt.Sprint(memory.Uid, memory.Gid)
	}
	return has, err
}

// belongings are the descriptors and children of a process: how many of each kind. kept: those that a program would get that it executes.
func belongings(pid int) (kinds map[string]int, kept []string) {
	kinds = map[string]int{}
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range fds {
		link, err := os.Readlink(fd)
		info, _ := os.ReadFile(strings.Replace(fd, "/fd/", "/fdinfo/", 1))
		if err != nil {
			continue
		}
		kinds[inode.ReplaceAllString(link, "")]++
		var flags uint64
		for line := range strings.Lines(string(info)) {
			if value, ok := strings.CutPrefix(line, "flags:"); ok {
				flags, _ = strconv.ParseUint(strings.TrimSpace(value), 8, 64)
			}
		}
		if flags&unix.O_CLOEXEC == 0 && flags > 0 {
			kept = append(kept, filepath.Base(fd)+" "+link)
		}
	}
	children, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, path := range children {
		text, _ := os.ReadFile(path)
		for range strings.Fields(string(text)) {
			kinds["child"]++
		}
	}
	slices.Sort(kept)
	return kinds, kept
}

// TestUpgradeLeavesNothing: after many hand-overs a guard's process has what it had before, and nothing else.
func TestUpgradeLeavesNothing(t *testing.T) {
	n := newNode(t)
	id, pid := n.id("neighbour"), n.neighbour.GuardPID
	must(t, n.cgpu("pause", id)) // it has a rescuer
	must(t, n.cgpu("resume", id))
	self, err := os.Executable()
	must(t, err)
	upgrade := func(i int) {
		program, err := n.otherGuard(i % 3)
		must(t, err)
		want := "upgraded"
		if i%3 == 2 {
			program, want = self, "failed" // after it was executed (TestMain)
		}
		list, err := n.upgrade("--program", program, id)
		if len(list) != 1 || list[0].Outcome != want {
			t.Fatalf("%+v, %v", list, err)
		}
		must(t, n.neighbourWorks())
	}
	before, err := traits(pid)
	must(t, err)
	had, kept := belongings(pid)
	const times = 21
	for i := range times {
		upgrade(i)
	}
	// Processes of the container come and go, each with some descriptors: not so many.
	must(t, n.eventually(func() error {
		has, still := belongings(pid)
		for kind, number := range has {
			if number >= had[kind]+times/2 {
				return fmt.Errorf("%d of %s, and there were %d", number, kind, had[kind])
			}
		}
		if !slices.Equal(kept, still) {
			return fmt.Errorf("whom the guard starts gets %q, and got %q", still, kept)
		}
		return nil
	}))
	now, err := traits(pid)
	must(t, err)
	for _, name := range slices.Sorted(maps.Keys(before)) {
		if now[name] != before[name] {
			t.Errorf("%s: %q, and was %q", name, now[name], before[name])
		}
	}
}

// hostile are programs of a container that does whatever it can while its guard becomes another program: processes that are stopped, and
// killed in the middle of a call; threads and processes that call and end; files in large numbers; races about what a call is made with.
// One of them says each time that it made its calls: the others may take minutes for one round, since their guard makes them wait.
const hostile = `
while :; do cgpu-probe work --for 1h --windows 100ms >/dev/null & p=$!; busybox usleep 300000; kill -STOP $p; busybox usleep 50000; kill -CONT $p
  busybox usleep 30000; kill -9 $p; wait $p; done 2>/dev/null &
for name in busy-processes busy-threads busy-files busy-refused; do while :; do cgpu-probe hostile $name --busy 3s >/dev/null 2>&1; done & done
while :; do for name in toctou-root toctou-fd announce-race sizes-threads stale-window bomb-clients exports; do
  cgpu-probe hostile $name --tries 20 >/dev/null 2>&1; done; done &
while :; do cgpu-probe hostile toctou-root --tries 1 >/dev/null 2>&1; echo tried; done
`

// interrupted makes calls that signals interrupt all the time. Each must have happened once.
const interrupted = "while :; do cgpu-probe signals --seconds 2 --timer 700us --size 64KiB 2>&1 >/dev/null || echo FAILED signals; echo " +
	"called; done"

// TestUpgradeHostile: a hostile container may keep its own guard from being replaced. It has nothing else from trying, no call of another
// container's is lost or made twice, the neighbour goes on, and at the end everything is given back.
func TestUpgradeHostile(t *testing.T) {
	n := newNode(t)
	for name, script := range map[string]string{"hostile": hostile, "interrupted": interrupted} {
		n.bundle(t, name, script, onFirst, fourGiB)
		must(t, n.runtime("create", "--bundle", n.path(name), n.id(name)))
		t.Cleanup(func() { _ = n.runtime("delete", "--force", n.id(name)) })
		must(t, n.runtime("start", n.id(name)))
	}
	outcomes := map[string]int{}
	for i := range 6 {
		program, err := n.otherGuard(i % 2)
		must(t, err)
		list, _ := n.upgrade("--program", program, "--all")
		for _, x := range list {
			outcomes[x.Outcome]++
			kept := x.Outcome == "failed" && x.Error != "" || x.Outcome == "already" // the program before, since the last one was not taken
			if x.Outcome != "upgraded" && (x.ID != n.id("hostile") || !kept) {
				t.Errorf("%+v", x)
			}
		}
		must(t, n.neighbourWorks())
	}
	t.Log(outcomes)
	for name, word := range map[string]string{"hostile": "tried", "interrupted": "called"} {
		_, begin := n.said(name, 0)
		must(t, n.eventually(func() error {
			text, _ := n.said(name, begin)
			if !strings.Contains(text, word) {
				return fmt.Errorf("%s makes no calls any more: %q", name, text)
			}
			return nil
		}))
	}
	if text, _ := n.said("interrupted", 0); strings.Contains(text, "FAILED") {
		t.Errorf("a call was lost, or made twice: %s", text)
	}
	for _, name := range []string{"hostile", "interrupted"} {
		must(t, n.runtime("delete", "--force", n.id(name)))
	}
	must(t, n.eventually(n.quiet))
	must(t, n.eventually(n.clean))
}
