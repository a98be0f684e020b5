package main

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// bundleFile is the config.json that an engine wrote for the runtime.
type bundleFile struct{ path string }

// replace puts content in the place of the file, whole or not at all. rename(2) itself: os.Rename looks at both names first.
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

// copied puts content into dir, a new folder, as the config.json of a bundle of which only that is there.
func (b bundleFile) copied(content []byte, dir string) error {
	err := os.MkdirAll(dir, 0o711)
	if err == nil {
		err = b.write(filepath.Join(dir, "config.json"), content)
	}
	if err != nil {
		return fmt.Errorf("cgpu-runtime: %w", err)
	}
	return nil
}

// write makes a file with the owner and mode of this one: hooks in a container with a user namespace read it. There is no fsync:
// bundles live on a tmpfs and do not outlive a crash of the machine.
func (b bundleFile) write(path string, content []byte) error {
	info, err := os.Stat(b.path)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if st, ok := info.Sys().(*syscall.Stat_t); ok && err == nil && int(st.Uid) != os.Geteuid() {
		err = f.Chown(int(st.Uid), int(st.Gid))
	}
	if err == nil {
		err = f.Chmod(info.Mode().Perm())
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	return err
}
