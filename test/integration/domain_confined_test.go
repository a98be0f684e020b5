// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestDomainConfined: NVIDIA's daemon, and its program by which the gate commands it, have no namespace of their own, by which they would
// have capabilities.
func TestDomainConfined(t *testing.T) {
	domainNode(t)
	control := filepath.Join(lab.Bin, "nvidia-cuda-mps-control")
	script := `#!/bin/sh
who=daemon
[ $# = 0 ] && who=command
/usr/bin/unshare -U true >/tmp/$who 2>&1
echo "unshare: $?" >>/tmp/$who
exec "${0%/*}/cgpu-probe" mps-control "$@"
`
	if err := os.WriteFile(control, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	if part := member(t, "0:0", "--threads", "30").has(t, "part"); part != 30 {
		t.Errorf("a part of %d %%", part)
	}
	s, _ := domainServer(t)
	for _, who := range []string{"daemon", "command"} {
		said, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/tmp/%s", s.InitPID, who))
		if err != nil || !strings.Contains(string(said), "Operation not permitted\nunshare: 1\n") {
			t.Errorf("the %s: %s, %v", who, said, err)
		}
	}
}
