// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func text(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestLogOfOneKind: what a container does a hundred thousand times is told some times and counted, and what comes after is told.
func TestLogOfOneKind(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log", "a.log")
	log := newLog(path)
	const calls = 100_000
	for i := range calls {
		log.Warn("denied a control", "control", fmt.Sprintf("%#x", 0x71000000+i*7))
	}
	log.Error("the container holds device memory that was never charged")
	log.Info("the container is over")
	log.close()
	got := text(t, path)
	lines := strings.Split(strings.TrimSpace(got), "\n")
	if len(lines) != maxLike+3 || len(got) > maxLog {
		t.Fatalf("%d lines, %d bytes", len(lines), len(got))
	}
	if !strings.Contains(lines[maxLike-1], "counted only") || strings.Contains(lines[maxLike-2], "counted only") ||
		!strings.Contains(lines[maxLike], "never charged") {
		t.Errorf("%s", strings.Join(lines[maxLike-2:], "\n"))
	}
	if want := fmt.Sprintf(`message="denied a control" lines=%d`, calls-maxLike); !strings.HasSuffix(lines[maxLike+2], want) {
		t.Errorf("last line %s, want %s", lines[maxLike+2], want)
	}
}

// TestLogFull: the file has a bound whatever is written, and says that it was reached.
func TestLogFull(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.log")
	log := newLog(path)
	for i := range 100 {
		for range 2 * maxLike {
			log.Warn(fmt.Sprint("message ", i), "err", strings.Repeat("x", 100+i))
		}
	}
	log.Warn("large", "err", strings.Repeat("x", 2*maxLog))
	log.close()
	got := text(t, path)
	if len(got) > maxLog || len(got) < maxLog/2 || !strings.HasSuffix(got, "\n"+string(fullLine)) ||
		strings.Count(got, "the log is full") != 1 {
		t.Errorf("%d bytes, the end is %q", len(got), got[max(0, len(got)-200):])
	}
}

// TestLogEndless: of any number of programs that have one log each says something at first, and the file has a bound.
func TestLogEndless(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.log")
	for i := range 1000 {
		newLogOf(path, maxLog/8).Warn("the guard was killed; this one goes on", "number", i, "err", strings.Repeat("x", 1000))
	}
	got := text(t, path)
	if !strings.Contains(got, "number=100 ") || len(got) > 3*maxLog {
		t.Errorf("%d bytes, the end is %q", len(got), got[max(0, len(got)-200):])
	}
}

// crashEnv has the test binary crash, with a log there.
const crashEnv = "CGPU_TEST_CRASH_LOG"

// TestLogCrash: why a guard crashed is in its log.
func TestLogCrash(t *testing.T) {
	if path := os.Getenv(crashEnv); path != "" {
		newLog(path).Info("ready")
		go func() { panic("index out of range") }()
		select {}
	}
	path := filepath.Join(t.TempDir(), "a.log")
	cmd := exec.Command(os.Args[0], "-test.run=^TestLogCrash$")
	cmd.Env = append(os.Environ(), crashEnv+"="+path)
	if err := cmd.Run(); err == nil {
		t.Fatal("it has not crashed")
	}
	if got := text(t, path); !strings.Contains(got, "panic: index out of range") || !strings.Contains(got, "log_test.go:") {
		t.Errorf("%q", got)
	}
}
