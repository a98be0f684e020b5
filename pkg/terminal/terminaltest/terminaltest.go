// SPDX-License-Identifier: Apache-2.0

// Package terminaltest is terminals for tests: a real pseudo-terminal, and a model of one that knows what it is to obey.
package terminaltest

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/terminal/cells"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// Open makes a pseudo-terminal.
func Open(t *testing.T) (user, terminal *os.File) {
	t.Helper()
	user, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		testenv.Lacks(t, "no pseudo-terminals here: %v", err)
	}
	t.Cleanup(func() { user.Close() })
	if err := unix.IoctlSetPointerInt(int(user.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(user.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { terminal.Close() })
	return user, terminal
}

// Model is a grid of what a terminal shows. It knows the sequences that cgpu top writes, and no others.
type Model struct {
	Rows, Columns int
	Cells         [][]rune
	Styles        [][]string
	row, column   int
	style         string
	Other         bool // the other screen is shown
	Hidden        bool // the cursor is
	NoWrap        bool
	Unknown       []string
}

// New is an empty one.
func New(rows, columns int) *Model {
	m := &Model{Rows: rows, Columns: columns}
	m.clear()
	return m
}

func (m *Model) clear() {
	m.Cells, m.Styles = make([][]rune, m.Rows), make([][]string, m.Rows)
	for r := range m.Cells {
		m.Cells[r], m.Styles[r] = []rune(strings.Repeat(" ", m.Columns)), make([]string, m.Columns)
	}
}

var sequence = regexp.MustCompile(`^\x1b\[([?0-9;]*)([A-Za-z])`)

// Write does what a terminal would with the text.
func (m *Model) Write(text string) {
	for text != "" {
		if s := sequence.FindStringSubmatch(text); s != nil {
			m.obey(s[0], s[1], s[2])
			text = text[len(s[0]):]
			continue
		}
		r, n := utf8.DecodeRuneInString(text)
		text = text[n:]
		if terminal.Acts(r) || r == utf8.RuneError && n == 1 {
			m.Unknown = append(m.Unknown, fmt.Sprintf("%q", r))
			continue
		}
		width := cells.Width(string(r))
		if m.column+width > m.Columns {
			m.Unknown = append(m.Unknown, fmt.Sprintf("%q beyond the line's end", r))
			continue
		}
		m.Cells[m.row][m.column], m.Styles[m.row][m.column] = r, m.style
		if width == 2 {
			m.Cells[m.row][m.column+1] = 0
		}
		m.column += width
	}
}

func (m *Model) obey(all, parameters, verb string) {
	var numbers []int
	for _, p := range strings.Split(parameters, ";") {
		n, _ := strconv.Atoi(p)
		numbers = append(numbers, n)
	}
	switch {
	case verb == "H" && len(numbers) == 2 && numbers[0] >= 1 && numbers[0] <= m.Rows && numbers[1] == 1:
		m.row, m.column = numbers[0]-1, 0
	case verb == "G" && numbers[0] >= 1:
		m.column = min(numbers[0]-1, m.Columns-1)
	case all == "\x1b[K":
		for i := m.column; i < m.Columns; i++ {
			m.Cells[m.row][i], m.Styles[m.row][i] = ' ', ""
		}
	case all == "\x1b[2J":
		m.clear()
	case verb == "m" && len(numbers) == 1:
		m.style = parameters
	case parameters == "?1049":
		m.Other = verb == "h"
	case parameters == "?25":
		m.Hidden = verb == "l"
	case parameters == "?7":
		m.NoWrap = verb == "l"
	default:
		m.Unknown = append(m.Unknown, fmt.Sprintf("%q", all))
	}
}

// Text is what is shown.
func (m *Model) Text() string {
	var b strings.Builder
	for _, line := range m.Cells {
		b.WriteString(strings.TrimRight(strings.ReplaceAll(string(line), "\x00", ""), " ") + "\n")
	}
	return b.String()
}
