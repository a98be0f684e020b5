// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/inside"
)

// root is a container's root folder. What is in it belongs to the image, perhaps to an attacker (package inside), who must not lead us
// into the volumes that are mounted in it: they are another's.
type root struct{ fd int }

func openRoot(path string) (root, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return root{}, fmt.Errorf("container root %s: %w", path, err)
	}
	return root{fd}, nil
}

func (r root) close() { unix.Close(r.fd) }

// folder is a folder inside the root. What is done in it, also when the tenant of another container renames it meanwhile, is done in one.
type folder struct {
	fd   int
	name string
}

func (f folder) close() { unix.Close(f.fd) }

// folder opens a folder of the image and makes what is missing of it.
func (r root) folder(name string) (folder, error) {
	return r.folderIn(name, inside.SameMount, 0)
}

// folderIn does so, and resolves the name as package inside says. So many links to what is not there may lead to a folder that is made.
func (r root) folderIn(name string, resolve uint64, links int) (folder, error) {
	const flags = unix.O_PATH | unix.O_DIRECTORY
	open := func(name string) (int, error) { return inside.Open(r.fd, name, flags, resolve) }
	fd, err := open(name)
	made := ""
	for part := range strings.SplitSeq(name, "/") {
		if part == "" || part == "." {
			continue
		}
		if !errors.Is(err, unix.ENOENT) {
			break
		}
		parent, openErr := open("/" + made)
		if openErr != nil {
			return folder{}, openErr
		}
		mkdirErr := unix.Mkdirat(parent, part, 0o755)
		if errors.Is(mkdirErr, unix.EEXIST) && links > 0 {
			r.makeTarget(parent, made, part, resolve, links-1)
		}
		unix.Close(parent)
		made += "/" + part
		if mkdirErr != nil && !errors.Is(mkdirErr, unix.EEXIST) {
			return folder{}, &os.PathError{Op: "mkdir", Path: made, Err: mkdirErr}
		}
		fd, err = open(name)
	}
	if errors.Is(err, unix.EXDEV) {
		return folder{}, fmt.Errorf("%s is in a volume, or leads to one: %w", name, unix.EXDEV)
	}
	return folder{fd, name}, err
}

// makeTarget makes the folder to which base, a link in the folder parent, leads: then what is opened by its name is there.
func (r root) makeTarget(parent int, name, base string, resolve uint64, links int) {
	var text [unix.PathMax]byte
	n, err := unix.Readlinkat(parent, base, text[:])
	if err != nil {
		return // a folder that another process has made
	}
	if f, err := r.folderIn(target(name, string(text[:n])), resolve, links); err == nil {
		f.close()
	}
}

// open opens a file of the folder, but not what is mounted there, and no link's target.
func (f folder) open(base string) (int, error) {
	fd, err := inside.Open(f.fd, base, unix.O_PATH|unix.O_NOFOLLOW, inside.SameMount)
	if err != nil {
		return -1, fmt.Errorf("%s: %w", f.name, err)
	}
	return fd, nil
}

// fail is an error of an operation on a file of the folder.
func (f folder) fail(op, base string, err error) error {
	return &os.PathError{Op: op, Path: path.Join(f.name, base), Err: err}
}

// makeLinks makes links, each by itself. Most are in one folder, which is opened once.
func makeLinks(r root, links []device.Link, stderr io.Writer) error {
	var dir folder
	var err error
	for i, l := range links {
		if in := path.Dir(l.Path); i == 0 || in != dir.name {
			if i > 0 && err == nil {
				dir.close()
			}
			dir, err = r.folder(in)
			dir.name = in
		}
		made := err
		if made == nil {
			made = dir.link(l.Target, path.Base(l.Path))
		}
		if err := forgive(stderr, made); err != nil {
			return err
		}
	}
	return nil
}

// link makes the symbolic link base to target. Another link and an empty file, as a committed image keeps of a mount,
// give way; a file of the image stays.
func (f folder) link(target, base string) (err error) {
	for range 3 { // a second process may be at work in the same root
		err = unix.Symlinkat(target, f.fd, base)
		if !errors.Is(err, unix.EEXIST) {
			break
		}
		if f.keeps(base, target) {
			return nil
		}
		if err := unix.Unlinkat(f.fd, base, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return f.fail("remove", base, err)
		}
	}
	if err != nil {
		return f.fail("link", base, err)
	}
	return nil
}

// keeps says whether what is in the place of a link to target stays.
func (f folder) keeps(base, target string) bool {
	fd, err := f.open(base)
	if err != nil {
		return errors.Is(err, unix.EXDEV)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return false
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		var have [4096]byte
		n, err := unix.Readlinkat(fd, "", have[:])
		return err == nil && string(have[:n]) == target
	case unix.S_IFREG:
		return st.Size > 0
	}
	return true
}

// readFile reads a regular file of at most so many bytes.
func (f folder) readFile(base string, most int64) ([]byte, error) {
	fd, err := f.open(base)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	text, err := inside.Read(fd, most)
	if err != nil {
		return nil, f.fail("read", base, err)
	}
	return text, nil
}

// write writes a file, whole or not at all; what was there, also a link, is replaced. What it has already is not written again: a
// container starts anew also where no room is left.
func (f folder) write(base string, content []byte) error {
	if have, err := f.readFile(base, int64(len(content))); err == nil && bytes.Equal(have, content) {
		return nil
	}
	// Not by pkg/atomicfile, which takes paths: this folder is a tenant's, and reached by its descriptor alone. The name is
	// of no other hook in the same folder, and none that a tenant there could guess.
	temp := fmt.Sprintf(".%s.%016x", base, rand.Uint64())
	fd, err := unix.Openat(f.fd, temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return f.fail("create", base, err)
	}
	file := os.NewFile(uintptr(fd), path.Join(f.name, base))
	_, err = file.Write(content)
	if err == nil {
		err = file.Chmod(0o644)
	}
	if closeErr := file.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		if err = unix.Renameat(f.fd, temp, f.fd, base); err != nil {
			err = f.fail("replace", base, err)
		}
	}
	if err != nil {
		unix.Unlinkat(f.fd, temp, 0)
	}
	return err
}

// forgive tells of what a container starts without, since its root, or one file of it, cannot be written to: its image may have what is
// needed, and what a link is missing for, the ld cache mostly has.
func forgive(stderr io.Writer, err error) error {
	for _, mild := range []error{unix.EROFS, unix.EXDEV, unix.EBUSY, unix.EPERM, unix.EACCES, unix.ENOSPC, unix.EDQUOT} {
		if errors.Is(err, mild) {
			fmt.Fprintln(stderr, "cgpu-hook: the container starts without:", err)
			return nil
		}
	}
	return err
}
