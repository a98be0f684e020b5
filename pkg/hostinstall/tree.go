// SPDX-License-Identifier: Apache-2.0

package hostinstall

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// What a version has, below its folder. Programs find one another beside themselves, so a version is whole or is none.
var (
	required = []string{"bin/cgpu", "bin/cgpu-guard", "bin/cgpu-hook", "bin/cgpu-podresources", "bin/cgpu-refresh", "bin/cgpu-runtime",
		"lib/cgpu/libcgpu.so"}
	optional = []string{"bin/cgpu-probe", "bin/cgpu-sim", "lib/cgpu/cgpu-load"}
)

// tree is a version that lies in a folder.
type tree struct {
	fs.FS
	files []string
	name  string // of what is in it, so that two versions never have one name, and one never two
}

// readTree reads the version that fsys has; dir is what it is called.
func readTree(fsys fs.FS, dir string) (t tree, err error) {
	t.FS = fsys
	sum := sha256.New()
	for i, name := range append(append([]string{}, required...), optional...) {
		content, err := digest(fsys, name)
		if errors.Is(err, fs.ErrNotExist) && i >= len(required) {
			continue
		}
		if err != nil {
			return t, fmt.Errorf("%s: %w: want all programs of cgpu there, as in the image cgpu-installer", filepath.Join(dir, name), bare(err))
		}
		t.files = append(t.files, name)
		fmt.Fprintf(sum, "%s %x\n", name, content)
	}
	t.name = fmt.Sprintf("%x", sum.Sum(nil)[:8])
	return t, nil
}

func digest(fsys fs.FS, name string) ([]byte, error) {
	f, err := fsys.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.Join(err, errors.New("want a file"))
	}
	sum := sha256.New()
	_, err = io.Copy(sum, f)
	return sum.Sum(nil), err
}

// bare is an error without the path, which the caller says.
func bare(err error) error {
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return e.Err
	}
	return err
}

// stage puts a version into the folder of versions. It gets its name when all of it is on the disk; a version that is there is not
// written again: guards run from its files.
func (t tree) stage(versions string) error {
	if err := rootsOwn(versions); err != nil {
		return fmt.Errorf("%w: chown and chmod it, if what is in it is cgpu-installer's", err)
	}
	target := filepath.Join(versions, t.name)
	if _, err := os.Lstat(target); err == nil {
		return t.sameAs(target)
	}
	work := filepath.Join(versions, newVersion)
	if err := os.RemoveAll(work); err != nil {
		return err
	}
	defer os.RemoveAll(work) // a part of a version would keep a full disk full
	for _, name := range t.files {
		if err := t.copyTo(filepath.Join(work, name), name); err != nil {
			return err
		}
	}
	if err := syncAll(work); err != nil {
		return err
	}
	return os.Rename(work, target)
}

// sameAs requires that a version that is there is this one, and stays so.
func (t tree) sameAs(target string) error {
	const remedy = "delete that folder when no container of cgpu runs on this node"
	if there, err := readTree(os.DirFS(target), target); err != nil {
		return err
	} else if there.name != t.name {
		return fmt.Errorf("%s: it is not what was installed there: %s", target, remedy)
	}
	return filepath.WalkDir(target, func(path string, _ fs.DirEntry, err error) error {
		if err == nil {
			err = rootsOwn(path)
		}
		if err != nil {
			return fmt.Errorf("%w: %s", err, remedy)
		}
		return nil
	})
}

// unfinished begins names of what is being made or removed.
const (
	unfinished = "."
	newVersion = unfinished + "new"
	gone       = unfinished + "gone-"
)

func (t tree) copyTo(to, name string) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	in, err := t.Open(name)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	if closed := out.Close(); err == nil {
		err = closed
	}
	return err
}

// syncAll writes out the file system of a folder: after a power cut there is no version of which a part is missing.
func syncAll(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	return nil
}

// isVersion tells the name of a version from those of others' files.
func isVersion(name string) bool {
	return len(name) == 16 && strings.Trim(name, "0123456789abcdef") == ""
}

// discard removes a version. It loses its name first: who is killed here leaves no version of which a part is missing.
func discard(versions, name string) error {
	work := filepath.Join(versions, gone+name)
	if err := os.RemoveAll(work); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(versions, name), work); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.RemoveAll(work)
}
