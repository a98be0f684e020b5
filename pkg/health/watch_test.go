// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// fakeDriver says what it is told to say.
type fakeDriver struct {
	mu   sync.Mutex
	next map[string]device.Hardware
	err  error
}

func (f *fakeDriver) ask() (map[string]device.Hardware, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.next, f.err
}

func watcher(runDir string, f *fakeDriver, t *device.Table) *Watcher {
	return &Watcher{RunDir: runDir, Load: func(string) (*device.Table, error) { return t, nil }, Ask: f.ask, Complain: func(error) {}}
}

// TestLook: what is found is in the file, in the events once, of the GPU and of each container that has it, and outlives the watcher.
func TestLook(t *testing.T) {
	runDir := t.TempDir()
	book := ledger.Open(runDir)
	for i, uuid := range []string{gpu0, gpu1} {
		_, err := book.Reserve(ledger.Request{
			GPUs: []ledger.GPU{{UUID: uuid, Index: i, Memory: 1 << 30}},
			Card: sched.Card{MaxInst: 2, PrioRatio: sched.DefaultPrioRatio},
			Record: ledger.Record{ID: fmt.Sprint("box", i), Nonce: fmt.Sprint("n", i), Name: "ml/train/main",
				VGPUs: []ledger.VGPU{{UUID: uuid, Slice: quota.Slice{Limit: 1 << 29}}}},
		})
		must(t, err)
	}
	table := tableOf(gpu0, gpu1)
	f := &fakeDriver{next: map[string]device.Hardware{gpu0: {NewXids: []uint64{79}}, gpu1: {}}}
	w := watcher(runDir, f, table)
	now := time.Unix(1000, 0).UTC()
	must(t, w.poll(now))
	told := func(want ...string) {
		t.Helper()
		events, err := event.Read(runDir)
		must(t, err)
		var got []string
		for _, e := range events {
			got = append(got, fmt.Sprintf("%s %d %s %s: %s", e.Kind, e.GPU.Index, e.Container, e.Name, e.Text))
		}
		if !slices.Equal(got, want) {
			t.Errorf("events %q, want %q", got, want)
		}
	}
	bad := []string{"unhealthy 0  : Xid 79: fallen off the bus", "unhealthy 0 box0 ml/train/main: Xid 79: fallen off the bus"}
	told(bad...)
	w = watcher(runDir, f, table) // another one, to which the driver does not tell of it again
	f.next = map[string]device.Hardware{gpu0: {}, gpu1: {}}
	must(t, w.poll(now.Add(time.Second)))
	told(bad...)
	marked, err := Marked(runDir, table)
	if must(t, err); marked.GPUs[0].Fault == "" || marked.GPUs[1].Fault != "" {
		t.Errorf("%+v", marked.GPUs)
	}
	cleared, err := Clear(runDir, gpu0)
	if must(t, err); len(cleared) != 1 {
		t.Errorf("cleared %+v", cleared)
	}
	must(t, w.poll(now.Add(2*time.Second)))
	if marked, err = Marked(runDir, table); err != nil || marked.GPUs[0].Fault != "" {
		t.Errorf("%v: cleared, and %+v", err, marked.GPUs)
	}
	for _, away := range []map[string]device.Hardware{{gpu0: {}}, {gpu0: {}, gpu1: {Lost: true}}} { // for one look
		f.next = away
		must(t, w.poll(now.Add(3*time.Second)))
		f.next = map[string]device.Hardware{gpu0: {}, gpu1: {}}
		must(t, w.poll(now.Add(3*time.Second)))
	}
	told(bad...)
	f.next = map[string]device.Hardware{gpu0: {}}
	must(t, w.poll(now.Add(3*time.Second)))
	f.err = errors.New("NVML: no answer")
	if err := w.poll(now.Add(3 * time.Second)); err == nil {
		t.Error("no answer is none")
	}
	told(bad...)
	f.err = nil
	must(t, w.poll(now.Add(3*time.Second)))
	f.next = map[string]device.Hardware{gpu0: {}, gpu1: {}}
	must(t, w.poll(now.Add(4*time.Second)))
	must(t, w.poll(now.Add(4*time.Second+Settle)))
	told(append(bad, "unhealthy 1  : the driver cannot reach the GPU", "unhealthy 1 box1 ml/train/main: the driver cannot reach the GPU",
		"healthy 1  : healthy again", "healthy 1 box1 ml/train/main: healthy again")...)
}

// TestSilent: NVML that does not answer for long makes all GPUs unhealthy, and its first answer ends that.
func TestSilent(t *testing.T) {
	runDir, table := t.TempDir(), tableOf(gpu0, gpu1)
	f := &fakeDriver{next: map[string]device.Hardware{gpu0: {}, gpu1: {}}}
	w := watcher(runDir, f, table)
	now := time.Now()
	must(t, w.poll(now))
	f.err = errors.New("NVML: no answer")
	unhealthy := func(after time.Duration, want int) {
		t.Helper()
		err := w.poll(now.Add(after))
		if (err == nil) != (f.err == nil) {
			t.Errorf("%v", err)
		}
		marked, err := Marked(runDir, table)
		if n := len(Unhealthy(marked)); err != nil || n != want {
			t.Errorf("%v: %d unhealthy after %v, want %d", err, n, after, want)
		}
	}
	unhealthy(Patience-time.Second, 0)
	unhealthy(Patience, 2)
	f.err = nil
	unhealthy(Patience+time.Second, 2)
	unhealthy(Patience+time.Second+Settle, 0)
}

// TestXidIsNotLost: the driver tells of an Xid once. It counts although nothing else is answered, although it could not be written at
// first, and although another thing is told of its GPU then.
func TestXidIsNotLost(t *testing.T) {
	runDir, table := t.TempDir(), tableOf(gpu0, gpu1)
	f := &fakeDriver{next: map[string]device.Hardware{gpu0: {}, gpu1: {}}}
	w := watcher(runDir, f, table)
	now := time.Now()
	must(t, w.poll(now))
	why := func(want string) {
		t.Helper()
		marked, err := Marked(runDir, table)
		if must(t, err); marked.GPUs[0].Fault != want || marked.GPUs[1].Fault != "" {
			t.Errorf("%+v, want %q", marked.GPUs, want)
		}
	}
	hangs := errors.New("NVML: no answer")
	f.next, f.err = map[string]device.Hardware{gpu0: {NewXids: []uint64{79}}}, hangs
	if err := w.poll(now); !errors.Is(err, hangs) { // at the very moment of the last answer, too
		t.Error(err)
	}
	why("Xid 79: fallen off the bus")
	must(t, os.WriteFile(File(runDir), []byte("{"), 0o600))
	f.next, f.err = map[string]device.Hardware{gpu0: {NewXids: []uint64{48}}, gpu1: {}}, nil
	if err := w.poll(now.Add(time.Second)); err == nil {
		t.Error("looked")
	}
	must(t, os.Remove(File(runDir)))
	f.next = map[string]device.Hardware{gpu0: {NewXids: []uint64{62}}, gpu1: {}}
	must(t, w.poll(now.Add(2*time.Second)))
	why("Xid 48: uncorrectable memory error; Xid 62: microcontroller halted")
	if f.next = map[string]device.Hardware{gpu0: {}, gpu1: {}}; len(w.xids) > 0 {
		t.Errorf("%v are kept", w.xids)
	}
	_, err := Clear(runDir, gpu0)
	must(t, err)
	must(t, w.poll(now.Add(3*time.Second)))
	why("")
}

// TestTellsWithoutLedger: who has a GPU may not be known. That it is unhealthy is.
func TestTellsWithoutLedger(t *testing.T) {
	runDir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(runDir, "ledger.json"), []byte("{"), 0o600))
	w := watcher(runDir, &fakeDriver{next: map[string]device.Hardware{gpu0: {NewXids: []uint64{79}}}}, tableOf(gpu0))
	if err := w.poll(time.Now()); err == nil || !strings.Contains(err.Error(), "who has the GPU") {
		t.Error(err)
	}
	events, err := event.Read(runDir)
	if must(t, err); len(events) != 1 || events[0].Kind != event.Unhealthy {
		t.Errorf("%+v", events)
	}
}

// TestOneWatcher: there is one, everybody sees that there is, and its end is seen too.
func TestOneWatcher(t *testing.T) {
	runDir := t.TempDir()
	if Watched(runDir) {
		t.Error("watched by nobody")
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error)
	w := watcher(runDir, &fakeDriver{next: map[string]device.Hardware{}}, tableOf(gpu0))
	go func() { done <- w.Run(ctx) }()
	for !Watched(runDir) {
		select {
		case err := <-done:
			t.Fatal(err)
		default:
		}
	}
	if err := watcher(runDir, &fakeDriver{}, tableOf()).Run(t.Context()); !errors.Is(err, errWatched) {
		t.Errorf("a second one: %v", err)
	}
	stop()
	must(t, <-done)
	if Watched(runDir) {
		t.Error("watched by one that has ended")
	}
}

// TestBrokenFile: a file that nobody can read is no state of health, and nothing is written over it.
func TestBrokenFile(t *testing.T) {
	runDir, table := t.TempDir(), tableOf(gpu0)
	must(t, os.WriteFile(File(runDir), []byte("{"), 0o600))
	if got, err := Marked(runDir, table); err == nil || got != table || !strings.Contains(err.Error(), "remove it") {
		t.Errorf("%v, %v", got, err)
	}
	w := watcher(runDir, &fakeDriver{next: map[string]device.Hardware{}}, table)
	if err := w.poll(time.Now()); err == nil {
		t.Error("looked")
	}
}
