// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/schema"
)

func ask(h http.HandlerFunc) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h(w, httptest.NewRequest(http.MethodGet, "/v1/smi", nil))
	return w
}

func TestSMIWithoutTable(t *testing.T) {
	if w := ask(smi(t.TempDir())); w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), "node.json") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// The answer has what a guard says, but no process; a second request within a second asks no guard.
func TestSMI(t *testing.T) {
	dir, err := os.MkdirTemp("", "smi") // short: a socket's path has 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	table := &device.Table{}
	text, err := os.ReadFile("../node/nodetest/node.json")
	if err == nil {
		err = json.Unmarshal(text, table)
	}
	if err != nil {
		t.Fatal(err)
	}
	gpu := table.GPUs[0]
	if err := table.Save(dir); err != nil {
		t.Fatal(err)
	}
	record := ledger.Record{ID: "c1", Nonce: "n1", Name: "web/serve-1/main", Control: filepath.Join(dir, "c.ctl"), GuardPID: os.Getpid(),
		InitPID: os.Getpid(), LauncherPID: os.Getpid()}
	l, err := net.Listen("unix", record.Control)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	asked := make(chan bool, 10)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			asked <- true
			_ = json.NewDecoder(c).Decode(&api.Request{}) // what is closed unread loses the answer
			_ = json.NewEncoder(c).Encode(api.Status{ID: "c1", Nonce: "n1", InitPID: 7, VGPUs: []api.VGPUStatus{{UUID: gpu.UUID, Used: quota.GiB}},
				Processes: []api.ProcessStatus{{PID: 7, Name: "secret-model", Used: []quota.Bytes{quota.GiB}}}})
			c.Close()
		}
	}()
	record.VGPUs = []ledger.VGPU{{UUID: gpu.UUID,
		Slice: quota.Slice{Limit: 6 * quota.GiB, Share: quota.Share{Weight: 1, Priority: quota.PriorityDefault}}}}
	if _, err := ledger.Open(dir).Reserve(ledger.Request{Record: record, GPUs: []ledger.GPU{{UUID: gpu.UUID, Memory: gpu.Memory}},
		Card: sched.Card{Policy: sched.PolicyPreempt, MaxInst: 20, PrioRatio: 80}}); err != nil {
		t.Fatal(err)
	}
	h, begun := smi(dir), time.Now()
	w := ask(h)
	var v schema.Node
	if err := json.Unmarshal(w.Body.Bytes(), &v); err != nil || w.Code != http.StatusOK || len(v.GPUs) != 2 || len(v.GPUs[0].VGPUs) != 1 {
		t.Fatalf("%v: %d %s", err, w.Code, w.Body)
	}
	if x := v.GPUs[0].VGPUs[0]; x.Used != quota.GiB || x.Name != "web/serve-1/main" || x.Limit != 6*quota.GiB {
		t.Errorf("%+v", x)
	}
	if strings.Contains(w.Body.String(), "secret-model") || strings.Contains(w.Body.String(), `"nonce"`) {
		t.Errorf("names a process, or a nonce: %s", w.Body)
	}
	ask(h)
	if took := time.Since(begun); len(asked) != 1 && took < fresh {
		t.Errorf("the guard was asked %d times for two requests within %v", len(asked), took)
	}
}

// Who may not be told of containers is not told of them in /metrics either.
func TestMetricsOfContainers(t *testing.T) {
	for smi, want := range map[bool]string{true: "\ncgpu_up 0\n", false: ""} {
		var text strings.Builder
		if err := metricsOf(Options{RunDir: t.TempDir(), SMI: smi}).write(&text); err != nil {
			t.Fatal(err)
		}
		if got := text.String(); !strings.Contains(got, "cgpu_agent_events_total 0\n") || !strings.Contains(got, want) || !smi &&
			strings.Contains(got, "cgpu_up") {
			t.Errorf("smi %v: %s", smi, got)
		}
	}
}
