// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/arbiter/process"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/test/node"
)

// image holds busybox and cgpu-probe (hack/node.sh).
const image = "probe"

// sixOfFifteen is 6/15 of the first GPU, as Alibaba Cloud's cGPU writes it.
var sixOfFifteen = quotaOf("6", "15", "0")

// quotaOf is the environment of a container that asks for container/dev of the GPUs named.
func quotaOf(container, dev, visible string) []string {
	env := []string{"ALIYUN_COM_GPU_MEM_CONTAINER=" + container}
	if dev != "" {
		env = append(env, "ALIYUN_COM_GPU_MEM_DEV="+dev)
	}
	if visible != "" {
		env = append(env, "ALIYUN_COM_GPU_VISIBLE_DEVICES="+visible)
	}
	return env
}

// sizeOf is a quota given as a size on the first GPU.
func sizeOf(size string) []string { return quotaOf(size, "", "0") }

// run runs a command on the node; it must succeed.
func run(t *testing.T, args ...string) string {
	t.Helper()
	r := lab.Run(nil, args...)
	if r.Code != 0 {
		t.Fatal(r)
	}
	return r.Stdout
}

// container is one `docker run`.
type container struct {
	name string   // "" for an anonymous one
	env  []string // -e
	opts []string // further options
	cmd  []string
}

func (c container) args(first ...string) []string {
	args := append([]string{"docker", "run", "--network", "none"}, first...)
	if c.name != "" {
		args = append(args, "--name", c.name)
	}
	for _, e := range c.env {
		args = append(args, "-e", e)
	}
	args = append(args, c.opts...)
	if lab.Driver == device.DriverNVIDIA {
		args = append(args, strings.Fields(os.Getenv("CGPU_TEST_DOCKER_OPTS"))...)
	}
	args = append(args, image)
	return append(args, c.cmd...)
}

// try runs the container in the foreground and removes it.
func (c container) try(t *testing.T) node.Result {
	t.Helper()
	return lab.Run(nil, c.args("--rm")...)
}

// run is try for a container that must succeed.
func (c container) run(t *testing.T) string {
	t.Helper()
	r := c.try(t)
	if r.Code != 0 {
		t.Fatal(r)
	}
	return r.Stdout
}

// start runs the container in the background until the test ends.
func (c container) start(t *testing.T) string {
	t.Helper()
	r := lab.Run(nil, c.args("-d")...)
	id := strings.TrimSpace(r.Stdout)
	if id != "" {
		t.Cleanup(func() { lab.Run(nil, "docker", "rm", "-f", id) })
	}
	if r.Code != 0 {
		t.Fatal(r)
	}
	return id
}

func docker(t *testing.T, args ...string) string {
	t.Helper()
	return run(t, append([]string{"docker"}, args...)...)
}

// execIn runs a command in a running container.
func execIn(id string, cmd ...string) node.Result {
	return lab.Run(nil, append([]string{"docker", "exec", id}, cmd...)...)
}

// eventually waits until check gives "", else it fails with check's last complaint. The limit is a busy machine's: a minute at least.
func eventually(t *testing.T, limit time.Duration, check func() string) {
	t.Helper()
	limit = max(limit, time.Minute)
	begin := time.Now()
	for {
		complaint := check()
		if complaint == "" {
			return
		}
		if time.Since(begin) > limit {
			t.Fatalf("after %v still: %s", limit, complaint)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// gpus are the node's physical GPUs.
func gpus(t *testing.T) []device.GPU {
	t.Helper()
	path := filepath.Join(lab.RunDir, "node.json")
	if _, err := os.Stat(path); err != nil {
		run(t, filepath.Join(lab.Bin, "cgpu-refresh"))
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var table device.Table
	if err := json.Unmarshal(text, &table); err != nil {
		t.Fatal(err)
	}
	return table.GPUs
}

// fraction is the limit that container/dev gives on the first GPU.
func fraction(t *testing.T, container, dev quota.Bytes) quota.Bytes {
	t.Helper()
	return (gpus(t)[0].Memory * container / dev).FloorMiB()
}

// records are the reservations of this node.
func records(t *testing.T) []ledger.Record {
	t.Helper()
	list, err := ledger.Open(lab.RunDir).List()
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// noRecord waits until the ledger has nothing. Who deletes a container waits for its guard to give the share back for a moment only.
func noRecord(t *testing.T, after string) {
	t.Helper()
	eventually(t, 30*time.Second, func() string {
		if left := records(t); len(left) > 0 {
			return fmt.Sprintf("after %s: %+v", after, left)
		}
		return ""
	})
}

// recordOf finds a container's record.
func recordOf(t *testing.T, id string) (ledger.Record, bool) {
	t.Helper()
	for _, r := range records(t) {
		if strings.HasPrefix(r.ID, id) || strings.HasPrefix(id, r.ID) {
			return r, true
		}
	}
	return ledger.Record{}, false
}

// noTrace asserts at the test's end that no reservation, guard, mount or byte of driver memory is left.
func noTrace(t *testing.T) {
	t.Helper()
	t.Cleanup(func() { // what this test has left must not fail those that follow
		if t.Failed() {
			ageLeftovers()
			tryCgpu("gc")
		}
	})
	t.Cleanup(func() {
		eventually(t, 5*time.Second, func() string {
			if left := records(t); len(left) > 0 {
				return fmt.Sprintf("ledger still has %+v", left)
			}
			if pids := guards(t); len(pids) > 0 {
				return fmt.Sprintf("guards still run: %v", pids)
			}
			if pages, _ := filepath.Glob(filepath.Join(lab.RunDir, "page", "*")); len(pages) > 0 {
				return fmt.Sprintf("vGPU pages are left: %v", pages)
			}
			if used := driverUsed(t); used > 0 && lab.Driver == device.DriverSim {
				return fmt.Sprintf("the driver still holds %d bytes", used)
			}
			return ""
		})
	})
}

// ageLeftovers makes what a killed program has left old enough for cgpu gc.
func ageLeftovers() {
	old := time.Now().Add(-time.Minute)
	for _, folder := range []string{"page", "g"} {
		files, _ := filepath.Glob(filepath.Join(lab.RunDir, folder, "*"))
		for _, path := range files {
			_ = os.Chtimes(path, old, old) // it may be gone
		}
	}
}

// guards are the pids of this node's guards.
func guards(t *testing.T) []int {
	t.Helper()
	var pids []int
	links, err := filepath.Glob("/proc/[0-9]*/exe")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		target, err := os.Readlink(link)
		if err != nil || !strings.HasPrefix(target, filepath.Join(lab.Bin, "cgpu-guard")) {
			continue
		}
		pid := 0
		fmt.Sscanf(link, "/proc/%d/exe", &pid)
		if name, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err != nil || strings.HasPrefix(string(name), process.Name) {
			continue // the same program; it ends some seconds after the last guard
		}
		// Other nodes of this machine may run the same binary; a guard of ours has its log open here.
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		for _, file := range files {
			if target, err := os.Readlink(file); err == nil && strings.HasPrefix(target, lab.RunDir+"/") {
				pids = append(pids, pid)
				break
			}
		}
	}
	return pids
}

// wantRefused asserts that a run failed and that its error says why.
func wantRefused(t *testing.T, r node.Result, reasons ...string) {
	t.Helper()
	if r.Code == 0 {
		t.Fatalf("want a refusal: %s", r)
	}
	for _, reason := range reasons {
		if !regexp.MustCompile(reason).MatchString(r.All()) {
			t.Errorf("want %q in the refusal: %s", reason, r)
		}
	}
}
