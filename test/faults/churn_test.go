// SPDX-License-Identifier: Apache-2.0

//go:build integration && amd64

package faults

import (
	"bytes"
	"cmp"
	"encoding/csv"
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

	"github.com/opencgpu/cgpu/pkg/guard/keeper"
)

// churn is how many containers there are at a time, how often each is exchanged for a new one, and over how long that is spread.
type churn struct {
	containers, rounds int
	over               time.Duration // 0: as fast as it goes
	csv                string        // file for the samples; empty: none
}

// asked reads CGPU_CHURN, such as 64x100 or 8x720,2h, and CGPU_CHURN_CSV.
func asked(t *testing.T) churn {
	c := churn{containers: 6, rounds: 4, csv: os.Getenv("CGPU_CHURN_CSV")}
	text := os.Getenv("CGPU_CHURN")
	if text == "" {
		return c
	}
	size, over, long := strings.Cut(text, ",")
	_, err := fmt.Sscanf(size, "%dx%d", &c.containers, &c.rounds)
	if err == nil && long {
		c.over, err = time.ParseDuration(over)
	}
	if err != nil {
		t.Fatalf("CGPU_CHURN=%q: %v; want CONTAINERSxROUNDS or CONTAINERSxROUNDS,DURATION", text, err)
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
	var with, without []time.Duration
	var samples []sample
	begin := time.Now()
	for round := range c.rounds {
		for slot := range c.containers {
			time.Sleep(time.Until(begin.Add(c.over * time.Duration(round*c.containers+slot) / time.Duration(c.rounds*c.containers))))
			id := fmt.Sprintf("slot%d", slot)
			must(t, n.quick("cgpu-runtime", "delete", "--force", n.id(id)))
			took, err := n.timed(fmt.Sprintf("life%d-%d", random.IntN(len(lives)), slot%2), id)
			must(t, err)
			with = append(with, took)
			n.meddle(random, c.containers)
			if slot%8 == 0 {
				took, err := n.timed("plain", "plain")
				must(t, err)
				without = append(without, took)
				_ = n.quick("cgpu-runtime", "delete", "--force", n.id("plain"))
			}
		}
		samples = append(samples, n.sample(time.Since(begin)))
		must(t, c.write(samples))
	}
	for slot := range c.containers {
		_ = n.quick("cgpu-runtime", "delete", "--force", n.id(fmt.Sprintf("slot%d", slot)))
	}
	for _, check := range []func() error{n.quiet, n.neighbourWorks, n.clean} {
		must(t, n.eventually(check))
	}
	samples = append(samples, n.sample(time.Since(begin)))
	must(t, c.write(samples))
	report(t, c, with, without, samples)
	grown(t, samples[:len(samples)-1])
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

// meddle does with some container what an administrator may do, or kills its guard; it may have ended.
func (n *node) meddle(random *rand.Rand, containers int) {
	id := n.id(fmt.Sprintf("slot%d", random.IntN(containers)))
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
		if program, err := n.otherGuard(random.IntN(2)); err == nil {
			_ = n.quick("cgpu", "upgrade", "--program", program, id)
		}
	case 7: // the neighbour's guard lives all the time
		if program, err := n.otherGuard(random.IntN(2)); err == nil {
			_ = n.quick("cgpu", "upgrade", "--program", program, n.id("neighbour"))
		}
	case 6:
		if r, err := n.record(strings.TrimPrefix(id, n.id(""))); err == nil && r.GuardPID > 0 {
			_ = unix.Kill(r.GuardPID, unix.SIGKILL)
		}
	}
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
		"logs":                                 {func(s sample) int { return s.logs }, 16},
		"mounts":                               {func(s sample) int { return s.mounts }, 8},
		"cgroups":                              {func(s sample) int { return s.cgroups }, 4},
	} {
		before, after := median(samples[fifth:2*fifth], c.field), median(samples[len(samples)-fifth:], c.field)
		if after > before+c.more {
			t.Errorf("%s: %d, then %d", name, before, after)
		}
	}
}

func report(t *testing.T, c churn, with, without []time.Duration, samples []sample) {
	quantiles := func(d []time.Duration) string {
		slices.SortFunc(d, cmp.Compare[time.Duration])
		return fmt.Sprintf("%d, median %v, p99 %v", len(d), d[len(d)/2].Round(time.Millisecond), d[len(d)*99/100].Round(time.Millisecond))
	}
	last := samples[len(samples)-2]
	t.Logf("%d containers, %d rounds in %v; create and start with a quota: %s; without: %s", c.containers, len(samples)-1,
		last.at.Round(time.Second), quantiles(with), quantiles(without))
	t.Logf("%v", columns)
	for _, i := range []int{0, len(samples) / 2, len(samples) - 2, len(samples) - 1} {
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
