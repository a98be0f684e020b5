// SPDX-License-Identifier: Apache-2.0

package process

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// lockFD is where a new process finds the standby's lock, which it has already.
const lockFD = 3

// Start makes an arbiter for a GPU, or a second one, unless there are both. config is what the new process is told on standard input.
// To ask costs two system calls where they are there.
func Start(runDir, uuid string, config []byte) error {
	lock, err := openLock(runDir, uuid, standbyLock)
	if err != nil {
		return err
	}
	defer lock.Close()
	if free, err := takeIfFree(lock); err != nil || !free {
		return err
	}
	_, err = start(lock, config)
	return err
}

// start makes a standby, which inherits its lock: at no time is the lock free while there will be one. ended is closed when it is over.
func start(lock *os.File, config []byte) (ended <-chan struct{}, err error) {
	// A file, not a pipe: it reads all of it, whatever becomes of this process.
	fd, err := unix.MemfdCreate(Name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd: %w", err)
	}
	input := os.NewFile(uintptr(fd), "configuration")
	defer input.Close()
	if _, err := input.WriteAt(config, 0); err != nil {
		return nil, fmt.Errorf("write the configuration: %w", err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{Name}
	cmd.Env = []string{}
	cmd.Dir = "/"
	cmd.Stdin = input
	cmd.ExtraFiles = []*os.File{lock}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", Name, err)
	}
	done := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(done)
	}()
	return done, nil
}
