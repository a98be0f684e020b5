// SPDX-License-Identifier: Apache-2.0

//go:build integration && amd64

package faults

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/guard/keeper"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

// killsEnv is how many guards TestKeeper kills.
const killsEnv = "CGPU_KEEPER_KILLS"

// record is a container's in the ledger.
func (n *node) record(name string) (ledger.Record, error) {
	for _, r := range n.records() {
		if r.ID == n.id(name) {
			return r, nil
		}
	}
	return ledger.Record{}, fmt.Errorf("%s has no record", name)
}

// children lists the processes that a process has made, by their names.
func children(pid int) (list map[string]int) {
	list = map[string]int{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		b, _ := os.ReadFile(path)
		text := string(b)
		open, end := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
		if open < 0 || end < open {
			continue
		}
		fields := strings.Fields(text[end+1:])
		if len(fields) > 1 && fields[1] == strconv.Itoa(pid) && fields[0] != "Z" {
			list[text[open+1:end]], _ = strconv.Atoi(strings.TrimSpace(text[:open]))
		}
	}
	return list
}

// kept waits until a guard has a keeper.
func (n *node) kept(name string) (guard, keeps int, err error) {
	err = n.eventually(func() error {
		r, err := n.record(name)
		if err != nil {
			return err
		}
		if guard = r.GuardPID; guard == 0 {
			return errors.New("no guard")
		}
		if keeps = children(guard)[keeper.Name]; keeps == 0 {
			return fmt.Errorf("guard %d has no keeper: %v", guard, children(guard))
		}
		return nil
	})
	return guard, keeps, err
}

// guardIs waits until the ledger knows a guard, and that answers.
func (n *node) guardIs(name string, pid int) error {
	return n.eventually(func() error {
		r, err := n.record(name)
		if err == nil && r.GuardPID != pid {
			err = fmt.Errorf("the guard is %d: want %d", r.GuardPID, pid)
		}
		if err == nil {
			_, err = api.Ask(r)
		}
		return err
	})
}

// busyAgain is busy, where a program that is ended has another one after it.
const busyAgain = "while :; do cgpu-probe work --for 24h --windows 200ms || echo FAILED work; done & " +
	"while :; do why=$(cgpu-probe alloc 1MiB 2>&1) && echo allocated || echo FAILED alloc: $? $why; done"

// pss is a process' part of the memory that it has, alone or with others.
func pss(pid int) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "Pss:"); ok {
			return strings.TrimSpace(value)
		}
	}
	return "?"
}

// startBusy starts containers that make calls all the time.
func (n *node) startBusy(t *testing.T, number int) (names []string) {
	for i := range number {
		name := fmt.Sprint("busy", i)
		names = append(names, name)
		_ = os.Remove(n.path("stdout-" + n.id(name))) // of an earlier round
		n.bundle(t, name, busyAgain, onSecond, "CGPU_MEM=512MiB")
		must(t, n.runtime("create", "--bundle", n.path(name), n.id(name)))
		t.Cleanup(func() { _ = n.runtime("delete", "--force", n.id(name)) })
		must(t, n.runtime("start", n.id(name)))
		must(t, n.works(name))
	}
	return names
}

// undecided is what a guard's log says where nobody can tell what came of a call.
const undecided = "nobody can tell what came of it"

// TestKeeper: guards of busy containers are killed, at any moment, and their programs go on. Where the simulated driver cannot be asked
// what came of a call, its process is ended, and the log says so.
func TestKeeper(t *testing.T) {
	rounds := 2
	if s := os.Getenv(killsEnv); s != "" {
		rounds, _ = strconv.Atoi(s)
	}
	n := newNode(t, "keeper = true")
	kills, ended := 0, 0
	for range rounds {
		names := n.startBusy(t, 3)
		for range 3 { // more often none would be started again
			next := map[string]int{}
			for _, name := range names {
				guard, keeps, err := n.kept(name)
				must(t, err)
				next[name] = keeps
				if kills == 0 {
					t.Logf("of memory a guard has %s, its keeper %s", pss(guard), pss(keeps))
				}
				time.Sleep(rand.N(100 * time.Millisecond))
				must(t, unix.Kill(guard, unix.SIGKILL))
				kills++
			}
			for _, name := range names {
				if err := errors.Join(n.guardIs(name, next[name]), n.works(name)); err != nil {
					t.Fatalf("%v\n%s", err, n.logs())
				}
			}
			must(t, n.neighbourWorks())
		}
		for _, name := range names {
			text, _ := n.said(name, 0)
			r, err := n.record(name)
			must(t, err)
			failed, told := strings.Count(text, "FAILED"), strings.Count(n.log(r.Nonce), undecided)
			if ended += told; failed > told {
				t.Fatalf("%s (%s): %d programs failed, %d were ended:\n%s\n%s", name, r.Nonce, failed, told, text, n.logs())
			}
			must(t, n.runtime("delete", "--force", n.id(name)))
		}
		must(t, n.eventually(n.quiet))
	}
	t.Logf("%d guards killed, %d times a process was ended with its guard", kills, ended)
}

// TestKeeperEnds: a keeper that is killed is replaced, and the next guard is what it would have been. A guard that is killed for the fourth
// time in an hour, and one that is killed with its keeper, has none after it: the container's calls fail, and nothing of it stays paused.
func TestKeeperEnds(t *testing.T) {
	n := newNode(t, "keeper = true")
	names := n.startBusy(t, 2)
	t.Run("the keeper", func(t *testing.T) {
		guard, first, err := n.kept(names[0])
		must(t, err)
		must(t, unix.Kill(first, unix.SIGKILL))
		var second int
		must(t, n.eventually(func() (err error) {
			if _, second, err = n.kept(names[0]); err == nil && second == first {
				err = errors.New("it is the same")
			}
			return err
		}))
		must(t, unix.Kill(guard, unix.SIGKILL))
		must(t, n.guardIs(names[0], second))
		must(t, n.works(names[0]))
	})
	t.Run("again and again", func(t *testing.T) {
		for range 2 {
			guard, keeps, err := n.kept(names[0])
			must(t, err)
			must(t, unix.Kill(guard, unix.SIGKILL))
			must(t, n.guardIs(names[0], keeps))
		}
		guard, keeps, err := n.kept(names[0])
		must(t, err)
		must(t, unix.Kill(guard, unix.SIGKILL))
		must(t, n.failsClosed(names[0], guard, keeps))
		if text := n.logs(); !strings.Contains(text, "end again and again") {
			t.Error(text)
		}
	})
	t.Run("both", func(t *testing.T) {
		guard, keeps, err := n.kept(names[1])
		must(t, err)
		must(t, errors.Join(unix.Kill(keeps, unix.SIGSTOP), unix.Kill(guard, unix.SIGKILL), unix.Kill(keeps, unix.SIGKILL)))
		must(t, n.failsClosed(names[1], guard, keeps))
	})
	must(t, n.neighbourWorks())
	for _, name := range names {
		must(t, n.runtime("delete", "--force", n.id(name)))
	}
	must(t, n.cgpu("gc"))
	must(t, n.eventually(n.quiet))
}

// TestKeeperUpgrade: a hand-over gives the other program a keeper of its own, and a guard that was killed before, or has lost its keeper,
// is handed over like any other.
func TestKeeperUpgrade(t *testing.T) {
	n := newNode(t, "keeper = true")
	name := n.startBusy(t, 1)[0]
	kill := func() {
		guard, keeps, err := n.kept(name)
		must(t, err)
		must(t, unix.Kill(guard, unix.SIGKILL))
		must(t, errors.Join(n.guardIs(name, keeps), n.works(name)))
	}
	for i := range 2 {
		program, err := n.otherGuard(i)
		must(t, err)
		_, before, err := n.kept(name)
		must(t, err)
		if i == 1 {
			must(t, unix.Kill(before, unix.SIGKILL))
		}
		if list, err := n.upgrade("--program", program, n.id(name)); err != nil {
			t.Fatalf("%v %v\n%s", err, list, n.logs())
		}
		must(t, n.eventually(func() error {
			if _, after, err := n.kept(name); err != nil || after == before {
				return fmt.Errorf("the keeper is %d, as before: %w", after, err)
			}
			return nil
		}))
		must(t, n.works(name))
		if i == 0 {
			kill()
		}
	}
	text, _ := n.said(name, 0)
	if r, err := n.record(name); err != nil || strings.Count(text, "FAILED") > strings.Count(n.log(r.Nonce), undecided) {
		t.Errorf("%v %s\n%s", err, text, n.logs())
	}
	must(t, n.runtime("delete", "--force", n.id(name)))
	must(t, n.eventually(n.quiet))
}

// TestKeeperTwice: a guard is killed, and the one that goes on in its place as well, while it does so or soon after. Whatever comes of
// that, no call waits for ever.
func TestKeeperTwice(t *testing.T) {
	n := newNode(t, "keeper = true")
	outcomes := map[string]int{}
	rounds := 2
	if s := os.Getenv(killsEnv); s != "" {
		rounds, _ = strconv.Atoi(s)
	}
	for range rounds {
		names := n.startBusy(t, 2)
		for _, name := range names {
			guard, keeps, err := n.kept(name)
			must(t, err)
			must(t, unix.Kill(guard, unix.SIGKILL))
			must(t, n.eventually(func() error {
				if comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", keeps)); strings.TrimSpace(string(comm)) == keeper.Name {
					return errors.New("it waits")
				}
				return nil
			}))
			time.Sleep(rand.N(25 * time.Millisecond))
			must(t, unix.Kill(keeps, unix.SIGKILL))
			_, begin := n.said(name, 0)
			must(t, n.eventually(func() error {
				said, _ := n.said(name, begin)
				for _, does := range [][2]string{{"allocated", "FAILED alloc"}, {" kernels=", "FAILED work"}} {
					if !strings.Contains(said, does[0]) && !strings.Contains(said, does[1]) {
						return fmt.Errorf("%s: neither %q nor %q", name, does[0], does[1])
					}
				}
				return nil
			}))
			if guard, _ := n.record(name); guard.GuardLives() {
				outcomes["goes on"]++
			} else {
				outcomes["fails closed"]++
			}
		}
		for _, name := range names {
			must(t, n.runtime("delete", "--force", n.id(name)))
		}
		must(t, n.cgpu("gc"))
		must(t, n.eventually(n.quiet))
	}
	must(t, n.neighbourWorks())
	t.Log(outcomes)
}

// failsClosed waits until a container's calls fail, and both processes are gone.
func (n *node) failsClosed(name string, processes ...int) error {
	return n.eventually(func() error {
		for _, pid := range processes {
			if err := unix.Kill(pid, 0); err == nil {
				return fmt.Errorf("process %d lives", pid)
			}
		}
		if text, _ := n.said(name, 0); !strings.Contains(text, "FAILED alloc") {
			return errors.New("its calls do not fail")
		}
		return nil
	})
}

func (n *node) logs() string { return n.log("") }

// log is that of a container's guards; of all with no nonce.
func (n *node) log(nonce string) string {
	var all strings.Builder
	paths, _ := filepath.Glob(filepath.Join(n.runDir, "log", "*"+nonce+"*"))
	for _, path := range paths {
		text, _ := os.ReadFile(path)
		if nonce == "" { // for a person; who counts wants all
			text = text[max(0, len(text)-3000):]
		}
		fmt.Fprintf(&all, "%s:\n%s\n", filepath.Base(path), text)
	}
	return all.String()
}
