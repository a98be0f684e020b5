// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// happen writes events into a node, a minute apart, the last one now.
func happen(n nodetest.Node, list ...event.Event) {
	n.Helper()
	for i, e := range list {
		e.Time = time.Now().Add(time.Duration(i+1-len(list)) * time.Minute)
		if err := event.Append(n.Dir, e); err != nil {
			n.Fatal(err)
		}
	}
}

// timed replaces times, which differ.
var timed = regexp.MustCompile(`(?m)^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d`)

func TestEvents(t *testing.T) {
	n := nodetest.New(t)
	if out := cgpu("events"); out != "" {
		t.Errorf("of a node without events: %s", out)
	}
	n.Reserve(nodetest.Docker{Name: "/web"}.Make(t,
		ledger.Record{ID: "abcdef0123456789", VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}}))
	happen(n,
		event.Event{Kind: event.Start, Container: "gone", Name: "default/pod/main", PID: 7, Text: "1024MiB of GPU 0"},
		event.Event{Kind: event.Refused, Container: "other", Text: "quota: A=\"\x1b[2J\": no\nsecond line"},
		event.Event{Kind: event.Policy, GPU: &event.GPU{Index: 1, UUID: nodetest.H200}, Text: "policy preempt → fixed"},
		event.Event{Kind: event.Denied, Container: "abcdef0123456789", GPU: &event.GPU{}, Count: 1000, Text: "2048MiB asked for"},
		event.Event{Kind: "later", Container: "abcdef0123456789", Text: "of a newer cgpu"},
	)
	all := `T  start      gone          default/pod/main: pid 7: 1024MiB of GPU 0
T  refused    other         quota: A="?[2J": no?second line
T  policy     -             GPU 1: policy preempt → fixed
T  denied     abcdef012345  web: GPU 0: 2048MiB asked for (1000 times)
T  later      abcdef012345  web: of a newer cgpu
`
	lines := strings.SplitAfter(all, "\n")
	for args, want := range map[string]string{
		"events":                               all,
		"events --tail 2":                      lines[3] + lines[4],
		"events --tail 0":                      "",
		"events --kind denied --kind start":    lines[0] + lines[3],
		"events --container web":               lines[3] + lines[4],
		"events --container abc --kind denied": lines[3],
		"events --container default/pod/main":  lines[0],
		"events --container nobody": "error: events: --container \"nobody\": no event and no container that runs has this ID or " +
			"name; cgpu smi lists those that run\n",
		"events --container web --kind start": "",
		"events --gpu 1":                      lines[2],
		"events -i 0,1 --kind denied":         "",
		"events --gpu 7":                      "error: events: --gpu: GPU \"7\": there is none: cgpu smi lists the 2 GPUs of this machine\n",
		"events --follow=maybe":               "error: events: --follow=\"maybe\": wants no value, or true or false (see cgpu events --help)\n",
		"events --since 90s":                  lines[3] + lines[4],
		"events --since 1999-01-01T00:00:00Z": all,
		"events --since 2999-01-01T00:00:00Z": "",
		"events --since yesterday": "error: events: --since \"yesterday\": want a time such as 2026-11-21T10:00:00Z, or a duration " +
			"such as 10m\n",
		"events --tail -1":     "error: events: --tail -1: want 0 or more\n",
		"events --kind later":  "error: events: --kind \"later\": no such kind; cgpu events --help lists them\n",
		"events -o wide":       "error: events: -o \"wide\": want table or json\n",
		"events web":           "error: events: \"web\": want no arguments; see cgpu events --help\n",
		"events --container= ": "error: events: --container \"\": want an ID or a name\n",
	} {
		if out := timed.ReplaceAllString(cgpu(args), "T"); out != want {
			t.Errorf("%s: printed\n%s\nwant\n%s", args, out, want)
		}
	}
	// Follow needs a folder to watch.
	t.Setenv("CGPU_RUN_DIR", n.Dir+"/none")
	if out := cgpu("events --follow"); !strings.Contains(out, "no such file or directory: cgpu refresh makes the run directory") {
		t.Error(out)
	}
	t.Setenv("CGPU_RUN_DIR", n.Dir)
	var e event.Event
	if err := json.Unmarshal([]byte(cgpu("events -o json --tail 2 --kind denied")), &e); err != nil || e.Count != 1000 {
		t.Errorf("%+v, %v", e, err)
	}
}

func TestEventsFollow(t *testing.T) {
	n := nodetest.New(t)
	happen(n, make([]event.Event, followTail)...) // no kind: of none of ours
	for range followTail + 5 {
		happen(n, event.Event{Kind: event.Start, Container: "a", Text: "past"})
	}
	in, out := io.Pipe()
	defer in.Close()
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		a := app()
		a.Writer = out
		ended <- a.RunContext(ctx, []string{"cgpu", "events", "--follow"})
		out.Close()
	}()
	var got bytes.Buffer
	read := func(lines int) {
		buf := make([]byte, 4096)
		for strings.Count(got.String(), "\n") < lines {
			n, err := in.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			got.Write(buf[:n])
		}
	}
	read(followTail)
	happen(n, event.Event{Kind: event.End, Container: "a", Text: "now"})
	read(followTail + 1)
	want := strings.Repeat("T  start      a             past\n", followTail) + "T  end        a             now\n"
	if got := timed.ReplaceAllString(got.String(), "T"); got != want {
		t.Errorf("printed\n%s\nwant\n%s", got, want)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// What is changed by command lines leaves events where no guard tells of it.
func TestCommandsTell(t *testing.T) {
	n := nodetest.New(t)
	n.Reserve(ledger.Record{ID: "guarded", VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}})
	n.Reserve(ledger.Record{ID: "preload", Preload: true, VGPUs: []ledger.VGPU{{UUID: nodetest.H200, Slice: quota.Slice{Limit: quota.GiB}}}})
	for _, args := range []string{"policy 1 weight --max-inst 8", "policy 1 weight", "set guarded --weight 2", "set preload --weight 2"} {
		if out := cgpu(args); strings.Contains(out, "error") {
			t.Errorf("%s: %s", args, out)
		}
	}
	want := `T  policy     -             GPU 1: policy preempt → weight-preempt, max-inst 20 → 8
T  set        preload       GPU 1: weight 1 → 2
`
	if out := timed.ReplaceAllString(cgpu("events"), "T"); out != want {
		t.Errorf("printed\n%s\nwant\n%s", out, want)
	}
}

// TestEventsOfTheDeleted: one event that has the container's name is enough for all of that start.
func TestEventsOfTheDeleted(t *testing.T) {
	n := nodetest.New(t)
	for _, e := range []event.Event{
		{Kind: event.Start, Container: "c", Nonce: "1", Text: "once"},
		{Kind: event.Deleted, Container: "c", Nonce: "1", Name: "web", Text: "x"},
		{Kind: event.Start, Container: "c", Nonce: "2", Text: "again"},
	} {
		if err := event.Append(n.Dir, e); err != nil {
			t.Fatal(err)
		}
	}
	if out := cgpu("events --container web"); strings.Count(out, "\n") != 2 || !strings.Contains(out, "web: once") ||
		strings.Contains(out, "again") {
		t.Errorf("printed %s", out)
	}
}
