// SPDX-License-Identifier: Apache-2.0

package top

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/opencgpu/cgpu/pkg/terminal/cells"
	"github.com/opencgpu/cgpu/pkg/terminal/tty"
)

// screen is a terminal that is drawn on as a whole.
type screen struct {
	in, out *os.File
	before  *term.State // while it is entered
}

// OpenScreen is the screen of a terminal that keys come from, too; nil: it is none.
func OpenScreen(in, out *os.File) *screen {
	if out == nil || !term.IsTerminal(int(in.Fd())) || !term.IsTerminal(int(out.Fd())) {
		return nil
	}
	return &screen{in: in, out: out}
}

// enterScreen goes to the other screen, hides the cursor, and has no line go on in the next one: what is misjudged in width moves nothing.
const (
	enterScreen = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
	leaveScreen = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
)

func (s *screen) enter() error {
	before, err := term.MakeRaw(int(s.in.Fd()))
	if err != nil {
		return err
	}
	s.before = before
	return s.write([]byte(enterScreen))
}

// leave makes the terminal as it was.
func (s *screen) leave() {
	if s.before != nil {
		_ = s.write([]byte(leaveScreen))
		_ = term.Restore(int(s.in.Fd()), s.before)
		s.before = nil
	}
}

// suspend stops the process, as Ctrl-Z does, until its shell lets it go on.
func (s *screen) suspend() {
	s.leave()
	_ = unix.Kill(0, unix.SIGSTOP) // sudo, which waits for this one, too
	_ = s.enter()
}

func (s *screen) write(text []byte) error {
	_, err := s.out.Write(text)
	return err
}

func (s *screen) size() (rows, columns int) {
	rows, columns, _ = tty.Size(s.out)
	if rows == 0 || columns == 0 {
		return 24, 80 // it does not know
	}
	return rows, columns
}

// input gives what is typed, until the terminal is gone.
func (s *screen) input() <-chan string {
	typed := make(chan string)
	go func() {
		defer close(typed)
		buffer := make([]byte, 256)
		for {
			n, err := s.in.Read(buffer)
			if err != nil || n == 0 {
				return
			}
			typed <- string(buffer[:n])
		}
	}()
	return typed
}

var sequences = map[string]rune{
	"A": keyUp, "B": keyDown, "C": keyRight, "D": keyLeft, "H": keyHome, "F": keyEnd,
	"1~": keyHome, "4~": keyEnd, "7~": keyHome, "8~": keyEnd, "5~": keyPageUp, "6~": keyPageDown,
}

// keysOf reads what was typed. A terminal sends a sequence in one piece.
func keysOf(text string) (keys []rune) {
	for text != "" {
		r, n := utf8.DecodeRuneInString(text)
		switch {
		case r == '\x1b' && len(text) > 2 && (text[1] == '[' || text[1] == 'O'):
			end := 2 + strings.IndexFunc(text[2:], func(r rune) bool { return r >= '@' && r <= '~' })
			if end < 2 {
				return keys
			}
			if n, r = end+1, keyNone; sequences[text[2:n]] != 0 {
				r = sequences[text[2:n]]
			}
		case r == '\x1b':
			r = keyEscape
		case r == '\r' || r == '\n':
			r = keyEnter
		case r == '\x7f' || r == '\b':
			r = keyErase
		case r == '\x03':
			r = keyInterrupt
		case r == '\x1a':
			r = keySuspend
		}
		keys, text = append(keys, r), text[n:]
	}
	return keys
}

var sgr = map[style]string{styleBold: "1", styleDim: "2", styleReverse: "7", styleGreen: "32", styleYellow: "33", styleRed: "31",
	styleCyan: "36"}

// paint draws the lines of the screen over what was there, each piece where it belongs. Without color text is bold, dim and
// reverse at most.
func paint(lines []line, color bool) []byte {
	var b bytes.Buffer
	for i, l := range lines {
		fmt.Fprintf(&b, "\x1b[%d;1H\x1b[K", i+1)
		for _, s := range l {
			fmt.Fprintf(&b, "\x1b[%dG", s.at+1)
			if code := sgr[s.style]; code != "" && (color || s.style < styleGreen) {
				b.WriteString("\x1b[" + code + "m" + s.text + "\x1b[0m")
			} else {
				b.WriteString(s.text)
			}
		}
	}
	return b.Bytes()
}

// plainLines is the same for what is no screen.
func plainLines(lines []line) string {
	var b strings.Builder
	for _, l := range lines {
		text := ""
		for _, s := range l {
			text = cells.Fit(text, max(s.at, cells.Width(text)), false) + s.text
		}
		b.WriteString(strings.TrimRight(text, " ") + "\n")
	}
	return b.String()
}
