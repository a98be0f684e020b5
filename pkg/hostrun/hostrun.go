// SPDX-License-Identifier: Apache-2.0

// Package hostrun gives a process of the host, without a container, what cgpu-runtime gives a container: a /dev with its GPUs and
// no others, a cgroup of its own, the vGPU page and the preload library, and the seccomp filter whose listener goes to the
// guard.
//
// cmd/cgpu's run does it to itself, and to a process of Slurm's by Prepare. There is no supervisor: the calling process is set up and
// becomes the command by execve, as runc's create and nice do. Its exit status, signals, terminal and job control are therefore the
// command's own, without anything of ours in between that could pass them on wrongly, and a kill of "cgpu run" is one of the command.
// What is left to do at the end the guard does, which notices when the last process with the filter is gone.
package hostrun

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// Run is a command and what it gets.
type Run struct {
	// Plan names the nodes, the page, the limiter and the guard's socket.
	Plan    spec.Plan
	RunDir  string
	Cgroups []string // of Cgroups; the guard removes them
	// HostMemory bounds the host's memory that it takes, where the machine has cgroup v2; 0: it is not bounded.
	HostMemory quota.Bytes
	// Input makes its standard input, by root and when all is reserved for it; nil: it has the caller's.
	Input func() (fd int, err error)
	// Root is what it sees of the host's files, and with one of its own it has no network.
	Root   Root
	User   User
	Args   []string
	Env    []string // the caller's
	Caller Inherited
}

// CommandError says that everything was ready but the command.
type CommandError struct {
	Name string
	Err  error
}

func (e *CommandError) Error() string {
	why := e.Err
	if errors.Is(e.Err, exec.ErrNotFound) {
		why = errors.New("there is no such program in PATH: give its path; sudo sets a PATH of its own")
	}
	return fmt.Sprintf("run: %s: %v", e.Name, why)
}

func (e *CommandError) Unwrap() error { return e.Err }

// ExitCode is what shells use.
func (e *CommandError) ExitCode() int {
	if errors.Is(e.Err, exec.ErrNotFound) || errors.Is(e.Err, os.ErrNotExist) {
		return 127
	}
	return 126
}

// Exec becomes the command. It returns only when that failed; the process is good for nothing but to end then.
//
// The order matters: the guard's socket is out of sight in the new namespace, and out of reach for another user; the user's
// privileges do for the filter, since he promises never to gain any (no_new_privs). What fails before the filter has gone to
// the guard is undone by the guard when this process ends, and so is what fails after.
func Exec(r Run) error {
	runtime.LockOSThread() // namespaces, credentials and filter are a thread's; exec makes it the only one
	conn, err := connect(r.Plan.Socket)
	if err != nil {
		return fmt.Errorf("run: connect to the guard: %w", err)
	}
	dir := workingFolder()
	var path string
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"cgroup", func() error { return makeCgroups(os.Getpid(), r.Cgroups, forbidden(r.Plan)) }},
		{"memory bound", func() error { return boundMemory(r.Cgroups, r.HostMemory) }},
		{"standard input", r.input},
		{"namespaces", func() error { return newNamespaces(r.Root.namespaces()) }},
		{"/dev", func() error { return mountDev(r.Plan, r.RunDir) }},
		{"driver parameters", func() error { return keepDeviceNodes("/dev", "/proc/driver/nvidia/params") }},
		{"root", func() error { return r.Root.build(filepath.Join(r.RunDir, stageName)) }},
		{"limiter", func() error { return mountLimiter(r.Plan) }},
		{"root", r.Root.enter},
		{"caller", r.Caller.GiveBack}, // what was raised only root may raise again
		{"user", func() error { return become(r.User) }},
		{"working folder", func() error { return returnTo(dir) }},
		{"command", func() (err error) { path, err = find(r.Args[0], r.Env); return err }},
		{"seccomp filter", func() error { return guarded(conn, r.Plan.ID, r.Plan.Nonce) }},
	} {
		err := step.do()
		if _, ok := errors.AsType[*CommandError](err); ok {
			return err
		}
		if err != nil {
			return fmt.Errorf("run: %s: %w", step.name, err)
		}
	}
	err = syscall.Exec(path, r.Args, environment(r.Env, r.User, r.Plan))
	return &CommandError{path, err}
}

func (r Run) input() error {
	if r.Input == nil {
		return nil
	}
	fd, err := r.Input()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Dup3(fd, 0, 0)
}

// find looks for the command as the user does, in the PATH of env, after all else that might hide it or forbid it.
func find(name string, env []string) (string, error) {
	for _, e := range env {
		if path, ok := strings.CutPrefix(e, "PATH="); ok {
			if err := os.Setenv("PATH", path); err != nil {
				return "", err
			}
		}
	}
	path, err := exec.LookPath(name)
	if e, ok := errors.AsType[*exec.Error](err); ok {
		err = e.Err
	}
	if err != nil {
		return "", &CommandError{name, err}
	}
	return path, nil
}

// newNamespaces gives this thread mounts of its own, and more. What the host mounts later, an automounted home say, still shows up.
func newNamespaces(flags int) error {
	if err := unix.Unshare(flags); err != nil {
		return fmt.Errorf("%w: it takes CAP_SYS_ADMIN", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("keep its mounts to itself: %w", err)
	}
	return nil
}

func connect(socket string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: socket}); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("%s: %w", socket, err)
	}
	return fd, nil
}

// become gives up root's powers for those of the user. Root himself keeps them: they are needed for his filter, and nothing
// holds root anyway.
func become(u User) error {
	if !u.Keep {
		if err := syscall.Setgroups(u.Groups); err != nil {
			return fmt.Errorf("setgroups: %w", err)
		}
		if err := syscall.Setresgid(u.GID, u.GID, u.GID); err != nil {
			return fmt.Errorf("setgid %d: %w", u.GID, err)
		}
		if err := syscall.Setresuid(u.UID, u.UID, u.UID); err != nil {
			return fmt.Errorf("setuid %d: %w", u.UID, err)
		}
	}
	if u.UID == 0 {
		return nil
	}
	// nvidia-modprobe, set-uid root, would make the nodes of other GPUs; sudo would lead out of the namespace.
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	return nil
}

// Name is what cgpu smi calls a run that has no name: the command's, without its path.
func Name(args []string) string {
	return args[0][strings.LastIndexByte(args[0], '/')+1:]
}
