// SPDX-License-Identifier: Apache-2.0

package domain

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/mps"
	"github.com/opencgpu/cgpu/pkg/page"
)

// sit gives a member its seat anew, before the folder is mounted into it: a folder and a socket that nobody has had, so that what somebody
// has kept of either leads nowhere. Killed in between it leaves a folder beside the seat's that the next one removes, or a socket at which
// nobody listens, in place of which the next one, and a server that starts, puts another.
func sit(pipes string, seat int) error {
	unlock, err := Lock(pipes)
	if err != nil {
		return err
	}
	defer unlock()
	members := filepath.Join(pipes, page.Members)
	dir := page.Seat(members, seat)
	fresh := dir + ".new"
	if err := os.RemoveAll(fresh); err != nil {
		return err
	}
	if err := errors.Join(os.Mkdir(fresh, 0o755), os.Chmod(fresh, 0o755)); err != nil { // whatever the umask
		return err
	}
	socket, err := Bind(fresh)
	if err != nil {
		return err
	}
	defer unix.Close(socket)
	if err := unix.Renameat2(unix.AT_FDCWD, fresh, unix.AT_FDCWD, dir, unix.RENAME_EXCHANGE); err != nil {
		return fmt.Errorf("exchange %s and %s: %w", fresh, dir, err)
	}
	if err := os.RemoveAll(fresh); err != nil {
		return err
	}
	gate, err := dial(page.Seat(members, 0))
	if err != nil {
		return err
	}
	defer gate.Close()
	return mps.Hand(gate, seat, socket)
}

// dial connects to the socket in a folder, whose path may be longer than a socket's may be.
func dial(dir string) (*net.UnixConn, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	conn, err := net.DialTimeout("unixpacket", inFolder(fd), time.Second)
	if err != nil {
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}

func inFolder(fd int) string {
	return "/proc/" + strconv.Itoa(os.Getpid()) + "/fd/" + strconv.Itoa(fd) + "/" + mps.SocketName
}

// Bind makes a socket in a folder in place of what is there, which members may have open: there is one at each moment. Anyone may connect
// who reaches the folder.
func Bind(dir string) (int, error) {
	folder, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(folder)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	path := inFolder(folder)
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

// Lock takes the lock of the folders in one of root's, which are changed in milliseconds; while a gate stands still, in seconds.
func Lock(folder string) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(folder, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return func() { f.Close() }, nil
}
