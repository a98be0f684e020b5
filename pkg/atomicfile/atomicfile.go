// SPDX-License-Identifier: Apache-2.0

// Package atomicfile puts content in the place of a file. What replaces a file otherwise keeps another one's owner and label (pkg/install,
// cgpu-runtime's bundle.go), has a folder's descriptor in place of a path (cgpu-hook), or is killed at each step by its test (pkg/dra).
package atomicfile

import (
	"io/fs"
	"os"
	"syscall"
)

// TempSuffix is behind the name of the file that becomes the new one.
const TempSuffix = ".tmp"

// Write replaces a file, whole or not at all: who reads it at any moment, or after its writer was killed, sees the old content or the new
// one. The mode is as given, whatever the umask. One process at a time may do it (the caller has a lock, or the name is his alone), so the
// temporary file has one name: what a killed writer left, or somebody put there, is replaced and never piles up.
//
// There is no fsync: what a kill of the process needs is in the page cache already, and after a power cut there is no run directory (a
// tmpfs), and no container.
func Write(path string, content []byte, mode fs.FileMode) error {
	return replace(path, content, mode, nil)
}

// WriteSynced is Write for what outlives the boot: after a power cut, too, the file is whole.
func WriteSynced(path string, content []byte, mode fs.FileMode) error {
	return replace(path, content, mode, (*os.File).Sync)
}

// replace does before to the file before it takes its name.
func replace(path string, content []byte, mode fs.FileMode, before func(*os.File) error) error {
	temp := path + TempSuffix
	_ = syscall.Unlink(temp) // os.Remove would try rmdir, too
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil && mode != 0o600 {
		err = f.Chmod(mode)
	}
	if err == nil && before != nil {
		err = before(f)
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		_ = os.Remove(temp)
	}
	return err
}
