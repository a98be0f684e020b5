package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// TestKeepDeviceNodes makes the copies of two containers. They are not the same file, since a tenant can stall whoever opens one that he
// sees, and nothing has a name on the host.
func TestKeepDeviceNodes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount")
	}
	runDir, params := t.TempDir(), filepath.Join(t.TempDir(), "params")
	if err := os.WriteFile(params, []byte("ModifyDeviceFiles: 1\nDeviceFileMode: 438\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	seen := map[uint64]bool{}
	container := func() error {
		runtime.LockOSThread() // and no unlock: the thread ends with its mounts
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
			return err
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		dir, err := os.MkdirTemp("", "root")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		inside := filepath.Join(dir, params)
		if err := os.MkdirAll(filepath.Dir(inside), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(inside, nil, 0o644); err != nil {
			return err
		}
		r, err := openRoot(dir)
		if err != nil {
			return err
		}
		defer r.close()
		if err := keepDeviceNodes(r, runDir, params); err != nil {
			return err
		}
		defer unix.Unmount(inside, unix.MNT_DETACH)
		text, err := os.ReadFile(inside)
		if err != nil || string(text) != "ModifyDeviceFiles: 0\nDeviceFileMode: 438\n" {
			return fmt.Errorf("the container sees %q, %v", text, err)
		}
		var st unix.Stat_t
		var fs unix.Statfs_t
		if err := unix.Stat(inside, &st); err != nil || seen[st.Ino] || st.Mode&0o777 != 0o444 {
			return fmt.Errorf("inode %d (of %v) with mode %o, %v", st.Ino, seen, st.Mode, err)
		}
		seen[st.Ino] = true
		if err := unix.Statfs(inside, &fs); err != nil || fs.Flags&unix.ST_RDONLY == 0 {
			return fmt.Errorf("flags %#x, %v", fs.Flags, err)
		}
		if f, err := os.Open(inside); err == nil { // the inode's number is not given again
			t.Cleanup(func() { f.Close() })
		}
		return nil
	}
	for range 2 {
		done := make(chan error)
		go func() { done <- container() }()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	_ = filepath.WalkDir(runDir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			t.Errorf("left behind: %s", path)
		}
		return nil
	})
}
