// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"fmt"
	"strings"
)

// Diff is what an edit changes, as diff -u and patch write and read it.
func Diff(e Edit) string {
	a, b := linesOf(e.Before), linesOf(e.After)
	var out strings.Builder
	name := func(text []byte) string {
		if text == nil {
			return "/dev/null"
		}
		return e.Path
	}
	fmt.Fprintf(&out, "--- %s\n+++ %s\n", name(e.Before), name(e.After))
	ops := lineOps(a, b)
	const context = 3
	for i := 0; i < len(ops); {
		if ops[i].kind == ' ' {
			i++
			continue
		}
		from := max(i-context, 0)
		to, equal := i, 0 // to: behind the last change
		for j := i; j < len(ops) && equal <= 2*context; j++ {
			if ops[j].kind == ' ' {
				equal++
			} else {
				equal, to = 0, j+1
			}
		}
		end := min(to+context, len(ops))
		hunk(&out, ops[from:end])
		i = end
	}
	return out.String()
}

// op is a line that both texts have (' '), or only the old one ('-'), or only the new one ('+').
type op struct {
	kind byte
	a, b int // lines before it in the two texts
	text string
}

func hunk(out *strings.Builder, ops []op) {
	olds, news := 0, 0
	for _, o := range ops {
		if o.kind != '+' {
			olds++
		}
		if o.kind != '-' {
			news++
		}
	}
	fmt.Fprintf(out, "@@ -%s +%s @@\n", span(ops[0].a, olds), span(ops[0].b, news))
	for _, o := range ops {
		out.WriteByte(o.kind)
		out.WriteString(o.text)
		if !strings.HasSuffix(o.text, "\n") {
			out.WriteString("\n\\ No newline at end of file\n")
		}
	}
}

// span is a range of lines; an empty one is named by the line before it.
func span(before, n int) string {
	switch n {
	case 0:
		return fmt.Sprintf("%d,0", before)
	case 1:
		return fmt.Sprint(before + 1)
	}
	return fmt.Sprintf("%d,%d", before+1, n)
}

func linesOf(text []byte) []string {
	var lines []string
	for _, l := range bytes.SplitAfter(text, []byte("\n")) {
		if len(l) > 0 {
			lines = append(lines, string(l))
		}
	}
	return lines
}

// lineOps compares by the longest common subsequence, between what is equal at both ends: edits are few and small.
func lineOps(a, b []string) []op {
	var ops []op
	i, j := 0, 0
	same := func() { ops = append(ops, op{' ', i, j, a[i]}); i++; j++ }
	for i < len(a) && j < len(b) && a[i] == b[j] {
		same()
	}
	tail := 0
	for tail < len(a)-i && tail < len(b)-j && a[len(a)-1-tail] == b[len(b)-1-tail] {
		tail++
	}
	endA, endB := len(a)-tail, len(b)-tail
	n, m := endA-i, endB-j
	baseA, baseB := i, j
	common := func(int, int) int { return 0 }
	const most = 4 << 20 // cells; a file beyond that is shown as replaced
	if n*m <= most {
		cells := make([]int32, (n+1)*(m+1))
		for x := n - 1; x >= 0; x-- {
			for y := m - 1; y >= 0; y-- {
				if a[baseA+x] == b[baseB+y] {
					cells[x*(m+1)+y] = cells[(x+1)*(m+1)+y+1] + 1
				} else {
					cells[x*(m+1)+y] = max(cells[(x+1)*(m+1)+y], cells[x*(m+1)+y+1])
				}
			}
		}
		common = func(x, y int) int { return int(cells[(x-baseA)*(m+1)+y-baseB]) }
	}
	for i < endA || j < endB {
		switch {
		case i < endA && j < endB && a[i] == b[j] && n*m <= most:
			same()
		case i < endA && (j == endB || common(i+1, j) >= common(i, j+1)):
			ops = append(ops, op{'-', i, j, a[i]})
			i++
		default:
			ops = append(ops, op{'+', i, j, b[j]})
			j++
		}
	}
	for i < len(a) {
		same()
	}
	return ops
}
