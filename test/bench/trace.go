// SPDX-License-Identifier: Apache-2.0

//go:build integration

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/opencgpu/cgpu/test/node"
)

// traces shows where a start's time goes, by the kernel's own tracer (strace stops programs at each call and makes mounts four times as
// long): medians of the parts, for a container with a quota, and for one without.
func traces(lab *node.Node, rounds int) ([]figure, error) {
	dir, err := startTracer()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench: no trace of a start:", err)
		return nil, nil
	}
	defer os.Remove(dir)
	var figures []figure
	for _, way := range []struct {
		name string
		env  []string
	}{{"traced, quota: ", quota}, {"traced, no quota: ", nil}} {
		var order []string
		parts := map[string][]float64{}
		for round := range rounds + 1 {
			events, err := trace(lab, dir, fmt.Sprintf("trace%d-%d", os.Getpid(), round), way.env)
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

// startTracer makes an instance of the kernel's tracer, a folder that is to be removed, for what a start does.
func startTracer() (string, error) {
	dir := fmt.Sprintf("/sys/kernel/tracing/instances/cgpu-bench-%d", os.Getpid())
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", err
	}
	var failed []error
	for file, text := range map[string]string{
		"set_event_pid":  strconv.Itoa(os.Getpid()), // with none there it would trace all
		"buffer_size_kb": "1024", "options/event-fork": "1", "events/sched/sched_process_exec/enable": "1",
		"events/sched/sched_process_exit/enable": "1", "events/syscalls/sys_enter_mount/enable": "1",
		"events/syscalls/sys_enter_move_mount/enable": "1", "events/syscalls/sys_enter_pivot_root/enable": "1",
	} {
		failed = append(failed, os.WriteFile(filepath.Join(dir, file), []byte(text), 0))
	}
	if err := errors.Join(failed...); err != nil {
		os.Remove(dir)
		return "", err
	}
	return dir, nil
}

// trace starts a container, and has what its programs did.
func trace(lab *node.Node, tracer, id string, env []string) ([]traceEvent, error) {
	root := filepath.Join(lab.Dir, "bench")
	bundle, file := filepath.Join(root, "bundle"), filepath.Join(tracer, "trace")
	if err := lab.Bundle(bundle, func(spec map[string]any) { node.SetProcess(spec, env, "true") }); err != nil {
		return nil, err
	}
	if err := os.WriteFile(file, nil, 0); err != nil { // forgets what was
		return nil, err
	}
	// The tracer follows the shell, and with it all that it starts.
	const script = `echo $$ >>"$4" && "$0" --root "$1" create --bundle "$2" "$3" && "$0" --root "$1" start "$3"
		status=$?
		"$0" --root "$1" delete --force "$3"
		exit $status`
	r := lab.Run(nil, "sh", "-c", script, filepath.Join(lab.Bin, "cgpu-runtime"), filepath.Join(root, "state"), bundle, id,
		filepath.Join(tracer, "set_event_pid"))
	if r.Code != 0 {
		return nil, fmt.Errorf("%s", r)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return readTrace(string(text)), nil
}

// traceEvent is a line of the trace: a program that begins (its base name), a thread that ends, a mount, a new root.
type traceEvent struct {
	pid        string
	at         float64 // ms
	call, name string
}

var (
	traceLine = regexp.MustCompile(`(?m)^ *.*-(\d+) +\[\d+\] +\S+ +(\d+\.\d+): (\w+)(?:: |\()(.*)$`)
	traceExec = regexp.MustCompile(`^filename=(\S+)`)
)

func readTrace(text string) (events []traceEvent) {
	for _, m := range traceLine.FindAllStringSubmatch(text, -1) {
		seconds, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			continue
		}
		e := traceEvent{pid: m[1], at: seconds * 1000, call: m[3]}
		if p := traceExec.FindStringSubmatch(m[4]); p != nil {
			e.name = p[1]
		}
		events = append(events, e)
	}
	return events
}

type part struct {
	name string
	took float64 // ms; of "calls" how many
}

// split is what lies between the events of one start: cgpu-runtime is called three times, for create, start and delete, and cgpu-hook in
// the first and in the last of them.
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
	begins := func(name string) func(traceEvent) bool {
		return func(e traceEvent) bool { return filepath.Base(e.name) == name }
	}
	// end is where a process ends: the last that is said of its number, since a program that is executed by another thread ends it, too.
	end := func(of *traceEvent) *traceEvent {
		for i := len(events) - 1; of != nil && i >= 0; i-- {
			if events[i].call == "sched_process_exit" && events[i].pid == of.pid {
				return &events[i]
			}
		}
		return nil
	}
	i := slices.IndexFunc(events, begins("cgpu-runtime"))
	if i < 0 {
		return nil
	}
	create := &events[i]
	created := end(create)
	runc := first(create, begins("runc"))
	inits := first(runc, func(e traceEvent) bool {
		return strings.HasPrefix(e.name, "/proc/self/") || strings.HasPrefix(e.name, "/dev/fd/")
	})
	pivot := first(inits, func(e traceEvent) bool { return e.call == "sys_pivot_root" })
	setup := first(inits, begins("cgpu-hook"))
	if setup != nil && pivot != nil && setup.at > pivot.at {
		setup = nil // that of delete
	}
	ready := end(setup)
	var mounts, hooked []*traceEvent
	for i, e := range events {
		switch {
		case !strings.HasSuffix(e.call, "mount") || pivot == nil || e.at > pivot.at:
		case e.pid == pivot.pid:
			mounts = append(mounts, &events[i])
		case setup != nil && e.at > setup.at:
			hooked = append(hooked, &events[i])
		}
	}
	add("create, all", create, created)
	add("  cgpu-runtime until it is runc", create, runc)
	add("    until the guard begins", create, first(create, begins("cgpu-guard")))
	add("  runc until its init begins", runc, inits)
	if n := len(mounts); n > 1 {
		add("  runc's init until it mounts", inits, mounts[0])
		add("  runc's mounts, from the first to the last", mounts[0], mounts[n-1])
		parts = append(parts, part{"    calls for them (no ms)", float64(n)})
	}
	add("  cgpu-hook setup", setup, ready)
	if n := len(hooked); n > 1 {
		add("    its mounts", hooked[0], hooked[n-1])
	}
	add("  runc from its new root to the end", pivot, created)
	start := first(created, begins("cgpu-runtime"))
	add("start, all", start, end(start))
	add("  cgpu-runtime start until it is runc", start, first(start, begins("runc")))
	add("  runc until the program begins", first(start, begins("runc")), first(start, begins("true")))
	return parts
}
