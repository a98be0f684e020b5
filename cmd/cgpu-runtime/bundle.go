package main

import (
	"fmt"
	"os"
	"syscall"
)

// bundleFile is a file that an engine wrote for the runtime: the config.json of a bundle, or a process for exec.
type bundleFile struct{ path string }

// stagedFile is what will take a file's place.
type stagedFile struct{ temp, path string }

// replace puts content in the place of the file.
func (b bundleFile) replace(content []byte) error {
	staged, err := b.stage(content)
	if err != nil {
		return err
	}
	return staged.commit()
}

// stage writes content beside the file, with the same owner and mode, for commit to put into its place. There is no
// fsync: bundles live on a tmpfs and do not outlive a crash of the machine.
func (b bundleFile) stage(content []byte) (stagedFile, error) {
	s := stagedFile{temp: fmt.Sprintf("%s.cgpu-%d", b.path, os.Getpid()), path: b.path}
	info, err := os.Stat(b.path)
	if err != nil {
		return s, fmt.Errorf("cgpu-runtime: %w", err)
	}
	// Of a killed process that had our number, or, as the folder may be /tmp, planted there: it must be a file of ours.
	s.discard()
	f, err := os.OpenFile(s.temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return s, fmt.Errorf("cgpu-runtime: %w", err)
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
	if err != nil {
		s.discard()
		return s, fmt.Errorf("cgpu-runtime: %w", err)
	}
	return s, nil
}

// commit replaces the file, whole or not at all. rename(2) itself: os.Rename looks at both names first.
func (s stagedFile) commit() error {
	if err := syscall.Rename(s.temp, s.path); err != nil {
		s.discard()
		return fmt.Errorf("cgpu-runtime: replace %s: %w", s.path, err)
	}
	return nil
}

// discard leaves the file as it was.
func (s stagedFile) discard() { os.Remove(s.temp) }
