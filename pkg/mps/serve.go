// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/page"
)

const (
	patience = 5 * time.Second  // for a process to say what it has to
	look     = 10 * time.Second // how often the server is asked whether it serves
)

// forAll is the daemon's argument to serve clients of all users. It must be root then, and is: in a user namespace that has no other user.
const forAll = "-multiuser-server"

// Server is a domain's control daemon with a gate before it. It needs no privilege.
type Server struct {
	Parts   *os.File   // says what each seat has of the multiprocessors (page.Parts)
	Sockets []*os.File // the gate's, of each seat, bound by who made them; both are of Receive
	Own     string     // the daemon's folder, out of the members' reach: for its own sockets, and daemon.log
	Command []string   // the daemon, in the foreground
	Confine []string   // the program that becomes the daemon by Confine, and its arguments before Command
	// Narrow takes from this process what it needs no more when the daemon has been started.
	Narrow func() error

	patience, look time.Duration // 0: those below
}

// Run starts the daemon and serves its members until it ends, or ctx does; then it is told to quit. It returns how the daemon ended.
func (s Server) Run(ctx context.Context) error {
	if _, err := exec.LookPath(s.Command[0]); err != nil {
		return fmt.Errorf("%w; it comes with the driver, in some distributions in a package of its own", err)
	}
	said, err := newLog(filepath.Join(s.Own, "daemon.log"), maxLog, os.Stderr)
	if err != nil {
		return err
	}
	command := slices.Concat(s.Confine, s.Command)
	daemon := exec.Command(command[0], command[1:]...)
	daemon.Env = daemonEnvironment(os.Environ(), s.Own)
	daemon.Stdout, daemon.Stderr = said, said
	daemon.WaitDelay = time.Second // its server has the pipe too
	daemon.SysProcAttr = s.attributes()
	runtime.LockOSThread() // when this thread ends, so does the daemon
	defer runtime.UnlockOSThread()
	if err := start(daemon); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- daemon.Wait() }()
	if err := s.Narrow(); err != nil {
		_ = daemon.Process.Kill()
		return err
	}
	socket := filepath.Join(s.Own, SocketName)
	if err := waitFor(socket, ended); err != nil {
		_ = daemon.Process.Kill()
		return fmt.Errorf("%s: %w", s.Command[0], err)
	}
	d := &control{program: s.Command[0], env: daemon.Env, percent: page.AllParts, patience: cmp.Or(s.patience, patience)}
	doubted := make(chan error, 1)
	doubt := func(err error) {
		select {
		case doubted <- err:
		default:
		}
	}
	g := &Gate{Daemon: socket, User: s.user(), Patience: d.patience, Refused: refused(said), Doubt: func(why error) {
		if err := d.ask(); err != nil && !errors.Is(err, errFault) { // that may pass
			doubt(fmt.Errorf("%w, since %w", err, why))
		}
	}}
	g.Prepare = func(seat int) error {
		percent, err := s.part(seat)
		if err != nil {
			return err
		}
		return d.setPercent(percent)
	}
	g.End = d.terminate
	defer g.callers.close()
	if err := s.open(g); err != nil {
		_ = daemon.Process.Kill()
		return err
	}
	said.apart()
	watched, enough := context.WithCancel(ctx)
	defer enough()
	go func() {
		if err := d.watch(watched, cmp.Or(s.look, look), g.Alone); err != nil {
			doubt(err)
		}
	}()
	select {
	case err = <-ended:
	case <-ctx.Done():
		err = s.quit(d, daemon, ended)
	case err = <-doubted: // neither it nor the daemon can be told anything
		fmt.Fprintln(said, "cgpu:", err)
		_ = daemon.Process.Kill()
	}
	if errors.Is(err, exec.ErrWaitDelay) { // the daemon ended well; its server is about to
		return nil
	}
	return err
}

// processes is how many threads the server's user has at most: NVIDIA's server has one for each client, of which there are 60.
const processes = 1024

// Bound bounds this process and those that it starts in what members could make them take of the machine. Memory its cgroup bounds.
func Bound() error {
	return errors.Join(
		unix.Setrlimit(unix.RLIMIT_NPROC, &unix.Rlimit{Cur: processes, Max: processes}),
		unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}),
	)
}

// start starts the daemon. The kernel gives the files of a process that is not dumpable (pkg/nodump) to root: meanwhile this one is, so
// that it can write the child's map of users.
func start(daemon *exec.Cmd) error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0); err != nil {
		return err
	}
	err := daemon.Start()
	if err != nil && daemon.SysProcAttr.Cloneflags != 0 {
		err = fmt.Errorf("%s: %w; it needs a user namespace (sysctl user.max_user_namespaces)", daemon.Path, err)
	}
	return errors.Join(err, unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0))
}

func (s Server) user() int {
	if slices.Contains(s.Command, forAll) {
		return AnyUser
	}
	return os.Geteuid()
}

// attributes are the daemon's as a process. It ends with this one, since nobody else knows it.
func (s Server) attributes() *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if s.user() == AnyUser {
		a.Cloneflags = syscall.CLONE_NEWUSER
		a.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
		a.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	}
	return a
}

// daemonEnvironment is the environment with the daemon's own folder for pipes and logs, and nothing else that it would go by.
func daemonEnvironment(env []string, own string) []string {
	var out []string
	for _, v := range env {
		if !strings.HasPrefix(v, "CUDA_MPS_") {
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

// refused tells of callers that were turned away, one a second at most.
func refused(log io.Writer) func(error) {
	tell := make(chan error, 1)
	go func() {
		for err := range tell {
			fmt.Fprintln(log, "cgpu: refused", err)
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
func (s Server) quit(d *control, daemon *exec.Cmd, ended <-chan error) error {
	if _, err := d.command("quit"); err == nil {
		select {
		case err := <-ended:
			return err
		case <-time.After(d.patience):
		}
	}
	_ = daemon.Process.Kill()
	return <-ended
}

// part is what a seat has of the multiprocessors now, in percent.
func (s Server) part(seat int) (int, error) {
	var percent [1]byte
	if _, err := s.Parts.ReadAt(percent[:], int64(seat)); err != nil {
		return 0, err
	}
	if percent[0] < 1 || percent[0] > page.AllParts {
		return 0, fmt.Errorf("%d%%: no container in the ledger has seat %d of the domain", percent[0], seat)
	}
	return int(percent[0]), nil
}

// open serves the gate's sockets: each is for the one container that sees its folder, and no other. Seat 0 is last: from then on others
// get new ones.
func (s Server) open(g *Gate) error {
	for seat, file := range slices.Backward(s.Sockets) {
		l, err := listen(file)
		if err != nil {
			return err
		}
		g.Sit(seat, l)
	}
	return nil
}

// listen listens on a socket that has its name. Members learn whose it is by that: this process'.
func listen(file *os.File) (*net.UnixListener, error) {
	defer file.Close()
	if err := unix.Listen(int(file.Fd()), unix.SOMAXCONN); err != nil {
		return nil, os.NewSyscallError("listen", err)
	}
	l, err := net.FileListener(file)
	if err != nil {
		return nil, err
	}
	return l.(*net.UnixListener), nil // nothing else of root's is a socket that listens
}

// Receive takes the file of parts and the gate's sockets from the socket that is a descriptor.
func Receive(fd int) (parts *os.File, sockets []*os.File, err error) {
	const want = 1 + page.Seats + 1
	oob := make([]byte, unix.CmsgSpace(want*4))
	_, n, _, _, err := unix.Recvmsg(fd, make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return nil, nil, os.NewSyscallError("recvmsg", err)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil {
		return nil, nil, err
	}
	var files []*os.File
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return nil, nil, err
		}
		for _, x := range fds {
			files = append(files, os.NewFile(uintptr(x), "parts or socket"))
		}
	}
	if len(files) != want {
		return nil, nil, fmt.Errorf("got %d files, want %d", len(files), want)
	}
	return files[0], files[1:], nil
}
