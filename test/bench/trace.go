// SPDX-License-Identifier: Apache-2.0

//go:build integration

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/opencgpu/cgpu/test/node"
)

// traced is how many starts are traced. Strace makes them slower, by what it does at each program's and each thread's beginning and end, so
// what it says is where the time goes, and not how much it is: that is what starts measures.
const traced = 10

// traces shows where a start's time goes: medians of the parts, for a container with a quota, and for one without.
func traces(lab *node.Node, rounds int) ([]figure, error) {
	strace, err := exec.LookPath("strace")
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench: no trace of a start: there is no strace")
		return nil, nil
	}
	var figures []figure
	for _, way := range []struct {
		name string
		env  []string
	}{{"traced, quota: ", quota}, {"traced, no quota: ", nil}} {
		var order []string
		parts := map[string][]float64{}
		for round := range min(rounds, traced) + 1 {
			events, err := trace(lab, strace, fmt.Sprintf("trace%d-%d", os.Getpid(), round), way.env)
			if err != nil {
				return nil, err
			}
			if round == 0 { // fills caches
				continue
			}
			for _, p := range split(events) {
				if parts[p.name] == nil {
					order = append(order, p.name)
				}
				parts[p.name] = append(parts[p.name], p.took)
			}
		}
		for _, name := range order {
			figures = append(figures, summary(way.name+name, "ms", parts[name]))
		}
	}
	return figures, nil
}

// trace starts a container below strace, and has what its programs did.
func trace(lab *node.Node, strace, id string, env []string) ([]traceEvent, error) {
	root := filepath.Join(lab.Dir, "bench")
	bundle, file := filepath.Join(root, "bundle"), filepath.Join(root, "trace")
	if err := lab.Bundle(bundle, func(spec map[string]any) { node.SetProcess(spec, env, "true") }); err != nil {
		return nil, err
	}
	// One strace around all, as it ends with the last of those that it traces, and the guard lives until the end.
	script := `"$0" --root "$1" create --bundle "$2" "$3" && "$0" --root "$1" start "$3"
		status=$?
		"$0" --root "$1" delete --force "$3"
		exit $status`
	calls := "trace=execve,mount,move_mount,pivot_root,symlinkat,renameat"
	r := lab.Run(nil, strace, "-f", "-ttt", "--seccomp-bpf", "-s", "200", "-o", file, "-e", calls,
		"sh", "-c", script, filepath.Join(lab.Bin, "cgpu-runtime"), filepath.Join(root, "state"), bundle, id)
	if r.Code != 0 {
		return nil, fmt.Errorf("%s", r)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return readTrace(string(text)), nil
}

// traceEvent is a line of strace's: a program that begins (its base name, and its arguments), one that ends, a mount, a link, a new name.
type traceEvent struct {
	pid        string
	at         float64 // ms
	call, name string
	args       string
}

var (
	traceLine = regexp.MustCompile(`(?m)^(\d+) +(\d+\.\d+) (?:(\w+)\((.*)|\+\+\+ (exited) .*)$`)
	traceExec = regexp.MustCompile(`^"([^"]*)", \[(.*?)\]`)
)

func readTrace(text string) (events []traceEvent) {
	for _, m := range traceLine.FindAllStringSubmatch(text, -1) {
		seconds, err := strconv.ParseFloat(m[2], 64)
		if err != nil || strings.Contains(m[4], ") = -1 ") {
			continue
		}
		e := traceEvent{pid: m[1], at: seconds * 1000, call: m[3] + m[5], args: m[4]}
		if p := traceExec.FindStringSubmatch(m[4]); e.call == "execve" && p != nil {
			e.name, e.args = filepath.Base(p[1]), p[2]
		}
		events = append(events, e)
	}
	return events
}

type part struct {
	name string
	took float64 // ms; of "calls" how many
}

// split is what lies between the events of one start.
func split(events []traceEvent) (parts []part) {
	add := func(name string, from, to *traceEvent) {
		if from != nil && to != nil {
			parts = append(parts, part{name, to.at - from.at})
		}
	}
	// first is the first event after another for which it is true.
	first := func(after *traceEvent, is func(traceEvent) bool) *traceEvent {
		for i := range events {
			if after != nil && events[i].at >= after.at && events[i] != *after && is(events[i]) {
				return &events[i]
			}
		}
		return nil
	}
	begins := func(name, arg string) func(traceEvent) bool {
		return func(e traceEvent) bool { return e.call == "execve" && e.name == name && strings.Contains(e.args, arg) }
	}
	ends := func(of *traceEvent) func(traceEvent) bool {
		return func(e traceEvent) bool { return of != nil && e.call == "exited" && e.pid == of.pid }
	}
	if len(events) == 0 {
		return nil
	}
	create := first(&events[0], begins("cgpu-runtime", `"create"`))
	guard := first(create, begins("cgpu-guard", ""))
	runc := first(create, begins("runc", `"create"`))
	inits := first(runc, func(e traceEvent) bool { return e.call == "execve" && strings.Contains(e.args, `"init"`) })
	created := first(runc, ends(create))
	add("create, all", create, created)
	add("  cgpu-runtime until it is runc", create, runc)
	add("    until the guard begins", create, guard)
	add("  runc until its init begins", runc, inits)
	var mounts, hooked, links []*traceEvent
	var cache *traceEvent
	setup := first(create, begins("cgpu-hook", `"setup"`))
	ready := first(setup, ends(setup))
	pivot := first(inits, func(e traceEvent) bool { return e.call == "pivot_root" })
	for i, e := range events {
		switch {
		case strings.HasSuffix(e.call, "mount") && ready != nil && e.at > setup.at && e.at < ready.at:
			hooked = append(hooked, &events[i])
		case strings.HasSuffix(e.call, "mount") && pivot != nil && e.pid == pivot.pid && e.at < pivot.at:
			mounts = append(mounts, &events[i])
		case begins("cgpu-hook", "")(e): // of create, or of delete
			add("  "+hookName(e), &events[i], first(&events[i], ends(&events[i])))
		case e.call == "symlinkat" && setup != nil && e.at > setup.at: // runc makes some before
			links = append(links, &events[i])
		case e.call == "renameat" && strings.Contains(e.args, `"ld.so.cache"`):
			cache = &events[i]
		}
	}
	if n := len(mounts); n > 1 {
		add("  runc's mounts, from the first to the last", mounts[0], mounts[n-1])
		parts = append(parts, part{"  calls for them (no ms)", float64(n)})
	}
	if n := len(hooked); n > 1 {
		add("  mounts, of cgpu-hook setup", hooked[0], hooked[n-1])
	}
	add("  runc from its new root to the end", pivot, created)
	if n := len(links); n > 0 {
		add("  links, of cgpu-hook setup", links[0], links[n-1])
		add("  ld cache, of cgpu-hook setup", links[n-1], cache)
	}
	start := first(created, begins("cgpu-runtime", `"start"`))
	startRunc := first(start, begins("runc", `"start"`))
	program := first(start, begins("true", ""))
	add("start, all", start, first(start, ends(start)))
	add("  cgpu-runtime start until it is runc", start, startRunc)
	add("  runc until the program begins", startRunc, program)
	return parts
}

// hookName is a hook's program with its first word.
func hookName(e traceEvent) string {
	words := strings.Split(e.args, ", ")
	if len(words) > 1 {
		return "cgpu-hook " + strings.Trim(words[1], `"`)
	}
	return "cgpu-hook"
}
