// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/mps"
	"github.com/opencgpu/cgpu/pkg/page"
)

// The gate's sockets are made by root, in folders of root's, and given to it: so the server's user has nothing to write in the host's /run,
// and members see nothing there that it could put in the sockets' place. Who takes them listens.

// sockets makes those of all seats in a domain's folder, and returns a socket from which mps.Receive takes them, with the file of parts.
func sockets(pipes string) (int, error) {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(ends[0])
	parts, err := unix.Open(filepath.Join(pipes, page.Parts), unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	made := []int{parts}
	if err == nil {
		defer unix.Close(parts)
	}
	for seat := 0; err == nil && seat <= page.Seats; seat++ {
		var fd int
		if fd, err = bound(page.Seat(filepath.Join(pipes, page.Members), seat)); err != nil {
			err = fmt.Errorf("make the socket of seat %d: %w", seat, err)
			break
		}
		defer unix.Close(fd)
		made = append(made, fd)
	}
	if err == nil {
		err = unix.Sendmsg(ends[0], []byte{0}, unix.UnixRights(made...), nil, 0)
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(ends[1]))
	}
	return ends[1], nil
}

// bound makes a socket in a folder in place of what an earlier server had, which members may have open: there is one at each moment.
// Anyone may connect who reaches the folder.
func bound(dir string) (int, error) {
	folder, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(folder)
	path := "/proc/self/fd/" + strconv.Itoa(folder) + "/" + mps.SocketName // the folder's own may be longer than a socket's may be
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	fresh := path + ".new"
	_ = os.Remove(fresh)
	if err = unix.Bind(fd, &unix.SockaddrUnix{Name: fresh}); err == nil {
		err = errors.Join(os.Chmod(fresh, 0o666), os.Rename(fresh, path))
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}
