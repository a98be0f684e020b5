package guard

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// news makes a guard tell its events into a folder of the test's, and returns how to read them as text.
func news(t *testing.T, g *Guard) func() string {
	t.Helper()
	dir := t.TempDir()
	g.cfg.RunDir = dir
	g.events = event.NewWriter(dir, g.cfg.ID, g.cfg.Nonce)
	g.account.onDenied = g.tellDenied
	return func() string {
		g.events.Close()
		list, err := event.Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		var lines []string
		for _, e := range list {
			gpu := ""
			if e.GPU != nil {
				gpu = fmt.Sprintf(" GPU %d", e.GPU.Index)
			}
			if e.Container != g.cfg.ID || e.Nonce != g.cfg.Nonce {
				t.Errorf("of another container: %+v", e)
			}
			lines = append(lines, fmt.Sprintf("%s%s ×%d: %s", e.Kind, gpu, max(e.Count, 1), e.Text))
		}
		return strings.Join(lines, "\n")
	}
}

func TestDeniedIsTold(t *testing.T) {
	g := newFakeGuard(t, answering(0, nil))
	read := news(t, g)
	if !g.reserve(0, 512*quota.MiB) || g.reserve(0, 600*quota.MiB) || g.reserve(0, 600*quota.MiB) || g.reserve(0, ^quota.Bytes(0)) {
		t.Fatal("a limit of 1 GiB does not hold")
	}
	if g.account.reserve(0, quota.GiB, false) { // a look before the real one
		t.Fatal("fits")
	}
	g.account.setLimits(0, testLimit, quota.MiB)
	if g.account.reserveSpill(0, quota.GiB) {
		t.Fatal("fits")
	}
	// The first at once, the others in one line when the container ends.
	want := `denied GPU 0 ×1: 600MiB asked for, 512MiB of 1024MiB in use
denied GPU 0 ×3: 1024MiB asked for, 512MiB of 1024MiB in use, 0MiB of 1MiB spilled`
	if got := read(); got != want {
		t.Errorf("told\n%s\nwant\n%s", got, want)
	}
	if got := inMiB(^quota.Bytes(0)); got != "17592186044416MiB" {
		t.Error(got)
	}
}

func TestLifeIsTold(t *testing.T) {
	g := newFakeGuard(t, answering(0, nil))
	read := news(t, g)
	g.tellStart(ledger.Record{InitPID: 7, Name: "default/pod/main"})
	if g.reserve(0, 2*quota.GiB) || !g.reserve(0, 3*quota.MiB) {
		t.Fatal("a limit of 1 GiB does not hold")
	}
	g.began.Store(time.Now().Add(-time.Hour).UnixNano())
	g.tellEnd()
	got := read()
	lines := strings.Split(got, "\n")
	if len(lines) != 3 || !strings.HasPrefix(lines[2], "end ×1: after 1h0m0") || !strings.HasSuffix(lines[2], "s, 3MiB at most on GPU 0, 1 denied") || !strings.Contains(got, "start ×1: 1024MiB of GPU 0") {
		t.Errorf("told\n%s", got)
	}
	// A container that never ran has no end.
	g = newFakeGuard(t, answering(0, nil))
	read = news(t, g)
	g.tellEnd()
	if got := read(); got != "" {
		t.Errorf("told %s", got)
	}
}

func TestChangesAreTold(t *testing.T) {
	g := newFakeGuard(t, answering(0, nil))
	read := news(t, g)
	slice := ledger.VGPU{UUID: g.cfg.GPUs[0].UUID, Limit: quota.GiB, Weight: 1}
	tell := func(change func(*ledger.Record)) {
		r := ledger.Record{ID: g.cfg.ID, Nonce: g.cfg.Nonce, VGPUs: []ledger.VGPU{slice}}
		change(&r)
		other := ledger.Record{ID: g.cfg.ID, Nonce: "other", Paused: true}
		g.compute.tell([]ledger.Record{other, r})
	}
	tell(func(*ledger.Record) {}) // how it began
	tell(func(r *ledger.Record) { r.InitPID = 1 })
	tell(func(r *ledger.Record) { r.VGPUs[0].Weight = 3 })
	tell(func(r *ledger.Record) { r.VGPUs[0].Weight, r.Paused = 3, true })
	tell(func(r *ledger.Record) { r.VGPUs[0].Weight = 3 })
	want := `set GPU 0 ×1: weight 1 → 3
paused ×1: all GPU work stops
resumed ×1: GPU work goes on`
	if got := read(); got != want {
		t.Errorf("told\n%s\nwant\n%s", got, want)
	}
}
