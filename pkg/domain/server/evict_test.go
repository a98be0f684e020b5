// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/opencontainers/cgroups"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// child starts one of a user, with a folder as its pipes.
func child(t *testing.T, folder string, user int) *exec.Cmd {
	t.Helper()
	script := fmt.Sprintf(`exec 3<%s && mount -t tmpfs none /run && mkdir -p %[2]s && mount --bind /proc/self/fd/3 %[2]s && exec 3<&- &&
		exec setpriv --reuid %[3]d --regid %[3]d --clear-groups sh -c 'echo; exec sleep 60'`, folder, page.PipesPath, user)
	cmd := exec.Command("unshare", "-m", "sh", "-c", script)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	if _, err := out.Read(make([]byte, 1)); err != nil { // it is what it will be
		t.Fatalf("%v: %s", err, said.String())
	}
	return cmd
}

// inRun puts a process into the cgroup of a run.
func inRun(t *testing.T, nonce string, pid int) {
	t.Helper()
	root := "/sys/fs/cgroup"
	if !cgroups.IsCgroup2UnifiedMode() {
		root = "/sys/fs/cgroup/devices"
	}
	dir := filepath.Join(root, "cgpu-run-"+nonce)
	if err := os.Mkdir(dir, 0o755); err != nil {
		testenv.Lacks(t, "%v", err)
	}
	t.Cleanup(func() {
		_ = cgroups.WriteCgroupProc(root, pid)
		_ = os.Remove(dir)
	})
	if err := cgroups.WriteCgroupProc(dir, pid); err != nil {
		t.Fatal(err)
	}
}

func lives(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !bytes.Contains(text, []byte(") Z"))
}

// TestUsersAreDrawn: nobody can guess the number, by which the kernel counts, from what he knows of the node.
func TestUsersAreDrawn(t *testing.T) {
	taken := map[int]bool{}
	for range 1000 {
		user := newUser(taken)
		if taken[user] || !isServers(user) {
			t.Fatalf("user %d; taken: %v", user, taken[user])
		}
		taken[user] = true
	}
	below := 0
	for user := range taken {
		if user < firstUser+users/2 {
			below++
		}
	}
	if below < 300 || below > 700 { // 12 standard deviations
		t.Errorf("%d of 1000 are in the lower half of %d numbers", below, users)
	}
	if max := firstUser + users - 1; max >= 0x7ffe0000 {
		t.Errorf("numbers up to %d: systemd gives out those from 0x7ffe0000 on", max)
	}
}

func made(t *testing.T, d Domain) int {
	t.Helper()
	user, err := d.folder()
	if err != nil {
		t.Fatal(err)
	}
	return user
}

// TestEvict: what is left of a server that no record names is killed, and nobody else; its user is given to no other while it is there.
func TestEvict(t *testing.T) {
	testenv.NeedsRoot(t, "processes of other users")
	runDir, elsewhere := t.TempDir(), t.TempDir()
	a, other := Domain{runDir, "GPU-1", "a"}, Domain{elsewhere, "GPU-1", "a"}
	user := made(t, a)
	folder, foreign := page.Pipes(runDir, "GPU-1", "a"), page.Pipes(elsewhere, "GPU-1", "a")
	made(t, other)
	if err := os.Chown(filepath.Join(foreign, page.Daemon), user, user); err != nil { // two run dirs may have the same
		t.Fatal(err)
	}
	if u := made(t, other); u != user {
		t.Errorf("user %d of a folder that was %d's", u, user)
	}
	gone := child(t, folder, user)
	stay := map[string]*exec.Cmd{
		"of another run dir": child(t, foreign, user), "of another user's run": child(t, folder, 1234), "in no run": child(t, folder, user),
	}
	nonces := map[string]string{"of another run dir": "00000000e71c0001", "of another user's run": "00000000e71c0002"}
	inRun(t, "00000000e71c0000", gone.Process.Pid)
	for who, nonce := range nonces {
		inRun(t, nonce, stay[who].Process.Pid)
	}
	if n, err := Evict(runDir); n != 1 || err != nil {
		t.Errorf("%d processes are killed, %v: want 1", n, err)
	}
	for range 200 {
		if !lives(gone.Process.Pid) {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if lives(gone.Process.Pid) {
		t.Error("what is left of the server lives")
	}
	for who, p := range stay {
		if !lives(p.Process.Pid) {
			t.Errorf("a process %s is killed", who)
		}
	}
	// Nobody names a's folder, but a process has its user.
	if u := made(t, Domain{runDir, "GPU-1", "b"}); u == user || !isServers(u) {
		t.Errorf("user %s is given again", strconv.Itoa(u))
	}
	if _, err := os.Stat(folder); !os.IsNotExist(err) {
		t.Errorf("the folder that nobody names: %v", err)
	}
}

// TestEvictLeaves: what a record names is its guard's.
func TestEvictLeaves(t *testing.T) {
	testenv.NeedsRoot(t, "processes of other users")
	runDir := t.TempDir()
	d := Domain{runDir, "GPU-1", "a"}
	p := child(t, page.Pipes(runDir, "GPU-1", "a"), made(t, d))
	const nonce = "00000000e71c0003"
	inRun(t, nonce, p.Process.Pid)
	gpu := ledger.GPU{UUID: "GPU-1", Memory: Memory}
	v := ledger.VGPU{UUID: gpu.UUID}
	v.Limit = Memory
	record := ledger.Record{ID: "a", Nonce: nonce, VGPUs: []ledger.VGPU{v}, Domain: "a", DomainServer: true, LauncherPID: os.Getpid()}
	request := ledger.Request{GPUs: []ledger.GPU{gpu}, Record: record,
		Card: sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 99}}
	if _, err := ledger.Open(runDir).Reserve(request); err != nil {
		t.Fatal(err)
	}
	if n, err := Evict(runDir); n != 0 || err != nil || !lives(p.Process.Pid) {
		t.Errorf("%d processes are killed, %v", n, err)
	}
}
