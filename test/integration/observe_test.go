// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/schema"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/test/node"
)

// noMemory is what cgpu-probe prints for RM's NV_ERR_NO_MEMORY.
const noMemory = `(?i)NO_MEMORY|0x51|out of memory`

// slack is what an allocate-until-refused may leave: less than its smallest piece on top of what the driver itself keeps
// for a client (nothing on the simulated one).
const slack = 2 * quota.MiB

// number finds a "key=number" line of cgpu-probe.
func number(t *testing.T, out, key string) quota.Bytes {
	t.Helper()
	m := regexp.MustCompile(`(?m)^` + key + `=(\d+)\s*$`).FindStringSubmatch(out)
	if m == nil {
		t.Fatalf("want a line %s=NUMBER in %q", key, out)
	}
	n, err := strconv.ParseUint(m[1], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return quota.Bytes(n)
}

// total, free and used are what a program in the container is told of its first GPU (cgpu-probe meminfo).
func total(t *testing.T, meminfo string) quota.Bytes {
	t.Helper()
	return number(t, meminfo, "total_mib") * quota.MiB
}

func free(t *testing.T, meminfo string) quota.Bytes {
	t.Helper()
	return number(t, meminfo, "free_mib") * quota.MiB
}

func used(t *testing.T, meminfo string) quota.Bytes {
	t.Helper()
	return number(t, meminfo, "used_mib") * quota.MiB
}

// pids is the number of processes that the container is told of (cgpu-probe pids).
func pids(t *testing.T, r node.Result) int {
	t.Helper()
	m := regexp.MustCompile(`(?m)^users=([\d,]*)\s*$`).FindStringSubmatch(r.Stdout)
	if m == nil {
		t.Fatalf("want a line users=… of %s", r)
	}
	return len(strings.FieldsFunc(m[1], func(c rune) bool { return c == ',' }))
}

// checkOOM checks that a program that allocated until it was refused got the limit and ended well.
func checkOOM(t *testing.T, r node.Result, limit quota.Bytes) {
	t.Helper()
	if r.Code != 0 {
		t.Error(r)
		return
	}
	if got := number(t, r.Stdout, "bytes"); got > limit || got < limit-slack {
		t.Errorf("allocated %v of %v until refused: %s", got, limit, r)
	}
}

// checkGPUs checks which of the node's GPUs a container sees.
func checkGPUs(t *testing.T, out string, want ...int) {
	t.Helper()
	all := gpus(t)
	for _, gpu := range all {
		wanted := false
		for _, w := range want {
			wanted = wanted || gpu.Index == w
		}
		if seen := strings.Contains(out, gpu.UUID); seen != wanted {
			t.Errorf("GPU %d seen = %v, want %v: %s", gpu.Index, seen, wanted, out)
		}
	}
}

// holding starts a container that allocates size and keeps it.
func holding(t *testing.T, c container, size string) string {
	t.Helper()
	c.cmd = []string{"cgpu-probe", "hold", size}
	return c.ready(t)
}

// ready starts a container and waits until its program says that it is.
func (c container) ready(t *testing.T) string {
	t.Helper()
	id := c.start(t)
	eventually(t, 20*time.Second, func() string {
		r := lab.Run(nil, "docker", "logs", id)
		if strings.Contains(r.Stdout, "ready=1") {
			return ""
		}
		return r.String()
	})
	return id
}

// cardUsed is what nvidia-smi on the host says is in use on the real card; the driver's own needs are in it.
func cardUsed(t *testing.T) quota.Bytes {
	t.Helper()
	out := strings.TrimSpace(run(t, "nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"))
	mib, err := strconv.ParseUint(out, 10, 32)
	if err != nil {
		t.Fatalf("nvidia-smi: %q", out)
	}
	return quota.Bytes(mib) * quota.MiB
}

// driverUsed is what the simulated driver has given out on all cards; 0 on a real one, which other programs share.
func driverUsed(t *testing.T) quota.Bytes {
	t.Helper()
	if lab.Driver != device.DriverSim {
		return 0
	}
	if _, err := os.Stat(filepath.Join(lab.RunDir, "sim.sock")); os.IsNotExist(err) {
		return 0 // no container has asked for a GPU yet
	}
	var sum quota.Bytes
	for _, gpu := range drivers(t).GPUs {
		sum += gpu.Used
	}
	return sum
}

// vgpu is what cgpu smi shows of a container's slice.
type vgpu struct {
	ID       string      `json:"id"`
	Name     string      `json:"name"`
	State    string      `json:"state"`
	Limit    quota.Bytes `json:"limit_bytes"`
	Used     quota.Bytes `json:"used_bytes"`
	Managed  quota.Bytes `json:"managed_bytes"`
	Spill    quota.Bytes `json:"spill_bytes"`
	Spilled  quota.Bytes `json:"spilled_bytes"`
	Weight   int         `json:"weight"`
	Percent  int         `json:"percent"`
	Priority string      `json:"priority"`
	Paused   bool        `json:"paused"`
	Calls    struct {
		ProcessesKilled uint64 `json:"processes_killed"`
	} `json:"calls"`
	Enforcement string         `json:"enforcement"`
	Compute     schema.Compute `json:"compute"`
}

// smiOf is a container's slice of its first GPU in cgpu smi. That waits for a guard for a moment only, which may be busy for longer.
func smiOf(t *testing.T, id string) (found vgpu) {
	t.Helper()
	eventually(t, 30*time.Second, func() string {
		found = smiOnce(t, id)
		if found.State == snapshot.StateNoAnswer {
			return "the guard of " + id + " does not answer"
		}
		return ""
	})
	return found
}

func smiOnce(t *testing.T, id string) vgpu {
	t.Helper()
	var smi struct {
		GPUs []struct {
			VGPUs []vgpu `json:"vgpus"`
		} `json:"gpus"`
	}
	out := cgpu(t, "smi", "--json")
	if err := json.Unmarshal([]byte(out), &smi); err != nil {
		t.Fatal(err)
	}
	for _, gpu := range smi.GPUs {
		for _, v := range gpu.VGPUs {
			if v.ID == id {
				return v
			}
		}
	}
	t.Fatalf("cgpu smi does not know %s: %s", id, out)
	return vgpu{}
}
