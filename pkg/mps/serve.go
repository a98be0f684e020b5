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
	"runtime"
	"strings"
	"syscall"
	"time"
)

// patience is for a process to say what it has to.
const patience = 5 * time.Second

// Server is a domain's control daemon with a gate before it. It runs as the user whom the members' programs run as, and needs no privilege.
type Server struct {
	Members string   // the folder that members get; the gate's socket is all that is in it
	Command []string // the daemon, in the foreground
	Say     func(string)
}

// Run starts the daemon and serves its members until it ends, or ctx does; then it is told to quit. It returns how the daemon ended.
func (s Server) Run(ctx context.Context) error {
	own, err := os.MkdirTemp("", "cgpu-mps-") // mode 0700
	if err != nil {
		return err
	}
	defer os.RemoveAll(own)
	daemon := exec.Command(s.Command[0], s.Command[1:]...)
	daemon.Env = daemonEnvironment(os.Environ(), own)
	daemon.Stdout, daemon.Stderr = os.Stdout, os.Stderr
	daemon.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // nobody else knows it
	runtime.LockOSThread()                                                // when this thread ends, the signal comes
	defer runtime.UnlockOSThread()
	if err := daemon.Start(); err != nil {
		return fmt.Errorf("%s: %w; it comes with the driver, in some distributions in a package of its own", s.Command[0], err)
	}
	ended := make(chan error, 1)
	go func() { ended <- daemon.Wait() }()
	socket := filepath.Join(own, SocketName)
	if err := waitFor(socket, ended); err != nil {
		_ = daemon.Process.Kill()
		return fmt.Errorf("%s: %w", s.Command[0], err)
	}
	l, err := listen(filepath.Join(s.Members, SocketName))
	if err != nil {
		_ = daemon.Process.Kill()
		return err
	}
	defer l.Close() // and its file goes
	g := &Gate{Daemon: socket, User: uint32(os.Geteuid()), Patience: patience, Refused: s.refused()}
	go func() { _ = g.Serve(l) }()
	select {
	case err = <-ended:
	case <-ctx.Done():
		err = s.quit(daemon, ended)
	}
	return err
}

// daemonEnvironment is the environment with the daemon's own folder for pipes and logs.
func daemonEnvironment(env []string, own string) []string {
	var out []string
	for _, v := range env {
		if !strings.HasPrefix(v, "CUDA_MPS_PIPE_DIRECTORY=") && !strings.HasPrefix(v, "CUDA_MPS_LOG_DIRECTORY=") {
			out = append(out, v)
		}
	}
	return append(out, "CUDA_MPS_PIPE_DIRECTORY="+own, "CUDA_MPS_LOG_DIRECTORY="+own)
}

// waitFor waits until the daemon has its socket.
func waitFor(socket string, ended <-chan error) error {
	for begin := time.Now(); time.Since(begin) < startTime; {
		if _, err := os.Stat(socket); err == nil {
			return nil
		}
		select {
		case err := <-ended:
			return fmt.Errorf("ended before it had its socket %s: %v", SocketName, err)
		case <-time.After(10 * time.Millisecond):
		}
	}
	return fmt.Errorf("has no socket %s after %v", SocketName, startTime)
}

// listen makes the gate's socket, in place of what a killed one left. Anyone may connect who reaches the folder; the gate looks who.
func listen(path string) (*net.UnixListener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: path, Net: network})
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o666); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// refused tells of callers that were turned away, one a second at most.
func (s Server) refused() func(error) {
	tell := make(chan error, 1)
	go func() {
		for err := range tell {
			s.Say("refused " + err.Error())
			time.Sleep(time.Second)
		}
	}()
	return func(err error) {
		select {
		case tell <- err:
		default:
		}
	}
}

// quit ends the daemon as its own command does, so that the server ends its clients' work in order; then whatever it says.
func (s Server) quit(daemon *exec.Cmd, ended <-chan error) error {
	command := exec.Command(s.Command[0])
	command.Env, command.Stdin = daemon.Env, strings.NewReader("quit\n")
	if err := command.Start(); err == nil {
		go func() { _ = command.Wait() }()
		select {
		case err := <-ended:
			return err
		case <-time.After(patience):
		}
		_ = command.Process.Kill()
	}
	_ = daemon.Process.Kill()
	return <-ended
}
