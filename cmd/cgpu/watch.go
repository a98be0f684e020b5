package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/terminal"
)

// seconds is the value of --watch, which may stand alone: package flag then sets it to "true".
type seconds struct {
	text string
}

func (s *seconds) Set(text string) error { s.text = text; return nil }
func (s *seconds) String() string        { return s.text }
func (s *seconds) IsBoolFlag() bool      { return true }

// interval reads --watch, --watch=SECONDS or --watch SECONDS; 0 is once.
func interval(c *cli.Context) (time.Duration, error) {
	text := ""
	if s, ok := c.Generic("watch").(*seconds); ok && c.IsSet("watch") {
		text = s.text
	}
	switch n := c.NArg(); {
	case n > 1, n == 1 && text != "true":
		return 0, fmt.Errorf("%q: want no arguments; see cgpu smi --help", c.Args().Get(n-1))
	case n == 1:
		text = c.Args().First()
	case text == "":
		return 0, nil
	case text == "true":
		return time.Second, nil
	}
	s, err := strconv.ParseFloat(text, 64)
	if err != nil {
		s = 0
	}
	every, err := everySeconds(s)
	if err != nil {
		return 0, fmt.Errorf("--watch %q: %w", text, err)
	}
	return every, nil
}

// everySeconds is how often something is shown.
func everySeconds(s float64) (time.Duration, error) {
	if !(s >= 0.1 && s <= 3600) {
		return 0, errors.New("want 0.1 to 3600 seconds")
	}
	return time.Duration(s * float64(time.Second)), nil
}

// watch shows something again and again, until ctx ends: in place on a terminal, else one after the other.
func watch(ctx context.Context, w, warnings io.Writer, every time.Duration, show func(w, warnings io.Writer) error) error {
	f, _ := w.(*os.File)
	tick := time.NewTicker(every)
	defer tick.Stop()
	for first := true; ; first = false {
		var text bytes.Buffer
		rows, columns, inPlace := size(f)
		if inPlace {
			warnings = &text // else they would be overwritten
		} else if !first {
			text.WriteByte('\n')
		}
		if err := show(&text, warnings); err != nil {
			return err
		}
		out := text.Bytes()
		if inPlace {
			out = frame(text.String(), rows, columns)
		}
		if _, err := w.Write(out); errors.Is(err, unix.EPIPE) {
			return nil // cgpu smi --watch | head
		} else if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			if inPlace {
				_, err := io.WriteString(w, "\n") // behind the ^C
				return err
			}
			return nil
		case <-tick.C:
		}
	}
}

// size is that of a terminal; false: f is none.
func size(f *os.File) (rows, columns int, ok bool) {
	if f == nil {
		return 0, 0, false
	}
	s, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, 0, false
	}
	return int(s.Row), int(s.Col), true
}

// frame draws a text over the one before: from the upper left corner, each line to its end, then clear the rest. It is
// cut to the terminal, because a line too many would scroll, and the next frame begin elsewhere. A terminal that does
// not know its size (0) cuts nothing.
func frame(text string, rows, columns int) []byte {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if rows > 1 && len(lines) > rows-1 {
		lines = lines[:rows-1]
	}
	var b bytes.Buffer
	b.WriteString("\x1b[H")
	for _, l := range lines {
		if columns > 0 {
			l = terminal.Cut(l, columns)
		}
		b.WriteString(l + "\x1b[K\n")
	}
	b.WriteString("\x1b[J")
	return b.Bytes()
}
