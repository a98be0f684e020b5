// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/testenv"
)

// TestHungProgram: who asks for an upgrade to a program that cannot be started, since its file system hangs, is told, and the next one who
// asks is when it does not hang any more.
func TestHungProgram(t *testing.T) {
	g := newFakeGuard(t, &inProcess{})
	const program = "/bin/true" // root's, and no guard
	g.upgrading.Store(true)
	syscall.ForkLock.RLock() // nobody starts a program
	said := g.upgradeWithin(time.Millisecond, nil, program).Error
	busy := g.upgrading.Load()
	syscall.ForkLock.RUnlock()
	if !strings.Contains(said, program+" is not opened and started within 1ms; does its file system hang?") || !busy {
		t.Errorf("%q; another one may begin: %v", said, !busy)
	}
	for g.upgrading.Load() {
		time.Sleep(time.Millisecond)
	}
	g.upgrading.Store(true)
	if said := g.upgradeWithin(time.Minute, nil, program).Error; !strings.Contains(said, "it ended without a word") || g.upgrading.Load() {
		t.Errorf("%q; under way: %v", said, g.upgrading.Load())
	}
}

// hungEnv says what hangs of a program.
const hungEnv = "CGPU_TEST_HUNG"

// TestHungFileSystem: a guard goes on with all that it does, while a program that it was asked to become cannot be opened, read or
// executed.
func TestHungFileSystem(t *testing.T) {
	testenv.NeedsRoot(t, "it has files hang")
	if os.Getenv(hungEnv) != "" {
		hang(t)
		return
	}
	for name, mask := range map[string]uint64{"open": unix.FAN_OPEN_PERM, "read": unix.FAN_ACCESS_PERM, "execve": unix.FAN_OPEN_EXEC_PERM} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command("/proc/self/exe", "-test.run", "^TestHungFileSystem$") // which may stand still
			cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", hungEnv, mask))
			late := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
			defer late.Stop()
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

// hang asks for an upgrade to a file, and answers nobody who asks whether that may be done which hangs.
func hang(t *testing.T) {
	mask, err := strconv.ParseUint(os.Getenv(hungEnv), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("/bin/true")
	program := filepath.Join(t.TempDir(), "program")
	if err == nil {
		err = os.WriteFile(program, text, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	asked, err := unix.FanotifyInit(unix.FAN_CLASS_CONTENT|unix.FAN_CLOEXEC, unix.O_RDONLY)
	if err == nil {
		err = unix.FanotifyMark(asked, unix.FAN_MARK_ADD, mask, unix.AT_FDCWD, program)
	}
	if err != nil {
		t.Fatal(err)
	}
	g := newFakeGuard(t, &inProcess{})
	g.upgrading.Store(true)
	said := g.upgradeWithin(time.Second, nil, program).Error
	if !strings.Contains(said, "is not opened and started within 1s; does its file system hang?") {
		t.Error(said)
	}
	if _, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); mask != unix.FAN_OPEN_EXEC_PERM && !errors.Is(err, unix.ECHILD) {
		t.Error("a child executes what has not been read", err)
	}
	runtime.GC() // stops all that goes on, once it can
	if err := unix.Close(asked); err != nil {
		t.Fatal(err)
	}
	for g.upgrading.Load() { // it does not hang any more
		time.Sleep(time.Millisecond)
	}
}
