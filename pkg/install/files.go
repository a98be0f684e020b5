// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/engine"
	"github.com/opencgpu/cgpu/pkg/hostrun"
)

// backupMark stands between a file's name and the time at which its backup was made.
const backupMark = ".cgpu-backup-"

// applied is what was done, for undoing it.
type applied struct {
	edits   []engine.Edit // with the paths that were written, links resolved
	backups []string      // that were made now
	said    []string
}

// apply makes edits: backup, new file beside the old, rename. If one fails, those before are undone.
func apply(edits []engine.Edit) (applied, error) {
	var done applied
	fail := func(err error) (applied, error) {
		if undo := done.undo(); undo != nil {
			err = fmt.Errorf("%w; and putting the files back: %w", err, undo)
		}
		return applied{}, err
	}
	// Others read the folders that are made: the engine's own users, containerd's imports.
	defer unix.Umask(unix.Umask(hostrun.Umask))
	for _, e := range edits {
		// A link (to a file of a configuration management, say) stays one.
		e.Path = linked(e.Path)
		if e.Before != nil && !e.Note && e.After != nil {
			made, err := backup(e)
			if err != nil {
				return fail(writeError(e.Path, err))
			}
			if made != "" {
				done.backups = append(done.backups, made)
				done.said = append(done.said, "backup: "+made)
			}
		}
		if err := write(e.Path, e.After); err != nil {
			return fail(writeError(e.Path, err))
		}
		done.edits = append(done.edits, e)
	}
	return done, nil
}

// linked is the file that a path leads to by links, though it may not be there yet.
func linked(path string) string {
	for range 40 { // as many as the kernel follows
		if real, err := filepath.EvalSymlinks(path); err == nil {
			return real
		}
		target, err := os.Readlink(path)
		if err != nil {
			break
		}
		if !filepath.IsAbs(target) {
			dir, err := filepath.EvalSymlinks(filepath.Dir(path))
			if err != nil {
				break
			}
			target = filepath.Join(dir, target)
		}
		path = target
	}
	return path
}

// undo puts the files back.
func (a applied) undo() error {
	var errs []error
	for _, e := range slices.Backward(a.edits) {
		if err := write(e.Path, e.Before); err != nil {
			errs = append(errs, writeError(e.Path, err))
		}
	}
	for _, b := range a.backups {
		if err := dropBackup(b); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// takeBack is undo for later: what others have written since is theirs.
func (a applied) takeBack() error {
	for _, e := range a.edits {
		text, err := os.ReadFile(e.Path)
		if e.After == nil && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return writeError(e.Path, err)
		}
		if e.After == nil || !bytes.Equal(text, e.After) {
			return fmt.Errorf("%s: others have changed it since: repair it by hand", e.Path)
		}
	}
	return a.undo()
}

// writeError says what to do.
func writeError(path string, err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		err = pe.Err
	}
	if le, ok := errors.AsType[*os.LinkError](err); ok {
		err = le.Err
	}
	remedy := ""
	switch {
	case errors.Is(err, fs.ErrPermission):
		remedy = ": run as root; what root may not change has an attribute (lsattr), or a security module before it"
	case errors.Is(err, syscall.EROFS):
		remedy = ": make it writable, or make the change where the file comes from (an image, a configuration management); --dry-run shows it"
	case errors.Is(err, syscall.EBUSY):
		remedy = ": it is a mount of its own, which cannot be replaced; make the change where it comes from; --dry-run shows it"
	}
	return fmt.Errorf("%s: %w%s", path, err, remedy)
}

// backup keeps a file as it is, unless something of ours is in it: then the backup of before the install is there already, or
// there was no file.
func backup(e engine.Edit) (made string, err error) {
	if e.Ours {
		return "", nil
	}
	dir := backupDir(e.Path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	path := filepath.Join(dir, filepath.Base(e.Path)+backupMark+time.Now().UTC().Format("20060102T150405.000000Z"))
	if err := writeLike(path, e.Path, e.Before); err != nil {
		return "", err
	}
	return path, nil
}

// backupDir is the folder for a file's backups: beside the one that the file lies in, where no import of DIR/* finds them. A
// folder that is a mount of its own keeps them itself: what is beside it may be gone with the container that we run in.
func backupDir(path string) string {
	dir := filepath.Dir(path)
	if outside(dir) == dir {
		return dir
	}
	return filepath.Clean(dir) + ".cgpu-backup"
}

// outside is the folder above one that an engine may read whole; that one itself, if the one above cannot be written or is of
// another file system.
func outside(dir string) string {
	var inner, outer unix.Stat_t
	up := filepath.Dir(dir)
	if unix.Stat(dir, &inner) == nil && unix.Stat(up, &outer) == nil && inner.Dev == outer.Dev && unix.Access(up, unix.W_OK) == nil {
		return up
	}
	return dir
}

// dropLeftovers removes what a killed install left of a new file, which an engine may read where it lies.
func dropLeftovers(path string) error {
	path = linked(path)
	dir := filepath.Dir(path)
	for _, d := range slices.Compact([]string{dir, outside(dir)}) {
		entries, err := os.ReadDir(d)
		if err != nil {
			continue // the folder comes with the file
		}
		for _, e := range entries {
			if !e.Type().IsRegular() || !engine.Leftover(e.Name()) || !strings.HasPrefix(e.Name(), "."+filepath.Base(path)+".cgpu-") {
				continue
			}
			if err := os.Remove(filepath.Join(d, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return writeError(filepath.Join(d, e.Name()), err)
			}
		}
	}
	return nil
}

// backupsOf are the backups of a file, the oldest first. Older versions of cgpu left them beside the file.
func backupsOf(path string) []string {
	var list []string
	prefix := filepath.Base(path) + backupMark
	for _, dir := range slices.Compact([]string{filepath.Dir(path), backupDir(path)}) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			continue
		}
		for _, e := range entries {
			if name := e.Name(); len(name) > len(prefix) && name[:len(prefix)] == prefix {
				list = append(list, filepath.Join(dir, name))
			}
		}
	}
	return list
}

// dropBackup removes a backup, and the folder of backups with the last one.
func dropBackup(path string) error {
	if err := os.Remove(path); err != nil {
		return err
	}
	if dir := filepath.Dir(path); filepath.Ext(dir) == ".cgpu-backup" {
		os.Remove(dir) //nolint:errcheck // it stays while others are in it
	}
	return nil
}

// restore makes uninstall's edits give back the backup's text, where the two say the same.
func restore(plan *engine.Plan, json bool) {
	for i, e := range plan.Edits {
		if text, _ := original(e, json); text != nil {
			plan.Edits[i].After = text
		}
	}
}

// original finds the backup that says the same as an edit's new text.
func original(e engine.Edit, json bool) (text []byte, path string) {
	if e.Note || e.After == nil {
		return nil, ""
	}
	real, err := filepath.EvalSymlinks(e.Path)
	if err != nil {
		return nil, ""
	}
	for _, b := range backupsOf(real) {
		text, err := os.ReadFile(b)
		if err == nil && engine.Restorable(text, e.After, json) {
			if text == nil {
				text = []byte{}
			}
			return text, b
		}
	}
	return nil, ""
}

// dropBackups removes the backups that are no longer of use, and names those that stay.
func (a applied) dropBackups(edits []engine.Edit, json bool) (said []string) {
	for _, e := range edits {
		_, same := original(e, json)
		e.Path = linked(e.Path)
		for _, b := range backupsOf(e.Path) {
			if b == same && dropBackup(b) == nil {
				continue
			}
			said = append(said, fmt.Sprintf("kept: %s: the file as it was before cgpu install; others have changed it since", b))
		}
	}
	return said
}

// write replaces a file as a whole, or removes it if text is nil. Nobody ever sees half of it.
func write(path string, text []byte) error {
	if text == nil {
		err := os.Remove(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return writeLike(path, path, text)
}

// writeLike writes a file with the mode, owner and security label of another one, if that is there. Until it is whole it lies
// outside of the folder, which an engine may read at any time.
func writeLike(path, like string, text []byte) error {
	dir := filepath.Dir(path)
	err := writeFrom(outside(dir), path, like, text)
	if errors.Is(err, unix.EXDEV) { // a mount of the same file system
		return writeFrom(dir, path, like, text)
	}
	return err
}

// writeFrom is writeLike with the folder in which the new file is made. Owner, mode and SELinux' label are the old file's, which
// pkg/atomicfile does not keep, and it outlives a power cut.
func writeFrom(dir, path, like string, text []byte) (err error) {
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+".cgpu-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name()) //nolint:errcheck // the first error counts
		}
	}()
	mode := fs.FileMode(0o644)
	if info, err := os.Stat(like); err == nil {
		mode = info.Mode().Perm()
		if s, ok := info.Sys().(*syscall.Stat_t); ok {
			if err := f.Chown(int(s.Uid), int(s.Gid)); err != nil {
				return err
			}
		}
		const label = "security.selinux"
		value := make([]byte, 1024)
		if n, err := unix.Getxattr(like, label, value); err == nil {
			if err := unix.Fsetxattr(int(f.Fd()), label, value[:n], 0); err != nil {
				return fmt.Errorf("%s: %w", label, err)
			}
		}
	}
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if _, err := f.Write(text); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
