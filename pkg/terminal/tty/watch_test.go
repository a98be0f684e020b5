// SPDX-License-Identifier: Apache-2.0

package tty

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/terminal/terminaltest"
)

func TestFrame(t *testing.T) {
	for _, tt := range []struct {
		text          string
		rows, columns int
		want          string
	}{
		{"a\nb\n", 24, 80, "\x1b[Ha\x1b[K\nb\x1b[K\n\x1b[J"},
		{"a\nb\n", 3, 1, "\x1b[Ha\x1b[K\nb\x1b[K\n\x1b[J"},
		{"a\nb\nc\n", 3, 80, "\x1b[Ha\x1b[K\nb\x1b[K\n\x1b[J"},
		{"äbc  def\n", 24, 6, "\x1b[Häbc…\x1b[K\n\x1b[J"},
		{"abc\n", 0, 0, "\x1b[Habc\x1b[K\n\x1b[J"},
	} {
		if got := string(frame(tt.text, tt.rows, tt.columns)); got != tt.want {
			t.Errorf("%q on %d rows of %d: %q, want %q", tt.text, tt.rows, tt.columns, got, tt.want)
		}
	}
}

// threeTimes shows a number, and ends the watch with the third.
func threeTimes(stop func()) func(w, warnings io.Writer) error {
	n := 0
	return func(w, warnings io.Writer) error {
		if n++; n == 3 {
			stop()
		}
		fmt.Fprintln(warnings, "warning")
		_, err := fmt.Fprintln(w, n)
		return err
	}
}

func TestWatchAppends(t *testing.T) {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var out, note bytes.Buffer
	if err := Watch(ctx, &out, &note, time.Millisecond, threeTimes(stop)); err != nil || out.String() != "1\n\n2\n\n3\n" ||
		note.String() != strings.Repeat("warning\n", 3) {
		t.Errorf("printed %q and %q, %v", out.String(), note.String(), err)
	}
	fault := errors.New("fault")
	if err := Watch(context.Background(), &out, &note, time.Hour, func(_, _ io.Writer) error { return fault }); !errors.Is(err, fault) {
		t.Error(err)
	}
}

func TestWatchInPlace(t *testing.T) {
	user, terminal := terminaltest.Open(t)
	if err := unix.IoctlSetWinsize(int(terminal.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 5}); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	if err := Watch(ctx, terminal, io.Discard, time.Millisecond, threeTimes(stop)); err != nil {
		t.Fatal(err)
	}
	// The line discipline writes \r\n.
	want := ""
	for n := range 3 {
		want += fmt.Sprintf("\x1b[Hwarn…\x1b[K\r\n%d\x1b[K\r\n\x1b[J", n+1)
	}
	want += "\r\n"
	got := make([]byte, len(want))
	if _, err := io.ReadFull(user, got); err != nil || string(got) != want {
		t.Errorf("drew %q, %v\nwant %q", got, err, want)
	}
}
