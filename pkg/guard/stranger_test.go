// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bufio"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/testenv"
	"golang.org/x/sys/unix"
)

// stranger is a process with a mount namespace of its own, as a container's has, or without, as the host's.
type stranger struct {
	t    *testing.T
	cmd  *exec.Cmd
	gone chan struct{}
}

// newStranger starts one that opens a node, if any, as descriptor 5, and has files from 3 on.
func newStranger(t *testing.T, apart bool, opens string, files ...*os.File) *stranger {
	t.Helper()
	testenv.NeedsRoot(t, "mount namespaces")
	script := strangerScript
	if opens != "" {
		script = "exec 5<>" + opens + "; " + script
	}
	cmd := exec.Command("sh", "-c", script)
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if apart {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNS
	}
	return startStranger(t, cmd, files)
}

const strangerScript = "echo ready; exec sleep 100"

func startStranger(t *testing.T, cmd *exec.Cmd, files []*os.File) *stranger {
	t.Helper()
	s := &stranger{t: t, cmd: cmd, gone: make(chan struct{})}
	s.cmd.ExtraFiles = files
	out, err := s.cmd.StdoutPipe()
	if err == nil {
		err = s.cmd.Start()
	}
	if err != nil {
		testenv.Lacks(t, "cannot start a process with a mount namespace of its own: %v", err)
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = s.cmd.Wait()
		close(s.gone)
	}()
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		<-s.gone
	})
	return s
}

// joining is one in the mount namespace of another.
func joining(t *testing.T, other *stranger, files ...*os.File) *stranger {
	t.Helper()
	return startStranger(t, exec.Command("nsenter", "--mount=/proc/"+strconv.Itoa(other.pid())+"/ns/mnt", "sh", "-c", strangerScript), files)
}

func (s *stranger) pid() int { return s.cmd.Process.Pid }

func (s *stranger) ended() bool {
	select {
	case <-s.gone:
		return true
	case <-time.After(patience):
		return false
	}
}

func (s *stranger) lives() bool {
	select {
	case <-s.gone:
		return false
	case <-time.After(200 * time.Millisecond):
		return true
	}
}

// file copies descriptor 5, as a process does that was sent it.
func (s *stranger) file() *os.File {
	s.t.Helper()
	pidfd, err := unix.PidfdOpen(s.pid(), 0)
	if err != nil {
		s.t.Fatal(err)
	}
	defer unix.Close(pidfd)
	fd, err := unix.PidfdGetfd(pidfd, 5, 0)
	if err != nil {
		s.t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "passed")
	s.t.Cleanup(func() { f.Close() })
	return f
}
