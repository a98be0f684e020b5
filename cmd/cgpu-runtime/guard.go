package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
)

// watch is a guard that was started for the container.
type watch struct {
	pid   int
	stdin int // write end of its standard input
	ready int // read end of its readiness pipe
	log   string
}

// startGuard starts cgpu-guard, which then waits for its configuration: its start takes longer than our reading of the
// node table and of the ledger, so it begins first. The guard outlives us: when runc's create ends it becomes a child
// of the engine's shim. When we end before we have told it anything, so does it.
func startGuard(runDir string) (*watch, error) {
	path, err := device.Program("cgpu-guard")
	if err != nil {
		return nil, err
	}
	var stdin, ready [2]int
	if err := unix.Pipe2(stdin[:], unix.O_CLOEXEC); err != nil {
		return nil, fmt.Errorf("cgpu-runtime: pipe: %w", err)
	}
	defer unix.Close(stdin[0])
	if err := unix.Pipe2(ready[:], unix.O_CLOEXEC); err != nil {
		unix.Close(stdin[1])
		return nil, fmt.Errorf("cgpu-runtime: pipe: %w", err)
	}
	defer unix.Close(ready[1])
	w := &watch{stdin: stdin[1], ready: ready[0]}
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		w.close()
		return nil, fmt.Errorf("cgpu-runtime: /dev/null: %w", err)
	}
	defer unix.Close(null)
	env := []string{"CGPU_RUN_DIR=" + runDir, "PATH=" + strings.Join(usual, ":")}
	w.pid, err = spawn(path, []string{"cgpu-guard"}, env, []int{stdin[0], null, null, ready[1]})
	if err != nil {
		w.close()
		return nil, fmt.Errorf("cgpu-runtime: start %s: %w", path, err)
	}
	return w, nil
}

// close closes our ends of the pipes. They are close-on-exec: runc never has them.
func (w *watch) close() {
	unix.Close(w.stdin)
	unix.Close(w.ready)
}

// tell gives the guard its configuration.
func (w *watch) tell(c guardcfg.Config) error {
	w.log = c.Log
	config, err := json.Marshal(c)
	if err != nil {
		return err
	}
	// It fits into the pipe (64 KiB) many times over; if it ever does not, the guard is there to read.
	for len(config) > 0 {
		n, err := unix.Write(w.stdin, config)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EPIPE):
			config = nil // the guard died: wait tells
		case err != nil:
			return fmt.Errorf("cgpu-runtime: tell cgpu-guard: %w", err)
		default:
			config = config[n:]
		}
	}
	unix.Close(w.stdin)
	w.stdin = -1
	return nil
}

// wait returns when the guard's socket listens. runc connects to it while the container starts.
func (w *watch) wait(timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	var said []byte
	for {
		left := time.Until(deadline)
		if left <= 0 {
			return fmt.Errorf("cgpu-runtime: cgpu-guard was not ready after %v: see %s, or raise guard_start_timeout in cgpu.toml", timeout, w.log)
		}
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(w.ready), Events: unix.POLLIN}}, int(left.Milliseconds())+1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("cgpu-runtime: wait for cgpu-guard: %w", err)
		}
		if err != nil {
			continue
		}
		n, err := w.read(&said)
		line, _, whole := strings.Cut(string(said), "\n")
		switch {
		case errors.Is(err, unix.EAGAIN):
		case whole && line == "ok":
			return nil
		case whole, err == nil && n == 0 && line != "":
			return errors.New(line)
		case err == nil && n == 0:
			return fmt.Errorf("cgpu-runtime: cgpu-guard ended before it was ready: see %s", w.log)
		case err != nil && !errors.Is(err, unix.EINTR):
			return fmt.Errorf("cgpu-runtime: wait for cgpu-guard: %w", err)
		}
	}
}

// read adds to said what the guard has said. Poll may have returned for nothing, so it must not block.
func (w *watch) read(said *[]byte) (int, error) {
	if err := unix.SetNonblock(w.ready, true); err != nil {
		return 0, err
	}
	var b [4096]byte
	n, err := unix.Read(w.ready, b[:])
	if n > 0 {
		*said = append(*said, b[:n]...)
	}
	return n, err
}

// stop ends a guard whose container will not be. It is our child, so the number is surely its own.
func (w *watch) stop() {
	if w == nil {
		return
	}
	syscall.Kill(w.pid, syscall.SIGKILL)
	var status syscall.WaitStatus
	for {
		if _, err := syscall.Wait4(w.pid, &status, 0, nil); !errors.Is(err, syscall.EINTR) {
			return
		}
	}
}

// refresh runs cgpu-refresh, which writes the node table. It locks: of containers that start together one refreshes.
func refresh() error {
	path, err := device.Program("cgpu-refresh")
	if err != nil {
		return err
	}
	// A file, not a pipe: the simulated driver's server, which cgpu-refresh may start, must not hold us up.
	fd, err := unix.MemfdCreate("cgpu-refresh", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("cgpu-runtime: memfd: %w", err)
	}
	output := os.NewFile(uintptr(fd), "output")
	defer output.Close()
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("cgpu-runtime: /dev/null: %w", err)
	}
	defer unix.Close(null)
	pid, err := spawn(path, []string{"cgpu-refresh"}, os.Environ(), []int{null, null, fd})
	if err != nil {
		return fmt.Errorf("cgpu-runtime: start %s: %w", path, err)
	}
	var status syscall.WaitStatus
	for {
		if _, err = syscall.Wait4(pid, &status, 0, nil); !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	switch {
	case err != nil:
		return fmt.Errorf("cgpu-runtime: wait for cgpu-refresh: %w", err)
	case status.Exited() && status.ExitStatus() == 0:
		return nil
	}
	text := make([]byte, 2048)
	n, _ := output.ReadAt(text, 0)
	return fmt.Errorf("cgpu-runtime: the node's GPUs could not be read: %s", oneLine(string(text[:n])))
}

// oneLine joins the lines of s: engines show one line of the log.
func oneLine(s string) string {
	return strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
}
