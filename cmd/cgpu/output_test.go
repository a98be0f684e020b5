// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

// TestJSONPlain: no command's JSON has raw what a tenant wants a terminal to do.
func TestJSONPlain(t *testing.T) {
	const evil = "web\u009b2J\u202e\u2066\u200b"
	n := nodetest.New(t)
	r := n.Reserve(ledger.Record{ID: "abcdef", Name: evil, VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}})
	s := nodetest.Status(r)
	s.Processes = []api.ProcessStatus{{PID: 7, Name: evil, Used: []quota.Bytes{quota.MiB}}}
	nodetest.FakeGuard(t, r.Control, nodetest.StatusLine(t, s))
	happen(n, event.Event{Kind: event.Denied, Container: r.ID, Name: evil, Text: evil})
	config := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(config, []byte(`{"ociVersion":"1.0.2","process":{"args":["`+evil+`"],"env":[]}}`), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{"smi --json", "ps -o json", "events -o json", "inspect abcdef", "spec --config " + config} {
		out := cgpu(args)
		if !strings.Contains(out, `web\u009b2J\u202e\u2066\u200b`) ||
			strings.ContainsFunc(out, func(r rune) bool { return r != '\n' && terminal.Acts(r) }) {
			t.Errorf("%s: printed %q", args, out)
		}
	}
}
