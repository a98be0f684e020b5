// SPDX-License-Identifier: Apache-2.0

// Package inside opens and reads what is below a folder that belongs to somebody else, such as a container's root: perhaps to an
// attacker. The kernel resolves every path as if the folder were "/", so that no symbolic link leads out of it. (os.Root would refuse
// absolute links, such as /lib -> /usr/lib, which images have.)
package inside

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// How Open resolves a path.
const (
	// AnyMount follows links, but none of the kind of /proc/PID/root.
	AnyMount = unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS
	// SameMount does so too, and fails with EXDEV where the way leads to a mount: a volume, which is not the image's, or a file system
	// that does not answer.
	SameMount = AnyMount | unix.RESOLVE_NO_XDEV
)

// Open opens the name of a file below the folder root.
func Open(root int, name string, flags, resolve uint64) (fd int, err error) {
	how := unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: resolve}
	err = retry(func() error {
		fd, err = unix.Openat2(root, name, &how)
		return err
	})
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return fd, nil
}

const (
	tries    = 100
	tryFirst = 10 // of them at once, the others a millisecond apart: who renames must do so all that time
)

// retry repeats a call that was interrupted, or during which something was renamed so that the kernel could not be sure of
// ".." (EAGAIN); not for ever, since a tenant can rename as long as he likes.
func retry(call func() error) (err error) {
	for try := range tries {
		if try >= tryFirst {
			time.Sleep(time.Millisecond)
		}
		if err = call(); !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) {
			return err
		}
	}
	return fmt.Errorf("given up after %d tries, during each of which a folder was renamed: %w", tries, err)
}

// Read reads a regular file of at most so many bytes, which was opened with O_PATH. Anything else is not even opened: a pipe would
// wait, a device act.
func Read(fd int, most int64) ([]byte, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > most {
		return nil, fmt.Errorf("no regular file of at most %d bytes", most)
	}
	// Who has a lease of the file (F_SETLEASE) would make an open wait for 45 seconds.
	file, err := unix.Open("/proc/self/fd/"+strconv.Itoa(fd), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(file)
	text := make([]byte, st.Size) // no more, should it grow meanwhile
	for n := 0; n < len(text); {
		got, err := unix.Read(file, text[n:])
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil, err
		case got == 0: // it has become shorter
			return text[:n], nil
		}
		n += got
	}
	return text, nil
}
