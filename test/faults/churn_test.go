// SPDX-License-Identifier: Apache-2.0

//go:build integration && amd64

package faults

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/keeper"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

// churn is how many containers there are at a time, how often each is exchanged for a new one, how many at once, and over how long that is
// spread.
type churn struct {
	containers, rounds, lanes int
	over                      time.Duration // 0: as fast as it goes
	csv                       string        // file for the samples; empty: none
}

// asked reads CGPU_CHURN, such as 64x100, 64x100x4 or 8x720,2h, and CGPU_CHURN_CSV.
func asked(t *testing.T) churn {
	c := churn{containers: 6, rounds: 4, lanes: 1, csv: os.Getenv("CGPU_CHURN_CSV")}
	text := os.Getenv("CGPU_CHURN")
	if text == "" {
		return c
	}
	size, over, long := strings.Cut(text, ",")
	format, to := "%dx%d", []any{&c.containers, &c.rounds}
	if strings.Count(size, "x") > 1 {
		format, to = "%dx%dx%d", append(to, &c.lanes)
	}
	_, err := fmt.Sscanf(size, format, to...)
	if err == nil && long {
		c.over, err = time.ParseDuration(over)
	}
	if err != nil || min(c.containers, c.rounds, c.lanes) < 1 {
		t.Fatalf("CGPU_CHURN=%q: %v; want CONTAINERSxROUNDS[xLANES][,DURATION]", text, err)
	}
	return c
}

// lives are what containers do, again after $PAUSE seconds; each also computes.
var lives = []string{
	"cgpu-probe hold 32MiB",
	"while :; do cgpu-probe alloc 16MiB; busybox sleep $PAUSE; done",
	"cgpu-probe alloc 256MiB; cgpu-probe hold 32MiB",                             // one is refused
	"cgpu-probe alloc 16MiB & cgpu-probe hold 32MiB & busybox sleep 2",           // ends by itself
	"while :; do cgpu-probe hold 16MiB 1 & busybox sleep $PAUSE; done",           // clients that come and go
	"cgpu-probe hold 16MiB & busybox sleep 1; kill -9 $!; cgpu-probe hold 16MiB", // killed with memory
}

// TestChurn: containers come, are changed, and go, many times over; afterwards nothing is left, and what lives on has not grown.
func TestChurn(t *testing.T) {
	c := asked(t)
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	kept := fmt.Sprintf("keeper = %v", c.over > 0 || random.IntN(2) == 0)
	t.Logf("seed %#x, %s", seed, kept)
	n := newNode(t, "max_inst = 64", kept)
	pause := fmt.Sprintf("PAUSE=%.1f", max(0.5, float64(c.containers)/16)) // or 64 leave a small machine no time for anything else
	for i := range lives {
		for gpu, on := range []string{onFirst, onSecond} {
			n.bundle(t, fmt.Sprintf("life%d-%d", i, gpu), "cgpu-probe work --for 24h >/dev/null & "+lives[i], "CGPU_MEM=128MiB", pause, on)
		}
	}
	n.bundle(t, "plain", "busybox true") // no quota: what the low-level runtime alone takes
	for i := range 2 {
		_, err := n.otherGuard(i) // before lanes make it at once
		must(t, err)
	}
	lanes := make([]*lane, c.lanes)
	for i := range lanes {
		lanes[i] = &lane{node: n, number: i, random: rand.New(rand.NewPCG(seed, uint64(i)))}
	}
	for slot := range c.containers {
		x := lanes[slot%c.lanes]
		x.slots = append(x.slots, slot)
	}
	var samples []sample
	begin := time.Now()
	defer func() { report(t, c, lanes, samples) }() // of a test that fails, too
	for round := range c.rounds {
		if end, ok := t.Deadline(); ok && time.Until(end) < patience {
			t.Logf("no time is left after %d rounds", round)
			break
		}
		works := make(chan error, 1)
		go func() { works <- n.neighbourWorks() }()
		ended := make(chan error, len(lanes))
		for _, x := range lanes {
			go func() { ended <- x.round(c, begin, round) }()
		}
		var errs []error
		for range lanes {
			errs = append(errs, <-ended)
		}
		must(t, n.withStacks(errors.Join(append(errs, <-works)...)))
		samples = append(samples, n.sample(time.Since(begin)))
		must(t, c.write(samples))
	}
	for slot := range c.containers {
		_ = n.quick("cgpu-runtime", "delete", "--force", n.id(fmt.Sprintf("slot%d", slot)))
	}
	for _, check := range []func() error{n.quiet, n.neighbourWorks, n.clean} {
		must(t, n.withStacks(n.eventually(check)))
	}
	grown(t, samples)
	samples = append(samples, n.sample(time.Since(begin)))
	must(t, c.write(samples))
}

// lane exchanges some of the containers, one after the other, beside other lanes.
type lane struct {
	node          *node
	number        int
	random        *rand.Rand
	slots         []int
	with, without []time.Duration // starts with a quota and of the low-level runtime alone
	failed        int             // upgrades of the neighbour's guard, in a row
	refused       []error         // creates, since what was there before is said to run
}

// inUse is said before the number of a process.
const inUse = "is in use by process "

// round exchanges each container once.
func (x *lane) round(c churn, begin time.Time, round int) error {
	n := x.node
	for _, slot := range x.slots {
		time.Sleep(time.Until(begin.Add(c.over * time.Duration(round*c.containers+slot) / time.Duration(c.rounds*c.containers))))
		id := fmt.Sprintf("slot%d", slot)
		if err := n.quick("cgpu-runtime", "delete", "--force", n.id(id)); err != nil {
			return err
		}
		life := fmt.Sprintf("life%d-%d", x.random.IntN(len(lives)), slot%2)
		took, err := n.timed(life, id)
		for tries := 0; err != nil && strings.Contains(err.Error(), inUse) && tries < 50; tries++ {
			x.refused = append(x.refused, n.withStacks(err))
			time.Sleep(100 * time.Millisecond)
			took, err = n.timed(life, id)
		}
		if err != nil {
			return err
		}
		x.with = append(x.with, took)
		if err := x.meddle(); err != nil {
			return err
		}
		if slot%8 != 0 {
			continue
		}
		plain := fmt.Sprintf("plain%d", x.number)
		if took, err = n.timed("plain", plain); err != nil {
			return err
		}
		if r, err := n.record(plain); err == nil {
			return fmt.Errorf("%s is to have no quota, and has %v", plain, r.VGPUs)
		}
		x.without = append(x.without, took)
		_ = n.quick("cgpu-runtime", "delete", "--force", n.id(plain))
	}
	return nil
}

// quick runs one of our programs, not watched.
func (n *node) quick(program string, args ...string) error {
	if program == "cgpu-runtime" {
		args = append([]string{"--root", n.path("state")}, args...)
	}
	cmd := exec.Command(filepath.Join(n.bin, program), args...)
	out, err := os.CreateTemp(n.dir, "out")
	if err != nil {
		return err
	}
	defer os.Remove(out.Name()) //nolint:errcheck // in the node's folder
	defer out.Close()
	// A file: a container keeps what it was given, and a pipe would keep us waiting for its end.
	cmd.Env, cmd.Stdout, cmd.Stderr = n.env, out, out
	if err := cmd.Start(); err != nil {
		return err
	}
	late := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	if err := cmd.Wait(); err != nil {
		said, _ := os.ReadFile(out.Name())
		return fmt.Errorf("%s %v: %w: %s", program, args, err, said)
	}
	return nil
}

// timed creates and starts a container, and says how long that took.
func (n *node) timed(bundle, id string) (time.Duration, error) {
	begin := time.Now()
	if err := n.quick("cgpu-runtime", "create", "--bundle", n.path(bundle), n.id(id)); err != nil {
		return 0, err
	}
	err := n.quick("cgpu-runtime", "start", n.id(id))
	return time.Since(begin), err
}

// maxFailed is how often in a row the neighbour's guard may fail to go on as another program, of which it is busy once or twice.
const maxFailed = 3

// meddle does with some container what an administrator may do, or kills its guard; it may have ended.
func (x *lane) meddle() error {
	n, random := x.node, x.random
	id := n.id(fmt.Sprintf("slot%d", x.slots[random.IntN(len(x.slots))]))
	switch random.IntN(8) {
	case 0:
		_ = n.quick("cgpu", "set", id, "--weight", strconv.Itoa(1+random.IntN(4)))
	case 1:
		_ = n.quick("cgpu", "set", id, "--memory", strconv.Itoa(64+64*random.IntN(3))+"MiB")
	case 2:
		_ = n.quick("cgpu", "pause", id)
		_ = n.quick("cgpu", "resume", id)
	case 3:
		_ = n.quick("cgpu-runtime", "exec", id, "/bin/cgpu-probe", "alloc", "1MiB")
	case 4:
		_ = n.quick("cgpu", "smi", "-o", "json")
	case 5:
		_ = n.upgradeSome(id, random)
	case 6:
		if r, err := n.record(strings.TrimPrefix(id, n.id(""))); err == nil {
			_ = killGuard(r)
		}
	case 7: // the neighbour's guard lives all the time
		if x.number > 0 {
			break // one upgrade at a time
		}
		err := n.upgradeSome(n.id("neighbour"), random)
		if err == nil {
			x.failed = 0
		} else if x.failed++; x.failed == maxFailed {
			return fmt.Errorf("%d times in a row: %w", x.failed, err)
		}
	}
	return nil
}

// upgradeSome has a guard go on as one of two programs.
func (n *node) upgradeSome(id string, random *rand.Rand) error {
	program, err := n.otherGuard(random.IntN(2))
	if err == nil {
		err = n.quick("cgpu", "upgrade", "--program", program, id)
	}
	return err
}

// killGuard kills the guard of a record. By the time its number may be another process'.
func killGuard(r ledger.Record) error {
	fd, err := unix.PidfdOpen(r.GuardPID, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if start, err := ledger.ProcStart(r.GuardPID); err != nil || start != r.GuardStart {
		return fmt.Errorf("process %d is not the guard: %w", r.GuardPID, err)
	}
	return unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
}

// withStacks adds to an error where the threads of the neighbour's guard are, and of a process that it names, and our goroutines.
func (n *node) withStacks(err error) error {
	if err == nil {
		return nil
	}
	var named int
	_, rest, _ := strings.Cut(err.Error(), inUse)
	_, _ = fmt.Sscan(rest, &named)
	var text strings.Builder
	for _, pid := range []int{n.neighbour.GuardPID, named} {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
		for _, thread := range threads {
			for _, name := range []string{"stat", "wchan", "syscall"} {
				b, _ := os.ReadFile(filepath.Join(thread, name))
				fmt.Fprintf(&text, "%s/%s: %s\n", thread, name, bytes.TrimSpace(b))
			}
		}
	}
	_ = pprof.Lookup("goroutine").WriteTo(&text, 1)
	return fmt.Errorf("%w\n%s", err, &text)
}

// sample is how large the node is at a time.
type sample struct {
	at                        time.Duration
	containers, files, logs   int
	logBytes                  int64
	mounts, cgroups, clients  int
	neighbour                 sizes // of its guard, which lives all the time
	guards, keepers, arbiters sizes // of all, the neighbour's too
	sim                       sizes
}

var columns = strings.Fields("seconds containers files logs log_bytes mounts cgroups driver_clients " +
	"neighbour neighbour_kib neighbour_fds neighbour_sockets guards guards_kib guards_fds guards_sockets " +
	"keepers keepers_kib keepers_fds keepers_sockets arbiters arbiters_kib arbiters_fds arbiters_sockets sim sim_kib sim_fds sim_sockets")

func (s sample) row() []string {
	row := []string{strconv.FormatFloat(s.at.Seconds(), 'f', 1, 64)}
	values := []int64{int64(s.containers), int64(s.files), int64(s.logs), s.logBytes, int64(s.mounts), int64(s.cgroups), int64(s.clients)}
	for _, z := range []sizes{s.neighbour, s.guards, s.keepers, s.arbiters, s.sim} {
		values = append(values, int64(z.processes), int64(z.kib), int64(z.fds), int64(z.sockets))
	}
	for _, v := range values {
		row = append(row, strconv.FormatInt(v, 10))
	}
	return row
}

func (n *node) sample(at time.Duration) sample {
	s := sample{at: at, containers: len(n.records()) - 1, files: len(n.files())}
	logs, _ := os.ReadDir(filepath.Join(n.runDir, "log"))
	s.logs = len(logs)
	for _, e := range logs {
		if info, err := e.Info(); err == nil {
			s.logBytes += info.Size()
		}
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	s.mounts = bytes.Count(mounts, []byte(n.dir))
	for _, of := range []string{"", "*/"} { // v2, and v1's controllers
		cgroups, _ := filepath.Glob("/sys/fs/cgroup/" + of + filepath.Base(n.dir) + "*")
		s.cgroups += len(cgroups)
	}
	if b, err := n.books(); err == nil {
		s.clients = b.Clients
	}
	for _, p := range n.processes() {
		if p.pid == n.neighbour.GuardPID {
			s.neighbour.add(p.pid)
		}
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", p.pid))
		of := map[string]*sizes{"cgpu-guard": &s.guards, keeper.Name: &s.keepers, "cgpu-arbiter": &s.arbiters, "cgpu-sim": &s.sim}
		if z := of[strings.TrimSpace(string(name))]; z != nil {
			z.add(p.pid)
		}
	}
	return s
}

// sizes are the resident memory of some processes, and how many descriptors they have, sockets among them.
type sizes struct{ processes, kib, fds, sockets int }

func (z *sizes) add(pid int) {
	z.processes++
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, "RssAnon:"); ok { // pages of files come and go as the machine has room
			kib, _ := strconv.Atoi(strings.Fields(value)[0])
			z.kib += kib
		}
	}
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range fds {
		z.fds++
		if target, _ := os.Readlink(fd); strings.HasPrefix(target, "socket:") {
			z.sockets++
		}
	}
}

// each is a size of one process, on average.
func each(sum int, of sizes) int { return sum / max(1, of.processes) }

// grown says what became larger from the second fifth of the samples to the last: the first is filling caches. Of few it compares one each.
func grown(t *testing.T, samples []sample) {
	fifth := max(1, len(samples)/5)
	median := func(of []sample, field func(sample) int) int {
		values := make([]int, len(of))
		for i, s := range of {
			values[i] = field(s)
		}
		slices.Sort(values)
		return values[len(values)/2]
	}
	for name, c := range map[string]struct {
		field func(sample) int
		more  int // that is no growth
	}{
		"KiB of the neighbour's guard":         {func(s sample) int { return s.neighbour.kib }, 4096},
		"descriptors of the neighbour's guard": {func(s sample) int { return s.neighbour.fds }, 8},
		"sockets of the neighbour's guard":     {func(s sample) int { return s.neighbour.sockets }, 4},
		"KiB of a guard":                       {func(s sample) int { return each(s.guards.kib, s.guards) }, 2048},
		"descriptors of a guard":               {func(s sample) int { return each(s.guards.fds, s.guards) }, 8},
		"KiB of an arbiter":                    {func(s sample) int { return each(s.arbiters.kib, s.arbiters) }, 4096},
		"descriptors of an arbiter":            {func(s sample) int { return each(s.arbiters.fds, s.arbiters) }, 8},
		"descriptors of the simulated driver":  {func(s sample) int { return s.sim.fds }, 64},
		"files in the run dir":                 {func(s sample) int { return s.files }, 16},
		"logs":                                 {func(s sample) int { return max(s.logs, 72) }, 16}, // so many are kept
		"mounts":                               {func(s sample) int { return s.mounts }, 8},
		"cgroups":                              {func(s sample) int { return s.cgroups }, 4},
	} {
		before, after := median(samples[fifth:2*fifth], c.field), median(samples[len(samples)-fifth:], c.field)
		if after > before+c.more {
			t.Errorf("%s: %d, then %d", name, before, after)
		}
	}
}

func report(t *testing.T, c churn, lanes []*lane, samples []sample) {
	var with, without []time.Duration
	for _, x := range lanes {
		with, without = append(with, x.with...), append(without, x.without...)
		if len(x.refused) > 0 {
			t.Errorf("%d creates were refused; the first: %v", len(x.refused), x.refused[0])
		}
	}
	if len(samples) == 0 || len(without) == 0 {
		return
	}
	slices.Sort(with)
	slices.Sort(without)
	text := fmt.Sprintf("create and start, %d with a quota and %d without", len(with), len(without))
	for _, percent := range []int{50, 90, 99} {
		of := func(d []time.Duration) time.Duration { return d[len(d)*percent/100] }
		text += fmt.Sprintf("; p%d %.1f and %.1f ms: %.1f more", percent, 1e3*of(with).Seconds(), 1e3*of(without).Seconds(),
			1e3*(of(with)-of(without)).Seconds())
	}
	last := samples[len(samples)-1]
	t.Logf("%d containers in %d lanes, %d samples in %v; %s", c.containers, c.lanes, len(samples), last.at.Round(time.Second), text)
	t.Logf("%v", columns)
	for _, i := range []int{0, len(samples) / 2, max(0, len(samples)-2), len(samples) - 1} {
		t.Logf("%v", samples[i].row())
	}
}

// write writes the samples so far: a test that fails, or is ended, has them too.
func (c churn) write(samples []sample) error {
	if c.csv == "" {
		return nil
	}
	var text bytes.Buffer
	w := csv.NewWriter(&text)
	_ = w.Write(columns) // Flush's error, which a buffer does not have
	for _, s := range samples {
		_ = w.Write(s.row())
	}
	w.Flush()
	return os.WriteFile(c.csv, text.Bytes(), 0o644)
}
