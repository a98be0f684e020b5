// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"path"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/inside"
	"github.com/opencgpu/cgpu/pkg/mount"
)

// bind is a driver file of the host that the container sees.
type bind struct{ host, path string }

// mostLinks is how many links to folders that are not there are followed to make them, such as /lib -> usr/lib in a small image: the
// runtime does so, too.
const mostLinks = 8

// errTaken is of a place where a mount is: the user's own file, or one of ours. It stays, as where config.json names the place.
var errTaken = errors.New("something is mounted in its place")

// bindFiles mounts the driver's files, read-only. The low-level runtime would, too, and takes five times as long: it looks at each part
// of each path again for each flag.
func bindFiles(r root, files []bind, stderr io.Writer) error {
	for _, b := range files {
		switch err := r.bind(b); {
		case errors.Is(err, errTaken):
			fmt.Fprintf(stderr, "cgpu-hook: the container starts without the driver's %s: %v\n", b.path, err)
		case err != nil:
			return fmt.Errorf("mount the driver's %s: %w", b.path, err)
		}
	}
	return nil
}

// bind mounts one. The mount has its flags before it has a place, which somebody may rename meanwhile: nobody ever sees one of the host's
// files that he could write to.
func (r root) bind(b bind) error {
	tree, err := mount.Copy(b.host)
	if err != nil {
		return err
	}
	defer unix.Close(tree)
	var st unix.Stat_t
	if err := unix.Fstat(tree, &st); err != nil {
		return err
	}
	isFolder := st.Mode&unix.S_IFMT == unix.S_IFDIR
	place, err := r.place(b.path, isFolder)
	if err != nil {
		return err
	}
	defer unix.Close(place)
	if err := r.allow(place, isFolder); err != nil {
		return err
	}
	return mount.Move(tree, place)
}

// allow says what speaks against a place, to which the image's links may have led.
func (r root) allow(place int, isFolder bool) error {
	var fs unix.Statfs_t
	var at, top unix.Statx_t
	const flags = unix.AT_EMPTY_PATH | unix.AT_STATX_DONT_SYNC
	if err := cmp.Or(unix.Fstatfs(place, &fs), unix.Statx(place, "", flags, unix.STATX_BASIC_STATS, &at),
		unix.Statx(r.fd, "", flags, unix.STATX_BASIC_STATS, &top)); err != nil {
		return err
	}
	switch {
	case fs.Type == unix.PROC_SUPER_MAGIC:
		// As runtimes refuse it: who writes there of a container that begins, such as its AppArmor profile, must reach the kernel.
		return fmt.Errorf("the image has a link to /proc in its place: %w", unix.EPERM)
	case at.Ino == top.Ino && at.Dev_major == top.Dev_major && at.Dev_minor == top.Dev_minor:
		return fmt.Errorf("the image has a link to its root folder in its place: %w", unix.EPERM)
	case !isFolder && at.Mode&unix.S_IFMT == unix.S_IFDIR:
		return fmt.Errorf("the image has a folder in its place: %w", unix.EISDIR)
	case at.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0:
		return errTaken
	}
	return nil
}

// place opens what a file, or a folder, is to be mounted over, and makes what is missing, also in a volume: the runtime has always done so.
func (r root) place(name string, isFolder bool) (int, error) {
	if isFolder {
		f, err := r.folderIn(name, inside.AnyMount, mostLinks)
		return f.fd, err
	}
	for range 3 { // a second process may be at work in the same root
		fd, err := inside.Open(r.fd, name, unix.O_PATH, inside.AnyMount)
		if !errors.Is(err, unix.ENOENT) {
			return fd, err
		}
		if err := r.makeFile(name, mostLinks); err != nil {
			return -1, err
		}
	}
	return -1, fmt.Errorf("%s is removed again and again: %w", name, unix.ENOENT)
}

// makeFile makes an empty file; where a link to nothing is, the file to which it leads, as the runtime does: the link may be a volume's.
func (r root) makeFile(name string, links int) error {
	in, base := path.Split(name) // not path.Dir: ".." behind a link is not what it looks like
	dir, err := r.folderIn(in, inside.AnyMount, mostLinks)
	if err != nil {
		return err
	}
	defer dir.close()
	fd, err := unix.Openat(dir.fd, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o755)
	switch {
	case err == nil:
		return unix.Close(fd)
	case !errors.Is(err, unix.EEXIST):
		return dir.fail("create", base, err)
	}
	var text [unix.PathMax]byte
	n, err := unix.Readlinkat(dir.fd, base, text[:])
	switch {
	case err != nil:
		return nil //nolint:nilerr // no link: another process has made the file
	case links == 0:
		return dir.fail("create", base, unix.ELOOP)
	}
	return r.makeFile(target(in, string(text[:n])), links-1)
}

// target is where a link in a folder leads, with every ".." left to the kernel.
func target(in, to string) string {
	if path.IsAbs(to) {
		return to
	}
	return in + "/" + to
}
