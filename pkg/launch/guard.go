// SPDX-License-Identifier: Apache-2.0

package launch

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

// Guard is a guard that was started for a container.
type Guard struct {
	PID    int
	stdin  int              // write end of its standard input
	ready  int              // read end of its readiness pipe
	config *guardcfg.Config // as it was told; nil: nothing yet
	odd    bool             // it did not answer, and its log may say why
}

// Start starts cgpu-guard, which then waits for its configuration: its start takes longer than our reading of the
// node table and of the ledger, so it begins first. The guard outlives us: when runc's create ends it becomes a child
// of the engine's shim. When we end before we have told it anything, so does it.
func Start(runDir string) (*Guard, error) {
	path, err := device.Program("cgpu-guard")
	if err != nil {
		return nil, err
	}
	return start(func(files []int) (int, error) {
		pid, err := spawn(path, []string{"cgpu-guard"}, guardEnv(runDir), files)
		if err != nil {
			return 0, fmt.Errorf("launch: start %s: %w", path, err)
		}
		return pid, nil
	})
}

func guardEnv(runDir string) []string {
	return []string{"CGPU_RUN_DIR=" + runDir, "CGPU_CONFIG=" + device.ConfigFile(), "PATH=" + strings.Join(Folders, ":")}
}

// start makes the pipes to a guard and has it started, with its descriptors 0 to 3 in files.
func start(spawn func(files []int) (int, error)) (*Guard, error) {
	var stdin, ready [2]int
	if err := unix.Pipe2(stdin[:], unix.O_CLOEXEC); err != nil {
		return nil, fmt.Errorf("launch: pipe: %w", err)
	}
	defer unix.Close(stdin[0])
	if err := unix.Pipe2(ready[:], unix.O_CLOEXEC); err != nil {
		unix.Close(stdin[1])
		return nil, fmt.Errorf("launch: pipe: %w", err)
	}
	defer unix.Close(ready[1])
	g := &Guard{stdin: stdin[1], ready: ready[0]}
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		g.close()
		return nil, fmt.Errorf("launch: /dev/null: %w", err)
	}
	defer unix.Close(null)
	if g.PID, err = spawn([]int{stdin[0], null, null, ready[1]}); err != nil {
		g.close()
		return nil, err
	}
	return g, nil
}

// close closes our ends of the pipes. They are close-on-exec: runc never has them.
func (g *Guard) close() {
	unix.Close(g.stdin)
	unix.Close(g.ready)
}

// Tell gives the guard its configuration.
func (g *Guard) Tell(c *guardcfg.Config) error {
	g.config = c
	config, err := json.Marshal(c)
	if err != nil {
		return err
	}
	// It fits into the pipe (64 KiB) many times over; if it ever does not, the guard is there to read.
	for len(config) > 0 {
		n, err := unix.Write(g.stdin, config)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EPIPE):
			config = nil // the guard died: Wait tells
		case err != nil:
			return fmt.Errorf("launch: tell cgpu-guard: %w", err)
		default:
			config = config[n:]
		}
	}
	unix.Close(g.stdin)
	g.stdin = -1
	return nil
}

// Wait returns when the guard's socket listens. runc connects to it while the container starts.
func (g *Guard) Wait(timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	var said []byte
	for {
		left := time.Until(deadline)
		if left <= 0 {
			g.odd = true
			return fmt.Errorf("launch: cgpu-guard was not ready after %v: see %s, or raise guard_start_timeout in cgpu.toml", timeout, g.config.Log)
		}
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(g.ready), Events: unix.POLLIN}}, int(left.Milliseconds())+1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("launch: wait for cgpu-guard: %w", err)
		}
		if err != nil {
			continue
		}
		n, err := g.read(&said)
		line, _, whole := strings.Cut(string(said), "\n")
		switch {
		case errors.Is(err, unix.EAGAIN):
		case whole && line == "ok":
			return nil
		case whole, err == nil && n == 0 && line != "":
			return errors.New(line)
		case err == nil && n == 0:
			g.odd = true
			return fmt.Errorf("launch: cgpu-guard ended before it was ready: see %s", g.config.Log)
		case err != nil && !errors.Is(err, unix.EINTR):
			return fmt.Errorf("launch: wait for cgpu-guard: %w", err)
		}
	}
}

// read adds to said what the guard has said. Poll may have returned for nothing, so it must not block.
func (g *Guard) read(said *[]byte) (int, error) {
	if err := unix.SetNonblock(g.ready, true); err != nil {
		return 0, err
	}
	var b [4096]byte
	n, err := unix.Read(g.ready, b[:])
	if n > 0 {
		*said = append(*said, b[:n]...)
	}
	return n, err
}

// Stop ends a guard whose container will not be, and removes what it has made: a pod that is refused is tried again for ever. The number
// is surely its own: a guard is our child, or told us of itself just now. One that hangs in the driver ends when that lets it go; the
// container's refusal does not wait for it.
func (g *Guard) Stop() {
	if g == nil {
		return
	}
	syscall.Kill(g.PID, syscall.SIGKILL)
	await(g.PID, killTimeout) //nolint:errcheck // of StartApart it is no child, and nothing is left to do
	if g.config == nil {
		return
	}
	g.config.CleanUp()
	if !g.odd {
		_ = os.Remove(g.config.Log)
	}
}

// oneLine joins the lines of s: engines show one line of the log.
func oneLine(s string) string {
	return strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
}
