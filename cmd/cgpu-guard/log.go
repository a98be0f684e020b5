// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
)

const (
	// maxLog bounds a guard's log in bytes; the node keeps so many logs (ledger.Sweep). Programs that go on in its place may add as much, all
	// together: a guard may be handed over, or crash, without end.
	maxLog = 64 << 10
	// maxLike bounds how often one message is written. A container can cause a denied call of each of 2³² controls: 93 KB of lines
	// in 0.07 s. Without this bound what it does first would keep out of the log what it does later.
	maxLike = 32
)

// guardLog is a log that a container can neither fill /run by nor fill so that other lines do not fit.
type guardLog struct {
	*slog.Logger
	lines *counting
}

func newLog(path string) *guardLog { return newLogOf(path, maxLog) }

// newLogOf is newLog of so many bytes more.
func newLogOf(path string, left int) *guardLog {
	lines := &counting{Handler: slog.NewTextHandler(&logFile{path: path, left: left}, nil), seen: map[string]int{}}
	return &guardLog{slog.New(lines), lines}
}

// close says what was counted only.
func (l *guardLog) close() {
	l.lines.mu.Lock()
	seen := maps.Clone(l.lines.seen)
	l.lines.mu.Unlock()
	for _, msg := range slices.Sorted(maps.Keys(seen)) {
		if seen[msg] > maxLike {
			l.Info("counted only", "message", msg, "lines", seen[msg]-maxLike)
		}
	}
}

// counting passes a message on maxLike times, whatever its attributes, and then counts. Messages are constants of the program.
type counting struct {
	slog.Handler
	mu   sync.Mutex
	seen map[string]int
}

func (c *counting) Handle(ctx context.Context, r slog.Record) error {
	c.mu.Lock()
	c.seen[r.Message]++
	n := c.seen[r.Message]
	c.mu.Unlock()
	if n > maxLike {
		return nil
	}
	if n == maxLike {
		r.AddAttrs(slog.String("more", "are counted only"))
	}
	return c.Handler.Handle(ctx, r)
}

// logFile is a log that is made when there is something to tell, since a container's start waits for us, and that stops
// to grow at a size. slog calls it from one goroutine at a time.
type logFile struct {
	path string
	f    *os.File
	left int
}

// fullLine is the last one of a full log.
var fullLine = []byte(fmt.Sprintf("level=WARN msg=\"the log is full\" bytes=%d\n", maxLog))

func (l *logFile) Write(p []byte) (int, error) {
	if l.f == nil {
		err := os.MkdirAll(filepath.Dir(l.path), 0o700)
		if err != nil {
			return 0, fmt.Errorf("make the log folder: %w", err)
		}
		if l.f, err = os.OpenFile(l.path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600); err != nil {
			return 0, fmt.Errorf("open the log: %w", err)
		}
		if info, err := l.f.Stat(); err == nil && info.Size() > 2*maxLog {
			l.left = 0
		} else if l.left > 0 {
			_ = debug.SetCrashOutput(l.f, debug.CrashOptions{}) // nobody reads what this process says on standard error
		}
	}
	switch {
	case l.left == 0:
	case len(p) <= l.left-len(fullLine):
		l.left -= len(p)
		_, _ = l.f.Write(p)
	default:
		l.left = 0
		_, _ = l.f.Write(fullLine)
	}
	return len(p), nil
}
