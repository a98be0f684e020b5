// SPDX-License-Identifier: Apache-2.0

// Package tty shows something again and again, in place on a terminal, and knows the terminal's size.
package tty

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/terminal"
)

// Watch shows something again and again, until ctx ends: in place on a terminal, else one after the other.
func Watch(ctx context.Context, w, warnings io.Writer, every time.Duration, show func(w, warnings io.Writer) error) error {
	f, _ := w.(*os.File)
	tick := time.NewTicker(every)
	defer tick.Stop()
	for first := true; ; first = false {
		var text bytes.Buffer
		rows, columns, inPlace := Size(f)
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

// Size is that of a terminal; false: f is none.
func Size(f *os.File) (rows, columns int, ok bool) {
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
