// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/peerpage"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// TestStartArbiter: where nobody decides one is started, now and then, by a guard that is on the page; where one does, or no context is
// there, none.
func TestStartArbiter(t *testing.T) {
	c := newFakeContainer(t, 1)
	x := c.gpu()
	now := c.Now()
	c.Now = func() time.Duration { return now }
	page, err := peerpage.Open(c.Config.RunDir, "GPU-0")
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan []byte, 100)
	c.StartArbiter = func(runDir, uuid string, config []byte) error {
		if runDir != c.Config.RunDir || uuid != "GPU-0" || page.Living() != 1 {
			t.Errorf("%s, %s, %d guards on the page", runDir, uuid, page.Living())
		}
		asked <- config
		return nil
	}
	x.joinPage(peerpage.Join)
	n := 0
	expect := func(what string, want int) {
		t.Helper()
		x.step(now)
		for n < want {
			select {
			case <-asked:
				n++
			case <-time.After(time.Minute):
				t.Fatalf("%s: %d were started, want %d", what, n, want)
			}
		}
		if len(asked) > 0 {
			t.Errorf("%s: more than %d were started", what, want)
		}
	}
	expect("its first context", 1)
	now += askTime - 1
	expect("soon after", 1)
	now++
	expect("still nobody", 2)
	says(t, c.Config.RunDir, func(g peerpage.Guest) sched.Verdict {
		return sched.Verdict{Row: sched.Row{Slice: 7 * time.Millisecond}, Until: now + 2*askTime, Adopted: g.Adopted, Busy: 1}
	})
	now += askTime
	expect("one that decides", 2)
	now += askTime
	expect("it is gone", 3)
	for _, g := range c.Groups(0) {
		c.free(g.Client.Handle(), g.Handle)
	}
	now += askTime
	expect("no context", 3)
}

// TestArbiterConfig: an arbiter is told of one GPU, and nothing of the container, which is over before.
func TestArbiterConfig(t *testing.T) {
	cfg := guardcfg.Config{ID: "secret", Nonce: "secret", RunDir: "/run/cgpu", Socket: "secret", Control: "secret", Log: "secret",
		Page: "secret", Driver: "sim", SimSocket: "/run/cgpu/sim.sock", Hold: []string{"secret"}, Cgroups: []string{"secret"}, LauncherPID: 7,
		GPUs: make([]guardcfg.GPU, 2)}
	cfg.GPUs[0].UUID, cfg.GPUs[1].UUID, cfg.GPUs[1].Limit = "GPU-a", "GPU-b", 1<<30
	got := arbiterConfig(cfg, 1)
	text, err := json.Marshal(got)
	if err != nil || strings.Contains(string(text), "secret") || got.LauncherPID != 0 {
		t.Errorf("%s, %v", text, err)
	}
	if len(got.GPUs) != 1 || got.GPUs[0].UUID != "GPU-b" || got.GPUs[0].Limit != 0 || got.Log != "/run/cgpu/log/arbiter-GPU-b.log" ||
		got.SimSocket != cfg.SimSocket {
		t.Errorf("%+v", got)
	}
	if _, err := OpenArbiter(cfg, nil, slog.Default()); err == nil || !strings.Contains(err.Error(), "want one") {
		t.Errorf("two GPUs: %v", err)
	}
}
