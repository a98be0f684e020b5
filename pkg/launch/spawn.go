// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// spawn starts a program in a session of its own with exactly the given files, and returns its process id.
//
// What the engine passed us without close-on-exec (a console, conmon's pipes, --preserve-fds) is for runc alone: a
// guard that held a copy would keep the engine waiting for its end. So those are closed for the program and left open
// for runc.
func spawn(path string, argv, env []string, files []int) (int, error) {
	inherited := openFiles()
	for _, fd := range inherited {
		unix.CloseOnExec(fd)
	}
	descriptors := make([]uintptr, len(files))
	for i, fd := range files {
		descriptors[i] = uintptr(fd)
	}
	pid, err := syscall.ForkExec(path, argv, &syscall.ProcAttr{
		Dir: "/", // a bundle must stay removable
		Env: env, Files: descriptors,
		Sys: &syscall.SysProcAttr{Setsid: true},
	})
	for _, fd := range inherited {
		unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0)
	}
	return pid, err
}

// openFiles lists the descriptors above stderr that a program we execute would inherit.
func openFiles() []int {
	dir, err := os.Open("/proc/self/fd")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	var fds []int
	for _, name := range names {
		fd, err := strconv.Atoi(name)
		if err != nil || fd <= 2 {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			fds = append(fds, fd)
		}
	}
	return fds
}
