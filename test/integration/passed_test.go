// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/test/node"
)

// TestPassedToPod: a pod's container without a GPU gets a GPU's files from another container, and they are of no use to it, whatever
// its seccomp profile is; nor to a command in it.
func TestPassedToPod(t *testing.T) {
	noTrace(t)
	withConfig(t, `pods = "allocated"`)
	volume := t.TempDir()
	sender := container{env: sizeOf("256MiB"), opts: []string{"-v", volume + ":/vol"},
		cmd: []string{"cgpu-probe", "send-fds", "/vol/s"}}.start(t)
	eventually(t, 10*time.Second, func() string { return notSaid(sender, "ready=1") })
	for name, opts := range map[string][]string{"default": {"--seccomp"}, "unconfined": nil} {
		t.Run(name, func(t *testing.T) {
			want := func(r node.Result) {
				t.Helper()
				if !strings.Contains(r.Stdout, "client=errno 1\n") || !strings.Contains(r.Stdout, "refused=1") {
					t.Errorf("%s\nwant EPERM", r)
				}
			}
			id := fmt.Sprintf("passed%d-%s", os.Getpid(), name)
			pod := func(first []string, id string, cmd ...string) node.Result {
				args := append([]string{"ctr", "run"}, first...)
				args = append(args, "--runc-binary", filepath.Join(lab.Bin, "cgpu-runtime"), "--annotation",
					"io.kubernetes.cri.container-type=container",
					"--mount", "type=bind,src="+volume+",dst=/vol,options=rbind:rw")
				return lab.Run(nil, append(append(append(args, opts...), "docker.io/library/probe:latest", id), cmd...)...)
			}
			want(pod([]string{"--rm"}, id, "cgpu-probe", "recv-fds", "/vol/s"))
			other := id + "-other"
			if r := pod([]string{"-d"}, other, "sleep", "600"); r.Code != 0 {
				t.Fatal(r)
			}
			t.Cleanup(func() {
				lab.Run(nil, "ctr", "tasks", "kill", "-s", "KILL", other)
				lab.Run(nil, "ctr", "tasks", "rm", "-f", other)
				lab.Run(nil, "ctr", "containers", "rm", other)
			})
			exec := func(id string, cmd ...string) node.Result {
				return lab.Run(nil, append([]string{"ctr", "tasks", "exec", "--exec-id", id, other}, cmd...)...)
			}
			want(exec("probe", "cgpu-probe", "recv-fds", "/vol/s"))
			// Ordinary calls go on.
			if r := exec("ordinary", "sh", "-c", "ifconfig lo && echo fine"); !strings.Contains(r.Stdout, "fine") {
				t.Error(r)
			}
		})
	}
}

// notSaid says that a container has not printed something yet.
func notSaid(id, text string) string {
	if r := lab.Run(nil, "docker", "logs", id); !strings.Contains(r.Stdout+r.Stderr, text) {
		return fmt.Sprintf("%s has not printed %q: %s", id, text, r)
	}
	return ""
}

// TestPassedOutside: a container that is not ours holds a file on which a container of ours has allocated. When that ends, the holder
// is ended too, and the reservation and the memory are free again; a neighbour that holds nothing lives.
func TestPassedOutside(t *testing.T) {
	for name, more := range map[string]func(sender string) []string{
		"elsewhere":                 func(string) []string { return nil },
		"below the sender's cgroup": func(sender string) []string { return belowCgroup(t, sender) },
	} {
		t.Run(name, func(t *testing.T) { passedOutside(t, more) })
	}
}

// belowCgroup are options of docker run that put a container's cgroup below another's. Where systemd makes the cgroups it refuses that.
func belowCgroup(t *testing.T, id string) []string {
	t.Helper()
	if strings.TrimSpace(docker(t, "info", "-f", "{{.CgroupDriver}}")) != "cgroupfs" {
		return nil
	}
	return []string{"--cgroup-parent", cgroupOf(t, id)}
}

// cgroupOf is a container's cgroup, as the ledger has it.
func cgroupOf(t *testing.T, id string) string {
	t.Helper()
	r, err := ledger.Open(lab.RunDir).Find(id)
	if err != nil || !strings.Contains(r.Cgroup, id) {
		t.Fatalf("cgroup %q, %v", r.Cgroup, err)
	}
	return r.Cgroup
}

func passedOutside(t *testing.T, more func(sender string) []string) {
	noTrace(t)
	volume := t.TempDir()
	neighbour := container{opts: []string{"--runtime", "runc"}, cmd: []string{"sleep", "600"}}.start(t)
	guarded := holding(t, container{env: sizeOf("512MiB")}, "200MiB")
	before := driverUsed(t)
	sender := container{env: sizeOf("256MiB"), opts: []string{"-v", volume + ":/vol"},
		cmd: []string{"cgpu-probe", "send-fds", "/vol/s", "100MiB"}}.start(t)
	eventually(t, 10*time.Second, func() string { return notSaid(sender, "ready=1") })
	holder := container{opts: append([]string{"--runtime", "runc", "-v", volume + ":/vol"}, more(sender)...),
		cmd: []string{"cgpu-probe", "recv-fds", "/vol/s", "100"}}.start(t)
	eventually(t, 10*time.Second, func() string { return notSaid(holder, "ready=1") })
	docker(t, "rm", "-f", sender)
	eventually(t, 10*time.Second, func() string {
		if running := strings.TrimSpace(docker(t, "inspect", "-f", "{{.State.Running}}", holder)); running != "false" {
			return "the holder lives"
		}
		records, err := ledger.Open(lab.RunDir).List()
		if err != nil || len(records) != 1 {
			return fmt.Sprintf("ledger: %d records, %v", len(records), err)
		}
		if now := driverUsed(t); now != before {
			return fmt.Sprintf("the driver holds %v, before %v", now, before)
		}
		return ""
	})
	for _, id := range []string{neighbour, guarded} {
		if r := execIn(id, "true"); r.Code != 0 {
			t.Errorf("a neighbour suffers: %s", r)
		}
	}
	events, err := event.Read(lab.RunDir)
	if err != nil {
		t.Fatal(err)
	}
	told := false
	for _, e := range events {
		told = told || e.Kind == event.Killed && e.Container == sender && strings.Contains(e.Text, "outside")
	}
	if !told {
		t.Error("no event tells of it")
	}
}
