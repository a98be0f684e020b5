// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// The agent waits for a table, says so on the node, and ends without one.
func TestRunWithoutTable(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "none")
	client := fake.NewClientset(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}})
	ctx, stop := context.WithCancel(t.Context())
	front := &fakeFront{}
	done := make(chan error)
	go func() {
		done <- Run(ctx, Options{Node: "n", Client: client, RunDir: dir, FrontEnds: []FrontEnd{front.frontEnd()}, Health: "127.0.0.1:0",
			Log: silent})
	}()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		n, err := client.CoreV1().Nodes().Get(ctx, "n", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(n.Status.Conditions) == 1 && n.Status.Conditions[0].Reason == ReasonNoTable {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("conditions %+v", n.Status.Conditions)
		}
	}
	stop()
	select {
	case err := <-done:
		if err != nil || front.starts != 0 {
			t.Errorf("%v, %d starts", err, front.starts)
		}
	case <-time.After(time.Minute):
		t.Fatal("does not end")
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("made the run directory, which is the host's")
	}
}

// A driver that the guard does not know: the front ends run, because claims are given back through them, and offer nothing.
func TestUnknownDriver(t *testing.T) {
	dir := t.TempDir()
	key, err := device.ReadKey(device.DriverSim, "", "", "")
	if err != nil {
		t.Fatal(err)
	}
	fake := &fakeFront{}
	metrics := NewMetrics()
	a := &agent{Options: Options{RunDir: dir, Log: silent}, metrics: metrics, table: newWatcher(dir),
		running:  []*front{{FrontEnd: fake.frontEnd()}},
		reporter: newReporter(nil, "n", nil, metrics, silent), resizer: newResizer(dir, newPods(answer(t), silent), nil, nil, metrics, silent)}
	for i, step := range []struct {
		version string
		gpus    int
		reason  string
	}{{"600.1.2", 0, ReasonUnknownDriver}, {"580.159.04", 1, ReasonReady}, {"470.1.2", 0, ReasonUnknownDriver}} {
		table := tableOf(device.PodsAllocated, device.GPU{UUID: "GPU-00000000-0000-0000-0000-000000000001", BusID: "0000:01:00.0",
			Memory: quota.GiB,
			Node:   device.Node{Path: "/dev/nvidia0", HostPath: "/dev/null"}})
		table.Key, table.DriverVersion, table.Config.PrioRatio = key, step.version, sched.DefaultPrioRatio
		if err := table.Save(dir); err != nil {
			t.Fatal(err)
		}
		a.refresh(t.Context())
		c := judge(a.state)
		if fake.starts != 1 || fake.updates != i || fake.gpus != step.gpus || c.Reason != step.reason || a.ready() != nil {
			t.Errorf("%s: %+v, %s %q, ready: %v", step.version, fake, c.Reason, c.Message, a.ready())
		}
	}
}

func TestHealth(t *testing.T) {
	a := &agent{Options: Options{Log: silent}, metrics: NewMetrics()}
	a.looked.Store(time.Now())
	a.metrics.Register(func(w io.Writer) error {
		_, err := io.WriteString(w, "# HELP more Of a source.\n# TYPE more gauge\nmore 1\n")
		return errors.Join(err, errors.New("half of it"))
	})
	made := 0
	a.metrics.Register(func(w io.Writer) error { made++; _, err := io.WriteString(w, "later 1\n"); return err })
	a.metrics.Add("events_total", 2)
	h := healthHandler(a)
	ask := func(method, path string, code int, has string) {
		t.Helper()
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(method, path, nil))
		if w.Code != code || !strings.Contains(w.Body.String(), has) {
			t.Errorf("%s %s: %d %q, want %d with %q", method, path, w.Code, w.Body.String(), code, has)
		}
	}
	ask("GET", "/healthz", 200, "ok")
	ask("GET", "/readyz", 503, "not looked at")
	a.state = State{Table: tableOf("", device.GPU{}), Fronts: []FrontState{{Name: "dra"},
		{Name: "deviceplugin", Err: errors.New("no kubelet\x1b")}}}
	ask("GET", "/readyz", 503, "deviceplugin: no kubelet?")
	a.state.Fronts[1].Err = nil
	ask("GET", "/readyz", 200, "ok")
	a.state.TableErr = device.ErrMissing
	ask("GET", "/readyz", 503, "no node table")
	a.looked.Store(time.Now().Add(-stuck - time.Second))
	ask("GET", "/healthz", 503, "has not looked")
	for _, has := range []string{"cgpu_agent_events_total 2\n", "cgpu_agent_events_dropped_total 0\n", "more 1\n", "later 1\n",
		"# TYPE cgpu_agent_heap_bytes gauge"} {
		ask("GET", "/metrics", 200, has)
	}
	// However often somebody asks.
	begun, before := time.Now(), made
	for range 200 {
		ask("GET", "/metrics", 200, "later 1\n")
	}
	if most := int(time.Since(begun)/fresh) + 1; made-before > most {
		t.Errorf("asked again and again the figures were made %d times, want at most %d", made-before, most)
	}
	ask("GET", "/debug/pprof/", 404, "")
	ask("GET", "/v1/smi", 404, "") // off
	a.SMI, a.RunDir = true, t.TempDir()
	h = healthHandler(a)
	ask("GET", "/v1/smi", 503, "node.json")
	ask("POST", "/metrics", http.StatusMethodNotAllowed, "")
	if _, err := serveHealth("nonsense:::", a); err == nil || !strings.Contains(err.Error(), "--health-address") {
		t.Error(err)
	}
}
