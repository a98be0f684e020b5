// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/opencgpu/cgpu/pkg/ledger"
)

// guardSays listens as a guard that answers a line, or nothing, and tells its status.
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
			} else {
				fmt.Fprintln(conn, "{}")
			}
			conn.Close()
		}
	}()
	return ledger.Record{ID: name, Control: path}
}

// process is one that lives, or whose number nobody has.
func process(t *testing.T, lives bool) (pid int, start uint64) {
	t.Helper()
	if !lives {
		return os.Getpid(), 1 // it was another one's before
	}
	start, err := ledger.ProcStart(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	return os.Getpid(), start
}

// TestGuards: each container has one outcome, whatever its guard says, and whoever has ended meanwhile.
func TestGuards(t *testing.T) {
	var asked atomic.Int32
	const both, guardOnly, containerOnly, none = 3, 2, 1, 0 // who lives
	const nobody = "nobody listens"
	table := []struct {
		says, want string
		live       int
	}{
		{`{"done":true,"stallNs":7000000,"tries":2}` + "\n", "upgraded", both},
		{`{"done":true,"already":true}` + "\n", "already", both},
		{`{"error":"it does not want to"}` + "\n", "failed it does not want to", both},
		{`{"error":"it does not want to","done":true}` + "\n", "failed it does not want to", both},
		{"", "failed its guard knows no hand-over", both},
		{"", "failed its guard has ended, and no driver call", containerOnly},
		{"", "gone", none},
		{`{"error":"the container is over"}` + "\n", "gone", none},
		{"x\n", "failed invalid", both},
		{"{}\n", "failed its guard says nothing", both},
		{nobody, "gone", none},
		{nobody, "failed its guard has ended, and no driver call", containerOnly},
	}
	var records []ledger.Record
	asks := 0
	for i, c := range table {
		r := ledger.Record{ID: fmt.Sprint(i), Control: filepath.Join(t.TempDir(), "none")}
		if c.says != nobody {
			asks++
			r = guardSays(t, r.ID, c.says, &asked)
		}
		r.GuardPID, r.GuardStart = process(t, c.live&guardOnly > 0)
		r.InitPID, r.InitStart = process(t, c.live&containerOnly > 0)
		records = append(records, r)
	}
	records = append(records, ledger.Record{ID: "preload", Preload: true})
	got := map[string]string{}
	Guards(context.Background(), records, "/bin/guard", 3, func(r Result) {
		text := string(r.Outcome)
		if r.Err != nil {
			text += " " + r.Err.Error()
		}
		got[r.ID] = text
	})
	for i, c := range table {
		if !strings.HasPrefix(got[fmt.Sprint(i)], c.want) {
			t.Errorf("%d, %q: %q, want %q", i, c.says, got[fmt.Sprint(i)], c.want)
		}
	}
	if got["preload"] != "preload" {
		t.Errorf("preload: %q", got["preload"])
	}
	if int(asked.Load()) != asks {
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
