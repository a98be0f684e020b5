// SPDX-License-Identifier: Apache-2.0

//go:build integration && amd64

package faults

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/guard/handover"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/schema"
)

// busy makes driver calls all the time, in one process after another, and says so should one of them fail.
const busy = "cgpu-probe work --for 24h --windows 200ms || echo FAILED work & " +
	"while :; do cgpu-probe alloc 1MiB >/dev/null && echo allocated || echo FAILED alloc; done"

// otherGuard is a copy of the guard's program: another program to a guard.
func (n *node) otherGuard(number int) (path string, err error) {
	path = filepath.Join(n.dir, "guards", fmt.Sprint(number), "cgpu-guard")
	if _, err = os.Stat(path); err == nil {
		return path, nil
	}
	text, err := os.ReadFile(filepath.Join(n.bin, "cgpu-guard"))
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o755)
	}
	if err == nil {
		err = os.WriteFile(path, text, 0o755)
	}
	return path, err
}

// upgraded is what cgpu upgrade -o json says of a container.
type upgraded struct {
	ID, Outcome, Error string
	Stall              schema.Seconds `json:"stall_seconds"`
	Tries              int
}

// upgrade calls cgpu upgrade.
func (n *node) upgrade(args ...string) ([]upgraded, error) { return n.upgradeTo("upgrade", args...) }

// upgradeTo is upgrade with an output of its own.
func (n *node) upgradeTo(name string, args ...string) (list []upgraded, err error) {
	out := n.path("stdout-" + name)
	_ = os.Remove(out)
	r := new(watch).run(patience, n.env, out, append([]string{filepath.Join(n.bin, "cgpu"), "upgrade", "-o", "json"}, args...)...)
	text, err := os.ReadFile(out)
	var v struct{ Containers []upgraded }
	if err = errors.Join(err, json.Unmarshal(text, &v)); err == nil && r.code != 0 {
		err = fmt.Errorf("%v: %s", r, text)
	}
	return v.Containers, err
}

// becomes has guards go on as another program, as often as it takes: on a slow machine one may not come to rest, or its child not answer.
func (n *node) becomes(program string, args ...string) (list []upgraded, err error) {
	return list, n.eventually(func() (err error) {
		list, err = n.upgrade(append(args, "--program", program)...)
		return err
	})
}

// said is what a container has printed since an offset.
func (n *node) said(name string, from int) (text string, end int) {
	b, _ := os.ReadFile(n.path("stdout-" + n.id(name)))
	return string(b[min(from, len(b)):]), len(b)
}

// works: since this was called a container has computed, and allocated, and nothing has failed.
func (n *node) works(name string) error {
	_, begin := n.said(name, 0)
	return n.eventually(func() error {
		text, _ := n.said(name, begin)
		if !strings.Contains(text, "allocated") || strings.Count(text, " kernels=") == strings.Count(text, " kernels=0 ") {
			return fmt.Errorf("%s does not work: %s", name, text)
		}
		return nil
	})
}

// TestUpgrade: guards of busy containers become another program, again and again, and no call fails.
func TestUpgrade(t *testing.T) {
	n := newNode(t)
	var guards []string
	for i := range 2 {
		path, err := n.otherGuard(i)
		must(t, err)
		guards = append(guards, path)
	}
	var names []string
	for i := range 3 {
		name := fmt.Sprint("busy", i)
		names = append(names, name)
		n.bundle(t, name, busy, fourGiB, onSecond)
		must(t, n.runtime("create", "--bundle", n.path(name), n.id(name)))
		t.Cleanup(func() { _ = n.runtime("delete", "--force", n.id(name)) })
		must(t, n.runtime("start", n.id(name)))
		must(t, n.works(name))
	}
	before := map[string]ledger.Record{}
	for _, r := range n.records() {
		before[r.ID] = r
	}
	for i := range 10 {
		list, err := n.becomes(guards[i%2], "--all")
		must(t, err)
		if len(list) != len(before) {
			t.Fatalf("%d containers: %+v", len(list), list)
		}
		for _, x := range list {
			t.Logf("%s: %s, stall %v, tries %d", x.ID, x.Outcome, x.Stall.Duration(), x.Tries)
			exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", before[x.ID].GuardPID))
			if x.Outcome != "upgraded" && x.Outcome != "already" || err != nil || exe != guards[i%2] {
				t.Errorf("%+v: the guard is %s (%v)", x, exe, err)
			}
		}
		for _, name := range names {
			must(t, n.works(name))
		}
	}
	for _, name := range names {
		if text, _ := n.said(name, 0); strings.Contains(text, "FAILED") {
			t.Errorf("%s: calls have failed: %s", name, text[strings.Index(text, "FAILED"):][:100])
		}
	}
	must(t, n.eventually(func() error { return childless(before) }))
	if list, err := n.upgrade("--all", "--program", guards[1]); err != nil || list[0].Outcome != "already" {
		t.Errorf("again: %+v, %v", list, err)
	}
	for _, name := range names {
		must(t, n.runtime("delete", "--force", n.id(name)))
	}
	must(t, n.eventually(n.quiet))
}

// childless: the children by which programs were tried have ended, and somebody has waited for them.
func childless(guards map[string]ledger.Record) error {
	for _, r := range guards {
		lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", r.GuardPID))
		for _, list := range lists {
			text, _ := os.ReadFile(list)
			for _, pid := range strings.Fields(string(text)) {
				line, _ := os.ReadFile("/proc/" + pid + "/cmdline")
				stat, _ := os.ReadFile("/proc/" + pid + "/stat")
				if len(stat) > 0 && len(line) == 0 || strings.Contains(string(line), handover.TryArg) ||
					strings.Contains(string(line), handover.StartArg) {
					return fmt.Errorf("guard %d has a child left: %s", r.GuardPID, stat)
				}
			}
		}
	}
	return nil
}

// TestMain is another program to a guard, if it is called as one: it can read the state, and then cannot go on.
func TestMain(m *testing.M) {
	if len(os.Args) < 2 || os.Args[1] != handover.TryArg && os.Args[1] != handover.TakeArg {
		os.Exit(m.Run())
	}
	if os.Args[1] == handover.TryArg {
		_ = handover.ServeTry(func(*handover.State) error { return slowly() })
		return
	}
	t, _ := handover.Take(os.Args[2:])
	_ = t.Back(errors.New("it does not want to\x00" + strings.Repeat("!", 1<<20)))
	os.Exit(1)
}

// slow is what TestMain's program is called where it tries a state for as long as the guard lets it, or until it is told (slow + ".on"). It
// says when it begins (slow + ".tries").
const slow = "slow"

func slowly() error {
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil || filepath.Base(exe) != slow {
		return err
	}
	if err := os.WriteFile(exe+".tries", nil, 0o600); err != nil {
		return err
	}
	for _, err = os.Stat(exe + ".on"); err != nil; _, err = os.Stat(exe + ".on") {
		time.Sleep(5 * time.Millisecond)
	}
	return nil
}

// TestUpgradeServes: while another program tries the state, calls are served.
func TestUpgradeServes(t *testing.T) {
	n := newNode(t)
	self, err := os.Executable()
	must(t, err)
	text, err := os.ReadFile(self)
	must(t, err)
	program := n.path(slow)
	must(t, os.WriteFile(program, text, 0o755))
	must(t, n.eventually(func() error { // the guard waits for two seconds, and the machine may be slow
		_, _ = os.Remove(program+".tries"), os.Remove(program+".on")
		over := make(chan []upgraded, 1)
		go func() {
			list, _ := n.upgrade("--program", program, n.id("neighbour"))
			over <- list
		}()
		if err := n.eventually(func() error { _, err := os.Stat(program + ".tries"); return err }); err != nil {
			return err
		}
		works := n.neighbourWorks()
		var list []upgraded
		select {
		case list = <-over:
			return fmt.Errorf("%v; it does not try the state any more: %+v", works, list)
		default:
		}
		_ = os.WriteFile(program+".on", nil, 0o600)
		<-over
		return works
	}))
	must(t, n.neighbourWorks())
}

// wrongProgram is one that a guard cannot become, and why.
type wrongProgram struct{ program, why string }

func (n *node) wrongPrograms(t *testing.T) (list []wrongProgram) {
	t.Helper()
	guard, err := os.ReadFile(filepath.Join(n.bin, "cgpu-guard"))
	must(t, err)
	foreign := slices.Clone(guard)
	foreign[18], foreign[19] = 8, 0 // e_machine: MIPS
	noexec := n.path("noexec")
	must(t, os.Mkdir(noexec, 0o755))
	must(t, unix.Mount("tmpfs", noexec, "tmpfs", unix.MS_NOEXEC, "mode=755"))
	busybox, err := exec.LookPath("busybox")
	must(t, err)
	list = []wrongProgram{{busybox, "ended without a word"}, {n.path("cgpu.toml"), "is no program"}}
	for _, c := range []struct {
		name, why string
		text      []byte
		mode      os.FileMode
		uid       int
	}{
		{"script", "ended without a word", []byte("#!/bin/sh\nexec sleep 1000\n"), 0o755, 0},
		{"foreign", "cannot be executed: exec format error", foreign, 0o755, 0},
		{"empty", "cannot be executed: exec format error", nil, 0o755, 0},
		{"cut", "", guard[:len(guard)/2], 0o755, 0}, // the kernel may notice it, or the program crashes
		{"data", "is no program", guard, 0o644, 0},
		{"theirs", "others than root can write it", guard, 0o755, 1000},
		{"open", "others than root can write it", guard, 0o757, 0},
		{"noexec/guard", "cannot be executed: permission denied", guard, 0o755, 0},
	} {
		path := n.path(c.name)
		must(t, os.WriteFile(path, c.text, 0o600))
		must(t, os.Chown(path, c.uid, 0))
		must(t, os.Chmod(path, c.mode))
		list = append(list, wrongProgram{path, c.why})
	}
	return list
}

// TestUpgradeFails: a program that cannot go on with a guard leaves the container as it was, also where it has been executed already.
func TestUpgradeFails(t *testing.T) {
	n := newNode(t)
	self, err := os.Executable()
	must(t, err)
	other, err := n.otherGuard(0)
	must(t, err)
	id, guard := n.id("neighbour"), n.neighbour.GuardPID
	exe := func() string {
		path, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", guard))
		return path
	}
	for _, c := range append(n.wrongPrograms(t), wrongProgram{self, "does not want to"}) {
		before := exe()
		list, err := n.upgrade("--program", c.program, id)
		if err == nil || len(list) != 1 || list[0].Outcome != "failed" || !strings.Contains(list[0].Error, c.why) || exe() != before {
			t.Errorf("%s: %+v, %v, the guard is %s; want %q", c.program, list, err, exe(), c.why)
		}
		must(t, n.neighbourWorks())
	}
	// Two at once: one does it, the other says so.
	both := make(chan []upgraded, 2)
	for i := range 2 {
		go func() {
			list, _ := n.upgradeTo(fmt.Sprint("upgrade", i), "--program", other, id)
			both <- list
		}()
	}
	for range 2 {
		if list := <-both; len(list) != 1 || list[0].Outcome == "gone" {
			t.Errorf("%+v", list)
		}
	}
	if list, err := n.becomes(other, id); err != nil || exe() != other {
		t.Errorf("%+v, %v: the guard is %s", list, err, exe())
	}
	must(t, n.neighbourWorks())
	// A pause stays, and is lifted by the program that is in charge then.
	must(t, n.cgpu("pause", id))
	if _, err := n.becomes(filepath.Join(n.bin, "cgpu-guard"), id); err != nil {
		t.Error(err)
	}
	must(t, n.eventually(func() error {
		s, err := api.Ask(n.neighbour)
		if err == nil && !s.VGPUs[0].Compute.Paused {
			t.Fatalf("not paused any more: %+v", s.VGPUs)
		}
		return err
	}))
	must(t, n.cgpu("resume", id))
	must(t, n.neighbourWorks())
}

// TestUpgradeBeside: what is changed while a guard becomes another program holds afterwards, a frozen container's guard becomes it, too,
// and a container that ends meanwhile is no failure and leaves nothing. A run dir that is full is in nobody's way.
func TestUpgradeBeside(t *testing.T) {
	n := newNode(t)
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	var programs []string
	for i := range 2 {
		program, err := n.otherGuard(i)
		must(t, err)
		programs = append(programs, program)
	}
	id := n.id("neighbour")
	turn := 0
	// beside has all guards go on as another program, and does something else at some moment of that.
	beside := func(do func() error) []upgraded {
		t.Helper()
		turn++
		done := make(chan error)
		wait := time.Duration(r.Int64N(int64(80 * time.Millisecond)))
		go func() {
			time.Sleep(wait)
			done <- do()
		}()
		list, err := n.upgrade("--all", "--program", programs[turn%2])
		must(t, <-done)
		if err != nil {
			t.Log(err)
			list, err = n.becomes(programs[turn%2], "--all")
		}
		must(t, err)
		return list
	}
	for i := range 8 {
		weight := i + 2
		limit := quota.Bytes(2+i%3) * quota.GiB
		beside(func() error {
			return n.cgpu("set", id, "--weight", fmt.Sprint(weight), "--memory", fmt.Sprint(2+i%3)+"GiB")
		})
		must(t, n.eventually(func() error {
			s, err := api.Ask(n.neighbour)
			if err == nil && (s.VGPUs[0].Limit != limit || s.VGPUs[0].Compute.Weight != weight) {
				err = fmt.Errorf("%+v: want %v, weight %d", s.VGPUs[0], limit, weight)
			}
			return err
		}))
	}
	for _, command := range []string{"pause", "resume"} {
		beside(func() error { return n.cgpu(command, id) })
		must(t, n.eventually(func() error {
			s, err := api.Ask(n.neighbour)
			if err == nil && s.VGPUs[0].Compute.Paused != (command == "pause") {
				err = fmt.Errorf("after %s: %+v", command, s.VGPUs[0].Compute)
			}
			return err
		}))
	}
	beside(func() error { return n.cgpu("gc") })
	for range 4 { // its filter comes to the guard's socket
		beside(func() error { return n.runtime("exec", id, "/bin/cgpu-probe", "alloc", "1MiB") })
	}
	must(t, n.neighbourWorks())

	ballast := filepath.Join(n.runDir, "g", "ballast")
	for _, left := range []int64{0, 1, 3} {
		fill(t, ballast, left*int64(os.Getpagesize()))
		beside(func() error { return nil })
		must(t, os.Remove(ballast))
	}
	must(t, n.neighbourWorks())

	must(t, n.runtime("pause", id))
	for range 2 {
		beside(func() error { return nil })
	}
	must(t, n.runtime("resume", id))
	must(t, n.neighbourWorks())

	n.bundle(t, "tenant", tenant, fourGiB, onFirst)
	t.Cleanup(func() { _ = n.runtime("delete", "--force", n.id("tenant")) })
	for range 6 {
		must(t, n.runtime("create", "--bundle", n.path("tenant"), n.id("tenant")))
		must(t, n.runtime("start", n.id("tenant")))
		for _, x := range beside(func() error { return n.runtime("delete", "--force", n.id("tenant")) }) {
			if x.Outcome != "upgraded" && x.Outcome != "already" && (x.ID == id || x.Outcome != "gone") {
				t.Errorf("%+v", x)
			}
		}
		must(t, n.eventually(n.quiet))
	}
	must(t, n.neighbourWorks())
}

// manyEnv is how many containers TestUpgradeMany has; unset: few.
const manyEnv = "CGPU_UPGRADE_MANY"

// TestUpgradeMany: all guards of a full node become another program, and back, while each container makes calls.
func TestUpgradeMany(t *testing.T) {
	number, err := strconv.Atoi(os.Getenv(manyEnv))
	if err != nil {
		number = 6
	}
	n := newNode(t, "max_inst = 64")
	const calls = "while :; do cgpu-probe alloc 1MiB >/dev/null && echo allocated || echo FAILED alloc; busybox sleep 1; done"
	var names []string
	for i := range number {
		name := fmt.Sprint("many", i)
		names = append(names, name)
		n.bundle(t, name, calls, onSecond, "CGPU_MEM=64MiB")
		must(t, n.runtime("create", "--bundle", n.path(name), n.id(name)))
		t.Cleanup(func() { _ = n.runtime("delete", "--force", n.id(name)) })
		must(t, n.runtime("start", n.id(name)))
	}
	for i := range 4 {
		program, err := n.otherGuard(i % 2)
		must(t, err)
		list, err := n.becomes(program, "--all", "--parallel", "8")
		if err != nil || len(list) != number+1 {
			t.Errorf("%d containers: %v", len(list), err)
		}
		var stalls []time.Duration
		for _, x := range list {
			if x.Outcome != "upgraded" && x.Outcome != "already" {
				t.Errorf("%+v", x)
			}
			stalls = append(stalls, x.Stall.Duration())
		}
		slices.Sort(stalls)
		t.Logf("calls waited for %v (median), %v at most", stalls[len(stalls)/2], stalls[len(stalls)-1])
	}
	for _, name := range names {
		from := 0
		must(t, n.eventually(func() error {
			text, end := n.said(name, from)
			if strings.Contains(text, "FAILED") {
				t.Errorf("%s: calls have failed: %s", name, text)
			}
			from = end
			if !strings.Contains(text, "allocated") {
				return fmt.Errorf("%s does not allocate", name)
			}
			return nil
		}))
	}
	must(t, n.neighbourWorks())
}
