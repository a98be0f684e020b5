// SPDX-License-Identifier: Apache-2.0

package top

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/history"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/terminal/cells"
	"github.com/opencgpu/cgpu/pkg/view"
)

// style is how text looks.
type style int

const (
	styleNone style = iota
	styleBold
	styleDim
	styleReverse
	styleGreen
	styleYellow
	styleRed
	styleCyan
)

// span is text in a line, from a column on.
type span struct {
	at    int
	text  string
	style style
}

// line is a line of the screen.
type line []span

// cell is a piece of a table. Bars and sparklines are as wide as the column is.
type cell struct {
	text  string
	style style
	fill  func(width int) string
}

// column is a column of a table. One with most can be cut to least; where even that has no room, those with spare are left out, the highest
// first.
type column struct {
	head        string
	right       bool
	least, most int
	spare       int
}

// table lays a table out in so many cells, its head first.
func table(columns []column, rows [][]cell, width int) []line {
	least, most := make([]int, len(columns)), make([]int, len(columns))
	for i, c := range columns {
		most[i] = max(cells.Width(c.head), c.least)
		for _, r := range rows {
			if r[i].fill != nil {
				most[i] = c.most
			}
			most[i] = max(most[i], cells.Width(r[i].text))
		}
		least[i] = most[i]
		if c.most > 0 {
			most[i] = min(most[i], c.most)
			least[i] = min(most[i], c.least)
		}
	}
	widths := share(columns, least, most, width)
	lines := make([]line, len(rows)+1)
	at := 0
	for i, c := range columns {
		if widths[i] == 0 {
			continue
		}
		lines[0] = append(lines[0], span{at, cells.Fit(c.head, widths[i], c.right), styleBold})
		for r, row := range rows {
			x := row[i]
			if x.fill != nil {
				x.text = x.fill(widths[i])
			}
			lines[r+1] = append(lines[r+1], span{at, cells.Fit(x.text, widths[i], c.right), x.style})
		}
		at += widths[i] + 1
	}
	return lines
}

// share gives the columns the room that there is: to each its least, and the rest from the left. 0: a column is left out.
func share(columns []column, least, most []int, width int) []int {
	widths := slices.Clone(least)
	left := width + 1 - len(widths)
	for _, w := range widths {
		left -= w
	}
	for left < 0 {
		i := slices.IndexFunc(columns, func(c column) bool {
			return c.spare == slices.MaxFunc(columns, func(a, b column) int { return a.spare - b.spare }).spare
		})
		if columns[i].spare == 0 {
			break
		}
		left += widths[i] + 1
		widths[i], most[i] = 0, 0
		columns[i].spare = 0
	}
	for i := range widths {
		if more := min(most[i]-widths[i], left); more > 0 {
			widths[i] += more
			left -= more
		}
	}
	return widths
}

// draw is the screen of so many columns and rows; for 0 rows it is all there is. It leaves in t what of it the keys need to know.
func (t *Top) draw(columns, rows int) []line {
	lines := t.lines(columns, rows)
	if rows > 0 {
		lines = append(lines, make([]line, rows)...)[:rows]
	}
	for _, l := range lines {
		for i := range l {
			l[i].text = cells.Fit(l[i].text, max(min(cells.Width(l[i].text), columns-l[i].at), 0), false)
		}
	}
	return lines
}

func (t *Top) lines(columns, rows int) []line {
	if t.help && rows > 0 {
		return help()
	}
	gpus, all := t.gpuLines(columns), t.rows()
	t.rowCount = len(all)
	containers := t.rowLines(all, columns)
	lines := []line{t.title(columns)}
	if rows == 0 {
		return append(append(append(lines, gpus...), nil), containers...)
	}
	if most := max(rows/2, 4); len(gpus) > most {
		more := fmt.Sprintf("… %d more GPUs", len(gpus)-(most-1))
		gpus = append(gpus[:most-1], line{{0, more, styleDim}})
	}
	lines = append(append(append(lines, gpus...), nil), containers[0])
	t.page = rows - len(lines) - 2 // the last two lines say what is chosen, and the keys
	chosen := slices.IndexFunc(all, func(r row) bool { return r.key() == t.chosen })
	t.scroll(chosen, len(all))
	for i := t.first; i < min(t.first+t.page, len(all)); i++ {
		l := containers[i+1]
		if i == chosen {
			for j := range l {
				l[j].style = styleReverse
			}
		}
		lines = append(lines, l)
	}
	lines = append(lines, make([]line, max(rows-2, 0))...)[:max(rows-2, 0)]
	detail := line{}
	if chosen >= 0 {
		detail = detailOf(all[chosen])
	}
	return append(lines, detail, t.footer(len(all)))
}

// scroll has the row that is chosen on the screen.
func (t *Top) scroll(chosen, all int) {
	page := max(t.page, 1)
	if chosen >= 0 {
		t.first = min(max(t.first, chosen-page+1), chosen)
	}
	t.first = max(min(t.first, all-page), 0)
}

func (t *Top) title(columns int) line {
	driver := "NVIDIA driver "
	if t.view.Driver == device.DriverSim {
		driver = "simulated driver "
	}
	vgpus := 0
	for _, g := range t.view.GPUs {
		vgpus += len(g.VGPUs)
	}
	text := fmt.Sprintf("cgpu top  %s%s, %s, %s", driver, cells.Text(t.view.DriverVersion), terminal.Plural(len(t.view.GPUs), "GPU"),
		terminal.Plural(vgpus, "vGPU"))
	l := line{{0, text, styleBold}}
	switch state, at := t.at.Format(time.TimeOnly), columns-len(time.TimeOnly); {
	case t.err != nil:
		return line{{0, "cgpu top  " + cells.Text(t.err.Error()), styleRed}}
	case t.paused && columns > len(text)+len("paused")+2:
		return append(l, span{columns - len("paused"), "paused", styleYellow})
	case at > len(text)+2:
		return append(l, span{at, state, styleDim})
	}
	return l
}

func (t *Top) footer(found int) line {
	if t.typing {
		return line{{0, "/" + cells.Text(t.find) + "_", styleBold}, {cells.Width(cells.Text(t.find)) + 4, terminal.Plural(found, "container"),
			styleDim}}
	}
	order := sorts[t.sort].name
	if t.reverse {
		order += " reversed"
	}
	text := fmt.Sprintf("q quit  h help  / find  p pause  < > sort: %s", order)
	if t.find != "" {
		text += fmt.Sprintf("  found: %q", cells.Text(t.find))
	}
	return line{{0, text, styleDim}}
}

// gpuLines is the table of GPUs.
func (t *Top) gpuLines(columns int) []line {
	cols := []column{{head: "GPU", right: true}, {head: "NAME", least: 8, most: 24, spare: 2},
		{head: "MEMORY", least: 10, most: 24, spare: 3}, {head: "USED/TOTAL", right: true},
		{head: "RESERVED", right: true, spare: 5}, {head: "GPU%", right: true, least: 6}, {head: "HISTORY", least: 8, most: 60, spare: 4},
		{head: "POLICY", spare: 6}}
	var rows [][]cell
	for _, g := range t.view.GPUs {
		line, part := t.past.Of(g.UUID, ""), sched.Permille(history.Unknown)
		if g.Utilization != nil {
			part = *g.Utilization
		}
		if line.Now.Got != history.Unknown {
			part = line.Now.Got
		}
		rows = append(rows, []cell{{text: fmt.Sprint(g.Index)}, {text: cells.Text(g.Name)}, memoryBar(g.Used, g.Total),
			{text: gib(g.Used) + "/" + gib(g.Total)},
			{text: gib(g.Reserved)}, {text: partOrDash(part), style: styleCyan}, t.sparkline(line), {text: g.Policy}})
	}
	return table(cols, rows, columns)
}

// rowLines is the table of containers.
func (t *Top) rowLines(all []row, columns int) []line {
	cols := []column{{head: "CONTAINER", least: view.LeastGiven, most: 40}, {head: "GPU", right: true, spare: 1},
		{head: "MEMORY", least: 8, most: 20, spare: 4},
		{head: "USED/LIMIT", right: true}, {head: "GPU%", right: true, least: 6}, {head: "DUE%", right: true, least: 6, spare: 2},
		{head: "HISTORY", least: 8, most: 60, spare: 5},
		{head: "WT", right: true, spare: 6}, {head: "PCT", right: true, spare: 8}, {head: "PRIO", spare: 7}, {head: "STATE", spare: 3}}
	var rows [][]cell
	for _, r := range all {
		used, limit := "?", gib(r.x.Limit)
		bar := cell{fill: func(w int) string { return strings.Repeat(" ", w) }}
		if r.x.Answered {
			used, bar = gib(r.x.Used), memoryBar(r.x.Used, r.x.Limit)
		}
		if r.x.Native {
			limit, bar = "whole", memoryBar(r.x.Used, r.gpu.Total)
		}
		state := r.x.ShownState() + view.Mark(r.x)
		rows = append(rows, []cell{{text: called(r.x)}, {text: fmt.Sprint(r.gpu.Index)}, bar, {text: used + "/" + limit},
			{text: partOrDash(gotNow(r.x, r.Line)), style: styleCyan}, {text: partOrDash(r.Now.Entitled)}, t.sparkline(r.Line),
			{text: view.OrDash(r.x.Weight)}, {text: view.OrDash(r.x.Percent)}, {text: view.Priority(r.x)}, {text: state, style: styleOf(state)}})
	}
	return table(cols, rows, columns)
}

// called is what people call a container.
func called(x snapshot.VGPU) string {
	if x.SharedID || x.Name == "" {
		return cells.Text(view.Handle(x))
	}
	return cells.Text(x.Name)
}

func styleOf(state string) style {
	switch strings.TrimRight(state, view.Marks) {
	case snapshot.StateRunning:
		return styleGreen
	case snapshot.StatePaused, snapshot.StateStarting:
		return styleYellow
	case snapshot.StateGone:
		return styleDim
	}
	return styleRed
}

// detailOf tells more of the container that is chosen.
func detailOf(r row) line {
	parts := []string{called(r.x)}
	if !r.x.Native {
		parts = append(parts, fmt.Sprintf("weight %d", r.x.Weight), "priority "+view.Priority(r.x))
	}
	if r.x.Percent > 0 {
		parts = append(parts, fmt.Sprintf("percent %d", r.x.Percent))
	}
	if r.x.Answered {
		parts = append(parts, "peak "+gib(r.x.Peak), fmt.Sprintf("denied %d", r.x.Denied))
	}
	if r.x.Spill > 0 {
		parts = append(parts, "spilled "+gib(r.x.Spilled)+"/"+gib(r.x.Spill))
	}
	if n := len(r.x.Processes); n > 0 {
		parts = append(parts, fmt.Sprintf("processes %d", n))
	}
	if c := r.x.Compute; c != nil && c.Exact {
		parts = append(parts, "GPU time "+c.GPUTime.Round(time.Second).String(), "waited "+c.Waiting.Round(time.Second).String())
	}
	return line{{0, strings.Join(parts, "  "), styleNone}}
}

// memoryBar shows how full something is; nothing where there is no end.
func memoryBar(used, of quota.Bytes) cell {
	part, s := 0.0, styleGreen
	if of > 0 {
		part = min(float64(used)/float64(of), 1)
	}
	switch {
	case part >= 0.95:
		s = styleRed
	case part >= 0.8:
		s = styleYellow
	}
	return cell{style: s, fill: func(width int) string {
		inside := max(width-2, 0)
		full := int(math.Ceil(part * float64(inside))) // what shows as empty is
		return "[" + strings.Repeat("|", full) + strings.Repeat(" ", inside-full) + "]"
	}}
}

// sparkline shows what was got, as far back as there is room; blank where it is not known.
func (t *Top) sparkline(l history.Line) cell {
	levels := []rune(" .:-=+*#")
	if t.utf8 {
		levels = []rune("▁▂▃▄▅▆▇█")
	}
	return cell{style: styleCyan, fill: func(width int) string {
		points := l.Points[max(len(l.Points)-width, 0):]
		text := []rune(strings.Repeat(" ", width-len(points)))
		for _, p := range points {
			level := ' '
			if p.Got != history.Unknown {
				level = levels[min(int(p.Got)*len(levels)/1000, len(levels)-1)]
			}
			text = append(text, level)
		}
		return string(text)
	}}
}

// partOrDash is a part of the GPU's time.
func partOrDash(p sched.Permille) string {
	if p == history.Unknown {
		return "-"
	}
	return view.Percent(p)
}

// gib is an amount in GiB, rounded up: what shows as 0 is nothing.
func gib(b quota.Bytes) string {
	tenths := (b*10 + quota.GiB - 1) / quota.GiB
	return fmt.Sprintf("%d.%dG", tenths/10, tenths%10)
}

func help() []line {
	lines := []line{{{0, "cgpu top: keys", styleBold}}, nil}
	var orders []string
	for _, s := range sorts {
		orders = append(orders, fmt.Sprintf("%c %s", s.key, s.name))
	}
	for _, x := range [][2]string{
		{"q, Ctrl-C", "quit"},
		{"up, down, PgUp, PgDn", "choose a container; Esc: none"},
		{"left, right", "sort by another column"},
		{"r", "reverse the order"},
		{"/", "find by name, ID or state; Enter keeps it, Esc ends it"},
		{"p, space", "pause, and go on"},
		{"sort by", strings.Join(orders[:4], ", ")},
		{"", strings.Join(orders[4:], ", ")},
	} {
		lines = append(lines, line{{2, x[0], styleBold}, {24, x[1], styleNone}})
	}
	return append(lines, nil, line{{2, "GPU%: part of the GPU's time that was got. DUE%: what the share of the", styleNone}},
		line{{2, "GPU's busy time would have been, while there was work. Any key: back.", styleNone}})
}
