package main

import (
	"fmt"
	"os"
	"syscall"
)

// bundleFile is the config.json of a bundle.
type bundleFile struct{ path string }

// replace puts content in the place of the file, whole or not at all, with the same owner and mode. There is no fsync:
// bundles live on a tmpfs and do not outlive a crash of the machine.
func (b bundleFile) replace(content []byte) error {
	info, err := os.Stat(b.path)
	if err != nil {
		return fmt.Errorf("cgpu-runtime: %w", err)
	}
	temp := fmt.Sprintf("%s.cgpu-%d", b.path, os.Getpid())
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("cgpu-runtime: %w", err)
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
	if err == nil {
		err = os.Rename(temp, b.path)
	}
	if err != nil {
		os.Remove(temp)
		return fmt.Errorf("cgpu-runtime: %w", err)
	}
	return nil
}
