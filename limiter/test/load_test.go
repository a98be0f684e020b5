// SPDX-License-Identifier: Apache-2.0

package limiter_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestLoad: cgpu-load computes as it is told, counts what it has done, and ends with its input. Without CUDA it says why, with a status of
// its own.
func TestLoad(t *testing.T) {
	r := newRig(t, native)
	program := filepath.Join(r.dir, "cgpu-load")
	command(t, "make", "-s", "-C", "..", "OUT="+r.dir, "CC="+r.cc, program)
	fails := func(says string, env ...string) {
		t.Helper()
		cmd := exec.Command(program)
		in, err := cmd.StdinPipe() // open, or the end of it could come first
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		var said strings.Builder
		cmd.Stderr, cmd.Env = &said, append(os.Environ(), env...)
		err = cmd.Run()
		if e, ok := errors.AsType[*exec.ExitError](err); !ok || e.ExitCode() != 3 || !strings.Contains(said.String(), says) {
			t.Errorf("%v: %s", err, said.String())
		}
	}
	fails("libcuda.so.1:", "LD_LIBRARY_PATH="+t.TempDir())
	command(t, r.program, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "testdata/fakecuda.c", "-o", filepath.Join(r.dir, "libcuda.so.1"))
	fails("cuInit: no CUDA-capable device", "LD_LIBRARY_PATH="+r.dir, "NO_DEVICE=1")

	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+r.dir)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stuck := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
	defer stuck.Stop()
	lines := bufio.NewScanner(out)
	until := func(what string, found func(line string) bool) {
		t.Helper()
		for lines.Scan() {
			if found(lines.Text()) {
				return
			}
		}
		t.Fatalf("no %s", what)
	}
	tell := func(word string) { _, _ = io.WriteString(in, word+"\n") }
	until("up", func(line string) bool { return line == "up" })
	tell("calibrate")
	var hog, loop float64
	until("ready", func(line string) bool { n, _ := fmt.Sscanf(line, "ready %f %f", &hog, &loop); return n == 2 })
	if hog < 100 || loop < 1.2*hog {
		t.Errorf("kernels of %v and %v µs", hog, loop)
	}
	var before float64
	for _, mode := range []string{"hog", "loop"} {
		tell(mode)
		var at, last int64
		var done float64
		until("work of "+mode, func(line string) bool {
			n, _ := fmt.Sscanf(line, "work %d %f %d", &at, &done, &last)
			return n == 3 && done > before+20*loop && last > 0 && last <= at
		})
		before = done
	}
	tell("stop")
	var done, old float64
	until("rest", func(line string) bool {
		var at int64
		if n, _ := fmt.Sscanf(line, "work %d %f", &at, &done); n < 2 {
			return false
		}
		same := done == old
		old = done
		return same
	})
	in.Close()
	for lines.Scan() {
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}
