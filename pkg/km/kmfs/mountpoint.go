// SPDX-License-Identifier: Apache-2.0

package kmfs

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/terminal"
)

// mountPoint is where the tree is mounted: a name in a folder that is held open. What is unmounted is found from there, and
// not by the path again, below which somebody may have put a link since.
type mountPoint struct {
	parent int // O_PATH
	name   string
	made   bool // by us
}

const (
	// fsType is the type of our mounts in mountinfo.
	fsType = "fuse." + fsName
	// maxLinks bounds the links in a path, as the kernel does.
	maxLinks = 40
	// maxLeft bounds what is taken away of killed ones that lie on each other.
	maxLeft = 16
)

// newMountPoint makes the mount point, unless it is there, and takes away what a killed cgpu km has left mounted on it.
func newMountPoint(dir string) (*mountPoint, error) {
	if dir == "/" {
		return nil, errors.New("/: is not empty: name another folder")
	}
	parent, err := openParent(filepath.Dir(dir))
	if err != nil {
		return nil, err
	}
	p := &mountPoint{parent: parent, name: filepath.Base(dir)}
	if err := p.prepare(dir); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func (p *mountPoint) close() { _ = unix.Close(p.parent) }

func (p *mountPoint) prepare(dir string) error {
	for range maxLeft {
		var s unix.Stat_t
		err := unix.Fstatat(p.parent, p.name, &s, unix.AT_SYMLINK_NOFOLLOW)
		switch {
		case errors.Is(err, syscall.ENOTCONN): // FUSE without a server
			m, err := p.mount()
			if err != nil {
				return fmt.Errorf("%s: %w", dir, err)
			}
			if m.kind != fsType {
				return fmt.Errorf("%s: is a mount whose server has ended (%s), and none of cgpu km: umount it, or name another folder", dir,
					terminal.Printable(m.kind))
			}
			if err := p.unmount(m); err != nil {
				return fmt.Errorf("%s: is a mount whose server has ended, and cannot be unmounted: %w", dir, err)
			}
			continue
		case errors.Is(err, syscall.ENOENT):
			if err := unix.Mkdirat(p.parent, p.name, 0o755); err != nil {
				return fmt.Errorf("mkdir %s: %w", dir, err)
			}
			p.made = true
			return nil
		case err != nil:
			return fmt.Errorf("%s: %w", dir, err)
		case s.Mode&unix.S_IFMT != unix.S_IFDIR:
			return fmt.Errorf("%s: is no folder: name another, or remove it", dir)
		}
		fd, err := unix.Openat(p.parent, p.name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("%s: %w", dir, err)
		}
		f := os.NewFile(uintptr(fd), dir)
		defer f.Close()
		names, err := f.Readdirnames(1)
		if len(names) > 0 {
			return fmt.Errorf("%s: is not empty (%s): cgpu km runs already, or name another folder", dir, terminal.Printable(names[0]))
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		return trusted(dir, s) // whoever owns the folder could take it away, where its parent is as /tmp
	}
	return fmt.Errorf("%s: more than %d mounts whose servers have ended: umount them", dir, maxLeft)
}

// remove takes the mount point away, if it is ours.
func (p *mountPoint) remove() {
	if p.made {
		_ = unix.Unlinkat(p.parent, p.name, unix.AT_REMOVEDIR)
	}
}

// mountInfo is what lies on a place: the mount's ID and type.
type mountInfo struct {
	id   int
	kind string
}

// mount finds the mount that a place is in: the one that lies on it, or the one of its parent. O_PATH asks no server.
func (p *mountPoint) mount() (m mountInfo, err error) {
	fd, err := unix.Openat(p.parent, p.name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return m, err
	}
	defer unix.Close(fd)
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
	if err != nil {
		return m, err
	}
	for line := range strings.Lines(string(info)) {
		if id, ok := strings.CutPrefix(line, "mnt_id:"); ok {
			if m.id, err = strconv.Atoi(strings.TrimSpace(id)); err != nil {
				return m, err
			}
		}
	}
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return m, err
	}
	defer f.Close()
	m.kind, err = mountType(f, m.id)
	return m, err
}

// mountType is the type of a mount in mountinfo (proc_pid_mountinfo(5)): the first word behind the optional fields' end.
func mountType(mountinfo io.Reader, id int) (string, error) {
	lines := bufio.NewReader(mountinfo)
	for {
		line, err := lines.ReadString('\n')
		if about, rest, ok := strings.Cut(line, " - "); ok {
			first, _, _ := strings.Cut(about, " ")
			kind, _, _ := strings.Cut(rest, " ")
			if first == strconv.Itoa(id) {
				return kind, nil
			}
		}
		if errors.Is(err, io.EOF) {
			return "", fmt.Errorf("mount %d is not in mountinfo", id)
		}
		if err != nil {
			return "", err
		}
	}
}

// unmount takes away the mount m of cgpu km, if it is still what lies on the place.
func (p *mountPoint) unmount(m mountInfo) error {
	if now, err := p.mount(); err != nil || now != m || m.kind != fsType {
		return err
	}
	return unix.Unmount(fmt.Sprintf("/proc/self/fd/%d/%s", p.parent, p.name), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
}

// openParent opens a folder, and makes it where it is missing. On the way there is nothing that others could replace by what
// they like: folders and links are root's (or ours), and others do not write there, or only as in /tmp.
func openParent(dir string) (int, error) {
	const how = unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC
	at, err := unix.Open("/", how, 0)
	if err != nil {
		return -1, fmt.Errorf("/: %w", err)
	}
	path, rest, links := "/", strings.Split(dir, "/"), 0
	fail := func(err error) (int, error) {
		_ = unix.Close(at)
		return -1, err
	}
	for len(rest) > 0 {
		name := rest[0]
		rest = rest[1:]
		if name == "" || name == "." {
			continue
		}
		here := filepath.Join(path, name)
		next, err := unix.Openat(at, name, how, 0)
		if errors.Is(err, syscall.ENOENT) {
			if err := unix.Mkdirat(at, name, 0o755); err != nil && !errors.Is(err, syscall.EEXIST) {
				return fail(fmt.Errorf("mkdir %s: %w", here, err))
			}
			next, err = unix.Openat(at, name, how, 0)
		}
		if err != nil {
			return fail(fmt.Errorf("%s: %w", here, err))
		}
		var s unix.Stat_t
		if err = unix.Fstat(next, &s); err == nil {
			err = trusted(here, s)
		}
		if err == nil && s.Mode&unix.S_IFMT == unix.S_IFLNK {
			target := make([]byte, unix.PathMax)
			n, lerr := unix.Readlinkat(next, "", target)
			if links++; links > maxLinks {
				lerr = syscall.ELOOP
			}
			_ = unix.Close(next)
			if lerr != nil {
				return fail(fmt.Errorf("%s: %w", here, lerr))
			}
			rest = append(strings.Split(string(target[:n]), "/"), rest...)
			if target[0] != '/' {
				continue
			}
			path = "/"
			if next, err = unix.Open("/", how, 0); err != nil {
				return fail(fmt.Errorf("/: %w", err))
			}
			_ = unix.Close(at)
			at = next
			continue
		}
		if err == nil && s.Mode&unix.S_IFMT != unix.S_IFDIR {
			err = fmt.Errorf("%s: is no folder", here)
		}
		if err != nil {
			_ = unix.Close(next)
			return fail(err)
		}
		_ = unix.Close(at)
		at, path = next, here
	}
	return at, nil
}

// trusted refuses what others could replace, or put something into that they can replace.
func trusted(path string, s unix.Stat_t) error {
	const remedy = "want a MOUNTPOINT below folders that are root's and that nobody else writes to"
	if s.Uid != 0 && int(s.Uid) != os.Geteuid() {
		return fmt.Errorf("%s: belongs to user %d: %s", path, s.Uid, remedy)
	}
	if folder := s.Mode&unix.S_IFMT == unix.S_IFDIR; folder && s.Mode&0o022 != 0 && s.Mode&unix.S_ISVTX == 0 {
		return fmt.Errorf("%s: has mode %#o: %s", path, s.Mode&0o7777, remedy)
	}
	return nil
}
