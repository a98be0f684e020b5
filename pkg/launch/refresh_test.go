// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestRefresh: a cgpu-refresh that hangs holds a create up for a while, and not for good.
func TestRefresh(t *testing.T) {
	for _, test := range []struct {
		name, script, want string
	}{
		{"good", "exit 0", ""},
		{"bad", "echo no driver >&2; echo at all >&2; exit 1", "launch: the node's GPUs could not be read: no driver; at all"},
		{"killed", "kill -9 $$", "launch: the node's GPUs could not be read: "},
		{"hangs", "trap '' TERM; exec sleep 60",
			"launch: cgpu-refresh was not done after 200ms, and was ended: the NVIDIA driver does not answer"},
	} {
		path := filepath.Join(t.TempDir(), "cgpu-refresh")
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+test.script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		timeout := time.Minute
		if test.name == "hangs" {
			timeout = 200 * time.Millisecond
		}
		begun := time.Now()
		switch err := refresh(path, timeout); {
		case (err == nil) != (test.want == ""):
			t.Errorf("%s: %v", test.name, err)
		case err != nil && !strings.HasPrefix(err.Error(), test.want):
			t.Errorf("%s: %v, want %s", test.name, err, test.want)
		}
		if took := time.Since(begun); took > 20*time.Second {
			t.Errorf("%s: took %v", test.name, took)
		}
	}
}
