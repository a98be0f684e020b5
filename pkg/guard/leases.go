// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"

	"golang.org/x/sys/unix"
)

// A tenant who is root in his container owns what root's are of the files that he sees, also those that are mounted read-only, and may take
// a write lease on each (fcntl(2), F_SETLEASE). Whoever opens it then waits until the holder gives way or 45 seconds are over
// (/proc/sys/fs/lease-break-time): every program that loads libcuda.so, every start of a container, and this guard when it reads the
// container's cgroup. The kernel grants no write lease on a file that somebody else has open (check_conflicting_open, fs/locks.c; before
// Linux 5.3 in generic_add_lease), so the guard has all of these open before the container has a process, for as long as it runs.
// Read leases it grants: only who opens for writing waits for those, and nobody does.

// holdOpen opens files for reading, forever. One that is not there, or is no regular file, cannot be leased.
func holdOpen(paths []string, log *slog.Logger) (fds []int) {
	for _, path := range paths {
		fd, err := holdFile(path)
		switch {
		case err == nil:
			fds = append(fds, fd)
		case errors.Is(err, errNotHeld), errors.Is(err, fs.ErrNotExist):
		default:
			// EAGAIN: somebody else holds a lease, who is in no container of ours. Our asking has begun to break it.
			log.Warn("a file that containers share is not held: one may stall whoever opens it", "err", err)
		}
	}
	return fds
}

var errNotHeld = errors.New("is no regular file")

func holdFile(path string) (int, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil { // a device or a pipe must not even be opened
		return -1, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return -1, fmt.Errorf("%s: %w", path, errNotHeld)
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}
