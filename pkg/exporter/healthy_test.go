// SPDX-License-Identifier: Apache-2.0

package exporter

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/health"
)

// TestHealthy: a GPU is told unhealthy also where nothing follows of it, and not told healthy where nobody can tell.
func TestHealthy(t *testing.T) {
	n := newNode(t)
	n.table.Config.Health = device.HealthOff
	must(t, n.table.Save(n.dir))
	ctx, stop := context.WithCancel(t.Context())
	w := health.Watcher{RunDir: n.dir, Load: func(string) (*device.Table, error) { return nil, errors.New("none") }, Complain: func(error) {}}
	ended := make(chan error)
	go func() { ended <- w.Run(ctx) }()
	for !health.Watched(n.dir) {
		time.Sleep(time.Millisecond)
	}
	_, _, err := health.Change(n.dir, func(s health.State) health.State {
		return s.Step(&n.table, health.Seen{Hardware: map[string]device.Hardware{gpu0: {NewXids: []uint64{79}}, gpu1: {}}}, time.Now())
	})
	must(t, err)
	got := scrape(t, New(Options{RunDir: n.dir}))
	for index, uuid := range []string{gpu0, gpu1} { // the first is broken
		if want := fmt.Sprintf("cgpu_gpu_healthy{gpu=%q,index=\"%d\"} %[2]d\n", uuid, index); !strings.Contains(got, want) {
			t.Errorf("want %s:\n%s", want, got)
		}
	}
	must(t, os.WriteFile(health.File(n.dir), []byte("{"), 0o600))
	if got = scrape(t, New(Options{RunDir: n.dir})); strings.Contains(got, "cgpu_gpu_healthy") {
		t.Errorf("nobody knows, and it is told:\n%s", got)
	}
	stop()
	must(t, <-ended)
}
