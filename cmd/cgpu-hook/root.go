package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// root is a container's root folder. What is in it belongs to the image, perhaps to an attacker: every path is resolved
// by the kernel as if the folder were "/", so that no symbolic link leads out of it. (os.Root would refuse absolute
// links, such as /lib -> /usr/lib, which images have.)
type root struct{ fd int }

func openRoot(path string) (root, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return root{}, fmt.Errorf("container root %s: %w", path, err)
	}
	return root{fd}, nil
}

func (r root) close() { unix.Close(r.fd) }

// open opens name inside the root.
func (r root) open(name string, flags uint64, mode uint32) (int, error) {
	how := unix.OpenHow{
		Flags: flags | unix.O_CLOEXEC, Mode: uint64(mode),
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	}
	fd := -1
	err := retry(func() (err error) {
		fd, err = unix.Openat2(r.fd, name, &how)
		return err
	})
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return fd, nil
}

// retry repeats a call that was interrupted, or during which something was renamed so that the kernel could not be sure of
// ".." (EAGAIN); not for ever, since a tenant can rename as long as he likes.
func retry(call func() error) (err error) {
	const tries = 100
	for range tries {
		if err = call(); !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) {
			return err
		}
	}
	return fmt.Errorf("given up after %d tries, during each of which a folder was renamed: %w", tries, err)
}

// folder opens a folder inside the root and makes what is missing of it.
func (r root) folder(name string) (int, error) {
	const flags = unix.O_PATH | unix.O_DIRECTORY
	fd, err := r.open(name, flags, 0)
	if !errors.Is(err, unix.ENOENT) {
		return fd, err
	}
	made := ""
	for part := range strings.SplitSeq(strings.Trim(path.Clean(name), "/"), "/") {
		parent, err := r.open("/"+made, flags, 0)
		if err != nil {
			return -1, err
		}
		err = unix.Mkdirat(parent, part, 0o755)
		unix.Close(parent)
		made += "/" + part
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return -1, &os.PathError{Op: "mkdir", Path: made, Err: err}
		}
	}
	return r.open(name, flags, 0)
}

// link makes the symbolic link name to target. Another link and an empty file, as a committed image keeps of a mount,
// give way; a file of the image stays.
func (r root) link(target, name string) error {
	dir, err := r.folder(path.Dir(name))
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	base := path.Base(name)
	for range 3 { // a second process may be at work in the same root
		err = unix.Symlinkat(target, dir, base)
		if !errors.Is(err, unix.EEXIST) {
			break
		}
		var have [4096]byte
		if n, readErr := unix.Readlinkat(dir, base, have[:]); readErr == nil {
			if string(have[:n]) == target {
				return nil
			}
		} else {
			var st unix.Stat_t
			if err := unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW); err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > 0) {
				return nil
			}
		}
		if err := unix.Unlinkat(dir, base, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return &os.PathError{Op: "remove", Path: name, Err: err}
		}
	}
	if err != nil {
		return &os.PathError{Op: "link", Path: name, Err: err}
	}
	return nil
}

// read reads a regular file of at most so many bytes. Anything else is not even opened: a pipe would wait, a device act.
func (r root) read(name string, most int64) ([]byte, error) {
	fd, err := r.open(name, unix.O_PATH, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	switch err := unix.Fstat(fd, &st); {
	case err != nil:
		return nil, &os.PathError{Op: "stat", Path: name, Err: err}
	case st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > most:
		return nil, fmt.Errorf("%s: no regular file of at most %d bytes", name, most)
	}
	// Who has a lease of the file (F_SETLEASE) would make an open wait for 45 seconds.
	file, err := unix.Open("/proc/self/fd/"+strconv.Itoa(fd), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(file), name)
	defer f.Close()
	text := make([]byte, st.Size) // no more, should it grow meanwhile
	n, err := io.ReadFull(f, text)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, &os.PathError{Op: "read", Path: name, Err: err}
	}
	return text[:n], nil
}

// write writes a file, whole or not at all; what was there, also a link, is replaced.
func (r root) write(name string, content []byte) error {
	dir, err := r.folder(path.Dir(name))
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	base := path.Base(name)
	temp := "." + base + ".cgpu"
	// A leftover of a killed hook, or something that the image put there.
	if err := unix.Unlinkat(dir, temp, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return &os.PathError{Op: "remove", Path: temp, Err: err}
	}
	fd, err := unix.Openat(dir, temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return &os.PathError{Op: "create", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.Write(content)
	if err == nil {
		err = f.Chmod(0o644)
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = unix.Renameat(dir, temp, dir, base)
	}
	if err != nil {
		unix.Unlinkat(dir, temp, 0)
		return &os.PathError{Op: "write", Path: name, Err: err}
	}
	return nil
}

// isReadOnly says whether err is that the root cannot be written to. Such a container starts all the same: its image
// may have what is needed.
func isReadOnly(err error) bool {
	return errors.Is(err, syscall.EROFS)
}
