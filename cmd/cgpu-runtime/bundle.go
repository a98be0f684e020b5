// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// bundleFile is the config.json that an engine wrote for the runtime.
type bundleFile struct{ path string }

// replace puts content in the place of the file, whole or not at all, with its owner and mode, which pkg/atomicfile does not keep.
// rename(2) itself: os.Rename looks at both names first.
func (b bundleFile) replace(content []byte) error {
	temp := fmt.Sprintf("%s.cgpu-%d", b.path, os.Getpid())
	// Of a killed process that had our number.
	os.Remove(temp)
	err := b.write(temp, content)
	if err == nil {
		err = syscall.Rename(temp, b.path)
	}
	if err != nil {
		os.Remove(temp)
		return fmt.Errorf("cgpu-runtime: replace %s: %w", b.path, err)
	}
	return nil
}

// copied puts content into dir, a new folder, as the config.json of a bundle of which only that is there. The folder is as closed as
// this file's: engines protect by it what is in the environment, and let in a group where root of a user namespace has to read it.
func (b bundleFile) copied(content []byte, dir string) error {
	if err := b.folder(dir); err != nil {
		return fmt.Errorf("cgpu-runtime: make %s: %w", dir, err)
	}
	if err := b.write(filepath.Join(dir, "config.json"), content); err != nil {
		return fmt.Errorf("cgpu-runtime: %w", err)
	}
	return nil
}

// uncopy takes that back. Nobody has put anything else there yet; page.RemoveBundle would make this program 12 KB larger.
func uncopy(dir string) error {
	if dir == "" {
		return nil
	}
	err := os.Remove(filepath.Join(dir, "config.json"))
	if err == nil || errors.Is(err, os.ErrNotExist) {
		err = os.Remove(dir)
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

func (b bundleFile) folder(dir string) error {
	var like unix.Stat_t
	if err := unix.Stat(filepath.Dir(b.path), &like); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o711); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	// The owner stays: a guard, which is root without powers, may have to remove it.
	if err := os.Chown(dir, -1, int(like.Gid)); err != nil {
		return err
	}
	return os.Chmod(dir, os.FileMode(like.Mode)&0o755|0o700)
}

// write makes a file with the owner and mode of this one: hooks in a container with a user namespace read it. There is no fsync:
// bundles live on a tmpfs and do not outlive a crash of the machine.
func (b bundleFile) write(path string, content []byte) error {
	var like unix.Stat_t
	if err := unix.Stat(b.path, &like); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil && (int(like.Uid) != os.Geteuid() || int(like.Gid) != os.Getegid()) {
		err = f.Chown(int(like.Uid), int(like.Gid))
	}
	if err == nil {
		err = f.Chmod(os.FileMode(like.Mode) & os.ModePerm)
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	return err
}
