// SPDX-License-Identifier: Apache-2.0

//go:build kubernetes

package kubernetes

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/opencgpu/cgpu/pkg/testenv"
	"github.com/opencgpu/cgpu/test/kubernetes/kube"
)

// gpushare is the address of its scheduler extender, as its own manifests have it.
const gpushare = "http://127.0.0.1:39999/gpushare-scheduler"

// startExtender runs gpushare's scheduler extender, unmodified, and a scheduler that asks it.
func startExtender(t *testing.T) {
	t.Helper()
	program := lab.path("bin/gpushare-extender")
	if _, err := os.Stat(program); err != nil {
		testenv.Skip(t, "no gpushare-extender: build.sh extender FOLDER makes it of a checkout, which the module proxy does not serve")
	}
	extra := filepath.Join(t.TempDir(), "extender.yaml")
	if err := os.WriteFile(extra, []byte(`extenders:
- urlPrefix: `+gpushare+`
  filterVerb: filter
  bindVerb: bind
  nodeCacheCapable: true
  managedResources: [{name: aliyun.com/gpu-mem, ignoredByScheduler: false}]
`), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+kube.Config(lab.dir), "PORT=39999", "THREADNESS=4")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	scheduler := func(extra string) {
		for _, verb := range []string{"stop", "start"} {
			if out, err := lab.scriptWith([]string{"SCHED_EXTRA=" + extra}, verb, "kube-scheduler"); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		}
	}
	t.Cleanup(func() {
		scheduler("")
		cmd.Process.Kill() //nolint:errcheck // it may have ended
		cmd.Wait()         //nolint:errcheck // it was killed
	})
	kube.Until(t, waitLimit, "the extender", func() error { _, err := inspect(); return err })
	scheduler(extra)
}

// inspected is what the extender says of a node, as kubectl inspect gpushare prints it.
type inspected struct {
	Nodes []struct {
		Name string `json:"name"`
		Devs []struct {
			ID    int  `json:"id"`
			Total uint `json:"totalGPU"`
			Used  uint `json:"usedGPU"`
		} `json:"devs"`
	} `json:"nodes"`
}

func inspect() (inspected, error) {
	var answer inspected
	r, err := http.Get(gpushare + "/inspect/" + nodeName)
	if err != nil {
		return answer, err
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err == nil {
		err = json.Unmarshal(text, &answer)
	}
	return answer, errorOf(err, "")
}

// used are the units in use of each GPU with any.
func (i inspected) used() map[int]uint {
	used := map[int]uint{}
	for _, n := range i.Nodes {
		for _, d := range n.Devs {
			if d.Used > 0 {
				used[d.ID] = d.Used
			}
		}
	}
	return used
}

// A cluster with gpushare's extender, whose device plugin was replaced by cgpu-agent: the extender chooses the GPU, the node
// follows it, and inspect agrees with the ledger.
func TestGPUShareExtender(t *testing.T) {
	needsDevicePlugin(t)
	t.Cleanup(func() {
		if err := lab.deploy(); err != nil {
			t.Error(err)
		}
	})
	if err := lab.applyOverlay("deploy/gpushare"); err != nil {
		t.Fatal(err)
	}
	if err := lab.agentIsReady(); err != nil {
		t.Fatal(err)
	}
	kube.Until(t, waitLimit, "all four GPUs are the device plugin's", func() error {
		out, err := lab.kubectl("", "get", "node", nodeName, "-o",
			`jsonpath={.status.allocatable.aliyun\.com/gpu-mem} {.status.allocatable.aliyun\.com/gpu-count}`)
		if err != nil || out != "60 4" {
			return errorOf(err, "gpu-mem and gpu-count are %s", out)
		}
		return nil
	})
	startExtender(t)
	s := login(t)
	// The plugin numbers its GPUs, and keeps the numbers it has given: here those of the two that it had before come first.
	uuids := map[int]string{}
	want := map[int]uint{}
	for i, units := range []int{10, 10, 5, 4, 9, 15} {
		name := fmt.Sprintf("p%d", i)
		s.apply(pod(name, withMemory(units, "sleep 1000")))
		s.reaches(name, corev1.PodRunning)
		// The plugin writes after the kubelet has said whose the units are.
		kube.Until(t, waitLimit, "the plugin's annotation", func() error {
			if a := s.get(name).Annotations; a["ALIYUN_COM_GPU_MEM_ASSIGNED"] != "true" {
				return fmt.Errorf("%v", a)
			}
			return nil
		})
		p := s.get(name)
		index, err := strconv.Atoi(p.Annotations["ALIYUN_COM_GPU_MEM_IDX"])
		if err != nil || p.Annotations["ALIYUN_COM_GPU_MEM_ASSIGNED"] != "true" || p.Annotations["ALIYUN_COM_GPU_MEM_ASSUME_TIME"] == "" {
			t.Fatalf("the extender and the plugin wrote %v", p.Annotations)
		}
		want[index] += uint(units)
		v := s.holds(name)["c"].VGPUs
		if len(v) != 1 || uuids[index] != "" && uuids[index] != v[0].UUID {
			t.Fatalf("pod %s of %d units is on %+v, the extender chose GPU %d, which is %s", name, units, v, index, uuids[index])
		}
		uuids[index] = v[0].UUID
	}
	if distinct := len(slices.Compact(slices.Sorted(maps.Values(uuids)))); distinct != len(uuids) || distinct != 4 {
		t.Errorf("the extender's GPUs are %v, want four", uuids)
	}
	says, err := inspect()
	if err != nil {
		t.Fatal(err)
	}
	if got := says.used(); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("inspect says that %v are in use, the pods' annotations %v", got, want)
	}
	// Seven units are left, on two GPUs.
	s.apply(pod("none", withMemory(7, "sleep 1000")))
	s.pending("none", "Insufficient GPU Memory in one device")
}
