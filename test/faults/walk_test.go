// SPDX-License-Identifier: Apache-2.0

//go:build integration && amd64

package faults

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
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
	"github.com/opencgpu/cgpu/pkg/guard/keeper"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/peerpage"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sim"
)

const (
	walkLimit = 512 * quota.MiB
	// What page tables may take beyond the limit (tableSlack of pkg/guard).
	walkTables = 16 * quota.MiB
	// neighbourClients are those of its two programs, one of which comes and goes.
	neighbourClients = 2
	// walkSample is how long it goes on where CGPU_OPERATIONS does not say how many there are to be.
	walkSample = 15 * time.Second
	// walkKills is what happens to a container between two looks at the books.
	walkKills = 8
)

// killing is TestWalkKilled: containers that walk at random, to each of which a lane of its own does things.
type killing struct {
	*node
	bare    *node // its containers have no keeper
	lanes   []*walkLane
	started time.Time
	agreed  [2][]time.Duration // how long it took until the books agreed: when tenants had stopped, and when they had ended
	late    [2][]string        // what disagreed, of the longest
	samples []sample
}

// walkLane is one container after the other in one place, and what happens to it.
type walkLane struct {
	*killing
	name   string
	random *rand.Rand
	kills  map[string]int // by what was killed
	fate   map[string]int // what came of containers
	kept   bool           // the container has a keeper
}

// TestWalkKilled: containers make calls at random, many of them wrong, while each process of ours is killed again and again. Whenever the
// tenants are quiet, ledger, driver and pages agree; a neighbour goes on all the time, and nothing is left.
func TestWalkKilled(t *testing.T) {
	wanted, containers, seed := 0, 3, rand.Uint64()
	if text := os.Getenv("CGPU_OPERATIONS"); text != "" {
		if _, err := fmt.Sscanf(text+"x3", "%dx%d", &wanted, &containers); err != nil || min(wanted, containers) < 1 {
			t.Fatalf("CGPU_OPERATIONS=%q: %v; want OPERATIONS[xCONTAINERS]", text, err)
		}
	}
	if text := os.Getenv("CGPU_WALK"); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 0, 64)
		must(t, err)
	}
	t.Logf("CGPU_WALK=%#x", seed)
	k := newKilling(t, seed, containers)
	defer k.report(t)
	for round := 0; ; round++ {
		must(t, k.withLogs(round, k.round()))
		made, refused := k.operations()
		if wanted == 0 && time.Since(k.started) > walkSample || wanted > 0 && made+refused >= wanted {
			break
		}
		if end, ok := t.Deadline(); ok && time.Until(end) < patience {
			t.Logf("no time is left after %d rounds", round)
			break
		}
	}
	for _, x := range k.lanes {
		_ = k.quick("cgpu-runtime", "delete", "--force", k.id(x.name))
	}
	for _, check := range []func() error{k.quiet, k.neighbourWorks, k.another, k.quiet, k.clean} {
		must(t, k.eventually(check))
	}
	if len(k.samples) >= 50 {
		grown(t, k.samples)
	}
}

func newKilling(t *testing.T, seed uint64, containers int) *killing {
	k := &killing{node: newNode(t, "max_inst = 64", "keeper = true")}
	text, err := os.ReadFile(k.path("cgpu.toml"))
	must(t, err)
	must(t, os.WriteFile(k.path("bare.toml"), []byte(strings.Replace(string(text), "keeper = true", "keeper = false", 1)), 0o600))
	bare := *k.node
	bare.env = append(slices.Clone(k.env), "CGPU_CONFIG="+k.path("bare.toml"))
	k.bare = &bare
	must(t, os.Mkdir(k.path("rootfs/walks"), 0o755))
	k.bundle(t, "brief", "cgpu-probe alloc 100MiB >/dev/null", fourGiB, onFirst)
	for i := range 2 {
		_, err := k.otherGuard(i) // before lanes make it at once
		must(t, err)
	}
	for i := range containers {
		x := &walkLane{killing: k, name: fmt.Sprint("tenant", i), random: rand.New(rand.NewPCG(seed, uint64(i))),
			kills: map[string]int{}, fate: map[string]int{}}
		k.lanes = append(k.lanes, x)
		wrong := []string{"--malformed", "", "--real"}[i%3]
		k.bundle(t, x.name, fmt.Sprintf("read i </walks/%[1]s.seed; while :; do i=$((i+10000)); "+
			"cgpu-probe walk --seed $i --for 24h --steps 100 --limit %v %s >>/walks/%[1]s 2>&1 || echo ended $? >>/walks/%[1]s; done",
			x.name, walkLimit, wrong), "CGPU_MEM="+walkLimit.String(),
			[]string{onFirst, onSecond}[i%2])
	}
	k.started = time.Now()
	for _, x := range k.lanes {
		must(t, x.create())
	}
	return k
}

// round has things happen to all containers at once, and then looks at the books.
func (k *killing) round() error {
	ended := make(chan error, len(k.lanes))
	for _, x := range k.lanes {
		go func() { ended <- x.live() }()
	}
	var errs []error
	for range k.lanes {
		errs = append(errs, <-ended)
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return k.look()
}

// live has things happen to a container.
func (x *walkLane) live() error {
	names := slices.Sorted(maps.Keys(deaths))
	for range walkKills {
		time.Sleep(x.moment(9))
		r, err := x.record(x.name)
		for begin := time.Now(); x.kept && err == nil && !r.GuardLives() && time.Since(begin) < 3*time.Second; time.Sleep(10 * time.Millisecond) {
			r, err = x.record(x.name) // another one may be about to go on
		}
		if err != nil || !r.GuardLives() {
			if err := x.exchange(); err != nil {
				return err
			}
			continue
		}
		name := names[x.random.IntN(len(names))]
		if err := deaths[name](x, r); err != nil {
			return fmt.Errorf("%s: %s: %w", x.name, name, err)
		}
	}
	return nil
}

// moment is some time below 2^most milliseconds, of any order of magnitude.
func (x *walkLane) moment(most int) time.Duration {
	return time.Duration(1+x.random.IntN(1000<<x.random.IntN(most+1))) * time.Microsecond
}

// comesBack reports that there is a guard again, which the keeper has become.
func (x *walkLane) comesBack(keeps int) bool {
	for end := time.Now().Add(patience); keeps > 0 && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if r, err := x.record(x.name); err == nil && r.GuardPID == keeps {
			return true
		}
		if text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", keeps)); err != nil || strings.Contains(string(text), ") Z ") {
			return false
		}
	}
	return false
}

// killGuard kills the container's guard, and returns its keeper's number; 0: there is none.
func (x *walkLane) killGuard(what string, r ledger.Record) (keeps int) {
	keeps = children(r.GuardPID)[keeper.Name]
	x.count(what, killGuard(r))
	return keeps
}

// create starts the container.
func (x *walkLane) create() error {
	n := x.node
	if x.kept = x.random.IntN(4) > 0; !x.kept {
		n = x.bare
	}
	seed := fmt.Sprintln(x.random.Uint32())
	if err := os.WriteFile(x.path("rootfs/walks/"+x.name+".seed"), []byte(seed), 0o644); err != nil {
		return err
	}
	_, err := n.timed(x.name, x.name)
	return err
}

// exchange starts a new container in the place of the one that is there, or may be. Another lane may have killed its hook.
func (x *walkLane) exchange() (err error) {
	x.fate["exchanged"]++
	for range 3 {
		if err := x.quick("cgpu-runtime", "delete", "--force", x.id(x.name)); err != nil {
			return err
		}
		if err = x.create(); err == nil {
			return nil
		}
		x.fate["created again"]++
	}
	return err
}

// deaths are what happens to a container, or beside it.
var deaths = map[string]func(*walkLane, ledger.Record) error{
	"guard": func(x *walkLane, r ledger.Record) error {
		keeps := x.killGuard("guard", r)
		if x.comesBack(keeps) {
			x.fate["went on"]++
			return nil
		}
		x.fate["failed closed"]++
		if _, why, ok := strings.Cut(x.log(r.Nonce), "nobody can go on in its place"); ok {
			_, why, _ = strings.Cut(strings.SplitN(why, "\n", 2)[0], "err=")
			x.fate["failed closed: "+why]++
		}
		return nil
	},
	"keeper": func(x *walkLane, r ledger.Record) error {
		x.kill("keeper", children(r.GuardPID)[keeper.Name])
		return nil
	},
	"guard and the next": func(x *walkLane, r ledger.Record) error {
		next := x.killGuard("guard", r)
		time.Sleep(x.moment(6))
		x.kill("next guard", next)
		return nil
	},
	"guard and keeper": func(x *walkLane, r ledger.Record) error {
		x.kill("keeper", x.killGuard("guard", r))
		return nil
	},
	"one of the node's": func(x *walkLane, _ ledger.Record) error {
		list := slices.DeleteFunc(x.processes(), func(p process) bool {
			return !slices.Contains([]string{"cgpu-arbiter", "cgpu-rescue", "cgpu-hook", "cgpu-refresh"}, p.name)
		})
		if len(list) > 0 {
			p := list[x.random.IntN(len(list))]
			x.killNamed(p.name, p.pid)
		}
		return nil
	},
	"tenant": func(x *walkLane, _ ledger.Record) error {
		if list := x.tenants(); len(list) > 0 {
			x.kill("tenant", list[x.random.IntN(len(list))])
		}
		return nil
	},
	"upgrade": func(x *walkLane, _ ledger.Record) error {
		program, err := x.otherGuard(x.random.IntN(2))
		return errors.Join(err, x.briefly("cgpu", "upgrade", "--program", program, x.id(x.name)))
	},
	"guard in an upgrade": func(x *walkLane, r ledger.Record) error {
		program, err := x.otherGuard(x.random.IntN(2))
		ended := make(chan error, 1)
		go func() { ended <- x.ended("cgpu", "upgrade", "--program", program, x.id(x.name)) }()
		time.Sleep(x.moment(7))
		x.killGuard("guard in an upgrade", r)
		return errors.Join(err, <-ended)
	},
	"set": func(x *walkLane, _ ledger.Record) error {
		return x.briefly("cgpu", "set", x.id(x.name), "--weight", strconv.Itoa(1+x.random.IntN(4)))
	},
	"policy": func(x *walkLane, _ ledger.Record) error {
		policies := []string{"preempt", "weight-preempt"}
		return x.briefly("cgpu", "policy", strconv.Itoa(x.random.IntN(2)), policies[x.random.IntN(2)])
	},
	"pause": func(x *walkLane, _ ledger.Record) error {
		return errors.Join(x.briefly("cgpu", "pause", x.id(x.name)), x.briefly("cgpu", "resume", x.id(x.name)),
			x.ended("cgpu", "resume", x.id(x.name)))
	},
	"smi": func(x *walkLane, _ ledger.Record) error { return x.briefly("cgpu", "smi", "-o", "json") },
	"gc":  func(x *walkLane, _ ledger.Record) error { return x.briefly("cgpu", "gc") },
	"exec": func(x *walkLane, _ ledger.Record) error {
		return x.briefly("cgpu-runtime", "exec", x.id(x.name), "/bin/cgpu-probe", "alloc", "1MiB")
	},
	"delete": func(x *walkLane, _ ledger.Record) error {
		return errors.Join(x.briefly("cgpu-runtime", "delete", "--force", x.id(x.name)), x.exchange())
	},
	"hook": func(x *walkLane, _ ledger.Record) error {
		err := x.quick("cgpu-runtime", "delete", "--force", x.id(x.name))
		create := []string{"create", "--bundle", x.path(x.name), x.id(x.name)}
		return errors.Join(err, x.while("cgpu-runtime", create, func(int) {
			for end, hit := time.Now().Add(300*time.Millisecond), false; !hit && time.Now().Before(end); {
				for _, p := range x.processes() {
					if hit = p.name == "cgpu-hook"; hit {
						x.kill(p.name, p.pid)
						break
					}
				}
			}
		}), x.exchange())
	},
	"create": func(x *walkLane, _ ledger.Record) error {
		err := x.quick("cgpu-runtime", "delete", "--force", x.id(x.name))
		return errors.Join(err, x.briefly("cgpu-runtime", "create", "--bundle", x.path(x.name), x.id(x.name)), x.exchange())
	},
}

func (x *walkLane) count(what string, err error) {
	if err == nil {
		x.kills[what]++
	}
}

// kill kills a process, if there is one.
func (x *walkLane) kill(what string, pid int) {
	if pid > 0 {
		x.count(what, unix.Kill(pid, unix.SIGKILL))
	}
}

// killNamed kills one of our processes, unless it has become another program: what runc leaves is not ours.
func (x *walkLane) killNamed(name string, pid int) {
	if unix.Kill(pid, unix.SIGSTOP) != nil {
		return
	}
	line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	argv, _, _ := strings.Cut(string(line), "\x00")
	if filepath.Base(argv) == name {
		x.kill(name, pid)
	}
	_ = unix.Kill(pid, unix.SIGCONT)
}

// briefly runs one of our programs and kills it at some moment.
func (x *walkLane) briefly(program string, args ...string) error {
	return x.while(program, args, func(pid int) {
		time.Sleep(x.moment(7))
		x.killNamed(program, pid)
	})
}

// ended runs one of our programs, whatever comes of it: but it ends.
func (x *walkLane) ended(program string, args ...string) error {
	return x.while(program, args, func(int) {})
}

func (x *walkLane) while(program string, args []string, do func(pid int)) error {
	if program == "cgpu-runtime" {
		args = append([]string{"--root", x.path("state")}, args...)
	}
	cmd := exec.Command(filepath.Join(x.bin, program), args...)
	cmd.Env = x.env // no output: a container keeps what it was given
	if err := cmd.Start(); err != nil {
		return err
	}
	late := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	do(cmd.Process.Pid)
	_ = cmd.Wait()
	if !late.Stop() {
		return fmt.Errorf("hangs: %s %v", program, args)
	}
	return nil
}

// tenants are the container's processes but its first.
func (x *walkLane) tenants() []int {
	r, _ := x.record(x.name)
	return slices.DeleteFunc(x.all(), func(pid int) bool { return pid == r.InitPID })
}

// all are the container's processes.
func (x *walkLane) all() (list []int) {
	r, _ := x.record(x.name)
	cgroups, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", r.InitPID))
	for line := range strings.Lines(string(cgroups)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) < 3 || !strings.Contains(parts[2], x.id(x.name)) {
			continue
		}
		text, _ := os.ReadFile(filepath.Join("/sys/fs/cgroup", parts[1], parts[2], "cgroup.procs"))
		for _, word := range strings.Fields(string(text)) {
			if pid, err := strconv.Atoi(word); err == nil && pid > 0 {
				list = append(list, pid)
			}
		}
		if len(list) > 0 {
			break
		}
	}
	return list
}

// look compares the books: when all tenants have stopped, and when all have ended.
func (k *killing) look() error {
	for end, whom := range []func(*walkLane) []int{(*walkLane).all, (*walkLane).tenants} {
		begin, last, took := time.Now(), "", time.Duration(0) // until the look that they agreed at began: one takes a while itself
		var said []string
		if err := k.eventually(func() error {
			k.send([]unix.Signal{unix.SIGSTOP, unix.SIGKILL}[end], whom) // again: they may start others
			took = time.Since(begin)
			err := k.agree(end == 1)
			if err != nil && err.Error() != last {
				last = err.Error()
				said = append(said, fmt.Sprintf("%v: %s", time.Since(begin).Round(time.Millisecond), last))
			}
			return err
		}); err != nil {
			return fmt.Errorf("%w; before: %v", err, said)
		}
		if len(k.agreed[end]) == 0 || took > slices.Max(k.agreed[end]) {
			k.late[end] = said
		}
		k.agreed[end] = append(k.agreed[end], took)
	}
	err := errors.Join(k.neighbourWorks(), k.walked())
	k.send(unix.SIGCONT, (*walkLane).all)
	k.samples = append(k.samples, k.sample(time.Since(k.started)))
	return err
}

// send sends a signal to some of each container's processes.
func (k *killing) send(signal unix.Signal, whom func(*walkLane) []int) {
	for _, x := range k.lanes {
		for _, pid := range whom(x) {
			_ = unix.Kill(pid, signal)
		}
	}
}

// agree compares what guards and pages say with the driver's books. Of a mapping that is taken away in parts a guard keeps the whole until
// the end.
func (k *killing) agree(end bool) error {
	before, err := api.Ask(k.neighbour)
	if err != nil {
		return err
	}
	c, err := sim.Dial(filepath.Join(k.runDir, "sim.sock"), nil)
	if err != nil {
		return err
	}
	defer c.Close()
	s, err := c.Snapshot()
	if err != nil {
		return err
	}
	charged, guards, clients := map[string]quota.Bytes{}, map[string]int{}, 0
	for _, r := range k.records() {
		if !r.GuardLives() {
			continue // the driver has nothing of it any more, or another guard comes
		}
		st, err := api.Ask(r)
		if err != nil {
			return fmt.Errorf("%s: %w", r.ID, err)
		}
		if err := k.one(r, st, end); err != nil {
			return fmt.Errorf("%s (%s): %w", r.ID, r.Nonce, err)
		}
		own := 0
		for _, p := range st.Processes {
			own += p.Clients
		}
		if r.ID == k.id("neighbour") {
			own = max(own, neighbourClients)
		}
		clients += own + 1 // the guard's
		for i, v := range st.VGPUs {
			if r.ID == k.id("neighbour") && i < len(before.VGPUs) {
				v.Used = max(v.Used, before.VGPUs[i].Used) // it allocates and frees
			}
			charged[v.UUID] += v.Used
			guards[v.UUID]++
		}
	}
	for _, g := range s.GPUs {
		if g.Used > charged[g.UUID] {
			return fmt.Errorf("GPU %d: the driver has given out %v, charged are %v", g.Index, g.Used, charged[g.UUID])
		}
		p, err := peerpage.Open(k.runDir, g.UUID)
		if err != nil {
			return err
		}
		living := p.Living()
		p.Close()
		if living > guards[g.UUID] {
			return fmt.Errorf("GPU %d: the peer page has %d guards, the ledger %d", g.Index, living, guards[g.UUID])
		}
	}
	for _, p := range k.processes() {
		if p.name == "cgpu-arbiter" {
			clients++
		}
	}
	b, err := k.books()
	if w := k.wantDriver; err == nil && end && (b.Used > w.Used || b.Groups > w.Groups || b.Exports > w.Exports || b.Clients > clients) {
		return fmt.Errorf("the tenants have ended, and driver and page have %+v; want %+v, and %d clients, at most; %s%s", b,
			w, clients, holders(s), k.who())
	}
	return err
}

// holders are the processes that have RM clients with something on a GPU.
func holders(s sim.Snapshot) string {
	var text strings.Builder
	for _, g := range s.GPUs {
		for _, p := range g.Processes {
			name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", p.PID))
			fmt.Fprintf(&text, "GPU %d: process %d (%s, %v) has %d objects and %v; ", g.Index, p.PID, bytes.TrimSpace(name), err, p.Objects, p.Bytes)
		}
	}
	return text.String()
}

// who are the guards by the ledger, and the processes of ours.
func (k *killing) who() string {
	var text strings.Builder
	for _, r := range k.records() {
		fmt.Fprintf(&text, "%s (%s): guard %d, lives: %v; ", r.ID, r.Nonce, r.GuardPID, r.GuardLives())
	}
	for _, p := range k.processes() {
		fmt.Fprintf(&text, "%d (%s, of %d); ", p.pid, p.name, p.parent)
	}
	return text.String()
}

// one compares what a guard says with its page.
func (k *killing) one(r ledger.Record, st api.Status, end bool) error {
	p, err := page.Read(page.File(k.runDir, r.Nonce))
	if err != nil {
		return err
	}
	for i, v := range st.VGPUs {
		switch shown := quota.Bytes(p.VGPU(i).Used); {
		case r.ID == k.id("neighbour"):
		case shown != v.Used:
			return fmt.Errorf("its page shows %v, charged are %v", shown, v.Used)
		case v.Used > v.Limit+walkTables:
			return fmt.Errorf("charged are %v of %v", v.Used, v.Limit)
		case end && (v.Used > 0 || len(st.Processes) > 0):
			return fmt.Errorf("its programs have ended; charged are %v, to %+v", v.Used, st.Processes)
		}
	}
	return nil
}

// walked says which call nobody has answered. Of what else ends a walk, such as the end of its container, nothing follows.
func (k *killing) walked() error {
	for _, x := range k.lanes {
		text, _ := os.ReadFile(k.path("rootfs/walks/" + x.name))
		for line := range strings.Lines(string(text)) {
			if strings.Contains(line, "the call hangs") {
				return fmt.Errorf("%s: %s", x.name, line)
			}
		}
	}
	return nil
}

// operations are how many were made and refused, of lists that were carried out to their ends with a guard.
func (k *killing) operations() (made, refused int) {
	for _, x := range k.lanes {
		text, _ := os.ReadFile(k.path("rootfs/walks/" + x.name))
		for line := range strings.Lines(string(text)) {
			var list, done, not, left, unanswered int
			if _, err := fmt.Sscanf(line, "list=%v made=%d refused=%d left_out=%d unanswered=%d", &list, &done, &not, &left,
				&unanswered); err == nil && unanswered == 0 {
				made, refused = made+done, refused+not
			}
		}
	}
	return made, refused
}

func (k *killing) withLogs(round int, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("round %d: %w\n%s", round, err, k.logs())
}

func (k *killing) report(t *testing.T) {
	kills, fate, sum := map[string]int{}, map[string]int{}, 0
	for _, x := range k.lanes {
		for what, n := range x.kills {
			kills[what] += n
			sum += n
		}
		for what, n := range x.fate {
			fate[what] += n
		}
	}
	made, refused := k.operations()
	t.Logf("%d containers, %v: %d operations, %d of them refused; %d kills: %v; containers: %v", len(k.lanes),
		time.Since(k.started).Round(time.Second), made+refused, refused, sum, kills, fate)
	for end, when := range []string{"had stopped", "had ended"} {
		list := slices.Sorted(slices.Values(k.agreed[end]))
		if len(list) == 0 {
			continue
		}
		later, _ := slices.BinarySearch(list, time.Second)
		t.Logf("%d times the tenants %s; until the books agreed: median %v, at most %v, more than a second %d times; the longest: %v", len(list),
			when, list[len(list)/2].Round(time.Millisecond), list[len(list)-1].Round(time.Millisecond), len(list)-later, k.late[end])
	}
}
