// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// domainNode is a node with trust domains, on which cgpu-probe stands for the driver's control daemon and MPS server.
func domainNode(t *testing.T, env ...string) {
	t.Helper()
	noTrace(t)
	withConfig(t, `domains = [{name = "team", weight = 3}]`)
	control := filepath.Join(lab.Bin, "nvidia-cuda-mps-control") // the server sees the folder that this is in, and programs of the host's
	script := "#!/bin/sh\nexec env " + strings.Join(env, " ") + ` "${0%/*}/cgpu-probe" mps-control "$@"` + "\n"
	if err := os.WriteFile(control, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(control) })
}

// member is a run in the domain.
func member(t *testing.T, user string, more ...string) *started {
	t.Helper()
	args := append([]string{"--domain", "team", "--user", user}, more...)
	return startRun(t, "1GiB", append(args, "--", userProgram(t, "cgpu-probe"), "mps-client", "--size", "100MiB")...)
}

// has waits until a member computes, and returns what it says of name.
func (s *started) has(t *testing.T, name string) (value int) {
	t.Helper()
	said := regexp.MustCompile("(?m)^" + name + "=(0x[0-9a-f]+|[0-9]+)$")
	eventually(t, 10*time.Second, func() string {
		out := s.out.String()
		m := said.FindStringSubmatch(out)
		if m == nil || !strings.Contains(out, "ready=1\n") {
			return "it says " + out
		}
		n, err := strconv.ParseInt(m[1], 0, 64)
		if err != nil {
			return err.Error()
		}
		value = int(n)
		return ""
	})
	return value
}

// domainServer is the record of the domain's server.
func domainServer(t *testing.T) (found ledger.Record, ok bool) {
	t.Helper()
	for _, r := range records(t) {
		if r.Domain == "team" && r.DomainServer {
			return r, true
		}
	}
	return found, false
}

// TestDomain: members of a domain find a server that nobody has started, each has its part and its limit, by docker as by cgpu run,
// whatever user it is; nobody else has any of it, and nobody commands.
func TestDomain(t *testing.T) {
	domainNode(t)
	all, part := member(t, "0:0"), member(t, "1234:1235", "--threads", "30")
	inDocker := container{env: append(sizeOf("1GiB"), "CGPU_DOMAIN=team", "CGPU_THREADS=7"),
		cmd: []string{"cgpu-probe", "mps-client", "--size", "200MiB"}}.ready(t)
	if a, b := all.has(t, "part"), part.has(t, "part"); a != 100 || b != 30 {
		t.Errorf("parts of %d %% and %d %%, want 100 and 30", a, b)
	}
	logs := lab.Run(nil, "docker", "logs", inDocker).Stdout
	if !strings.Contains(logs, "part=7\n") {
		t.Errorf("in docker: %s", logs)
	}
	if a, b := all.has(t, "server"), part.has(t, "server"); a != b || !strings.Contains(logs, fmt.Sprintf("server=%#x\n", a)) {
		t.Errorf("servers' clients %#x and %#x, in docker %s", a, b, logs)
	}
	server, ok := domainServer(t)
	if !ok {
		t.Fatalf("no server in %+v", records(t))
	}
	if out := cgpu(t, "smi"); !strings.Contains(out, server.ID[:12]) || !strings.Contains(out, "team (MPS)") ||
		!strings.Contains(out, "team 30%") {
		t.Errorf("cgpu smi: %s", out)
	}
	if v := server.VGPUs[0]; v.Weight != 3 || server.Name != "mps-team-0" {
		t.Errorf("the server is %+v", server)
	}
	for name, want := range map[string]string{"limits": `Max processes +1024 +1024 `, "oom_score_adj": "^500\n",
		"status": "NoNewPrivs:\t1\n"} {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", server.InitPID, name))
		if err != nil || !regexp.MustCompile(want).Match(text) {
			t.Errorf("the server's %s: %s, %v", name, text, err)
		}
	}
	if got := filesIn(fmt.Sprintf("/proc/%d/root/run", server.InitPID)); got != "cgpu" {
		t.Errorf("the server sees in the host's /run: %s", got)
	}
	daemon := lab.Run(nil, "pgrep", "-P", strconv.Itoa(server.InitPID)).Stdout
	status, err := os.ReadFile("/proc/" + strings.TrimSpace(daemon) + "/status")
	if err != nil || !regexp.MustCompile(`CapEff:\t0+\nCapBnd:\t0+\n`).Match(status) {
		t.Errorf("NVIDIA's daemon %q: %s, %v: want no capability", daemon, status, err)
	}
	// Its own memory and the server's two pieces, at least; nobody gets more than his limit.
	for _, s := range []*started{all, part} {
		if used := quota.Bytes(s.has(t, "used_kib")) * quota.KiB; used < 104*quota.MiB {
			t.Errorf("a member uses %v", used)
		}
	}
	p := userProgram(t, "cgpu-probe")
	wantRefused(t, tryRun("1GiB", "--domain", "team", "--", p, "mps-client", "--size", "1100MiB"), noMemory)

	// A member that commands the daemon; one that is none, and has all folders.
	for _, command := range []string{"quit", "get_server_list", "set_active_thread_percentage 4242 100"} {
		r := tryRun("1GiB", "--domain", "team", "--", "sh", "-c", "echo "+command+" | "+p+" mps-control")
		if r.Code == 0 || strings.Contains(r.Stdout, "4242") {
			t.Errorf("%s: %v", command, r)
		}
	}
	members := filepath.Join(lab.RunDir, "mps", server.VGPUs[0].UUID, "team", "seats", strconv.Itoa(records(t)[slices.IndexFunc(records(t),
		func(r ledger.Record) bool { return r.IsMember() })].Seat))
	stranger := []string{"--", "env", "CUDA_MPS_PIPE_DIRECTORY=" + members, p, "mps-client"}
	wantRefused(t, tryRun("1GiB", stranger...), "RM_DUP_OBJECT.*NV_ERR_INVALID_CLIENT")
	for _, s := range []*started{all, part} {
		if strings.Contains(s.out.String(), "has ended") {
			t.Errorf("a member's server has ended meanwhile: %s", s.out)
		}
	}
}

// filesIn are the names in a folder.
func filesIn(dir string) string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err.Error()
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return strings.Join(names, " ")
}

// TestThreadsLive: cgpu set changes a member's part for what starts from then on; the member cannot, by all that it sees of the domain.
func TestThreadsLive(t *testing.T) {
	domainNode(t)
	id := container{env: append(sizeOf("1GiB"), "CGPU_DOMAIN=team", "CGPU_THREADS=30"), cmd: []string{"sleep", "1000"}}.start(t)
	part := func(want int, more ...string) {
		t.Helper()
		exec := []string{"docker", "exec", "-e", "CUDA_MPS_PIPE_DIRECTORY=/run/cgpu/mps"} // which engines know nothing of
		r := lab.Run(nil, slices.Concat(exec, more, []string{id, "cgpu-probe", "mps-client", "--hold", "0"})...)
		if !strings.Contains(r.Stdout, fmt.Sprintf("part=%d\n", want)) {
			t.Errorf("want a part of %d %%: %v", want, r)
		}
	}
	part(30)
	if out := cgpu(t, "set", id, "--threads", "60"); !strings.Contains(out, "threads of new programs 30% → 60%") {
		t.Errorf("cgpu set: %s", out)
	}
	part(60)
	// It is root there, has the folder that it is given, and says what it likes.
	hostile := `cd /run/cgpu/mps; ls -a . ..; for f in parts ../parts seats/1 control ../../cgpu/mps/x; do echo d > $f; rm -f $f; mkdir -p $f; done`
	if r := lab.Run(nil, "docker", "exec", "-u", "0", id, "sh", "-c", hostile); strings.Contains(r.Stdout, "parts") {
		t.Errorf("it sees %v", r)
	}
	part(60, "-e", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100")
	eventually(t, 10*time.Second, func() string {
		if out := cgpu(t, "events"); !strings.Contains(out, "threads of new programs 30% → 60%") {
			return out
		}
		return ""
	})
	if out := cgpu(t, "smi"); !strings.Contains(out, "team 60%") {
		t.Errorf("cgpu smi: %s", out)
	}
	// cgpu set was killed before it told the gate: the server's guard does.
	server, ok := domainServer(t)
	if !ok {
		t.Fatal("no server")
	}
	file := filepath.Join(lab.RunDir, "mps", server.VGPUs[0].UUID, "team", "parts")
	if err := os.WriteFile(file, make([]byte, 65), 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, func() string {
		if text, err := os.ReadFile(file); err != nil || text[1] != 60 {
			return fmt.Sprint(text, err)
		}
		return ""
	})
	part(60)
	wantRefused(t, tryCgpu("set", server.Name, "--threads", "7"), "it is a domain's MPS server")
}

// TestMemberKilled: of a member that an engine kills the server ends the work first, so that nothing of it runs when it is killed; its
// neighbour goes on, and who is asked to end is not ended.
func TestMemberKilled(t *testing.T) {
	domainNode(t)
	neighbour := member(t, "0:0")
	neighbour.has(t, "part")
	ends := func(id string) bool {
		return strings.Contains(lab.Run(nil, "docker", "logs", id).Stderr, "the MPS server has ended")
	}
	start := func() string {
		return container{env: append(sizeOf("1GiB"), "CGPU_DOMAIN=team"),
			cmd: []string{"sh", "-c", "trap '' TERM; cgpu-probe mps-client --size 64MiB; sleep 1000"}}.ready(t)
	}
	id := start()
	docker(t, "kill", "--signal", "WINCH", id)
	time.Sleep(200 * time.Millisecond)
	if ends(id) {
		t.Error("any signal ends its work")
	}
	docker(t, "kill", id)
	if !ends(id) {
		t.Errorf("its work was not ended: %s", lab.Run(nil, "docker", "logs", id).Stderr)
	}
	if out := cgpu(t, "events"); strings.Contains(out, "its work is not ended") {
		t.Errorf("events: %s", out)
	}
	id = start()
	server, ok := domainServer(t)
	if !ok {
		t.Fatal("no server")
	}
	if strings.Contains(neighbour.out.String(), "has ended") {
		t.Errorf("the neighbour says %s", neighbour.out)
	}
	// A gate that does not answer holds up nobody's end.
	if err := syscall.Kill(server.InitPID, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	docker(t, "kill", id)
	if err := syscall.Kill(server.InitPID, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, func() string {
		if out := cgpu(t, "events"); !strings.Contains(out, "its work is not ended before it is killed") {
			return out
		}
		return ""
	})
}

// TestDomainServerKilled: its members' contexts end with the server, and the next member finds another.
func TestDomainServerKilled(t *testing.T) {
	domainNode(t)
	first := member(t, "0:0")
	first.has(t, "part")
	server, ok := domainServer(t)
	if !ok {
		t.Fatalf("no server in %+v", records(t))
	}
	cgpu(t, "set", server.Name, "--weight", "5") // of the domain, and not of this server alone
	if err := syscall.Kill(server.InitPID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	first.end(t)
	if out := first.out.String(); !strings.Contains(out, "the MPS server has ended") {
		t.Errorf("the member says %s", out)
	}
	next := member(t, "0:0")
	next.has(t, "part")
	if again, ok := domainServer(t); !ok || again.Nonce == server.Nonce || again.VGPUs[0].Weight != 5 {
		t.Errorf("the server is %+v, %v", again, ok)
	}
}

// TestDomainServerFaults: a server that takes no more clients is ended, and an event says why.
func TestDomainServerFaults(t *testing.T) {
	domainNode(t, "MPS_FAULT=1")
	first := member(t, "0:0")
	first.has(t, "part")
	first.end(t)
	if out := first.out.String(); !strings.Contains(out, "the MPS server has ended") {
		t.Errorf("the member says %s", out)
	}
	eventually(t, 10*time.Second, func() string {
		out := cgpu(t, "events")
		if !strings.Contains(out, "the MPS server of domain team has ended") ||
			!strings.Contains(out, "why: the MPS server takes no more clients") {
			return out
		}
		return ""
	})
}

// TestDomainServerStopped: a gate that stands still, as whoever has its user can make it, does not keep its domain.
func TestDomainServerStopped(t *testing.T) {
	domainNode(t)
	first := member(t, "0:0")
	first.has(t, "part")
	server, ok := domainServer(t)
	if !ok {
		t.Fatalf("no server in %+v", records(t))
	}
	if err := syscall.Kill(server.InitPID, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	eventually(t, 3*time.Minute, func() string { // it has longer while it begins
		if again, ok := domainServer(t); ok && again.Nonce == server.Nonce {
			return "the server is there"
		}
		if out := cgpu(t, "events"); !strings.Contains(out, "why: its gate did not answer") {
			return out
		}
		return ""
	})
	member(t, "0:0").has(t, "part")
}
