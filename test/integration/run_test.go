// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/testenv"
	"github.com/opencgpu/cgpu/test/node"
)

// TestRun: cgpu run, a slice of a GPU without a container.
func TestRun(t *testing.T) {
	if _, err := os.Stat("/run/cgpu"); os.IsNotExist(err) {
		// Where runs have their page mounted; on a node with cgpu it is the run dir.
		t.Cleanup(func() { _ = os.Remove("/run/cgpu") })
	}
	for _, test := range []struct {
		name string
		do   func(*testing.T)
	}{
		{"limit", runLimit},
		{"sees", runSees},
		{"other user", runUser},
		{"sudo", runSudo},
		{"set-user-ID", runSetUID},
		{"umask", runUmask},
		{"folder", runFolder},
		{"refused", runRefused},
		{"exit status", runExit},
		{"signals", runSignals},
		{"input and output", runPipes},
		{"terminal", runTerminal},
		{"two on a GPU", runTwo},
		{"one after the other", runSequence},
		{"live changes", runSet},
		{"killed", runKilled},
		{"background", runBackground},
		{"guard killed", runGuardKilled},
		{"cgroup v2", runUnified},
		{"preload mode", runPreload},
		{"hostile", runHostile},
	} {
		t.Run(test.name, func(t *testing.T) {
			noTrace(t)
			test.do(t)
		})
	}
}

// runArgs is the command line of a run of size on the first GPU. more are flags, "--" and the command.
func runArgs(size string, more ...string) []string {
	return append([]string{"run", "--memory", size, "--gpu", "0"}, more...)
}

// tryRun is a run in the foreground.
func tryRun(size string, more ...string) node.Result { return tryCgpu(runArgs(size, more...)...) }

// wantRun is one that must succeed; it returns what was printed.
func wantRun(t *testing.T, size string, more ...string) string {
	t.Helper()
	r := tryRun(size, more...)
	if r.Code != 0 {
		t.Fatal(r)
	}
	return r.Stdout
}

// started is a run in the background, in a process group of its own.
type started struct {
	cmd  *exec.Cmd
	out  *written
	done chan error
}

// startRun starts a run, and kills it when the test ends.
func startRun(t *testing.T, size string, more ...string) *started {
	t.Helper()
	s := &started{cmd: exec.Command(filepath.Join(lab.Bin, "cgpu"), runArgs(size, more...)...), out: new(written), done: make(chan error, 1)}
	s.cmd.Stdout, s.cmd.Stderr = s.out, s.out
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { s.done <- s.cmd.Wait() }()
	t.Cleanup(func() { _ = syscall.Kill(-s.cmd.Process.Pid, syscall.SIGKILL) })
	return s
}

// record waits until the run is in the ledger with its first process, which is cgpu run itself.
func (s *started) record(t *testing.T) (found ledger.Record) {
	t.Helper()
	eventually(t, 5*time.Second, func() string {
		for _, r := range records(t) {
			if r.InitPID == s.cmd.Process.Pid {
				found = r
				return ""
			}
		}
		return fmt.Sprintf("no run of process %d in the ledger: %+v", s.cmd.Process.Pid, records(t))
	})
	return found
}

// holdsSize waits until the run uses so much.
func (s *started) holdsSize(t *testing.T, size quota.Bytes) ledger.Record {
	t.Helper()
	r := s.record(t)
	eventually(t, 10*time.Second, func() string {
		if got := smiOf(t, r.ID).Used; got < size {
			return fmt.Sprintf("%s uses %v, want %v", r.ID, got, size)
		}
		return ""
	})
	return r
}

// says waits until the run has said that, and no more.
func (s *started) says(t *testing.T, want string) {
	t.Helper()
	eventually(t, 30*time.Second, func() string {
		if got := s.out.String(); got != want {
			return fmt.Sprintf("it said %q, want %q", got, want)
		}
		return ""
	})
}

// written is what a process that runs has written so far.
type written struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *written) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *written) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// end waits for the run's end.
func (s *started) end(t *testing.T) syscall.WaitStatus {
	t.Helper()
	select {
	case <-s.done:
	case <-time.After(time.Minute):
		t.Fatal("the run does not end")
	}
	return s.cmd.ProcessState.Sys().(syscall.WaitStatus)
}

func probe() string { return filepath.Join(lab.Bin, "cgpu-probe") }

// runLimit: the card is as large as asked for, and an allocation beyond fails; with the preload library and without.
func runLimit(t *testing.T) {
	for _, m := range []struct {
		probe string
		flags []string
	}{{"cgpu-probe-libc", nil}, {"cgpu-probe", nil}, {"cgpu-probe-libc", []string{"--no-limiter"}}} {
		command := func(args ...string) []string {
			return append(append(append([]string{}, m.flags...), "--", filepath.Join(lab.Bin, m.probe)), args...)
		}
		out := wantRun(t, "1GiB", command("meminfo")...)
		if total := number(t, out, "total_mib"); total != 1024 {
			t.Errorf("%s %v: total %v MiB", m.probe, m.flags, total)
		}
		wantRun(t, "1GiB", command("alloc", "1000MiB")...)
		wantRefused(t, tryRun("1GiB", command("alloc", "1100MiB")...), noMemory)
	}
	wantRun(t, "512MiB", "--spill", "1GiB", "--", probe(), "alloc", "900MiB")
}

// runSees: of NVIDIA's nodes the run's own and no others; the rest of /dev, and all else, is the host's.
func runSees(t *testing.T) {
	nodes := strings.Fields(wantRun(t, "1GiB", "--", "sh", "-c", "LC_ALL=C ls -d /dev/nvidia* /dev/cgpu-sim 2>/dev/null; true"))
	cards := gpus(t)
	want := []string{"/dev/nvidia-uvm", cards[0].Node.Path, "/dev/nvidiactl"}
	if !slices.Equal(nodes, want) {
		t.Errorf("nodes %s, want %s", nodes, want)
	}
	if len(cards) > 1 {
		if got := strings.TrimSpace(wantRun(t, "1GiB", "--gpu", "1", "--", "sh", "-c", "ls -d /dev/nvidia[0-9]*")); got != cards[1].Node.Path {
			t.Errorf("nodes of GPU 1: %s", got)
		}
	}
	const names = "ls /dev | grep -v -e nvidia -e cgpu-sim; echo hello >/dev/null; head -c1 /dev/zero | wc -c"
	host, err := exec.Command("sh", "-c", names).Output()
	if err != nil {
		t.Fatal(err)
	}
	if got := wantRun(t, "1GiB", "--", "sh", "-c", names); got != string(host) {
		t.Errorf("/dev:\n%s\nthe host's:\n%s", got, host)
	}
	if got := strings.TrimSpace(wantRun(t, "1GiB", "--", "ls", "/run/cgpu")); got != "libcgpu.so\nvgpu" {
		t.Errorf("/run/cgpu: %s", got)
	}
	env := wantRun(t, "1GiB", "--", "env", "-u", "SUDO_UID", "env")
	if !strings.Contains(env, "\nLD_PRELOAD=/run/cgpu/libcgpu.so\n") {
		t.Errorf("environment: %s", env)
	}
	// Nothing of it is seen outside.
	s := startRun(t, "1GiB", "--", "sleep", "600")
	s.record(t)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), "cgpu-dev") || strings.Contains(string(mounts), " /run/cgpu ") {
		t.Errorf("mounts of the run show outside: %v\n%s", err, mounts)
	}
}

// userProgram copies a program to where any user can run it.
func userProgram(t *testing.T, name string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "cgpu-run")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	text, err := os.ReadFile(filepath.Join(lab.Bin, name))
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, name), text, 0o755)
	}
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, name)
}

// runUser: the command runs as somebody else, with nothing of root's, and is held as well.
func runUser(t *testing.T) {
	p := userProgram(t, "cgpu-probe")
	out := wantRun(t, "1GiB", "--user", "1234:1235", "--", "sh", "-c",
		"cd /; id -u; id -G; grep -E '^(CapEff|CapPrm|NoNewPrivs)' /proc/self/status; "+p+" meminfo")
	for _, want := range []string{"1234\n1235\n", "CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1",
		"\ntotal_mib=1024\n"} {
		if !strings.Contains("\n"+out, want) {
			t.Errorf("want %q in\n%s", want, out)
		}
	}
	wantRefused(t, tryRun("1GiB", "--user", "1234:1235", "--", p, "alloc", "1100MiB"), noMemory)
	nobody := wantRun(t, "1GiB", "--user", "nobody", "--", "sh", "-c",
		"id -un; echo $USER $LOGNAME; ls /proc/1/root/ >/dev/null 2>&1 || echo closed")
	if nobody != "nobody\nnobody nobody\nclosed\n" {
		t.Errorf("as nobody: %s", nobody)
	}
	// Who comes through sudo chooses neither another user nor the files that root trusts.
	sudo := []string{"SUDO_UID=1234", "SUDO_GID=1235"}
	r := lab.Run(sudo, append([]string{filepath.Join(lab.Bin, "cgpu")}, runArgs("1GiB", "--", "id")...)...)
	wantRefused(t, r, "CGPU_RUN_DIR=.*sudo")
	r = lab.Run(append(sudo, "CGPU_RUN_DIR=", "CGPU_CONFIG="),
		append([]string{filepath.Join(lab.Bin, "cgpu")}, runArgs("1GiB", "--user", "root", "--", "id")...)...)
	wantRefused(t, r, `--user "root": sudo was called by user 1234`)
	// And root is needed.
	cgpu := userProgram(t, "cgpu")
	cmd := exec.Command(cgpu, runArgs("1GiB", "--", "true")...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1234, Gid: 1235}}
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "sudo cgpu run") {
		t.Errorf("as a user: %v %s", err, out)
	}
}

// runSudo: with the run dir and the configuration where they are by default, a user who comes through sudo runs his command as
// himself. The places are this machine's in a mount namespace of the test's own.
func runSudo(t *testing.T) {
	const places = `set -e
mount -t tmpfs none /run; mkdir /run/cgpu; mount --bind "$CGPU_RUN_DIR" /run/cgpu
mount -t tmpfs none /mnt; cp /etc/passwd /etc/group /mnt; mkdir /mnt/cgpu; cp "$CGPU_CONFIG" /mnt/cgpu/cgpu.toml; mount --move /mnt /etc
exec env -u CGPU_RUN_DIR -u CGPU_CONFIG SUDO_UID=65534 SUDO_GID=65534 LD_LIBRARY_PATH=/nonexistent "$@"`
	command := "id -u; id -G; echo $HOME; ls /run/cgpu; grep NoNewPrivs /proc/self/status; " + userProgram(t, "cgpu-probe") + " meminfo"
	args := append([]string{"unshare", "-m", "sh", "-c", places, "sh", filepath.Join(lab.Bin, "cgpu")},
		runArgs("1GiB", "--", "sh", "-c", command)...)
	r := lab.Run(nil, args...)
	if r.Code != 0 || !strings.HasPrefix(r.Stdout, "65534\n65534\n/nonexistent\nlibcgpu.so\nvgpu\nNoNewPrivs:\t1\ntotal_mib=1024\n") {
		t.Error(r)
	}
}

// runRefused: what cannot be had is refused in the words of the command line.
func runRefused(t *testing.T) {
	total := gpus(t)[0].Memory
	over := fmt.Sprintf("%dMiB", total/quota.MiB+1)
	for _, test := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--", "true"}, 2, "want --memory SIZE"},
		{[]string{"--memory", "1GiB"}, 2, "want a COMMAND"},
		{[]string{"--memory", "7x", "--", "true"}, 2, `--memory "7x": is no size`},
		{[]string{"--memory", "1GiB", "--weight", "65", "--", "true"}, 2, "--weight 65"},
		{[]string{"--memory", "1GiB", "--gpu", "0,", "--", "true"}, 2, `--gpu "0,"`},
		{[]string{"--memory", "1GiB", "--nonsense", "--", "true"}, 2, "nonsense"},
		{[]string{"--memory", over, "--gpu", "0", "--", "true"}, 125, `run: --memory "` + over + `": .*is more than the GPU`},
		{[]string{"--memory", "1GiB", "--gpu", "77", "--", "true"}, 125, `run: --gpu "77": there is no GPU`},
		{[]string{"--memory", "1GiB", "--gpu", "0,0", "--", "true"}, 125, `run: --gpu "0,0": .*twice`},
		{[]string{"--memory", "1GiB", "--spill", "100000GiB", "--gpu", "0", "--", "true"}, 125, `run: --spill "100000GiB"`},
		{[]string{"--memory", "1GiB", "--user", "no-such-user", "--", "true"}, 125, `--user "no-such-user": no such user`},
		{[]string{"--memory", "1GiB", "--", filepath.Join(lab.Bin, "cgpu"), "run", "--memory", "64MiB", "--", "true"}, 125,
			"seccomp listener already"},
	} {
		r := tryCgpu(append([]string{"run"}, test.args...)...)
		wantRefused(t, r, test.want)
		if r.Code != test.code || strings.Contains(r.Stderr, "ALIYUN") || strings.Count(r.Stderr, "\n") != 1 {
			t.Errorf("want exit status %d and one line without variables: %s", test.code, r)
		}
	}
	s := startRun(t, "600MiB", "--percent", "80", "--", "sleep", "600")
	s.record(t)
	wantRefused(t, tryRun("600MiB", "--percent", "30", "--", "true"), `run: --percent "30"`)
	wantRefused(t, tryRun(fmt.Sprintf("%dMiB", total/quota.MiB-500), "--", "true"), `run: --memory ".*MiB": GPU 0`)
}

// runExit: the exit status is the command's.
func runExit(t *testing.T) {
	for want, command := range map[int][]string{
		0: {"true"}, 7: {"sh", "-c", "exit 7"}, 255: {"sh", "-c", "exit 255"}, 127: {"no-such-program"}, 126: {"/etc/passwd"},
	} {
		if r := tryRun("1GiB", append([]string{"--"}, command...)...); r.Code != want {
			t.Errorf("want exit status %d: %s", want, r)
		}
	}
	// Flags behind the command are the command's, also without "--".
	if r := tryRun("1GiB", "sh", "-c", "echo $0 $@", "--memory", "-x"); r.Stdout != "--memory -x\n" {
		t.Error(r)
	}
	status := startRun(t, "1GiB", "--", "sh", "-c", "kill -USR1 $$").end(t)
	if !status.Signaled() || status.Signal() != syscall.SIGUSR1 {
		t.Errorf("a command that dies by a signal: %#x", status)
	}
}

// runSignals: what is sent to cgpu run, or to its process group, reaches the command, once.
func runSignals(t *testing.T) {
	const script = `n=0; trap 'n=$((n+1)); echo TERM $n' TERM; trap 'echo INT; exit 9' INT; trap 'echo HUP' HUP; echo ready; while :; do sleep 0.05; done`
	s := startRun(t, "1GiB", "--", "sh", "-c", script)
	s.record(t)
	want := "ready\n"
	for _, next := range []struct {
		signal syscall.Signal
		answer string
	}{{syscall.SIGTERM, "TERM 1\n"}, {syscall.SIGHUP, "HUP\n"}, {syscall.SIGTERM, "TERM 2\n"}, {syscall.SIGINT, "INT\n"}} {
		s.says(t, want)
		if err := syscall.Kill(s.cmd.Process.Pid, next.signal); err != nil {
			t.Fatal(err)
		}
		want += next.answer
	}
	if status := s.end(t); status.ExitStatus() != 9 || s.out.String() != want {
		t.Errorf("status %#x, output %s", status, s.out)
	}
	// What was ignored stays so, and nothing else is: bit n-1 is signal n.
	for _, shell := range []string{"", "trap '' TSTP HUP; "} {
		const show = "exec grep -E '^Sig(Ign|Blk|Cgt)' /proc/self/status"
		want, err := exec.Command("sh", "-c", shell+show).Output()
		if err != nil {
			t.Fatal(err)
		}
		got := lab.Run(nil, "sh", "-c", shell+"exec \"$@\"", "sh", filepath.Join(lab.Bin, "cgpu"), "run", "--memory", "1GiB",
			"--", "sh", "-c", show)
		if got.Stdout != string(want) {
			t.Errorf("%q: signals of the command:\n%swant\n%s", shell, got, want)
		}
	}
	// A whole process group, as a terminal's ^C does.
	s = startRun(t, "1GiB", "--", "sh", "-c", "echo ready; sleep 60; true")
	s.says(t, "ready\n")
	if err := syscall.Kill(-s.cmd.Process.Pid, syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if status := s.end(t); !status.Signaled() || status.Signal() != syscall.SIGINT {
		t.Errorf("^C: %#x", status)
	}
}

// runPipes: standard input, output and error, and further descriptors, are the caller's.
func runPipes(t *testing.T) {
	cmd := exec.Command(filepath.Join(lab.Bin, "cgpu"),
		runArgs("1GiB", "--", "sh", "-c", "cat; echo err >&2; echo three >&3; ls -l /proc/self/fd | grep -c -e socket -e seccomp")...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(strings.Repeat("x", 1<<20)+"\n"), &stdout, &stderr
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd.ExtraFiles = []*os.File{w}
	err = cmd.Run()
	w.Close()
	three := make([]byte, 16)
	n, _ := r.Read(three)
	// grep counts no line, and says so by its exit status.
	if cmd.ProcessState.ExitCode() != 1 || stdout.Len() != 1<<20+1+2 || !strings.HasSuffix(stdout.String(), "x\n0\n") ||
		stderr.String() != "err\n" || string(three[:n]) != "three\n" {
		t.Errorf("%v: %d bytes of output, %q, %q", err, stdout.Len(), stderr.String(), three[:n])
	}
}

// runTerminal: the command has the caller's terminal, and can make others.
func runTerminal(t *testing.T) {
	testenv.NeedsProgram(t, "script")
	line := func(command string) string {
		return fmt.Sprintf("%s run --memory 1GiB --gpu 0 -- sh -c '%s'", filepath.Join(lab.Bin, "cgpu"), command)
	}
	r := lab.Run(nil, "script", "-qec", line("tty; stty size >/dev/null && echo sized; test -t 0 && test -t 1 && echo both"), "/dev/null")
	if r.Code != 0 || !strings.Contains(r.Stdout, "/dev/pts/") || !strings.Contains(r.Stdout, "sized") || !strings.Contains(r.Stdout, "both") {
		t.Error(r)
	}
	if r := lab.Run(nil, "script", "-qec", line("exit 5"), "/dev/null"); r.Code != 5 {
		t.Error(r)
	}
	if out := wantRun(t, "1GiB", "--", "script", "-qec", "tty", "/dev/null"); !strings.Contains(out, "/dev/pts/") {
		t.Errorf("a terminal of the run's own: %s", out)
	}
}

// runTwo: two runs and a container share a GPU, each within its limit.
func runTwo(t *testing.T) {
	a := startRun(t, "1GiB", "--name", "first", "--weight", "2", "--", probe(), "hold", "900MiB")
	b := startRun(t, "512MiB", "--", probe(), "hold", "400MiB")
	c := holding(t, container{env: sizeOf("512MiB")}, "300MiB")
	first, second := a.holdsSize(t, 900*quota.MiB), b.holdsSize(t, 400*quota.MiB)
	if first.Name != "first" || first.VGPUs[0].Weight != 2 || second.Name != "cgpu-probe" {
		t.Errorf("records %+v, %+v", first, second)
	}
	if got := execIn(c, "cgpu-probe", "alloc", "100MiB"); got.Code != 0 {
		t.Error(got)
	}
	wantRefused(t, execIn(c, "cgpu-probe", "alloc", "300MiB"), noMemory)
	if out := cgpu(t, "smi"); !strings.Contains(out, "first") || !strings.Contains(out, first.ID[:12]) {
		t.Errorf("cgpu smi: %s", out)
	}
}

// runSequence: a run right after another one finds the room that the first one has had.
func runSequence(t *testing.T) {
	all := fmt.Sprintf("%dMiB", gpus(t)[0].Memory/quota.MiB-100)
	for range 5 {
		wantRun(t, all, "--", probe(), "alloc", "100MiB")
	}
}

// runSet: cgpu set, pause and resume reach a run.
func runSet(t *testing.T) {
	dir := t.TempDir()
	// A named pipe each way would do; files show more when it fails.
	script := fmt.Sprintf(`while [ ! -e %[1]s/go ]; do sleep 0.02; done; %[2]s alloc 900MiB`, dir, probe())
	s := startRun(t, "512MiB", "--name", "grows", "--", "sh", "-c", script)
	r := s.record(t)
	if out := cgpu(t, "set", "grows", "--memory", "1GiB", "--weight", "3"); !strings.Contains(out, "512MiB → 1024MiB") {
		t.Errorf("cgpu set: %s", out)
	}
	cgpu(t, "pause", r.ID)
	cgpu(t, "resume", r.ID[:10])
	if err := os.WriteFile(filepath.Join(dir, "go"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if status := s.end(t); status.ExitStatus() != 0 {
		t.Errorf("after cgpu set: %#x %s", status, s.out)
	}
}

// cgroupsOfRun are the folders of a run.
func cgroupsOfRun(r ledger.Record) []string {
	var found []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() && d.Name() == "cgpu-run-"+r.Nonce {
			found = append(found, path)
		}
		return nil
	})
	return found
}

// runKilled: kill -9 of cgpu run gives everything back.
func runKilled(t *testing.T) {
	s := startRun(t, "1GiB", "--", probe(), "hold", "900MiB")
	r := s.holdsSize(t, 900*quota.MiB)
	if len(cgroupsOfRun(r)) == 0 {
		t.Error("it has no cgroup")
	}
	if err := s.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	s.end(t)
	eventually(t, time.Second, func() string {
		if used := driverUsed(t); used > 0 && lab.Driver == device.DriverSim {
			return fmt.Sprintf("the driver still holds %v", used)
		}
		if left := records(t); len(left) > 0 {
			return fmt.Sprintf("ledger still has %+v", left)
		}
		if left := cgroupsOfRun(r); len(left) > 0 {
			return fmt.Sprintf("cgroups are left: %v", left)
		}
		return ""
	})
}

// runBackground: what the command leaves running keeps the slice, and its limit, until it ends.
func runBackground(t *testing.T) {
	out := wantRun(t, "1GiB", "--", "sh", "-c", "setsid "+probe()+" hold 700MiB >/dev/null 2>&1 & echo $!")
	pid, err := strconv.Atoi(strings.TrimSpace(out))
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Kill(pid, syscall.SIGKILL)
	list := records(t)
	if len(list) != 1 {
		t.Fatalf("%d records, want that of the run", len(list))
	}
	eventually(t, 5*time.Second, func() string {
		if got := smiOf(t, list[0].ID).Used; got < 700*quota.MiB {
			return fmt.Sprintf("uses %v", got)
		}
		return ""
	})
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// runGuardKilled: without its guard a run has no GPU. What is left of it the next run and cgpu gc take away.
func runGuardKilled(t *testing.T) {
	dir := t.TempDir()
	script := fmt.Sprintf(`while [ ! -e %[1]s/go ]; do sleep 0.02; done; %[2]s alloc 1MiB`, dir, probe())
	s := startRun(t, "1GiB", "--", "sh", "-c", script)
	r := s.record(t)
	killGuard(t, r.ID)
	if err := os.WriteFile(filepath.Join(dir, "go"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if status := s.end(t); status.ExitStatus() == 0 {
		t.Errorf("it got memory without a guard: %s", s.out)
	}
	if out := cgpu(t, "gc"); !strings.Contains(out, r.ID[:12]) {
		t.Errorf("cgpu gc: %s", out)
	}
	wantRun(t, "1GiB", "--", "true")
	if left := cgroupsOfRun(r); len(left) > 0 {
		t.Errorf("cgroups are left: %v", left)
	}
	_ = os.RemoveAll(filepath.Dir(r.Page)) // gc spares what is younger than half a minute
}

// runUnified: on a machine with cgroup v2 alone, or where it looks so, a run has a cgroup too and leaves none behind.
func runUnified(t *testing.T) {
	const mount = `umount -l /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && test -e /sys/fs/cgroup/cgroup.controllers || exit 99
"$@"; status=$?
i=0; while [ $((i += 1)) -lt 150 ]; do [ "$(find /sys/fs/cgroup -name 'cgpu-run-*')" ] || exit $status; sleep 0.2; done
find /sys/fs/cgroup -name 'cgpu-run-*'; exit 98`
	args := append([]string{"unshare", "-m", "sh", "-c", mount, "sh", filepath.Join(lab.Bin, "cgpu")},
		runArgs("1GiB", "--", "sh", "-c", "grep '^0::.*/cgpu-run-' /proc/self/cgroup && exec "+probe()+" alloc 900MiB")...)
	r := lab.Run(nil, args...)
	if r.Code == 99 {
		testenv.Lacks(t, "%v", r)
	}
	if r.Code != 0 || !strings.HasPrefix(r.Stdout, "0::/") {
		t.Error(r)
	}
}

// runPreload: where a library alone enforces, a process that need not load it is refused.
func runPreload(t *testing.T) {
	withConfig(t, `enforcement = "preload"`)
	r := tryRun("1GiB", "--", "true")
	wantRefused(t, r, `enforcement = "guard"`)
	if r.Code != 125 {
		t.Error(r)
	}
}

// runHostile: everything cgpu-probe knows to try, beside a neighbour, as a user and as root.
func runHostile(t *testing.T) {
	p := userProgram(t, "cgpu-probe")
	neighbour := startRun(t, "512MiB", "--", probe(), "hold", "200MiB")
	neighbour.holdsSize(t, 200*quota.MiB)
	before := driverUsed(t)
	for _, user := range []string{"1234:1235", "root"} {
		args := append([]string{filepath.Join(lab.Bin, "cgpu")},
			runArgs("256MiB", "--user", user, "--", p, "hostile", "all", "--tries", "500")...)
		if r := lab.RunFor(5*time.Minute, nil, args...); r.Code != 0 {
			t.Error(r)
		}
		eventually(t, 2*time.Second, func() string {
			if after := driverUsed(t); after != before {
				return fmt.Sprintf("the driver holds %v, before the attacks as %s %v", after, user, before)
			}
			return ""
		})
	}
}

// runSetUID: with the bit on it cgpu would make any user root; it does nothing then.
func runSetUID(t *testing.T) {
	program := filepath.Join(lab.Dir, "cgpu-with-bit")
	t.Cleanup(func() { os.Remove(program) })
	text, err := os.ReadFile(filepath.Join(lab.Bin, "cgpu"))
	if err == nil {
		err = os.WriteFile(program, text, 0o755)
	}
	if err == nil {
		err = os.Chmod(program, 0o755|os.ModeSetuid)
	}
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(program) // nobody may not pass through the lab's folder
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, args := range [][]string{{"run", "--memory", "1GiB", "--", "id", "-u"}, {"gc"}} {
		cmd := exec.Command("/proc/self/fd/3", args...)
		cmd.ExtraFiles = []*os.File{f}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "set-user-ID bit") {
			t.Errorf("%v: %v: %s", args, err, out)
		}
	}
}

// runUmask: the caller's umask is the command's, and not that of the files that root makes for it.
func runUmask(t *testing.T) {
	line := "umask 0777; exec " + filepath.Join(lab.Bin, "cgpu") + " " +
		strings.Join(runArgs("1GiB", "--", "sh", "-c", "'umask; read x'"), " ")
	cmd := exec.Command("sh", "-c", line)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said := make([]byte, 16)
	n, _ := out.Read(said)
	if string(said[:n]) != "0777\n" {
		t.Errorf("umask of the command: %q", said[:n])
	}
	folders := []string{device.RunDir()}
	if text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", cmd.Process.Pid)); err == nil {
		for line := range strings.Lines(string(text)) {
			if parts := strings.SplitN(strings.TrimSpace(line), ":", 3); len(parts) == 3 && strings.Contains(parts[2], "cgpu-run-") {
				folders = append(folders, filepath.Join("/sys/fs/cgroup", parts[1], parts[2]))
			}
		}
	}
	if len(folders) == 1 {
		t.Error("the run has no cgroup")
	}
	for _, folder := range folders {
		_ = filepath.WalkDir(folder, func(path string, e os.DirEntry, err error) error {
			if err != nil {
				return nil // gone meanwhile
			}
			if info, err := e.Info(); err == nil && info.Mode().Perm()&0o400 == 0 && !strings.HasPrefix(path, "/sys/fs/cgroup/") || err == nil &&
				path == folder && info.Mode().Perm()&0o055 == 0 && strings.HasPrefix(path, "/sys/") {
				t.Errorf("%s: mode %v", path, info.Mode())
			}
			return nil
		})
	}
	_ = in.Close()
	_ = cmd.Wait()
}

// runFolder: a working folder or an input that lead to the host's /dev are not taken along.
func runFolder(t *testing.T) {
	shm, err := os.MkdirTemp("/dev/shm", "cgpu-run-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(shm)
	of := func(dir, redirect string, command string) node.Result {
		line := "cd " + dir + " && exec " + filepath.Join(lab.Bin, "cgpu") + " " +
			strings.Join(runArgs("1GiB", "--", "sh", "-c", "'"+command+"'"), " ") + redirect
		return lab.Run(nil, "sh", "-c", line)
	}
	// The run's /dev is a tmpfs of 1 MiB, and its number is that of no other.
	const same = `test "$(stat -c %d .)" = "$(stat -c %d /dev)" && pwd`
	if r := of("/dev", "", same); r.Code != 0 || r.Stdout != "/dev\n" {
		t.Errorf("in /dev: %v", r)
	}
	if r := of(shm, "",
		`test "$(stat -c %d ..)" = "$(stat -c %d /dev/shm)" && test "$(stat -c %d ../..)" = "$(stat -c %d /dev)" && pwd`); r.Code != 0 ||
		r.Stdout != shm+"\n" {
		t.Errorf("in /dev/shm: %v", r)
	}
	if r := of("/tmp", "", "pwd"); r.Stdout != "/tmp\n" {
		t.Errorf("in /tmp: %v", r)
	}
	wantRefused(t, of("/", " </dev", "true"), "standard input: is a folder")
}

// holdLedger takes the ledger's lock, for the test to let go of it; it does so at its end anyway.
func holdLedger(t *testing.T) *os.File {
	t.Helper()
	lock, err := os.OpenFile(filepath.Join(lab.RunDir, "ledger.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lock.Close() })
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	return lock
}

// awaitsLedger waits until a process has the lock's file open, which somebody else has locked.
func awaitsLedger(t *testing.T, pid int, out *output) {
	t.Helper()
	eventually(t, 8*time.Second, func() string {
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		for _, f := range files {
			if to, _ := os.Readlink(f); to == filepath.Join(lab.RunDir, "ledger.lock") {
				return ""
			}
		}
		return "it does not wait for the ledger: " + out.String()
	})
}

// hardship starts a command as nobody would who wants it to end soon. Hard limits stay, since root in a container cannot raise them.
var hardship = []string{"prlimit", "--fsize=100:", "--nofile=40:", "--cpu=50:", "--core=1000:", "chrt", "-b", "0", "taskset", "-c",
	"0", "nice", "-n", "7"}

// TestRunSettled: while cgpu run takes the node's locks it has nothing of its caller's that could slow it or cut its writes off, on none
// of its threads, and neither has the guard. The command has all of it.
func TestRunSettled(t *testing.T) {
	noTrace(t)
	const footing = `cat /proc/self/limits /proc/self/timerslack_ns; grep ^Cpus_allowed: /proc/self/status; sed "s/.*) //" /proc/self/stat | cut -d" " -f16,17,39`
	runtime.LockOSThread() // whose timer slack the commands get
	defer runtime.UnlockOSThread()
	const slack = 3_000_000
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, slack, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	defer unix.Prctl(unix.PR_SET_TIMERSLACK, 0, 0, 0, 0) //nolint:errcheck // the default
	want, err := exec.Command(hardship[0], append(hardship[1:len(hardship):len(hardship)], "sh", "-c", footing)...).Output()
	if err != nil {
		t.Fatal(err)
	}

	lock := holdLedger(t)
	var out output
	cmd := exec.Command(hardship[0], slices.Concat(hardship[1:], []string{filepath.Join(lab.Bin, "cgpu")},
		runArgs("512MiB", "--", "sh", "-c", footing+"; read x"))...)
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), "CGPU_RUN_DIR="+lab.RunDir), &out, &out
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill() //nolint:errcheck // it has ended, usually
	awaitsLedger(t, cmd.Process.Pid, &out)
	wantSettled(t, "cgpu run", cmd.Process.Pid)
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, func() string {
		if !strings.HasSuffix(out.String(), string(want[len(want)-6:])) {
			return "the command did not tell what it has: " + out.String()
		}
		return ""
	})
	if out.String() != string(want) || !strings.Contains(string(want), strconv.Itoa(slack)) {
		t.Errorf("the command has\n%s\nand without cgpu run\n%s", out.String(), want)
	}
	for _, r := range records(t) {
		if r.InitPID == cmd.Process.Pid {
			wantSettled(t, "its guard", r.GuardPID)
		}
	}
	_ = in.Close()
	_ = cmd.Wait()
}

// wantSettled looks at every thread of a process for what hardship did to its parent.
func wantSettled(t *testing.T, who string, pid int) {
	t.Helper()
	read := func(path string) string {
		text, err := os.ReadFile(path)
		if err != nil && !os.IsNotExist(err) { // a thread may have ended
			t.Error(err)
		}
		return string(text)
	}
	limits := regexp.MustCompile(`  +`).ReplaceAllString(read(fmt.Sprintf("/proc/%d/limits", pid)), " ")
	for _, line := range []string{"Max file size unlimited", "Max cpu time unlimited", "Max core file size 0"} {
		if !strings.Contains(limits, line) {
			t.Errorf("%s: want %q in %s", who, line, limits)
		}
	}
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil || len(threads) == 0 {
		t.Fatal(err)
	}
	for _, thread := range threads {
		stat := read(fmt.Sprintf("/proc/%d/task/%s/stat", pid, thread.Name()))
		if fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:]); len(fields) > 38 && (fields[16] != "0" || fields[38] != "0") {
			t.Errorf("%s, thread %s: nice value %s, policy %s", who, thread.Name(), fields[16], fields[38])
		}
		if slack := strings.TrimSpace(read("/proc/" + thread.Name() + "/timerslack_ns")); slack != "" && slack != "50000" {
			t.Errorf("%s, thread %s: timer slack %s", who, thread.Name(), slack)
		}
		all := read("/proc/self/status") // this process may run everywhere
		cpus := regexp.MustCompile(`(?m)^Cpus_allowed:.*$`)
		if mask := cpus.FindString(read(fmt.Sprintf("/proc/%d/task/%s/status", pid, thread.Name()))); mask != "" && mask != cpus.FindString(all) {
			t.Errorf("%s, thread %s: %s", who, thread.Name(), mask)
		}
	}
}

// TestRunFrozen: who can freeze his cgroup cannot freeze cgpu run in it while that takes the node's locks; the command is in it again.
func TestRunFrozen(t *testing.T) {
	noTrace(t)
	root := "/sys/fs/cgroup/freezer"
	if exists("/sys/fs/cgroup/cgroup.controllers") {
		root = "/sys/fs/cgroup"
	}
	home := filepath.Join(root, fmt.Sprintf("cgpu-test-%d", os.Getpid()))
	if err := os.Mkdir(home, 0o755); err != nil {
		testenv.Lacks(t, "no cgroup to freeze: %v", err)
	}
	t.Cleanup(func() {
		eventually(t, 10*time.Second, func() string {
			if err := os.Remove(home); err != nil {
				return err.Error()
			}
			return ""
		})
	})
	lock := holdLedger(t)
	var out output
	cmd := exec.Command("sh", append([]string{"-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, home, filepath.Join(lab.Bin, "cgpu")},
		runArgs("512MiB", "--", "cat", "/proc/self/cgroup")...)...)
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), "CGPU_RUN_DIR="+lab.RunDir), &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill() //nolint:errcheck // it has ended, usually
	awaitsLedger(t, cmd.Process.Pid, &out)
	in, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", cmd.Process.Pid))
	if err != nil || strings.Contains(string(in), filepath.Base(home)) {
		t.Errorf("it waits for a lock in its caller's cgroup: %s, %v", in, err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil || !strings.Contains(out.String(), "/"+filepath.Base(home)) {
		t.Errorf("the command is not in its caller's cgroup: %v: %s", err, out.String())
	}
}
