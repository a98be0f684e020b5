// SPDX-License-Identifier: Apache-2.0

package mount

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// Try copies the mount of a file and moves it over the file itself, where nobody sees it: kernels before 5.12 do not know these calls, and
// a filter of system calls or a security module may forbid each by itself.
func Try(file string) error {
	failed := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with its mounts
		failed <- try(file)
	}()
	return <-failed
}

// try is Try, on a thread that nobody uses afterwards.
func try(file string) error {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("mounts of its own: %w", err)
	}
	// Not private: what the host unmounts must not stay mounted here.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("mounts of its own: %w", err)
	}
	tree, err := Copy(file)
	if err != nil {
		return err
	}
	defer unix.Close(tree)
	place, err := unix.Open(file, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(place)
	return Move(tree, place)
}
