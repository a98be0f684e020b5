package main

import (
	"bytes"
	"encoding/json"
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

func TestEncodeJSON(t *testing.T) {
	for in, want := range map[string]string{
		"größe <a>":            `"größe <a>"`,
		"\x1b[2J\x7f":          `"\u001b[2J\u007f"`,
		"\u009b2J\u0080\u009f": `"\u009b2J\u0080\u009f"`,
		"\u202egnp.exe\u2069":  `"\u202egnp.exe\u2069"`,
		"\u061c\u200e\ufeff":   `"\u061c\u200e\ufeff"`,
		"\U000e0041":           `"\udb40\udc41"`,
		"\u2028":               `"\u2028"`,
		"\xff":                 `"\ufffd"`,
		`\u009b`:               `"\\u009b"`,
		"a\nb":                 `"a\nb"`,
	} {
		var b bytes.Buffer
		if err := encodeJSON(&b, []string{in}, "  "); err != nil {
			t.Fatal(err)
		}
		if got := b.String(); got != "[\n  "+want+"\n]\n" {
			t.Errorf("%q: %s, want %s", in, got, want)
		}
		var back []string
		if err := json.Unmarshal(b.Bytes(), &back); err != nil || back[0] != strings.ToValidUTF8(in, "\ufffd") {
			t.Errorf("%q: reads %q, %v", in, back, err)
		}
	}
}

// What engines have written is not touched but for what acts.
func TestEscapeJSON(t *testing.T) {
	const text, want = "{\n\t\"a\":\r\n \"größe <\x7f>\"}\n", "{\n\t\"a\": \n \"größe <\\u007f>\"}\n"
	if got := terminal.EscapeJSON(text); got != want || !json.Valid([]byte(got)) {
		t.Errorf("%q, want %q", got, want)
	}
}

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
