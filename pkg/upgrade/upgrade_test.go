// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/opencgpu/cgpu/pkg/ledger"
)

// guardSays listens as a guard that answers a line, or nothing.
func guardSays(t *testing.T, name, line string, asked *atomic.Int32) ledger.Record {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ctl")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			request, _ := bufio.NewReader(conn).ReadString('\n')
			if strings.Contains(request, `"op":"upgrade","program":"/bin/guard"`) {
				asked.Add(1)
				fmt.Fprint(conn, line)
			}
			conn.Close()
		}
	}()
	return ledger.Record{ID: name, Control: path}
}

// TestGuards: each container has one outcome, whatever its guard says.
func TestGuards(t *testing.T) {
	var asked atomic.Int32
	records := []ledger.Record{
		guardSays(t, "done", `{"done":true,"stallNs":7000000,"tries":2}`+"\n", &asked),
		guardSays(t, "already", `{"done":true,"already":true}`+"\n", &asked),
		guardSays(t, "refused", `{"error":"it does not want to"}`+"\n", &asked),
		guardSays(t, "older", "", &asked),
		guardSays(t, "garbage", "x\n", &asked),
		guardSays(t, "nothing", "{}\n", &asked),
		{ID: "gone", Control: filepath.Join(t.TempDir(), "none")},
		{ID: "preload", Preload: true},
	}
	want := map[string]string{"done": "upgraded", "already": "already", "refused": "failed it does not want to", "older": "failed its guard ended",
		"garbage": "failed invalid", "nothing": "failed its guard says nothing", "gone": "gone", "preload": "preload"}
	got := map[string]string{}
	Guards(context.Background(), records, "/bin/guard", 3, func(r Result) {
		text := string(r.Outcome)
		if r.Err != nil {
			text += " " + r.Err.Error()
		}
		got[r.ID] = text
	})
	for id, text := range want {
		if !strings.HasPrefix(got[id], text) {
			t.Errorf("%s: %q, want %q", id, got[id], text)
		}
	}
	if asked.Load() != 6 {
		t.Errorf("%d guards were asked", asked.Load())
	}
}

// TestStopped: who is stopped asks no more guards, and says which are left.
func TestStopped(t *testing.T) {
	ctx, stop := context.WithCancel(context.Background())
	var asked atomic.Int32
	var records []ledger.Record
	for i := range 5 {
		records = append(records, guardSays(t, fmt.Sprint(i), `{"done":true}`+"\n", &asked))
	}
	n := map[Outcome]int{}
	Guards(ctx, records, "/bin/guard", 1, func(r Result) {
		n[r.Outcome]++
		stop()
	})
	if n[Done] != int(asked.Load()) || n[Done] < 1 || n[Done] > 2 || n[Done]+n[Skipped] != 5 {
		t.Errorf("%v, and %d were asked", n, asked.Load())
	}
}
