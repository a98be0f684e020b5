// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/json"
	"log/slog"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/handover"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// FuzzRestoreChanged: whatever a state says, it makes a guard, whose state in turn is one, or is refused. Each input changes some values of
// a good state: of arbitrary bytes next to none would be read.
func FuzzRestoreChanged(f *testing.F) {
	b, err := os.ReadFile("handover/testdata/v1.json")
	if err != nil {
		f.Fatal(err)
	}
	nodes := makeNodes(f)
	for n := range 20 {
		f.Add(uint64(n), uint8(n))
	}
	f.Fuzz(func(t *testing.T, seed uint64, changes uint8) {
		var text any
		if err := json.Unmarshal(b, &text); err != nil {
			t.Fatal(err)
		}
		r := rand.New(rand.NewPCG(seed, 0))
		for range changes % 8 {
			change(text, r)
		}
		changed, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		s, err := handover.Decode(changed)
		if err != nil {
			return
		}
		gpus := len(s.Config.GPUs)
		s.Config = testConfig(nodes)
		if len(s.Config.GPUs) != gpus {
			return
		}
		g, err := Restore(s, rmclient.Kernel{}, slog.New(slog.DiscardHandler))
		if err != nil {
			return
		}
		defer endWatcher(t, g.watch)
		again, err := g.snapshot()
		if err != nil {
			return
		}
		p := &again.Process
		p.Seccomp, p.Control, p.Listeners = s.Process.Seccomp, s.Process.Control, s.Process.Listeners
		p.Sim, p.Tally = s.Process.Sim, s.Process.Tally
		if written, err := handover.Encode(again); err != nil {
			t.Error(err)
		} else if _, err := handover.Decode(written); err != nil {
			t.Errorf("a guard that was made of it writes what is none: %v", err)
		}
	})
}

// change puts something else in the place of one value of a JSON text.
func change(text any, r *rand.Rand) {
	for {
		var set func(any)
		var was any
		switch x := text.(type) {
		case map[string]any:
			keys := slices.Sorted(maps.Keys(x))
			if len(keys) == 0 {
				return
			}
			key := keys[r.IntN(len(keys))]
			was, set = x[key], func(v any) { x[key] = v }
		case []any:
			if len(x) == 0 {
				return
			}
			i := r.IntN(len(x))
			was, set = x[i], func(v any) { x[i] = v }
		default:
			return
		}
		switch was.(type) {
		case map[string]any, []any:
			if r.IntN(40) > 0 {
				text = was
				continue
			}
		}
		n, _ := was.(float64)
		set([]any{nil, 0, 1, 2, 3, -1, n + 1, n - 1, 1 << 20, 1 << 31, uint64(1 << 63), uint64(math.MaxUint64), true, "", "x", []any{was, was},
			map[string]any{}}[r.IntN(17)])
		return
	}
}

// endWatcher ends what a guard has running that was never served.
func endWatcher(t *testing.T, w *watcher) {
	fd, err := unix.Eventfd(1, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	if err := w.watch(fd, unix.EPOLLIN, func() {
		_, _ = unix.Close(fd), unix.Close(w.epfd)
		close(done)
		runtime.Goexit()
	}); err != nil {
		t.Fatal(err)
	}
	<-done
}
