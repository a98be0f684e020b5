package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

// TestJSONPlain: no command's JSON has raw what a tenant wants a terminal to do.
func TestJSONPlain(t *testing.T) {
	const evil = "web\u009b2J\u202e\u2066\u200b"
	n := newNode(t)
	r := n.reserve(ledger.Record{ID: "abcdef", Name: evil, VGPUs: []ledger.VGPU{{UUID: t4, Limit: quota.GiB}}})
	s := status(r)
	s.Processes = []api.ProcessStatus{{PID: 7, Name: evil, Used: []quota.Bytes{quota.MiB}}}
	fakeGuard(t, r.Control, statusLine(t, s))
	n.happen(event.Event{Kind: event.Denied, Container: r.ID, Name: evil, Text: evil})
	config := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(config, []byte(`{"ociVersion":"1.0.2","process":{"args":["`+evil+`"],"env":[]}}`), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{"smi --json", "ps -o json", "events -o json", "inspect abcdef", "spec --config " + config} {
		out := cgpu(args)
		if !strings.Contains(out, `web\u009b2J\u202e\u2066\u200b`) || strings.ContainsFunc(out, func(r rune) bool { return r != '\n' && terminal.Acts(r) }) {
			t.Errorf("%s: printed %q", args, out)
		}
	}
}
