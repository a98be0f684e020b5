// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/mps/mpstest"
)

// asDaemon has this program stand for nvidia-cuda-mps-control.
const asDaemon = "CGPU_TEST_MPS"

func TestMain(m *testing.M) {
	if os.Getenv(asDaemon) == "" {
		os.Exit(m.Run())
	}
	if err := mpstest.Program(os.Args[1:], func(c *net.UnixConn) { _ = c.Close() }); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(3)
	}
}

// started is a server that has its socket.
func started(t *testing.T, command ...string) (socket string, stop func() error) {
	t.Helper()
	t.Setenv(asDaemon, "1")
	dir := t.TempDir()
	s := Server{Members: filepath.Join(dir, "members"), Own: filepath.Join(dir, "daemon"), Command: command}
	if err := os.Mkdir(s.Members, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(s.Own, "control_lock"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, stale := range []string{filepath.Join(s.Members, SocketName), filepath.Join(s.Members, SocketName+".new")} {
		l, err := net.ListenUnix(network, &net.UnixAddr{Name: stale, Net: network}) // of one that was killed
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		_ = l.Close()
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	socket = filepath.Join(s.Members, SocketName)
	for range 1000 {
		if c, err := net.DialUnix(network, nil, &net.UnixAddr{Name: socket, Net: network}); err == nil {
			_ = c.Close()
			return socket, func() error { cancel(); return <-ended }
		}
		select {
		case err := <-ended:
			cancel()
			return "", func() error { return err }
		case <-time.After(10 * time.Millisecond):
		}
	}
	cancel()
	t.Fatal("no socket")
	return "", nil
}

// ownOf is the daemon's folder, by the gate's socket.
func ownOf(socket string) string { return filepath.Join(filepath.Dir(filepath.Dir(socket)), "daemon") }

func TestServer(t *testing.T) {
	socket, stop := started(t, os.Args[0], "-f")
	c, err := mpstest.Client(socket)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	if err := mpstest.Command(socket, "quit"); err == nil {
		t.Error("a member has commanded the daemon")
	}
	if c, err = mpstest.Client(socket); err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	if err := stop(); err != nil {
		t.Errorf("the daemon ended by %v: want quit", err)
	}
	if left, err := os.ReadDir(filepath.Dir(socket)); err != nil || len(left) != 0 {
		t.Errorf("left in the members' folder: %v, %v", left, err)
	}
	log, err := os.ReadFile(filepath.Join(ownOf(socket), "daemon.log"))
	if err != nil || !strings.Contains(string(log), `refused process`) {
		t.Errorf("the log has %q, %v", log, err)
	}
}

func TestNoDaemon(t *testing.T) {
	for _, test := range []struct {
		command []string
		want    string
	}{
		{[]string{"/no/such/nvidia-cuda-mps-control", "-f"}, "it comes with the driver"},
		{[]string{os.Args[0], "-x"}, "ended before it had its socket control: exit status 3"},
	} {
		_, stop := started(t, test.command...)
		if err := stop(); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%q: %v, want %q", test.command, err, test.want)
		}
	}
}

// A daemon that ends takes the gate along, with how it ended.
func TestDaemonEnds(t *testing.T) {
	socket,
		stop := started(t, "sh", "-c", `exec 3<&0; "$0" -f & while [ ! -e "$CUDA_MPS_PIPE_DIRECTORY/go" ]; do sleep 0.05; done; kill $!; exit 7`,
		os.Args[0])
	if err := os.WriteFile(filepath.Join(ownOf(socket), "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 500 {
		if _, err := os.Stat(socket); errors.Is(err, os.ErrNotExist) {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	exit, ok := errors.AsType[*exec.ExitError](stop())
	if !ok || exit.ExitCode() != 7 {
		t.Errorf("ended by %v, want exit status 7", exit)
	}
}

// A daemon for all users is root in a user namespace; one for its own user is in none.
func TestUsers(t *testing.T) {
	one, all := Server{Command: []string{"d", "-f"}}, Server{Command: []string{"d", "-f", forAll}}
	if a := one.attributes(); one.user() != os.Geteuid() || a.Cloneflags != 0 || a.Pdeathsig != syscall.SIGKILL {
		t.Errorf("for one: user %d, %+v", one.user(), a)
	}
	a := all.attributes()
	want := []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
	if all.user() != AnyUser || a.Cloneflags != syscall.CLONE_NEWUSER || a.Pdeathsig != syscall.SIGKILL || !slices.Equal(a.UidMappings, want) {
		t.Errorf("for all: user %d, %+v", all.user(), a)
	}
}

func TestDaemonEnvironment(t *testing.T) {
	got := daemonEnvironment([]string{"A=1", "CUDA_MPS_PIPE_DIRECTORY=/x", "CUDA_MPS_LOG_DIRECTORY=/y"}, "/own")
	want := []string{"A=1", "CUDA_MPS_PIPE_DIRECTORY=/own", "CUDA_MPS_LOG_DIRECTORY=/own"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestLog: whatever is written, two files of the log are all that there is.
func TestLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	l, err := newLog(path, 100, nil)
	if err != nil {
		t.Fatal(err)
	}
	line := func(i int) string { return fmt.Sprintf("line %d\n", i) }
	for i := range 1000 {
		if n, err := l.Write([]byte(line(i))); err != nil || n != len(line(i)) {
			t.Fatal(n, err)
		}
	}
	before, err1 := os.ReadFile(path + ".1")
	now, err2 := os.ReadFile(path)
	if err := errors.Join(err1, err2); err != nil || len(before) > 100 || len(now) > 100 {
		t.Errorf("%d and %d bytes, %v", len(before), len(now), err)
	}
	if all := string(before) + string(now); !strings.HasSuffix(all, line(998)+line(999)) || !strings.Contains(all, line(990)) {
		t.Errorf("the last lines are %q", all)
	}
}
