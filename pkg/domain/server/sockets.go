// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/domain"
	"github.com/opencgpu/cgpu/pkg/page"
)

// The gate's sockets are made by root, in folders of root's, and given to it: so the server's user has nothing to write in the host's /run,
// and members see nothing there that it could put in the sockets' place. Who takes them listens.

// sockets makes those of all seats in a domain's folder, and returns a socket from which mps.Receive takes them, with the file of parts.
func sockets(pipes string) (int, error) {
	unlock, err := domain.Lock(pipes)
	if err != nil {
		return -1, err
	}
	defer unlock()
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
		if fd, err = domain.Bind(page.Seat(filepath.Join(pipes, page.Members), seat)); err != nil {
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
