// SPDX-License-Identifier: Apache-2.0

//go:build integration && amd64

package faults

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// scenario is what is done on a node while one of our programs has a fault. An error is a complaint about more than that.
type scenario struct {
	name     string
	programs []string // which of ours take part
	config   []string
	steps    func(s *session)
}

// session is one scenario that is carried out. Commands may fail, since something fails; they may not hang.
type session struct {
	*node
	watch  *watch
	failed []result
	hangs  error
	lacks  error // it started, and does not get what it asks for
}

func (s *session) do(args ...string) result {
	r := s.watch.run(patience, s.env, s.path("stdout-tenant"), args...)
	if r.code == -2 && s.hangs == nil {
		s.hangs = fmt.Errorf("hangs: %v", r)
	}
	if r.code != 0 {
		s.failed = append(s.failed, r)
	}
	return r
}

func (s *session) cgpu(args ...string) result {
	return s.do(append([]string{filepath.Join(s.bin, "cgpu")}, args...)...)
}

func (s *session) runtime(args ...string) result {
	return s.do(append([]string{filepath.Join(s.bin, "cgpu-runtime"), "--root", s.path("state")}, args...)...)
}

// start creates the tenant, which computes and holds memory, and waits until it does, or has failed.
func (s *session) start(bundle string) {
	_ = os.Remove(s.path("stdout-tenant"))
	if s.runtime("create", "--bundle", s.path(bundle), s.id("tenant")).code != 0 {
		return
	}
	if s.runtime("start", s.id("tenant")).code != 0 {
		return
	}
	s.wait(func() error {
		text, _ := os.ReadFile(s.path("stdout-tenant"))
		ready, over := strings.Contains(string(text), "ready"), strings.Contains(string(text), "over")
		if over && !ready && s.watch.program != "cgpu-guard" { // a call may fail by the guard's fault, once a container has begun
			s.lacks = fmt.Errorf("the tenant started without its GPU: %s", text)
		}
		if ready || over {
			return nil
		}
		return fmt.Errorf("the tenant is neither ready nor over: %s", text)
	})
}

// wait waits until check has no complaint.
func (s *session) wait(check func() error) {
	if err := s.eventually(check); err != nil && s.hangs == nil {
		s.hangs = err
	}
}

// goesOn waits until the tenant has computed for so many tenths of a second more.
func (s *session) goesOn(tenths int) {
	computed := func() int {
		text, _ := os.ReadFile(s.path("stdout-tenant"))
		return strings.Count(string(text), " kernels=") - strings.Count(string(text), " kernels=0 ")
	}
	before := computed()
	s.wait(func() error {
		if now := computed(); now < before+tenths {
			return fmt.Errorf("the tenant has computed in %d intervals, and in %d before", now, before)
		}
		return nil
	})
}

func (s *session) upgradeTenant(args ...string) {
	s.watch.count(true)
	defer s.watch.count(false)
	s.cgpu(append([]string{"upgrade", s.id("tenant")}, args...)...)
	s.runtime("exec", s.id("tenant"), "/bin/cgpu-probe", "alloc", "1MiB")
}

// keepsGPU: whatever fails, a tenant that has begun is served; kept: also where its guard was killed.
func (s *session) keepsGPU(kept bool) {
	records := s.records()
	i := slices.IndexFunc(records, func(r ledger.Record) bool { return r.ID == s.id("tenant") })
	if i < 0 || !s.ready() {
		return
	}
	alloc := []string{"exec", s.id("tenant"), "/bin/cgpu-probe", "alloc", "10MiB"}
	if s.runtime(alloc...).code == 0 || !kept && s.watch.killed() == records[i].GuardPID {
		return
	}
	// The one call that failed may have been made for this one.
	if err := s.node.runtime(alloc...); err != nil {
		s.lacks = fmt.Errorf("the tenant has no GPU any more: %w", err)
	}
}

// ready says whether the tenant has what it has asked for.
func (s *session) ready() bool {
	text, _ := os.ReadFile(s.path("stdout-tenant"))
	return strings.Contains(string(text), "ready")
}

// end ends the tenant as an engine does: it does not care whether there ever was one.
func (s *session) end() { s.runtime("delete", "--force", s.id("tenant")) }

var scenarios = []scenario{
	{name: "life", programs: []string{"cgpu-runtime", "cgpu-hook", "cgpu-guard"}, steps: func(s *session) {
		s.start("tenant")
		s.runtime("exec", s.id("tenant"), "/bin/cgpu-probe", "alloc", "10MiB")
		s.end()
	}},
	{name: "preload", programs: []string{"cgpu-runtime", "cgpu-hook"}, config: []string{`enforcement = "preload"`}, steps: func(s *session) {
		s.start("tenant")
		s.end()
	}},
	{name: "changes", programs: []string{"cgpu", "cgpu-rescue", "cgpu-guard"}, steps: func(s *session) {
		s.start("tenant")
		s.cgpu("set", s.id("tenant"), "--weight", "3", "--memory", "3GiB")
		s.cgpu("policy", "0", "weight-preempt")
		s.cgpu("pause", s.id("tenant"))
		s.cgpu("resume", s.id("tenant"))
		s.cgpu("policy", "0", "preempt")
		s.cgpu("gc")
		s.end()
	}},
	// Of calls only those count that are made during an upgrade, and by what makes the next call of the container's: the rest is life's.
	{name: "upgrade", programs: []string{"cgpu", "cgpu-guard"}, steps: func(s *session) {
		s.watch.count(false)
		s.start("tenant")
		for i := range 2 { // the second time by the program that the first one brought
			program, err := s.otherGuard(i)
			if err != nil {
				s.hangs = err
				return
			}
			s.upgradeTenant("--program", program)
		}
		s.cgpu("pause", s.id("tenant"))
		s.upgradeTenant()
		s.cgpu("resume", s.id("tenant"))
		s.keepsGPU(false)
		s.end()
	}},
	// The next guard is what was the keeper of the one that is killed.
	{name: "keeper", programs: []string{"cgpu-guard"}, config: []string{"keeper = true"}, steps: func(s *session) {
		s.start("tenant")
		s.runtime("exec", s.id("tenant"), "/bin/cgpu-probe", "alloc", "10MiB")
		s.keepsGPU(true)
		s.end()
	}},
	{name: "arbiter", programs: []string{"cgpu-arbiter"}, steps: func(s *session) {
		s.start("alone")
		s.goesOn(20) // a second takes over meanwhile
		s.end()
		s.wait(func() error {
			if left := slices.DeleteFunc(s.processes(), func(p process) bool { return p.name != "cgpu-arbiter" }); len(left) > 2 {
				return fmt.Errorf("besides the neighbour's: %+v", left)
			}
			return nil
		})
	}},
	{name: "run", programs: []string{"cgpu", "cgpu-guard"}, steps: func(s *session) {
		s.cgpu("run", "--memory", "1GiB", "--no-limiter", "--", filepath.Join(s.bin, "cgpu-probe"), "alloc", "100MiB")
	}},
	{name: "refresh", programs: []string{"cgpu-refresh", "cgpu-runtime"}, steps: func(s *session) {
		_ = os.Remove(filepath.Join(s.runDir, "node.json"))
		s.runtime("run", "--bundle", s.path("brief"), s.id("tenant"))
	}},
}

// faulty is one scenario with one program that has one kind of fault.
type faulty struct {
	scenario
	program string
	kind    kind
}

func (f faulty) String() string { return f.kind.name + "/" + f.name + "/" + f.program }

// TestFaults: whichever of our processes is killed at whichever system call, or has it fail, nothing is left behind, and all else goes on.
func TestFaults(t *testing.T) {
	var cases []faulty
	for _, k := range kinds {
		for _, sc := range scenarios {
			for _, program := range sc.programs {
				cases = append(cases, faulty{sc, program, k})
			}
		}
	}
	nodes := map[string]*node{} // by configuration
	asked := os.Getenv("CGPU_FAULTS")
	from, to := 1, math.MaxInt
	if _, err := fmt.Sscanf(asked, "%d-%d", &from, &to); err == nil || asked == "all" {
		for _, f := range cases {
			t.Run(f.String(), func(t *testing.T) {
				sweep(t, nodes, f, func(calls int) (which []int) {
					for i := from; i <= min(to, calls); i++ {
						which = append(which, i)
					}
					return which
				})
			})
		}
		return
	}
	source := chance(t)
	source.Shuffle(len(cases), func(i, j int) { cases[i], cases[j] = cases[j], cases[i] })
	for begin := time.Now(); time.Since(begin) < sampleTime && !t.Failed() && len(cases) > 0; cases = cases[1:] {
		sweep(t, nodes, cases[0], func(calls int) []int {
			return []int{1 + source.IntN(calls), 1 + source.IntN(calls), 1 + source.IntN(calls)}
		})
	}
}

// chance is by what calls are chosen where not all are tried. It can be repeated.
func chance(t *testing.T) *rand.Rand {
	t.Helper()
	asked := os.Getenv("CGPU_FAULTS")
	if asked == "" {
		asked = strconv.FormatUint(rand.Uint64N(1<<32), 10)
		if os.Getenv("CI") != "" { // what nobody has tried is for who looks for faults, not for who made another change
			asked = "0x5eed"
		}
	}
	seed, err := strconv.ParseUint(asked, 0, 64)
	if err != nil {
		t.Fatalf("CGPU_FAULTS=%s: want all, FROM-TO or a seed", asked)
	}
	t.Logf("CGPU_FAULTS=%#x", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// TestUpgradeKilled is TestFaults for some calls of guards that become another program, and of who asks them.
func TestUpgradeKilled(t *testing.T) {
	i := slices.IndexFunc(scenarios, func(s scenario) bool { return s.name == "upgrade" })
	if _, err := strconv.ParseUint(os.Getenv("CGPU_FAULTS"), 0, 64); os.Getenv("CGPU_FAULTS") != "" && err != nil {
		testenv.Skip(t, "TestFaults tries each")
	}
	source := chance(t)
	nodes := map[string]*node{}
	for _, program := range scenarios[i].programs {
		sweep(t, nodes, faulty{scenarios[i], program, kinds[0]}, func(calls int) (which []int) {
			for range 6 {
				which = append(which, 1+source.IntN(calls))
			}
			return which
		})
	}
}

// sampleTime is how long calls are tried where not all are.
const sampleTime = 40 * time.Second

// tenant computes and holds memory.
const tenant = "cgpu-probe work --for 1h --windows 100ms 2>&1 & cgpu-probe hold 64MiB 2>&1; echo over"

// sweep tries a fault at those calls that choose names of so many.
func sweep(t *testing.T, nodes map[string]*node, f faulty, choose func(calls int) []int) {
	t.Helper()
	key := strings.Join(f.config, "\n")
	ready := func() *node {
		if nodes[key] == nil {
			n := newNode(t, f.config...)
			t.Cleanup(func() { nodes[key] = nil })
			n.bundle(t, "tenant", tenant, fourGiB, onFirst)
			n.bundle(t, "alone", tenant, fourGiB, onSecond)
			n.bundle(t, "brief", "cgpu-probe alloc 100MiB >/dev/null", fourGiB, onFirst)
			nodes[key] = n
		}
		return nodes[key]
	}
	calls, _, err := try(ready(), f.scenario, fault{program: f.program, errors: f.kind.errors})
	if err != nil {
		t.Fatalf("%v, without a fault: %v", f, err)
	}
	if calls == 0 && f.kind.errors == nil {
		t.Fatalf("%v: no system call of it was seen; is PTRACE_GET_SYSCALL_INFO (Linux 5.3) there?", f)
	}
	if calls == 0 {
		t.Logf("%v: no call", f)
		return
	}
	which := choose(calls)
	t.Logf("%v: %d of %d calls", f, len(which), calls)
	for _, i := range which {
		n := ready()
		_, hit, err := try(n, f.scenario, fault{program: f.program, n: i, errors: f.kind.errors})
		t.Logf("%d: %s", i, hit)
		if testing.Verbose() && n.slowest.waited > time.Second {
			t.Logf("waited %v for: %.300v", n.slowest.waited, n.slowest.what)
		}
		if err != nil {
			t.Errorf("%v, call %d, %s: %v", f, i, hit, err)
			nodes[key] = nil // taken down at the end
		}
	}
}

// try carries out a scenario with a fault in it, and says how many calls there were, at which it happened, and what was wrong afterwards.
func try(n *node, sc scenario, f fault) (calls int, hit string, err error) {
	n.slowest = slowest{}
	s := &session{node: n, watch: &watch{fault: f}}
	sc.steps(s)
	calls, hit = s.watch.stop()
	for _, err := range []error{s.hangs, s.lacks, s.plain()} {
		if err != nil {
			return calls, hit, err
		}
	}
	if f.n == 0 && len(s.failed) > 0 {
		return calls, hit, fmt.Errorf("%v", s.failed)
	}
	_ = n.runtime("delete", "--force", n.id("tenant"))
	if f.n == 0 {
		return calls, hit, n.observe()
	}
	for _, check := range []func() error{n.quiet, n.neighbourWorks, n.another, n.quiet, n.clean} {
		if err := n.eventually(check); err != nil {
			return calls, hit, fmt.Errorf("%w; what failed: %v", err, s.failed)
		}
	}
	return calls, hit, nil
}

// plain: what fails of ours says so in one line.
func (s *session) plain() error {
	for _, r := range s.failed {
		if strings.Contains(r.stderr, "hanwen/go-fuse") { // it makes pipes before main, or panics
			continue
		}
		if strings.Count("\n"+r.stderr, "\ncgpu") > 1 || strings.Contains(r.stderr, "panic") || strings.Contains(r.stderr, "goroutine ") {
			return fmt.Errorf("not one line: %v", r)
		}
	}
	return nil
}

// another: a new container of the same name starts and gets what it asks for.
func (n *node) another() error {
	return n.runtime("run", "--bundle", n.path("brief"), n.id("tenant"))
}
