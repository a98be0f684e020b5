// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/schema"
)

// eventsOf are the events that cgpu events shows of a container, as "kind text".
func eventsOf(t *testing.T, args ...string) (list []event.Event) {
	t.Helper()
	out := run(t, append([]string{"cgpu", "events", "-o", "json"}, args...)...)
	for line := range strings.Lines(out) {
		var e event.Event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		list = append(list, e)
	}
	return list
}

func kindsOf(list []event.Event) string {
	var kinds []string
	for _, e := range list {
		kinds = append(kinds, string(e.Kind))
	}
	return strings.Join(kinds, " ")
}

// livelyKinds is kindsOf with one denial at most, the first: how many lines tell of denials, and when, is a matter of how fast the machine
// is.
func livelyKinds(list []event.Event) string {
	denied := false
	return kindsOf(slices.DeleteFunc(slices.Clone(list), func(e event.Event) bool {
		again := e.Kind == event.Denied && denied
		denied = denied || e.Kind == event.Denied
		return again
	}))
}

// output is what a program has written so far.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// TestEvents: a container's life can be read afterwards, and followed.
func TestEvents(t *testing.T) {
	noTrace(t)
	gpus(t)
	var followed output
	follow := exec.Command(filepath.Join(lab.Bin, "cgpu"), "events", "--follow", "--tail", "0")
	follow.Env = append(os.Environ(), "CGPU_RUN_DIR="+lab.RunDir)
	follow.Stdout, follow.Stderr = &followed, &followed
	if err := follow.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = follow.Process.Signal(syscall.SIGINT)
		if err := follow.Wait(); err != nil {
			t.Errorf("cgpu events --follow: %v: %s", err, followed.String())
		}
	}()

	began := time.Now()
	id := container{name: "lively", env: sizeOf("128MiB"), cmd: []string{"cgpu-probe", "hold", "64MiB"}}.ready(t)
	for range 20 { // each refused one is counted, one line tells
		wantRefused(t, execIn(id, "cgpu-probe", "alloc", "65MiB"), noMemory)
	}
	run(t, "cgpu", "set", "lively", "--weight", "3", "--memory", "256MiB")
	run(t, "cgpu", "pause", "lively")
	run(t, "cgpu", "resume", "lively")
	eventually(t, 5*time.Second, func() string {
		if got := eventsOf(t, "--container", "lively"); livelyKinds(got) != "start denied set paused resumed" {
			return "events: " + kindsOf(got)
		}
		return ""
	})

	// While it lives, everything about it is in one place, and its process in a list.
	var seen struct {
		Name, State string
		Guard       struct {
			InitPID int `json:"init_pid"`
		}
		Page struct {
			VGPUs []schema.PageVGPU
		}
		Log    struct{ Path string }
		Events []event.Event
	}
	// The guard may be too busy to answer in the short time that it is given, here and below.
	eventually(t, 5*time.Second, func() string {
		if err := json.Unmarshal([]byte(run(t, "cgpu", "inspect", "lively")), &seen); err != nil {
			t.Fatal(err)
		}
		if seen.Name != "lively" || seen.State != "running" || seen.Guard.InitPID == 0 || len(seen.Page.VGPUs) != 1 ||
			seen.Page.VGPUs[0].Limit != 256*quota.MiB ||
			seen.Page.VGPUs[0].Used < 64*quota.MiB || livelyKinds(seen.Events) != "start denied set paused resumed" ||
			!strings.HasPrefix(seen.Log.Path, lab.RunDir) {
			return fmt.Sprintf("cgpu inspect: %+v", seen)
		}
		return ""
	})
	var processes []struct {
		Container, Name, Process string
		PID, NSPID, GPU          int
		Used                     quota.Bytes `json:"used_bytes"`
	}
	eventually(t, 5*time.Second, func() string {
		if err := json.Unmarshal([]byte(run(t, "cgpu", "ps", "-o", "json", "--container", "lively")), &processes); err != nil {
			t.Fatal(err)
		}
		if len(processes) != 1 || processes[0].Container != id || processes[0].Name != "lively" || processes[0].NSPID != 1 ||
			processes[0].PID != seen.Guard.InitPID || processes[0].Used < 64*quota.MiB || processes[0].Process != "cgpu-probe" {
			return fmt.Sprintf("cgpu ps: %+v", processes)
		}
		return ""
	})
	for args, want := range map[string]bool{"--filter state=running": true, "--filter state=paused": false,
		"--container lively": true, "--gpu 0": true} {
		eventually(t, 5*time.Second, func() string {
			out := run(t, append([]string{"cgpu", "smi"}, strings.Fields(args)...)...)
			if strings.Contains(out, id[:12]) != want {
				return fmt.Sprintf("cgpu smi %s: %s", args, out)
			}
			return ""
		})
	}

	docker(t, "rm", "-f", id)
	wantRefused(t, container{env: quotaOf("7x", "", "0"), cmd: []string{"true"}}.try(t), "7x")
	var list []event.Event
	eventually(t, 10*time.Second, func() string {
		list = eventsOf(t, "--container", "lively") // Docker knows the name no more, and its events do
		// The guard tells of the end, and the hook that the container was deleted.
		if got := livelyKinds(list); got != "start denied set paused resumed end deleted" &&
			got != "start denied set paused resumed deleted end" {
			return "events: " + kindsOf(list)
		}
		return ""
	})
	denied, lines, texts := 0, 0, map[event.Kind]string{}
	for _, e := range list {
		texts[e.Kind] = e.Text
		if e.Kind == event.Denied {
			denied += max(e.Count, 1)
			lines++
			if e.GPU == nil || e.GPU.Index != 0 || !strings.Contains(e.Text, "asked for") {
				t.Errorf("%+v", e)
			}
		}
		if e.Container != id || e.Name != "lively" {
			t.Errorf("%+v", e)
		}
	}
	// What was counted of the denials is told by the end.
	if denied != 20 || !strings.Contains(texts[event.End], "20 denied") {
		t.Errorf("%d denials told, the end: %s", denied, texts[event.End])
	}
	if most := 2 + int(time.Since(began)/event.Every); lines > most {
		t.Errorf("%d lines tell of denials, want at most %d", lines, most)
	}
	if set := texts[event.Set]; set != "memory 128MiB → 256MiB, weight 1 → 3" {
		t.Error(set)
	}
	refused := eventsOf(t, "--kind", "refused", "--tail", "1")
	if len(refused) != 1 || !strings.Contains(refused[0].Text, `ALIYUN_COM_GPU_MEM_CONTAINER="7x"`) {
		t.Errorf("%+v", refused)
	}
	eventually(t, 5*time.Second, func() string {
		out := followed.String()
		for _, want := range []string{"  start      " + id[:12], "  denied     ", "  paused     ", "  end        ", "  refused    "} {
			if !strings.Contains(out, want) {
				return "followed: " + out
			}
		}
		return ""
	})
}
