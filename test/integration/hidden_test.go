// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// nobody is a user without rights. To root every process looks as if it were not dumpable.
const nobody = 65534

// TestHidden looks at each program of ours while it runs, as nobody: what is dumpable is his in /proc, what is not is root's
// (task_dump_owner, fs/proc/base.c). They run until they wait for something that does not come.
func TestHidden(t *testing.T) {
	dir, err := os.MkdirTemp("/tmp", "cgpu-hidden") // below no folder that nobody may not enter
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	pipe := filepath.Join(dir, "config.json")
	for _, err := range []error{unix.Mkfifo(pipe, 0o600), os.Chown(pipe, nobody, nobody), os.Chown(dir, nobody, nobody)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	socket := filepath.Join(dir, "socket") // of a kubelet that does not answer
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := os.Chmod(socket, 0o666); err != nil {
		t.Fatal(err)
	}
	held, err := os.OpenFile(filepath.Join(dir, "node.lock"), os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	for _, err := range []error{held.Chmod(0o666), unix.Flock(int(held.Fd()), unix.LOCK_EX)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{
		{"cgpu-guard"}, // waits for its configuration
		{"cgpu-hook", "started", "--id", "a", "--nonce", "n"},
		{"cgpu-runtime", "create", "--bundle", dir, "a"},
		{"cgpu-refresh"},
		{"cgpu-podresources", socket, "20s", "namespace", "pod", "container"},
		{"cgpu-agent", "--kubeconfig", pipe, "--node-name", "n"},
		{"cgpu", "refresh"},
		{"sleep", "20"}, // of somebody else: the opposite, or this test proves nothing
	} {
		t.Run(args[0], func(t *testing.T) {
			path := filepath.Join(lab.Bin, args[0])
			if args[0] == "sleep" {
				path = "/bin/sleep"
			}
			if _, err := os.Stat(path); err != nil && lab.Driver != device.DriverSim {
				testenv.Skip(t, "on a GPU: test/gpu/pack.sh leaves it out")
			}
			cmd := exec.Command(path, args[1:]...)
			cmd.Env = []string{"CGPU_RUN_DIR=" + dir, "CGPU_CONFIG=" + filepath.Join(dir, "none.toml"), "PATH=/usr/bin:/bin"}
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}, Pdeathsig: syscall.SIGKILL}
			var said bytes.Buffer
			cmd.Stderr = &said
			stdin, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			defer stdin.Close()
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer cmd.Wait()         //nolint:errcheck // it was killed
			defer cmd.Process.Kill() //nolint:errcheck // it may have ended
			want := uint32(0)
			if args[0] == "sleep" {
				want = nobody
			}
			eventually(t, 5*time.Second, func() string {
				var st unix.Stat_t
				path := fmt.Sprintf("/proc/%d/statm", cmd.Process.Pid)
				if err := unix.Stat(path, &st); err != nil || st.Uid != want {
					return fmt.Sprintf("the process is user %d's, %v", st.Uid, err)
				}
				if text, err := os.ReadFile(path); err != nil || strings.HasPrefix(string(text), "0 ") {
					t.Fatalf("it has ended, and what has is root's: %s", &said)
				}
				return ""
			})
		})
	}
}
