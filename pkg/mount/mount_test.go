// SPDX-License-Identifier: Apache-2.0

package mount

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/testenv"
)

// forbidden names the call that the filter of a child refuses.
const forbidden = "CGPU_TEST_FORBIDDEN"

var calls = map[string]uint32{"open_tree": unix.SYS_OPEN_TREE, "mount_setattr": unix.SYS_MOUNT_SETATTR, "move_mount": unix.SYS_MOVE_MOUNT,
	"unshare": unix.SYS_UNSHARE, "none": 1 << 20}

// Each of the calls may be forbidden by itself, and then Try says so; what it mounts nobody sees.
func TestTry(t *testing.T) {
	testenv.NeedsRoot(t, "mounts")
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if call := os.Getenv(forbidden); call != "" {
		forbid(t, calls[call])
		if err := Try(file); (err == nil) != (call == "none") {
			t.Errorf("%s forbidden: %v", call, err)
		}
		if text, err := os.ReadFile("/proc/thread-self/mountinfo"); err != nil || strings.Contains(string(text), file) {
			t.Errorf("mounted for others: %s, %v", text, err)
		}
		return
	}
	for call := range calls {
		cmd := exec.Command("/proc/self/exe", "-test.run", "^TestTry$")
		cmd.Env = append(os.Environ(), forbidden+"="+call)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", call, err, out)
		}
	}
}

// forbid has all threads' calls of one number fail with EPERM.
func forbid(t *testing.T, number uint32) {
	t.Helper()
	code := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: number},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&program))); errno != 0 {
		t.Fatal(errno)
	}
}

// A copy cannot be written to, before and after it has a place.
func TestCopy(t *testing.T) {
	testenv.NeedsRoot(t, "mounts")
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	tree, err := Copy(file)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(tree)
	var fs unix.Statfs_t
	const want = unix.ST_RDONLY | unix.ST_NOSUID | unix.ST_NODEV
	if err := unix.Fstatfs(tree, &fs); err != nil || fs.Flags&want != want {
		t.Errorf("flags %#x, %v", fs.Flags, err)
	}
	if _, err := Copy(file + ".gone"); err == nil || !strings.Contains(err.Error(), ".gone") {
		t.Errorf("of nothing: %v", err)
	}
}
