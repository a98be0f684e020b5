// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/sim"
)

// simServer is the process cgpu-sim of one run directory. It serves the GPUs that node.json told of when it started, and
// holds a lock on sim.lock, which has its process id, as long as it lives.
type simServer struct {
	runDir  string
	program string
	say     func(string, ...any)
}

const simStartTimeout = 10 * time.Second

// runs reports whether the server accepts connections.
func (s simServer) runs() bool {
	c, err := net.DialTimeout("unix", device.SimSocket(s.runDir), time.Second)
	if err != nil {
		return false
	}
	c.Close()
	return true
}

// serves reports whether a server runs and has the GPUs of table t. What the server does not tell (names, bus ids, the
// driver's version) is compared with the table before this one.
func (s simServer) serves(t, old *device.Table) (bool, error) {
	if !s.runs() {
		return false, nil
	}
	c, err := sim.Dial(device.SimSocket(s.runDir), nil)
	if err != nil {
		return false, err
	}
	defer c.Close()
	now, err := c.Snapshot()
	if err != nil {
		return false, err
	}
	same := slices.EqualFunc(t.GPUs, now.GPUs, func(g device.GPU, n sim.GPUSnapshot) bool {
		return g.Index == n.Index && g.Minor == n.Minor && g.UUID == n.UUID && g.Memory == n.Memory
	})
	if same && old != nil && old.Driver == device.DriverSim {
		same = old.DriverVersion == t.DriverVersion && slices.EqualFunc(t.GPUs, old.GPUs, func(g, o device.GPU) bool {
			return g.Name == o.Name && g.BusID == o.BusID
		})
	}
	return same, nil
}

// start runs the server in a session of its own and waits until it accepts connections.
func (s simServer) start() error {
	log, err := s.openLog()
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(s.program, "--run-dir", s.runDir)
	cmd.Dir = "/" // keep no mount busy
	// The server is told its folder above; with the variable whoever ends a node's processes knows it for one of them.
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "CGPU_RUN_DIR=" + s.runDir}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("simulated driver: %w; cgpu-sim belongs beside cgpu-refresh", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for deadline := time.After(simStartTimeout); ; {
		select {
		case err := <-ended:
			return fmt.Errorf("simulated driver: %s ended at once (%v): %s", s.program, err, lastLine(log))
		case <-deadline:
			return fmt.Errorf("simulated driver: %s does not answer on %s after %v; see %s", s.program, device.SimSocket(s.runDir),
				simStartTimeout, log.Name())
		case <-time.After(2 * time.Millisecond):
			if s.runs() {
				s.say("started %s, process %d", s.program, cmd.Process.Pid)
				return nil
			}
		}
	}
}

// stop ends the running server and waits until it is gone.
func (s simServer) stop() error {
	path := filepath.Join(s.runDir, "sim.lock")
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	gone := func() bool { return syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB) == nil }
	if gone() { // a process id in a file that nobody locks may be anybody's by now
		return nil
	}
	text, err := io.ReadAll(io.LimitReader(f, 32))
	if err != nil {
		return err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || pid <= 1 {
		return fmt.Errorf("%s: %q: want the process id of cgpu-sim", path, text)
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		return fmt.Errorf("stop cgpu-sim, process %d: %w", pid, err)
	}
	for deadline := time.Now().Add(5 * time.Second); !gone(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("cgpu-sim, process %d, did not end within 5s of SIGTERM", pid)
		}
	}
	return nil
}

// maxLog bounds the server's log over restarts.
const maxLog = 1 << 20

func (s simServer) openLog() (*os.File, error) {
	dir := filepath.Join(s.runDir, "log")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "sim.log"), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err == nil && info.Size() > maxLog {
		_ = f.Truncate(0)
	}
	return f, nil
}

// lastLine is the end of what a program wrote before it ended.
func lastLine(f *os.File) string {
	info, err := f.Stat()
	if err != nil {
		return ""
	}
	buf := make([]byte, min(info.Size(), 512))
	n, _ := f.ReadAt(buf, info.Size()-int64(len(buf)))
	lines := strings.Split(strings.TrimSpace(string(buf[:n])), "\n")
	return lines[len(lines)-1]
}
