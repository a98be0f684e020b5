// SPDX-License-Identifier: Apache-2.0

package view

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/terminal/tty"
)

// TableFor is how a table is printed for a file: with lines on a terminal that has the width for it, else without. The terminal is
// asked each time, since it may have become another size.
func TableFor(out io.Writer) func(io.Writer, snapshot.View) error {
	f, _ := out.(*os.File)
	return func(w io.Writer, v snapshot.View) error {
		_, columns, ok := tty.Size(f)
		if ok && columns == 0 {
			columns = TableWidth // it does not know
		}
		for _, how := range []struct{ both, spare bool }{{true, false}, {false, false}, {false, true}} {
			if text, fits := boxed(v, columns, how.both, how.spare); ok && fits {
				_, err := io.WriteString(w, text)
				return err
			}
		}
		return PrintTable(w, v)
	}
}

// column is one of a grid. Numbers are to the right; a column that gives is cut where the grid is too wide, and then those with spare
// are left out, the highest first.
type column struct {
	head         string
	right, gives bool
	spare        int
}

type grid struct {
	columns []column
	rows    [][]string
	widths  []int
}

// LeastGiven is what a column keeps that gives: a short ID.
const LeastGiven = 12

// boxed draws the view as nvidia-smi draws its own; with both ID and name of a container, or only what people call it; with
// spare, also without columns that are not needed most. False: it does not fit.
func boxed(v snapshot.View, columns int, both, spare bool) (string, bool) {
	gpus, vgpus, processes := gpuGrid(v), vgpuGrid(v, both), processGrid(v, both)
	grids := []*grid{gpus}
	for _, g := range []*grid{vgpus, processes} {
		if len(g.rows) > 0 {
			grids = append(grids, g)
		}
	}
	widest := 0
	for _, g := range grids {
		g.measure()
		if !g.shrink(columns, spare) {
			return "", false
		}
		widest = max(widest, g.width())
	}
	driver := "NVIDIA driver " + v.DriverVersion
	if v.Driver == device.DriverSim {
		driver = "simulated driver " + v.DriverVersion
	}
	count := fmt.Sprintf("%s, %s", terminal.Plural(len(v.GPUs), "GPU"), terminal.Plural(len(vgpus.rows), "vGPU"))
	inside := max(widest-4, utf8.RuneCountInString(driver)+2+len(count))
	if inside+4 > columns {
		return "", false
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "+%s+\n", strings.Repeat("-", inside+2))
	fmt.Fprintf(&b, "| %s%s |\n", driver, pad(count, inside-utf8.RuneCountInString(driver), true))
	for i, g := range grids {
		g.widths[len(g.widths)-1] += inside + 4 - g.width()
		if i > 0 {
			b.WriteByte('\n')
			g.line(&b, '-')
		} else {
			g.line(&b, '-')
		}
		g.row(&b, g.heads())
		g.line(&b, '=')
		for _, row := range g.rows {
			g.row(&b, row)
		}
		g.line(&b, '-')
		if g == vgpus {
			b.WriteString(extrasOf(v, false).notes())
		}
	}
	return b.String(), true
}

func gpuGrid(v snapshot.View) *grid {
	g := &grid{columns: []column{{"GPU", true, false, 0}, {"Name", false, true, 0}, {"Used / Reserved / Total MiB", true, false, 0},
		{"Util", true, false, 1},
		{"Policy", false, false, 2}}}
	outside := slices.ContainsFunc(v.GPUs, usedOutside)
	if outside {
		g.columns = append(g.columns, column{"Outside MiB", true, false, 1})
	}
	for _, x := range v.GPUs {
		util := "-"
		if x.Utilization != nil {
			util = Percent(*x.Utilization)
		}
		row := []string{fmt.Sprint(x.Index), short(x.Name), amounts(MiB(x.Used), MiB(x.Reserved), MiB(x.Total)), util, x.Policy}
		if outside {
			row = append(row, strings.TrimSuffix(outsideCell(x), "MiB"))
		}
		g.rows = append(g.rows, row)
	}
	return g
}

// amounts puts amounts of memory into one column, below each other.
func amounts(list ...string) string {
	for i, a := range list {
		list[i] = pad(strings.TrimSuffix(a, "MiB"), 6, true)
	}
	return strings.Join(list, " / ")
}

func vgpuGrid(v snapshot.View, both bool) *grid {
	extra := extrasOf(v, false)
	g := &grid{columns: []column{{"GPU", true, false, 0}, {"Container", false, !both, 0}}}
	if both {
		g.columns = append(g.columns, column{"Name", false, true, 0})
	}
	g.columns = append(g.columns, column{"Used / Lim. MiB", true, false, 0})
	if extra.spill {
		g.columns = append(g.columns, column{"Spill", true, false, 2})
	}
	g.columns = append(g.columns, column{"Util", true, false, 1}, column{"Wt", true, false, 3}, column{"Pct", true, false, 4},
		column{"Prio", false, false, 5},
		column{"State", false, false, 0})
	if extra.domain {
		g.columns = append(g.columns, column{"Domain", false, true, 6})
	}
	for _, gpu := range v.GPUs {
		for _, x := range gpu.VGPUs {
			used, limit, util, state, known := usageCells(x)
			if x.Native {
				limit = "whole"
			}
			row := append([]string{fmt.Sprint(gpu.Index)}, called(x, both)...)
			row = append(row, amounts(used, limit))
			if extra.spill {
				row = append(row, strings.ReplaceAll(fmt.Sprint(extra.cells(x, known)...), "MiB", ""))
			}
			row = append(row, util, OrDash(x.Weight), OrDash(x.Percent), Priority(x), state)
			if extra.domain {
				row = append(row, domainCell(x))
			}
			g.rows = append(g.rows, row)
		}
	}
	return g
}

// called are the columns that say which container it is.
func called(x snapshot.VGPU, both bool) []string {
	switch {
	case both:
		return []string{Handle(x), nameCell(x)}
	case x.Name == "" || x.SharedID:
		return []string{Handle(x)}
	}
	return []string{terminal.Printable(x.Name)}
}

func processGrid(v snapshot.View, both bool) *grid {
	g := &grid{columns: []column{{"GPU", true, false, 0}, {"Container", false, !both, 0}, {"PID", true, false, 0},
		{"Used MiB", true, false, 0}, {"Process", false, true, 0}}}
	for _, gpu := range v.GPUs {
		for _, x := range gpu.VGPUs {
			for _, p := range x.Processes {
				g.rows = append(g.rows, []string{fmt.Sprint(gpu.Index), called(x, both)[0], fmt.Sprint(p.PID),
					strings.TrimSuffix(MiB(p.Used), "MiB"), terminal.Printable(p.Name)})
			}
		}
	}
	return g
}

func (g *grid) heads() []string {
	var list []string
	for _, c := range g.columns {
		list = append(list, c.head)
	}
	return list
}

// measure makes each column as wide as what is in it.
func (g *grid) measure() {
	g.widths = make([]int, len(g.columns))
	for _, row := range append([][]string{g.heads()}, g.rows...) {
		for i, cell := range row {
			g.widths[i] = max(g.widths[i], utf8.RuneCountInString(cell))
		}
	}
}

// width is that of the whole grid, lines included.
func (g *grid) width() int {
	n := 1
	for _, w := range g.widths {
		n += w + 3
	}
	return n
}

// shrink makes the grid as narrow as it must be. False: it cannot.
func (g *grid) shrink(columns int, spare bool) bool {
	for i, c := range g.columns {
		if over := g.width() - columns; over > 0 && c.gives {
			g.widths[i] = max(g.widths[i]-over, min(g.widths[i], LeastGiven))
		}
	}
	for g.width() > columns {
		most := slices.MaxFunc(g.columns, func(a, b column) int { return a.spare - b.spare })
		if most.spare == 0 || !spare {
			return false
		}
		i := slices.Index(g.columns, most)
		g.columns, g.widths = slices.Delete(g.columns, i, i+1), slices.Delete(g.widths, i, i+1)
		for r := range g.rows {
			g.rows[r] = slices.Delete(g.rows[r], i, i+1)
		}
	}
	return true
}

func (g *grid) line(b *bytes.Buffer, with byte) {
	for _, w := range g.widths {
		b.WriteString("+" + strings.Repeat(string(with), w+2))
	}
	b.WriteString("+\n")
}

func (g *grid) row(b *bytes.Buffer, cells []string) {
	for i, cell := range cells {
		b.WriteString("| " + pad(terminal.Cut(cell, g.widths[i]), g.widths[i], g.columns[i].right) + " ")
	}
	b.WriteString("|\n")
}

// pad makes s so many columns wide.
func pad(s string, width int, right bool) string {
	space := strings.Repeat(" ", max(0, width-utf8.RuneCountInString(s)))
	if right {
		return space + s
	}
	return s + space
}
