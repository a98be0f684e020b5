// SPDX-License-Identifier: Apache-2.0

//go:build integration

// Command bench measures what cgpu costs on this machine: a container's start, and by a trace where that goes, a trapped call, a guard at
// rest. It asserts nothing; it prints a table and writes the figures as JSON. Run it by `make bench`.
//
// What is compared is interleaved, round by round, so that a machine that slows down slows both sides down.
package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/opencgpu/cgpu/pkg/arbiter/process"
	"github.com/opencgpu/cgpu/test/node"
)

// figure is one row of the table.
type figure struct {
	Name   string  `json:"name"`
	Unit   string  `json:"unit"`
	Rounds int     `json:"rounds"`
	Min    float64 `json:"min,omitempty"`
	Median float64 `json:"median"`
	P99    float64 `json:"p99,omitempty"`
	// Ratio is Median over the median of the row that Base names.
	Base  string  `json:"base,omitempty"`
	Ratio float64 `json:"ratio,omitempty"`
}

func main() {
	out := flag.String("o", "", "write the figures as JSON to this file")
	rounds := flag.Int("rounds", 40, "rounds of container starts")
	only := flag.String("only", "", "only these parts, with commas between them: starts, traces, calls, guards")
	files := flag.Int("files", 0, "driver files that the simulated driver's node has, such as 35")
	flag.Parse()
	if err := bench(*out, *rounds, *only, *files); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func bench(out string, rounds int, only string, files int) error {
	lab, err := node.FromEnv()
	if err != nil {
		return err
	}
	// Or the first start makes the node's table, and the simulated driver.
	if r := lab.Run(nil, filepath.Join(lab.Bin, "cgpu"), "refresh"); r.Code != 0 {
		return fmt.Errorf("%s", r)
	}
	if files > 0 {
		if err := bringFiles(lab, files); err != nil {
			return err
		}
	}
	var figures []figure
	for _, part := range []struct {
		name    string
		measure func(*node.Node, int) ([]figure, error)
	}{{"starts", starts}, {"traces", traces}, {"calls", calls}, {"guards", guards}} {
		if only != "" && !slices.Contains(strings.Split(only, ","), part.name) {
			continue
		}
		more, err := part.measure(lab, rounds)
		if err != nil {
			return err
		}
		figures = append(figures, more...)
	}
	fmt.Printf("%-54s %4s %9s %9s %9s  %s\n", "what", "unit", "min", "median", "p99", "ratio of medians")
	for _, f := range figures {
		ratio := ""
		if f.Base != "" {
			ratio = fmt.Sprintf("%.3f × %s", f.Ratio, f.Base)
		}
		fmt.Printf("%-54s %4s %9s %9s %9s  %s\n", f.Name, f.Unit, number(f.Min), number(f.Median), number(f.P99), ratio)
	}
	if out == "" {
		return nil
	}
	text, err := json.MarshalIndent(map[string]any{
		"driver": lab.Driver, "cpus": runtime.NumCPU(), "time": time.Now().UTC().Format(time.RFC3339), "figures": figures,
	}, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(out, append(text, '\n'), 0o644)
}

func summary(name, unit string, values []float64) figure {
	slices.SortFunc(values, cmp.Compare[float64])
	return figure{Name: name, Unit: unit, Rounds: len(values), Min: values[0], Median: values[len(values)/2], P99: values[len(values)*99/100]}
}

// number writes a figure; what was not measured is left empty.
func number(v float64) string {
	if v == 0 {
		return ""
	}
	return strconv.FormatFloat(v, 'f', 2, 64)
}

func (f figure) over(base figure) figure {
	f.Base, f.Ratio = base.Name, f.Median/base.Median
	return f
}

var quota = []string{"ALIYUN_COM_GPU_MEM_CONTAINER=64MiB", "ALIYUN_COM_GPU_VISIBLE_DEVICES=0"}

// starts times create, start and delete of one container: runc alone, through cgpu-runtime without and with a quota. What a quota costs is
// the difference of two starts of the same round, so that a machine's pauses fall out.
func starts(lab *node.Node, rounds int) ([]figure, error) {
	ways := []struct {
		name    string
		runtime string
		env     []string
	}{
		{"runc create+start+delete", filepath.Join(lab.Dir, "lab", "runc"), nil},
		{"through cgpu-runtime, no quota", filepath.Join(lab.Bin, "cgpu-runtime"), nil},
		{"through cgpu-runtime, with quota", filepath.Join(lab.Bin, "cgpu-runtime"), quota},
	}
	root := filepath.Join(lab.Dir, "bench")
	times, started := make([][]float64, len(ways)), make([][]float64, len(ways)) // started: without delete
	for round := range rounds + 2 {
		for i, way := range ways {
			bundle := filepath.Join(root, "bundle")
			err := lab.Bundle(bundle, func(spec map[string]any) { node.SetProcess(spec, way.env, "true") })
			if err != nil {
				return nil, err
			}
			id := fmt.Sprintf("bench%d-%d-%d", os.Getpid(), round, i)
			begin := time.Now()
			var running time.Duration
			for _, args := range [][]string{{"create", "--bundle", bundle, id}, {"start", id}, {"delete", "--force", id}} {
				if args[0] == "delete" {
					running = time.Since(begin)
				}
				if r := lab.Run(nil, append([]string{way.runtime, "--root", filepath.Join(root, "state")}, args...)...); r.Code != 0 {
					return nil, fmt.Errorf("%s", r)
				}
			}
			// The first rounds fill the caches and make the node's table.
			if round >= 2 {
				times[i] = append(times[i], float64(time.Since(begin).Microseconds())/1000)
				started[i] = append(started[i], float64(running.Microseconds())/1000)
			}
		}
	}
	above := []figure{
		difference("  above runc, no quota", times[1], times[0]),
		difference("  above runc, with quota", times[2], times[0]),
		difference("  with quota above no quota", times[2], times[1]),
		difference("  create+start, no quota above runc", started[1], started[0]),
		difference("  create+start, with quota above no quota", started[2], started[1]),
	} // before summary sorts
	figures := make([]figure, len(ways))
	for i, way := range ways {
		figures[i] = summary(way.name, "ms", times[i])
		if i > 0 {
			figures[i] = figures[i].over(figures[0])
		}
	}
	return append(figures, above...), nil
}

// difference is what each of some starts took more than another of the same round.
func difference(name string, of, than []float64) figure {
	more := make([]float64, len(of))
	for i := range of {
		more[i] = of[i] - than[i]
	}
	return summary(name, "ms", more)
}

// calls has cgpu-probe time trapped calls inside a container.
func calls(lab *node.Node, _ int) ([]figure, error) {
	const rounds = 2000
	r := lab.Run(nil, "docker", "run", "--rm", "--network", "none", "-e", "ALIYUN_COM_GPU_MEM_CONTAINER=1GiB",
		"-e", "ALIYUN_COM_GPU_VISIBLE_DEVICES=0", "probe", "cgpu-probe", "bench", strconv.Itoa(rounds))
	if r.Code != 0 {
		return nil, fmt.Errorf("%s", r)
	}
	type timing struct{ MedianUs, P99Us, MeanUs float64 }
	var probe struct {
		OpenUs    float64
		Passed    timing
		FBInfo    timing `json:"fbInfo"`
		Alloc2MiB timing `json:"alloc2MiB"`
		Free2MiB  timing `json:"free2MiB"`
	}
	if err := json.Unmarshal([]byte(r.Stdout), &probe); err != nil {
		return nil, fmt.Errorf("cgpu-probe bench: %w: %s", err, r.Stdout)
	}
	row := func(name string, t timing) figure {
		return figure{Name: name, Unit: "µs", Rounds: rounds, Median: t.MedianUs, P99: t.P99Us}
	}
	return []figure{
		{Name: "open a client on a GPU (guarded)", Unit: "µs", Rounds: 1, Median: probe.OpenUs},
		row("ioctl of another driver, waved through", probe.Passed),
		row("FB_GET_INFO_V2 (guarded)", probe.FBInfo),
		row("allocate 2 MiB (guarded)", probe.Alloc2MiB),
		row("free 2 MiB (guarded)", probe.Free2MiB),
	}, nil
}

// guards measures the memory of a guard that has nothing to do.
func guards(lab *node.Node, _ int) ([]figure, error) {
	r := lab.Run(nil, "docker", "run", "-d", "--network", "none", "-e", "ALIYUN_COM_GPU_MEM_CONTAINER=64MiB",
		"-e", "ALIYUN_COM_GPU_VISIBLE_DEVICES=0", "probe", "sleep", "60")
	if r.Code != 0 {
		return nil, fmt.Errorf("%s", r)
	}
	id := strings.TrimSpace(r.Stdout)
	defer lab.Run(nil, "docker", "rm", "-f", id)
	time.Sleep(2 * time.Second)
	var rss []float64
	links, err := filepath.Glob("/proc/[0-9]*/exe")
	if err != nil {
		return nil, err
	}
	for _, link := range links {
		if target, err := os.Readlink(link); err != nil || target != filepath.Join(lab.Bin, "cgpu-guard") {
			continue
		}
		if name, err := os.ReadFile(filepath.Join(filepath.Dir(link), "cmdline")); err != nil || bytes.HasPrefix(name, []byte(process.Name)) {
			continue // the same program
		}
		status, err := os.ReadFile(filepath.Join(filepath.Dir(link), "status"))
		if err != nil {
			continue
		}
		_, after, _ := bytes.Cut(status, []byte("VmRSS:"))
		fields := strings.Fields(string(after))
		if len(fields) == 0 {
			continue
		}
		kib, err := strconv.ParseFloat(fields[0], 64)
		if err != nil {
			return nil, err
		}
		rss = append(rss, kib/1024)
	}
	if len(rss) == 0 {
		return nil, fmt.Errorf("no guard runs beside %s", id)
	}
	return []figure{summary("guard at rest, resident", "MiB", rss)}, nil
}
