// SPDX-License-Identifier: Apache-2.0

package domain

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/page"
)

// TestEnded: the words of a server are one line of bounded length, whatever its user writes or puts there.
func TestEnded(t *testing.T) {
	runDir := t.TempDir()
	dir := page.Pipes(runDir, "GPU-1", "a")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if got := Ended(runDir, "GPU-1", "a"); got != "" {
		t.Errorf("nobody has said %q", got)
	}
	file := filepath.Join(dir, page.Ended)
	for words, want := range map[string]string{
		"":                             "",
		"it does not answer":           "it does not answer",
		"a\nb\x1b[31mc\xff":            "a b [31mc?",
		strings.Repeat("long ", 1<<16): strings.Repeat("long ", 60),
	} {
		if err := os.WriteFile(file, []byte(words), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := Ended(runDir, "GPU-1", "a"); got != want {
			t.Errorf("%.20q: %q, want %q", words, got, want)
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/passwd", file); err != nil {
		t.Fatal(err)
	}
	if got := Ended(runDir, "GPU-1", "a"); got != "" {
		t.Errorf("by a link: %q", got)
	}
}
