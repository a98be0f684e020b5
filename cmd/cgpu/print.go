package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
)

func printJSON(w io.Writer, v view) error {
	out := json.NewEncoder(w)
	out.SetIndent("", "  ")
	return out.Encode(v)
}

func printTable(w io.Writer, v view) error { return printText(w, v, false) }
func printWide(w io.Writer, v view) error  { return printText(w, v, true) }

// table aligns columns; a row is cells separated by tabs.
type table struct{ *tabwriter.Writer }

func newTable(w io.Writer) table { return table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)} }

func (t table) row(cells ...any) {
	for i, c := range cells {
		if i > 0 {
			fmt.Fprint(t, "\t")
		}
		fmt.Fprint(t, c)
	}
	fmt.Fprintln(t)
}

// printText writes three tables: GPUs, vGPUs, processes. The errors of writing come out at the flushes.
func printText(w io.Writer, v view, wide bool) error {
	driver := "NVIDIA driver " + v.DriverVersion
	if v.Driver == device.DriverSim {
		driver = "simulated driver " + v.DriverVersion
	}
	vgpus, processes := 0, 0
	for _, g := range v.GPUs {
		vgpus += len(g.VGPUs)
		for _, x := range g.VGPUs {
			processes += len(x.Processes)
		}
	}
	fmt.Fprintf(w, "%s, %s, %s\n\n", driver, plural(len(v.GPUs), "GPU"), plural(vgpus, "vGPU"))
	if err := printGPUs(w, v, wide); err != nil {
		return err
	}
	if vgpus > 0 {
		fmt.Fprintln(w)
		if err := printVGPUs(w, v, wide); err != nil {
			return err
		}
	}
	if processes > 0 {
		fmt.Fprintln(w)
		return printProcesses(w, v, wide)
	}
	return nil
}

func printGPUs(w io.Writer, v view, wide bool) error {
	t := newTable(w)
	head := []any{"GPU", "NAME", "UUID", "USED", "RESERVED", "TOTAL"}
	if wide {
		head = append(head, "BUS ID", "VGPUS")
	}
	t.row(head...)
	for _, g := range v.GPUs {
		uuid := shortUUID(g.UUID)
		if wide {
			uuid = g.UUID
		}
		cells := []any{g.Index, printable(g.Name), uuid, mib(g.Used), mib(g.Reserved), mib(g.Total)}
		if wide {
			cells = append(cells, g.BusID, len(g.VGPUs))
		}
		t.row(cells...)
	}
	return t.Flush()
}

func printVGPUs(w io.Writer, v view, wide bool) error {
	t := newTable(w)
	head := []any{"CONTAINER", "GPU", "USED", "LIMIT", "STATE"}
	if wide {
		head = append(head, "PEAK", "DENIED", "WEIGHT", "PERCENT", "PRIORITY", "GUARD", "INIT", "CALLS", "CALLS DENIED")
	}
	t.row(append(head, "NAME")...)
	for _, g := range v.GPUs {
		for _, x := range g.VGPUs {
			used, limit := mib(x.Used), mib(x.Limit)
			if x.State != stateRunning && x.State != stateStarting {
				used = "?" // nobody knows
			}
			if x.Native {
				limit = "whole GPU"
			}
			cells := []any{shortID(x.ID), g.Index, used, limit, x.State}
			if wide {
				cells = append(cells, mib(x.Peak), x.Denied, orDash(x.Weight), orDash(x.Percent), priority(x), orDash(x.GuardPID), orDash(x.InitPID), x.Calls.Trapped, x.Calls.Denied)
			}
			name := "-"
			if x.Name != "" {
				name = printable(x.Name)
			}
			t.row(append(cells, name)...)
		}
	}
	return t.Flush()
}

func printProcesses(w io.Writer, v view, wide bool) error {
	t := newTable(w)
	if wide {
		t.row("CONTAINER", "GPU", "PID", "PID INSIDE", "USED", "PROCESS")
	} else {
		t.row("CONTAINER", "GPU", "PID", "USED", "PROCESS")
	}
	for _, g := range v.GPUs {
		for _, x := range g.VGPUs {
			for _, p := range x.Processes {
				if wide {
					t.row(shortID(x.ID), g.Index, p.PID, p.NSPID, mib(p.Used), printable(p.Name))
				} else {
					t.row(shortID(x.ID), g.Index, p.PID, mib(p.Used), printable(p.Name))
				}
			}
		}
	}
	return t.Flush()
}

// mib rounds up: what shows as 0 is nothing.
func mib(b quota.Bytes) string {
	return strconv.FormatUint(uint64((b+quota.MiB-1)/quota.MiB), 10) + "MiB"
}

func orDash(n int) string {
	if n == 0 {
		return "-"
	}
	return strconv.Itoa(n)
}

func priority(x vgpuView) string {
	switch {
	case x.Native:
		return "-"
	case x.Priority == quota.PriorityBestEffort:
		return "best effort"
	case x.Priority == quota.PriorityHigh:
		return "high"
	}
	return "default"
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.Itoa(n) + " " + what + "s"
}
