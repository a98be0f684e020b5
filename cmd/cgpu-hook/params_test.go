// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/testenv"
	"golang.org/x/sys/unix"
)

// TestKeepDeviceNodes makes the copies of two containers. They are not the same file, since a tenant can stall whoever opens one that he
// sees, and where they were made nothing is left.
func TestKeepDeviceNodes(t *testing.T) {
	testenv.NeedsRoot(t, "a mount")
	params := filepath.Join(t.TempDir(), "params")
	if err := os.WriteFile(params, []byte("ModifyDeviceFiles: 1\nDeviceFileMode: 438\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	type inode struct{ device, number uint64 }
	seen := map[inode]bool{}
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
		for _, name := range []string{inside, filepath.Join(filepath.Dir(inside), "version")} {
			if err := os.WriteFile(name, nil, 0o644); err != nil {
				return err
			}
		}
		r, err := openRoot(dir)
		if err != nil {
			return err
		}
		defer r.close()
		if err := keepDeviceNodes(r, params); err != nil {
			return err
		}
		defer unix.Unmount(inside, unix.MNT_DETACH)
		text, err := os.ReadFile(inside)
		if err != nil || string(text) != "ModifyDeviceFiles: 0\nDeviceFileMode: 438\n" {
			return fmt.Errorf("the container sees %q, %v", text, err)
		}
		if beside, err := os.ReadDir(filepath.Dir(inside)); err != nil || len(beside) != 2 {
			return fmt.Errorf("the container sees %v, %v", beside, err)
		}
		var st unix.Stat_t
		var fs unix.Statfs_t
		if err := unix.Stat(inside, &st); err != nil || seen[inode{st.Dev, st.Ino}] || st.Mode&0o777 != 0o444 {
			return fmt.Errorf("inode %d:%d (of %v) with mode %o, %v", st.Dev, st.Ino, seen, st.Mode, err)
		}
		seen[inode{st.Dev, st.Ino}] = true
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
}

// A hook that is root of a user namespace may write nowhere on the host.
func TestKeepDeviceNodesAsAnother(t *testing.T) {
	testenv.NeedsRoot(t, "maps users")
	dir := t.TempDir()
	for parent := dir; parent != os.TempDir(); parent = filepath.Dir(parent) {
		if err := os.Chmod(parent, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	params := filepath.Join(dir, "params")
	inside := filepath.Join(dir, "rootfs", params)
	if err := os.MkdirAll(filepath.Dir(inside), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{params: "ModifyDeviceFiles: 1\n", inside: ""} {
		if err := os.WriteFile(name, []byte(text), 0o444); err != nil {
			t.Fatal(err)
		}
	}
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100000, Size: 65536}}
	cmd := exec.Command("/proc/self/exe", filepath.Join(dir, "rootfs"), params)
	cmd.Env = []string{asHook + "=" + asKeeper}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS, UidMappings: ids, GidMappings: ids, Credential: &syscall.Credential{},
	}
	if out, err := cmd.CombinedOutput(); err != nil || string(out) != "ModifyDeviceFiles: 0\n" {
		t.Errorf("%v: %s", err, out)
	}
}

// keeper calls keepDeviceNodes and shows what a container sees.
func keeper(dir, params string) error {
	r, err := openRoot(dir)
	if err != nil {
		return err
	}
	if err := keepDeviceNodes(r, params); err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(dir, params))
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(text)
	return err
}
