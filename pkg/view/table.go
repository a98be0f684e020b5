// SPDX-License-Identifier: Apache-2.0

// Package view shows what a snapshot of the node holds, as text for people: tables with and without lines, narrowed to what is asked for.
package view

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

func PrintJSON(w io.Writer, v snapshot.View) error { return terminal.EncodeJSON(w, v.JSON(), "  ") }

// TableWidth is what a table fits in; names, which stand last, are cut.
const TableWidth = 100

func PrintTable(w io.Writer, v snapshot.View) error {
	var text bytes.Buffer
	if err := printText(&text, v, false); err != nil {
		return err
	}
	for line := range strings.Lines(text.String()) {
		if _, err := io.WriteString(w, terminal.Cut(strings.TrimSuffix(line, "\n"), TableWidth)+"\n"); err != nil {
			return err
		}
	}
	return nil
}

func PrintWide(w io.Writer, v snapshot.View) error { return printText(w, v, true) }

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
func printText(w io.Writer, v snapshot.View, wide bool) error {
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
	fmt.Fprintf(w, "%s, %s, %s\n\n", driver, terminal.Plural(len(v.GPUs), "GPU"), terminal.Plural(vgpus, "vGPU"))
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

func printGPUs(w io.Writer, v snapshot.View, wide bool) error {
	t := newTable(w)
	head := []any{"GPU", "NAME", "UUID", "USED", "RESERVED", "TOTAL", "UTIL", "POLICY"}
	if wide {
		head = append(head, "MAX INST", "PRIO RATIO", "PROMISED", "BUS ID", "VGPUS")
	}
	outside := slices.ContainsFunc(v.GPUs, usedOutside)
	if outside {
		head = append(head, "OUTSIDE")
	}
	unhealthy := slices.ContainsFunc(v.GPUs, func(g snapshot.GPU) bool { return g.Fault != "" })
	if unhealthy {
		head = append(head, "HEALTH")
	}
	t.row(head...)
	for _, g := range v.GPUs {
		uuid, name, util := ShortUUID(g.UUID), short(g.Name), "-"
		if wide {
			uuid, name = g.UUID, terminal.Printable(g.Name)
		}
		if g.Utilization != nil {
			util = Percent(*g.Utilization)
		}
		cells := []any{g.Index, name, uuid, MiB(g.Used), MiB(g.Reserved), MiB(g.Total), util, g.Policy}
		if wide {
			cells = append(cells, g.MaxInst, fmt.Sprintf("%d%%", g.PrioRatio), Percent(g.Promised), g.BusID, len(g.VGPUs))
		}
		if outside {
			cells = append(cells, outsideCell(g))
		}
		if unhealthy {
			cells = append(cells, healthWord(g.Fault))
		}
		t.row(cells...)
	}
	return t.Flush()
}

// usedOutside: so much of the GPU's memory is used outside cgpu that people should see it. Less can be cgpu's own RM clients, and what
// contexts take beyond what is charged for them.
func usedOutside(g snapshot.GPU) bool {
	const much = 256 * quota.MiB
	return g.Outside != nil && *g.Outside >= much
}

func outsideCell(g snapshot.GPU) string {
	if g.Outside == nil {
		return "-"
	}
	return MiB(*g.Outside)
}

// healthWord is a GPU's health in a column; cgpu health tells why.
func healthWord(fault string) string {
	if fault != "" {
		return "unhealthy"
	}
	return "ok"
}

func printVGPUs(w io.Writer, v snapshot.View, wide bool) error {
	t := newTable(w)
	extra := extrasOf(v, wide)
	head := []any{"CONTAINER", "GPU", "USED", "LIMIT"}
	if extra.domain {
		head = append(head, "DOMAIN")
	}
	head = append(append(head, extra.heads()...), "UTIL", "WEIGHT", "PCT", "PRIO", "STATE")
	if wide {
		head = append(head, "CAP", "GPU TIME", "WAITING", "TSGS", "BUSY", "SLICE", "PREEMPTED", "PAUSES", "PEAK", "DENIED", "GUARD", "INIT",
			"CALLS", "CALLS DENIED")
	}
	t.row(append(head, "NAME")...)
	for _, g := range v.GPUs {
		for _, x := range g.VGPUs {
			used, limit, util, state, known := usageCells(x)
			if known && x.Compute != nil && x.Compute.Entitled > 0 {
				util += " of " + Percent(x.Compute.Entitled)
			}
			cells := []any{Handle(x), g.Index, used, limit}
			if extra.domain {
				cells = append(cells, domainCell(x))
			}
			cells = append(append(cells, extra.cells(x, known)...), util, OrDash(x.Weight), OrDash(x.Percent), Priority(x), state)
			if wide {
				cells = append(cells, timeCells(x.Compute)...)
				cells = append(cells, MiB(x.Peak), x.Denied, OrDash(x.GuardPID), OrDash(x.InitPID), x.Calls.Trapped, x.Calls.Denied)
			}
			t.row(append(cells, nameCell(x))...)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := io.WriteString(w, extra.notes())
	return err
}

// Handle is how a table names a container.
func Handle(x snapshot.VGPU) string {
	if x.SharedID {
		return terminal.Printable(x.Nonce)
	}
	return ShortID(x.ID)
}

// nameCell is what people call the container: where others have the same ID, that and where the container is.
func nameCell(x snapshot.VGPU) string {
	name := x.Name
	switch {
	case x.SharedID && x.Root != "":
		name = cmp.Or(name, x.ID) + " (" + x.Root + ")"
	case x.SharedID:
		name = cmp.Or(name, x.ID)
	}
	return terminal.Printable(cmp.Or(name, "-"))
}

// domainCell is the trust domain, with the member's part of the multiprocessors, or that it is the domain's server.
func domainCell(x snapshot.VGPU) string {
	switch {
	case x.DomainServer:
		return x.Domain + " (MPS)"
	case x.Threads != 0:
		return fmt.Sprintf("%s %d%%", x.Domain, x.Threads)
	}
	return cmp.Or(x.Domain, "-")
}

// usageCells are the columns that every table of vGPUs has. known is false where nobody can tell what is used.
func usageCells(x snapshot.VGPU) (used, limit, util, state string, known bool) {
	used, limit, util, known = MiB(x.Used), MiB(x.Limit), "-", true
	if x.Compute != nil && x.Compute.Exact {
		util = Percent(x.Compute.Utilization)
	}
	// Of one that the engine has paused the guard, which is not, answers.
	if x.State != snapshot.StateRunning && x.State != snapshot.StateStarting && x.State != snapshot.StatePaused ||
		x.Enforcement == device.EnforceDriver && !x.Answered {
		used, util, known = "?", "?", false
	}
	state = x.ShownState() + Mark(x)
	if x.Native {
		limit = "whole GPU"
	}
	return used, limit, util, state, known
}

// notes tell below a table what a mark behind the state of a container means.
var notes = map[string]string{
	"*":  "enforced by the preload library only; a program can walk around it (enforcement in cgpu.toml)",
	"*+": "enforced by the preload library and NVIDIA's driver; a program can walk around both (enforcement, limits in cgpu.toml)",
	"+":  "memory is limited by the guard and NVIDIA's driver (limits in cgpu.toml)",
	"^":  "memory is limited by NVIDIA's driver only, and time is not shared out (limits in cgpu.toml)",
}

// Marks are the signs that they are made of.
const Marks = "*+^"

// Mark says who limits a container, where that is not its guard alone.
func Mark(x snapshot.VGPU) string {
	switch {
	case x.Native:
		return ""
	case x.Enforcement == device.EnforceDriver:
		return "^"
	case x.Enforcement == device.EnforcePreload && x.DriverLimits:
		return "*+"
	case x.Enforcement == device.EnforcePreload:
		return "*"
	case x.DriverLimits:
		return "+"
	}
	return ""
}

// extras are what the table of vGPUs has only where there is something to tell.
type extras struct {
	spill, managed, domain bool
	marks                  []string
}

// notes are the lines below the table.
func (e extras) notes() string {
	var b strings.Builder
	for _, mark := range e.marks {
		fmt.Fprintln(&b, mark, notes[mark])
	}
	return b.String()
}

func extrasOf(v snapshot.View, wide bool) (e extras) {
	for _, g := range v.GPUs {
		for _, x := range g.VGPUs {
			e.spill = e.spill || x.Spill > 0 || x.Spilled > 0
			e.managed = e.managed || wide && x.Managed > 0
			e.domain = e.domain || x.Domain != ""
			if m := Mark(x); m != "" && !slices.Contains(e.marks, m) {
				e.marks = append(e.marks, m)
			}
		}
	}
	return e
}

func (e extras) heads() (heads []any) {
	if e.managed {
		heads = append(heads, "MANAGED")
	}
	if e.spill {
		heads = append(heads, "SPILL")
	}
	return heads
}

// cells are those of heads. What was spilled before cgpu set took the spill away is shown until it is freed.
func (e extras) cells(x snapshot.VGPU, known bool) (cells []any) {
	if e.managed {
		managed := MiB(x.Managed)
		if !known {
			managed = "?"
		}
		cells = append(cells, managed)
	}
	switch {
	case !e.spill:
	case x.Spill == 0 && x.Spilled == 0:
		cells = append(cells, "-")
	case known:
		cells = append(cells, MiB(x.Spilled)+"/"+MiB(x.Spill))
	default:
		cells = append(cells, "?/"+MiB(x.Spill))
	}
	return cells
}

// timeCells are the columns from CAP to PAUSES.
func timeCells(c *api.ComputeStatus) []any {
	if c == nil {
		return []any{"-", "-", "-", "-", "-", "-", "-", "-"}
	}
	limit := "-"
	if c.Cap > 0 {
		limit = Percent(c.Cap)
	}
	cells := []any{limit, "-", "-", c.TSGs, c.Busy, c.Slice, "-", c.Pauses}
	if c.Exact {
		cells[1], cells[2], cells[6] = c.GPUTime.Round(time.Millisecond), (c.Waiting + c.Throttled).Round(time.Millisecond), c.Preemptions
	}
	return cells
}

func printProcesses(w io.Writer, v snapshot.View, wide bool) error {
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
					t.row(Handle(x), g.Index, p.PID, p.NSPID, MiB(p.Used), terminal.Printable(p.Name))
				} else {
					t.row(Handle(x), g.Index, p.PID, MiB(p.Used), terminal.Printable(p.Name))
				}
			}
		}
	}
	return t.Flush()
}

// MiB rounds up: what shows as 0 is nothing.
func MiB(b quota.Bytes) string {
	return strconv.FormatUint(uint64((b+quota.MiB-1)/quota.MiB), 10) + "MiB"
}

func OrDash(n int) string {
	if n == 0 {
		return "-"
	}
	return strconv.Itoa(n)
}

func Priority(x snapshot.VGPU) string {
	if x.Native {
		return "-"
	}
	return x.Priority.String()
}

// Percent is a part in percent, such as "12.5%".
func Percent(p sched.Permille) string {
	if p%10 == 0 {
		return fmt.Sprintf("%d%%", p/10)
	}
	return fmt.Sprintf("%d.%d%%", p/10, p%10)
}

// short is a GPU's name in a table.
func short(name string) string { return terminal.Cut(terminal.Printable(name), 24) }
