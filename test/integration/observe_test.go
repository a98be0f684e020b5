//go:build integration

package integration

import (
	"encoding/json"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sim"
	"github.com/opencgpu/cgpu/test/node"
)

// noMemory is what cgpu-probe prints for RM's NV_ERR_NO_MEMORY.
const noMemory = `(?i)NO_MEMORY|0x51|out of memory`

// contextOverhead bounds what a program that allocates until it is refused may leave: the context's hidden memory and
// one smallest piece.
const contextOverhead = 64 * quota.MiB

// number finds "key value" or "key=value" lines of cgpu-probe, one per GPU.
func numbers(t *testing.T, out, key string) []quota.Bytes {
	t.Helper()
	var all []quota.Bytes
	for _, m := range regexp.MustCompile(`(?m)\b`+key+`[ =](\d+)`).FindAllStringSubmatch(out, -1) {
		n, err := strconv.ParseUint(m[1], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, quota.Bytes(n))
	}
	return all
}

func number(t *testing.T, out, key string) quota.Bytes {
	t.Helper()
	all := numbers(t, out, key)
	if len(all) != 1 {
		t.Fatalf("want one %s in %q", key, out)
	}
	return all[0]
}

// total, free and used are what a program in the container is told of its one GPU.
func total(t *testing.T, meminfo string) quota.Bytes { t.Helper(); return number(t, meminfo, "total") }
func free(t *testing.T, meminfo string) quota.Bytes  { t.Helper(); return number(t, meminfo, "free") }
func used(t *testing.T, meminfo string) quota.Bytes {
	t.Helper()
	return total(t, meminfo) - free(t, meminfo)
}

// totals are the sizes of all GPUs of the container.
func totals(t *testing.T, meminfo string) []quota.Bytes {
	t.Helper()
	return numbers(t, meminfo, "total")
}

// pids is the number of processes that the container is told of.
func pids(t *testing.T, out string) int { t.Helper(); return int(number(t, out, "count")) }

// checkOOM checks that a program that allocated until it was refused got the limit and ended well.
func checkOOM(t *testing.T, r node.Result, limit quota.Bytes) {
	t.Helper()
	if r.Code != 0 {
		t.Error(r)
		return
	}
	got := number(t, r.Stdout, "allocated")
	if got > limit || got < limit-contextOverhead {
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
	id := c.start(t)
	eventually(t, 20*time.Second, func() string {
		r := lab.Run(nil, "docker", "logs", id)
		if strings.Contains(r.Stdout, "holding") {
			return ""
		}
		return r.String()
	})
	return id
}

// driverUsed is what the simulated driver has given out on all cards; 0 on a real one, which other programs share.
func driverUsed(t *testing.T) quota.Bytes {
	t.Helper()
	if lab.Driver != device.DriverSim {
		return 0
	}
	var s sim.Snapshot
	if err := json.Unmarshal([]byte(run(t, filepath.Join(lab.Bin, "cgpu-sim"), "snapshot")), &s); err != nil {
		t.Fatal(err)
	}
	var sum quota.Bytes
	for _, gpu := range s.GPUs {
		sum += gpu.Used
	}
	return sum
}

// smiUsed is a container's use as cgpu smi reports it.
func smiUsed(t *testing.T, id string) quota.Bytes {
	t.Helper()
	var smi struct {
		GPUs []struct {
			VGPUs []struct {
				ID   string
				Used quota.Bytes
			} `json:"vgpus"`
		} `json:"gpus"`
	}
	out := run(t, filepath.Join(lab.Bin, "cgpu"), "smi", "-o", "json")
	if err := json.Unmarshal([]byte(out), &smi); err != nil {
		t.Fatal(err)
	}
	for _, gpu := range smi.GPUs {
		for _, v := range gpu.VGPUs {
			if strings.HasPrefix(id, v.ID) || strings.HasPrefix(v.ID, id) {
				return v.Used
			}
		}
	}
	t.Fatalf("cgpu smi does not know %s: %s", id, out)
	return 0
}
