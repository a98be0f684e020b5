// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// news makes a guard tell its events into a folder of the test's, and returns how to read them as text.
func news(t *testing.T, g *Guard) func() string {
	t.Helper()
	dir := t.TempDir()
	g.cfg.RunDir = dir
	g.events = event.NewWriter(dir, g.cfg.ID, g.cfg.Nonce)
	g.account.onDenied = g.noteDenied
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
	if !g.reserve(cost{size: 512 * quota.MiB}) || g.reserve(cost{size: 600 * quota.MiB}) || g.reserve(cost{size: 600 * quota.MiB}) ||
		g.reserve(cost{size: ^quota.Bytes(0)}) {
		t.Fatal("a limit of 1 GiB does not hold")
	}
	if g.account.reserve(cost{size: quota.GiB}, false) { // a look before the real one
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
	g.noteStart(ledger.Record{InitPID: 7, Name: "default/pod/main"})
	if g.reserve(cost{size: 2 * quota.GiB}) || !g.reserve(cost{size: 3 * quota.MiB}) {
		t.Fatal("a limit of 1 GiB does not hold")
	}
	g.beganAt.Store(time.Now().Add(-time.Hour).UnixNano())
	g.noteEnd()
	got := read()
	lines := strings.Split(got, "\n")
	if len(lines) != 3 || !strings.HasPrefix(lines[2], "end ×1: after 1h0m0") ||
		!strings.HasSuffix(lines[2], "s, 3MiB at most on GPU 0, 1 denied") || !strings.Contains(got, "start ×1: 1024MiB of GPU 0") {
		t.Errorf("told\n%s", got)
	}
	// A container that never ran has no end.
	g = newFakeGuard(t, answering(0, nil))
	read = news(t, g)
	g.noteEnd()
	if got := read(); got != "" {
		t.Errorf("told %s", got)
	}
}

func TestChangesAreTold(t *testing.T) {
	g := newFakeGuard(t, answering(0, nil))
	read := news(t, g)
	slice := ledger.VGPU{UUID: g.cfg.GPUs[0].UUID, Slice: quota.Slice{Limit: quota.GiB, Share: quota.Share{Weight: 1}}}
	tell := func(change func(*ledger.Record)) {
		r := ledger.Record{ID: g.cfg.ID, Nonce: g.cfg.Nonce, VGPUs: []ledger.VGPU{slice}}
		change(&r)
		other := ledger.Record{ID: g.cfg.ID, Nonce: "other", Paused: true}
		g.noteLedgerChanges([]ledger.Record{other, r})
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

// What a container held is given back before anything is told of its end, which may hang.
func TestGivenBackBeforeTheEnd(t *testing.T) {
	g := newFakeGuard(t, answering(0, nil))
	news(t, g)
	dir := g.cfg.RunDir
	g.cfg.LauncherPID = os.Getpid()
	g.cfg.Socket, g.cfg.Control = filepath.Join(dir, "s"), filepath.Join(dir, "c")
	book, x := ledger.Open(dir), g.cfg.GPUs[0]
	if _, err := book.Reserve(ledger.Request{
		Record: ledger.Record{ID: g.cfg.ID, Nonce: g.cfg.Nonce, VGPUs: []ledger.VGPU{{UUID: x.UUID, Slice: quota.Slice{Limit: quota.GiB,
			Share: quota.Share{Weight: 1}}}}},
		GPUs: []ledger.GPU{{UUID: x.UUID, Memory: x.Memory}},
		Card: sched.Card{Policy: sched.PolicyFair, MaxInst: 20, PrioRatio: sched.DefaultPrioRatio},
	}); err != nil {
		t.Fatal(err)
	}
	sockets, err := Listen(g.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(event.File(dir), 0o600); err != nil { // nobody reads: who opens it waits
		t.Fatal(err)
	}
	g.noteStart(ledger.Record{InitPID: 7})
	ended := make(chan error, 1)
	go func() { ended <- g.Run(sockets) }()
	g.endContainer()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		records, err := book.List()
		if err != nil {
			t.Fatal(err)
		}
		if len(records) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the reservation waits for the news")
		}
	}
	for { // let the writers go
		f, err := os.OpenFile(event.File(dir), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-ended:
			f.Close()
			if err != nil {
				t.Error(err)
			}
			return
		case <-time.After(10 * time.Millisecond):
			f.Close()
		}
	}
}

// Who asks for too much in a loop does not have the account's holder format a line each time.
func TestDeniedCostsLittle(t *testing.T) {
	g := newFakeGuard(t, answering(0, nil))
	read := news(t, g)
	deny := func() { g.noteDenied(0, quota.GiB, true, gpuAccount{}) }
	deny() // what is written at once
	// The GPU, the text's closure, and what they hold.
	if n := testing.AllocsPerRun(1000, deny); n > 4 {
		t.Errorf("%v allocations for a denial that is only counted", n)
	}
	read()
}
