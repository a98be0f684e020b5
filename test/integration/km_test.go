// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// kmMounted runs cgpu km until the test ends, with the capabilities that its unit leaves it, and returns its mount point: args' last, else
// the run dir's.
func kmMounted(t *testing.T, args ...string) (dir string, cmd *exec.Cmd, said func() string) {
	t.Helper()
	if f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0); err != nil {
		testenv.Lacks(t, "no FUSE here: %v", err)
	} else {
		f.Close()
	}
	dir = filepath.Join(lab.RunDir, "km")
	if len(args) > 0 {
		dir = args[len(args)-1]
	}
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	unit, err := os.ReadFile("../../configs/cgpu-km.service")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^CapabilityBoundingSet=(.+)$`).FindSubmatch(unit)
	if m == nil {
		t.Fatal("cgpu-km.service keeps all capabilities")
	}
	left := strings.NewReplacer("cap_", "+", " ", ",").Replace(strings.ToLower(string(m[1])))
	cmd = exec.Command("setpriv", append([]string{"--no-new-privs", "--bounding-set", "-all," + left, filepath.Join(lab.Bin, "cgpu"), "km"},
		args...)...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said = func() string {
		text, err := os.ReadFile(log.Name())
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		log.Close()
		_ = syscall.Unmount(dir, 0)
	})
	eventually(t, 10*time.Second, func() string {
		if strings.Contains(said(), "mounted on "+dir) {
			return ""
		}
		return "not mounted: " + said()
	})
	return dir, cmd, said
}

// kmRead reads a file, which must be there.
func kmRead(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestKM: scripts of cGPU's users, in words of a shell: read the tree, change a container and a GPU, see it live.
func TestKM(t *testing.T) {
	noTrace(t)
	dir, cmd, said := kmMounted(t)
	id := holding(t, container{env: sizeOf("2GiB")}, "512MiB")
	box := filepath.Join(dir, "0", id[:12])

	if got := kmRead(t, filepath.Join(box, "memsize")); got != fmt.Sprintln(uint64(2*quota.GiB)) {
		t.Errorf("memsize %q", got)
	}
	eventually(t, 30*time.Second, func() string { // a guard is waited for only a moment
		lines := strings.Split(kmRead(t, filepath.Join(box, "meminfo")), "\n")
		var free, mem uint64
		var pid int
		if _, err := fmt.Sscanf(lines[0], "Free: %d", &free); err != nil || quota.Bytes(free) != 2*quota.GiB-smiOf(t, id).Used {
			return fmt.Sprintf("meminfo %q: %v; cgpu smi says %v is used", lines, err, smiOf(t, id).Used)
		}
		if len(lines) < 2 {
			return fmt.Sprintf("meminfo %q: no process", lines)
		}
		if _, err := fmt.Sscanf(lines[1], "PID: %d Mem: %d", &pid, &mem); err != nil || pid != initOf(t, id) || quota.Bytes(mem) < 512*quota.MiB {
			return fmt.Sprintf("meminfo %q: %v; want process %d", lines, err, initOf(t, id))
		}
		return ""
	})

	// By a shell, because it opens with O_TRUNC and O_APPEND, and as cGPU's scripts do it.
	write := func(ok bool, file, text string) {
		t.Helper()
		for _, redirect := range []string{">", ">>"} {
			eventually(t, 5*time.Second, func() string { // what needs a guard's answer fails where that is late
				r := lab.Run(nil, "sh", "-c", "echo "+text+" "+redirect+file)
				if r.Code == 0 && !ok {
					t.Fatalf("%s: want it refused", r)
				}
				if (r.Code == 0) != ok {
					return fmt.Sprintf("%s: want ok = %v", r, ok)
				}
				return ""
			})
		}
	}
	write(true, filepath.Join(box, "weight"), "3")
	if r, _ := recordOf(t, id); r.VGPUs[0].Weight != 3 || kmRead(t, filepath.Join(box, "weight")) != "3\n" {
		t.Errorf("weight: the ledger has %+v", r.VGPUs)
	}
	if got := kmRead(t, filepath.Join(dir, "0", "policy")); got != "2\n" {
		t.Errorf("policy %q beside a weight of 3", got)
	}
	write(true, filepath.Join(box, "memsize"), strconv.Itoa(int(quota.GiB)))
	eventually(t, 30*time.Second, func() string {
		if out := execIn(id, "cgpu-probe", "meminfo"); total(t, out.Stdout) != quota.GiB {
			return fmt.Sprintf("memsize: the container still sees %s", out)
		}
		return ""
	})
	write(false, filepath.Join(box, "memsize"), strconv.Itoa(int(256*quota.MiB))) // 512 MiB are in use
	write(false, filepath.Join(box, "weight"), "65")
	if want := fmt.Sprintf(`cgpu: km: 0/%s/weight: "65": want a number from 1 to 64`, id[:12]); !strings.Contains(said(), want) {
		t.Errorf("said %q, not %q", said(), want)
	}
	if err := os.WriteFile(filepath.Join(box, "weight"), []byte("0"), 0); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("weight 0: %v, want %v", err, syscall.EINVAL)
	}
	if err := os.WriteFile(filepath.Join(box, "id"), []byte("0"), 0); err == nil {
		t.Error("id can be written to")
	}
	if err := os.WriteFile(filepath.Join(dir, "new"), nil, 0o600); err == nil {
		t.Error("a file can be made")
	}
	// The GPU's card, and back, for the tests beside.
	last := lastGPU(t)
	t.Cleanup(func() { cgpu(t, "policy", last, "preempt", "--max-inst", "20") })
	write(true, filepath.Join(dir, last, "policy"), strconv.Itoa(int(sched.PolicySoft)))
	write(true, filepath.Join(dir, last, "max_inst"), "8")
	if out := cgpu(t, "policy", last); !strings.Contains(out, "soft") || !strings.Contains(out, "  8 ") {
		t.Errorf("cgpu policy says %s", out)
	}

	// A file that is open when its container ends is nobody's.
	weight, err := os.OpenFile(filepath.Join(box, "weight"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer weight.Close()
	docker(t, "rm", "-f", id)
	eventually(t, 10*time.Second, func() string {
		if _, err := os.Stat(box); errors.Is(err, os.ErrNotExist) {
			return ""
		}
		return box + " is still there"
	})
	if _, err := weight.Write([]byte("1")); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("write to a container that has ended: %v, want %v", err, syscall.ENOENT)
	}

	// It goes when asked to, though somebody has a file of it open.
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v: %s", err, said())
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is left: %v", dir, err)
	}
}

// lastGPU is the index of the node's last GPU: a node with one GPU has that.
func lastGPU(t *testing.T) string { return strconv.Itoa(len(gpus(t)) - 1) }

// TestKMUsers: who is not root does not get in, or with --allow-other gets in and writes nothing.
func TestKMUsers(t *testing.T) {
	// The node's own folder lets no user through.
	open, err := os.MkdirTemp("", "km")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(open) })
	if err := os.Chmod(open, 0o755); err != nil {
		t.Fatal(err)
	}
	user := func(words string) int {
		return lab.Run(nil, "setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "sh", "-c", words).Code
	}
	for _, tt := range []struct {
		name string
		args []string
		mode os.FileMode // of a file that can be written to
		read bool
	}{
		{"root", nil, 0o666, false},
		{"others", []string{"--allow-other"}, 0o644, true},
	} {
		dir, cmd, _ := kmMounted(t, append(tt.args, filepath.Join(open, tt.name))...)
		ratio := filepath.Join(dir, lastGPU(t), "prio_ratio")
		info, err := os.Stat(ratio)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != tt.mode {
			t.Errorf("%s: %v, want %v", tt.name, info.Mode(), tt.mode)
		}
		if code := user("cat " + ratio); (code == 0) != tt.read {
			t.Errorf("%s: a user's cat ends with %d, want it to read: %v", tt.name, code, tt.read)
		}
		if code := user("echo 50 > " + ratio); code == 0 || kmRead(t, ratio) == "50\n" {
			t.Errorf("%s: a user could write: exit %d, %s", tt.name, code, kmRead(t, ratio))
		}
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	}
}

// TestKMKilled: what a killed one leaves behind, the next one takes away.
func TestKMKilled(t *testing.T) {
	dir, cmd, _ := kmMounted(t)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if _, err := os.Stat(dir); !errors.Is(err, syscall.ENOTCONN) {
		t.Fatalf("%s: %v, want %v", dir, err, syscall.ENOTCONN)
	}
	dir, _, _ = kmMounted(t)
	if got := kmRead(t, filepath.Join(dir, "version")); strings.Count(got, ".") != 2 {
		t.Errorf("version %q", got)
	}
	// And a second one leaves the first alone.
	r := tryCgpu("km")
	if r.Code != 1 || !strings.Contains(r.Stderr, "is not empty") {
		t.Error(r)
	}
}
