// SPDX-License-Identifier: Apache-2.0

package hostrun

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/opencontainers/cgroups"
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/spec"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

func TestRunFolders(t *testing.T) {
	const deep = "/slurm/uid_1000/job_3/step_0"
	type paths = map[string]string // of /proc/PID/cgroup
	for _, test := range []struct {
		name    string
		paths   paths
		unified bool
		want    []string
		leave   []string
	}{
		{
			"v1", paths{"freezer": deep, "devices": deep, "cpu": "/", "cpuacct": "/", "name=systemd": "/user.slice/session-3.scope", "": "/x"},
			false,
			[]string{"/sys/fs/cgroup/devices/slurm/uid_1000/job_3/step_0/cgpu-run-n", "/sys/fs/cgroup/cpuacct/cgpu/cgpu-run-n"},
			[]string{"/sys/fs/cgroup/freezer", "/sys/fs/cgroup/systemd"},
		},
		{"v2", paths{"": "/user.slice/user-1000.slice/session-3.scope"}, true,
			[]string{"/sys/fs/cgroup/user.slice/user-1000.slice/session-3.scope/cgpu-run-n"}, []string{"/sys/fs/cgroup"}},
		{"v2, one below the root", paths{"": "/x"}, true, []string{"/sys/fs/cgroup/x/cgpu-run-n"}, []string{"/sys/fs/cgroup"}},
		{"v2, root", paths{"": "/"}, true, []string{"/sys/fs/cgroup/cgpu/cgpu-run-n"}, []string{"/sys/fs/cgroup"}},
		{"devices with others", paths{"devices": "/a", "cpuacct": "/a", "pids": "/a"}, false, []string{"/sys/fs/cgroup/devices/a/cgpu-run-n"},
			nil},
		{"not mounted", paths{"cpuacct": "/a", "hidden": "/a"}, false, []string{"/sys/fs/cgroup/cpuacct/a/cgpu-run-n"}, nil},
		{"outside of the namespace", paths{"": "/../x"}, true, nil, nil},
		{"none", nil, true, nil, nil},
	} {
		controllers, ends := []string{"devices", "cpuacct", "hidden"}, []string{"freezer", "name=systemd"}
		if test.unified {
			controllers, ends = []string{""}, []string{""}
		}
		mounted := func(controller string) (string, error) {
			switch {
			case controller == "hidden":
				return "", os.ErrNotExist
			case controller == "cpuacct" && test.paths["pids"] != "": // which share a hierarchy here
				controller = "devices"
			}
			return filepath.Join(cgroupRoot, strings.TrimPrefix(controller, "name=")), nil
		}
		if got := runFolders(hierarchies(test.paths, mounted, controllers), "n"); !slices.Equal(got, test.want) {
			t.Errorf("%s: %q, want %q", test.name, got, test.want)
		}
		var leave []string
		for _, h := range hierarchies(test.paths, mounted, ends) {
			leave = append(leave, h.root)
		}
		if !slices.Equal(leave, test.leave) {
			t.Errorf("%s: the guard leaves %q, want %q", test.name, leave, test.leave)
		}
	}
}

func TestForbidden(t *testing.T) {
	p := spec.Plan{
		Common: []device.Node{{Path: "/dev/nvidiactl", Major: 195, Minor: 255}, {Path: "/dev/nvidia-uvm", Major: 510}},
		Hidden: []device.Node{{Path: "/dev/nvidia1", Major: 195, Minor: 1}},
	}
	want := "195:1 195:254 510:1"
	var got []string
	for _, n := range forbidden(p) {
		got = append(got, fmt.Sprintf("%d:%d", n.Major, n.Minor))
	}
	if strings.Join(got, " ") != want {
		t.Errorf("%v, want %s", got, want)
	}
	p.Common[0].Bind, p.Common[1].Bind = true, true // of the simulated driver: they carry the numbers of /dev/null
	if got := forbidden(p); len(got) != 1 {
		t.Errorf("%v", got)
	}
}

func TestWayOf(t *testing.T) {
	const char = fs.ModeDevice | fs.ModeCharDevice
	own := []string{"cgpu-sim"}
	for _, test := range []struct {
		name string
		mode fs.FileMode
		want way
	}{
		{"nvidia0", char, leaveOut}, {"nvidiactl", char, leaveOut}, {"nvidia-uvm-tools", char, leaveOut}, {"nvidia-modeset", char, leaveOut},
		{"nvidia-caps", fs.ModeDir, leaveOut}, {"nvidia1", fs.ModeSymlink, leaveOut}, {"cgpu-sim", fs.ModeDir, leaveOut},
		{"null", char, bindFile}, {"sda", fs.ModeDevice, bindFile}, {"log", fs.ModeSocket, bindFile}, {"initctl", fs.ModeNamedPipe, bindFile},
		{"stdin", fs.ModeSymlink, copyLink}, {"ptmx", fs.ModeSymlink, copyLink}, {"ptmx", char, makeNode},
		{"pts", fs.ModeDir, bindTree}, {"infiniband", fs.ModeDir, bindTree}, {"dri", fs.ModeDir, graphics},
	} {
		if got := wayOf(test.name, test.mode, own); got != test.want {
			t.Errorf("%s (%v): %v, want %v", test.name, test.mode, got, test.want)
		}
	}
	p := spec.Plan{
		Common: []device.Node{{HostPath: "/dev/cgpu-sim/nvidiactl", Bind: true}, {HostPath: "/dev/nvidia-uvm"}},
		Hidden: []device.Node{{HostPath: "/tmp/x/nvidia1", Bind: true}},
	}
	if got := ownFolders(p); !slices.Equal(got, own) {
		t.Errorf("own folders %q, want %q", got, own)
	}
}

// users is a data base of two.
func users(name string) (User, error) {
	switch name {
	case "1000", "ann":
		return User{UID: 1000, GID: 100, Groups: []int{100, 44}, Name: "ann", Home: "/home/ann", Shell: "/bin/zsh"}, nil
	case "0", "root":
		return User{Name: "root", Home: "/root"}, nil
	}
	return User{}, errors.New("no such user")
}

func TestWhom(t *testing.T) {
	ann, _ := users("ann")
	for _, test := range []struct {
		flag   string
		caller Caller
		want   User
		err    string
	}{
		{"", Caller{}, User{Keep: true}, ""},
		{"ann", Caller{}, ann, ""},
		{"1000", Caller{}, ann, ""},
		{"ann:7", Caller{}, User{UID: 1000, GID: 7, Groups: []int{7}, Name: "ann", Home: "/home/ann", Shell: "/bin/zsh"}, ""},
		{"4000:7", Caller{}, User{UID: 4000, GID: 7, Groups: []int{7}}, ""},
		{"4000", Caller{}, User{}, "no such user"},
		{"bob:7", Caller{}, User{}, "no such user"},
		{"ann:x", Caller{}, User{}, "UID:GID"},
		{"-1:-1", Caller{}, User{}, "UID:GID"},
		{"4294967295:1", Caller{}, User{}, "no such user"}, // setuid would take it for "leave it"
		{"", Caller{SudoUID: "0", SudoGID: "0"}, User{Keep: true}, ""},
		{"ann", Caller{SudoUID: "0", SudoGID: "0"}, ann, ""},
		{"", Caller{SudoUID: "1000", SudoGID: "100"}, ann, ""},
		{"ann", Caller{SudoUID: "1000", SudoGID: "100"}, ann, ""},
		{"1000", Caller{SudoUID: "1000", SudoGID: "100"}, ann, ""},
		{"", Caller{SudoUID: "4000", SudoGID: "7"}, User{UID: 4000, GID: 7, Groups: []int{7}}, ""},
		// A user whom sudoers allows cgpu run with any arguments must not become root by it.
		{"root", Caller{SudoUID: "1000", SudoGID: "100"}, User{}, "SUDO_UID"},
		{"0", Caller{SudoUID: "1000", SudoGID: "100"}, User{}, "SUDO_UID"},
		{"0:0", Caller{SudoUID: "1000", SudoGID: "100"}, User{}, "SUDO_UID"},
		{"1000:0", Caller{SudoUID: "1000", SudoGID: "100"}, User{}, "SUDO_UID"},
		{"", Caller{SudoUID: "00", SudoGID: "0"}, User{}, "numbers that sudo sets"},
		{"", Caller{SudoUID: "x", SudoGID: "0"}, User{}, "numbers that sudo sets"},
		{"", Caller{SudoUID: "-1", SudoGID: "0"}, User{}, "numbers that sudo sets"},
	} {
		got, err := Whom(test.flag, test.caller, users)
		if (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
			t.Errorf("--user %q, %+v: error %v, want %q", test.flag, test.caller, err, test.err)
		}
		if err == nil && !reflect.DeepEqual(got, test.want) {
			t.Errorf("--user %q, %+v: %+v, want %+v", test.flag, test.caller, got, test.want)
		}
	}
}

func TestLookup(t *testing.T) {
	u, err := Lookup("root")
	if err != nil || u.UID != 0 || u.GID != 0 || u.Home == "" || !slices.Contains(u.Groups, 0) {
		t.Errorf("root: %+v, %v", u, err)
	}
	// The same without getent and id.
	t.Setenv("PATH", "/nonexistent")
	if u, err := Lookup("root"); err != nil || u.UID != 0 || !slices.Contains(u.Groups, 0) {
		t.Errorf("root, from the files: %+v, %v", u, err)
	}
	for _, name := range []string{"", "-h", "no such user"} {
		if u, err := Lookup(name); err == nil {
			t.Errorf("%q: %+v", name, u)
		}
	}
	if _, err := parsePasswd("ann:x:1000"); err == nil {
		t.Error("a line of three parts")
	}
	if u, err := parsePasswd("ann:x:1000:100:Ann, phone 1:/home/ann:/bin/zsh"); err != nil || u.UID != 1000 || u.GID != 100 ||
		u.Shell != "/bin/zsh" {
		t.Errorf("%+v, %v", u, err)
	}
}

func TestEnvironment(t *testing.T) {
	ann, _ := users("ann")
	limiter := spec.Plan{Limiter: "/x"}
	for _, test := range []struct {
		env  string
		user User
		plan spec.Plan
		want string
	}{
		{"A=1 HOME=/root USER=root", User{Keep: true}, spec.Plan{}, "A=1 HOME=/root USER=root"},
		{"HOME=/root A=1 USER=root", ann, spec.Plan{}, "A=1 USER=ann LOGNAME=ann HOME=/home/ann SHELL=/bin/zsh"},
		{"HOME=/root A=1", User{UID: 4000}, spec.Plan{}, "HOME=/root A=1"},
		{"A=1", User{Keep: true}, limiter, "A=1 LD_PRELOAD=/run/cgpu/libcgpu.so"},
		{"LD_PRELOAD=/a.so:/run/cgpu/libcgpu.so:/b.so A=1", User{Keep: true}, limiter, "A=1 LD_PRELOAD=/run/cgpu/libcgpu.so:/a.so:/b.so"},
		{"LD_PRELOAD=/a.so", User{Keep: true}, spec.Plan{}, "LD_PRELOAD=/a.so"},
		{"CUDA_VISIBLE_DEVICES=1 CUDA_VISIBLE=1 NVIDIA_VISIBLE_DEVICES=all", User{Keep: true}, spec.Plan{}, "CUDA_VISIBLE=1"},
		{"A=1", User{Keep: true}, spec.Plan{Domain: "team"}, "A=1 CUDA_MPS_PIPE_DIRECTORY=/run/cgpu/mps"},
		{"A=1 CUDA_MPS_PIPE_DIRECTORY=/x", User{Keep: true}, spec.Plan{Domain: "team"}, "A=1 CUDA_MPS_PIPE_DIRECTORY=/x"},
		{"A=1", User{Keep: true}, spec.Plan{Domain: "team", DomainServer: true}, "A=1"},
		{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=60", User{Keep: true}, spec.Plan{}, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=60"},
	} {
		if got := strings.Join(environment(strings.Fields(test.env), test.user, test.plan), " "); got != test.want {
			t.Errorf("%s:\ngot  %s\nwant %s", test.env, got, test.want)
		}
	}
}

func TestCommandError(t *testing.T) {
	for err, want := range map[error]int{
		exec.ErrNotFound: 127, fmt.Errorf("x: %w", os.ErrNotExist): 127, os.ErrPermission: 126, errors.New("exec format error"): 126,
	} {
		if got := (&CommandError{"x", err}).ExitCode(); got != want {
			t.Errorf("%v: %d, want %d", err, got, want)
		}
	}
	for _, name := range []string{"", "/nonexistent/x", "no-such-program"} {
		if _, err := find(name, os.Environ()); err == nil {
			t.Errorf("found %q", name)
		}
	}
	t.Setenv("PATH", "/nonexistent")
	if path, err := find("sh", []string{"A=1", "PATH=/nonexistent:/bin"}); path != "/bin/sh" || err != nil {
		t.Errorf("%q, %v", path, err)
	}
}

// TestSweepCgroups has a parent as systemd names it.
func TestSweepCgroups(t *testing.T) {
	parent := filepath.Join(t.TempDir(), `app-a\x2db[1].scope`)
	for _, name := range []string{"cgpu-run-dead", "cgpu-run-alive", "other"} {
		if err := os.MkdirAll(filepath.Join(parent, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	SweepCgroups([]string{filepath.Join(parent, "cgpu-run-new")}, func(nonce string) bool { return nonce == "alive" })
	left, err := os.ReadDir(parent)
	if err != nil || len(left) != 2 || left[0].Name() != "cgpu-run-alive" || left[1].Name() != "other" {
		t.Errorf("left: %v, %v", left, err)
	}
}

// TestBoundFolder: what is bounded is not swapped instead; a file that the kernel does not have is left out.
func TestBoundFolder(t *testing.T) {
	cgroups.TestMode = true // takes other files than the kernel's
	t.Cleanup(func() { cgroups.TestMode = false })
	dir := t.TempDir()
	for _, swap := range []bool{false, true} {
		if swap {
			if err := os.WriteFile(dir+"/memory.swap.max", []byte("max"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(os.WriteFile(dir+"/memory.max", []byte("max"), 0o600), boundFolder(dir, quota.MiB)); err != nil {
			t.Fatal(err)
		}
	}
	memory, err1 := os.ReadFile(dir + "/memory.max")
	swap, err2 := os.ReadFile(dir + "/memory.swap.max")
	if err := errors.Join(err1, err2); err != nil || !strings.HasPrefix(string(memory), "1048576") || !strings.HasPrefix(string(swap), "0") {
		t.Errorf("memory %s, swap %s, %v", memory, swap, err)
	}
}

func TestLeadsPast(t *testing.T) {
	nodes := []device.Node{{Major: 195}, {Major: 510, Minor: 1}, {Major: 1, Minor: 3, Bind: true}}
	for _, test := range []struct {
		mode, major uint32
		want        bool
	}{
		{unix.S_IFCHR | 0o666, 195, true}, {unix.S_IFCHR, 510, true}, {unix.S_IFCHR, 226, true}, {unix.S_IFDIR | 0o755, 0, true},
		{unix.S_IFCHR, 1, false}, {unix.S_IFCHR, 136, false}, {unix.S_IFBLK, 195, false}, {unix.S_IFREG, 195, false}, {unix.S_IFIFO, 0, false},
	} {
		if got := leadsPast(test.mode, test.major, Majors(nodes)); got != test.want {
			t.Errorf("mode %o, major %d: %v", test.mode, test.major, got)
		}
	}
}

// TestKeepDeviceNodes: the copy of the driver's parameters is where it is said to be made, and its name is gone at once.
func TestKeepDeviceNodes(t *testing.T) {
	if err := keepDeviceNodes(t.TempDir(), filepath.Join(t.TempDir(), "none")); err != nil {
		t.Errorf("without a driver: %v", err)
	}
	dir, params := t.TempDir(), filepath.Join(t.TempDir(), "params")
	if err := os.WriteFile(params, []byte("ModifyDeviceFiles: 1\nDeviceFileMode: 438\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := keepDeviceNodes(filepath.Join(dir, "none"), params); err == nil {
		t.Error("the copy was made elsewhere")
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and no unlock: the thread ends with its mounts
		done <- func() error {
			if err := newNamespaces(unix.CLONE_NEWNS); err != nil {
				return err
			}
			if err := keepDeviceNodes(dir, params); err != nil {
				return err
			}
			text, err := os.ReadFile(params)
			if err == nil && string(text) != "ModifyDeviceFiles: 0\nDeviceFileMode: 438\n" {
				err = fmt.Errorf("the run sees %q", text)
			}
			return err
		}()
	}()
	if err := <-done; errors.Is(err, unix.EPERM) {
		testenv.Lacks(t, "needs root: a mount namespace")
	} else if err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if text, _ := os.ReadFile(params); !strings.Contains(string(text), "ModifyDeviceFiles: 1") {
		t.Errorf("the host sees %q", text)
	}
}

// TestHideElsewhere: a process in this one's mount namespace is refused, or the host's /dev would be covered. It is tried in a process with
// a namespace of its own, where that does no harm.
func TestHideElsewhere(t *testing.T) {
	if os.Getenv("CGPU_TEST_HIDE") == "" {
		testenv.NeedsRoot(t, "a mount namespace")
		cmd := exec.Command(os.Args[0], "-test.run", "^TestHideElsewhere$")
		cmd.Env = append(os.Environ(), "CGPU_TEST_HIDE=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		return
	}
	if err := Hide(os.Getpid(), spec.Plan{}, t.TempDir()); err == nil || !strings.Contains(err.Error(), "no mount namespace of its own") {
		t.Errorf("got %v", err)
	}
	// Whoever may fill it could lead this process, which is root, anywhere.
	users := exec.Command("sleep", "1000")
	users.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS, Credential: &syscall.Credential{Uid: 0},
		UidMappings: []syscall.SysProcIDMap{{HostID: 65534, Size: 1}}, GidMappings: []syscall.SysProcIDMap{{HostID: 65534, Size: 1}}}
	if err := users.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = users.Process.Kill(); _ = users.Wait() }()
	if err := Hide(users.Process.Pid, spec.Plan{}, t.TempDir()); err == nil || !strings.Contains(err.Error(), "another user namespace") {
		t.Errorf("got %v", err)
	}
}

// TestCgroupsBelow: runs' cgroups are found wherever a session or a batch job has them.
func TestCgroupsBelow(t *testing.T) {
	root := t.TempDir()
	want := filepath.Join(root, "devices", "user.slice", cgroupPrefix+"0123456789abcdef")
	for _, dir := range []string{filepath.Join(want, "child"), filepath.Join(root, "devices", "other")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if got := cgroupsBelow(root); len(got) != 1 || got[want] != "0123456789abcdef" {
		t.Errorf("%v", got)
	}
}
