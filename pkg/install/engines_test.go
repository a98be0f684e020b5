// SPDX-License-Identifier: Apache-2.0

package install

import (
	"strings"
	"testing"
)

func TestConfigOf(t *testing.T) {
	for args, want := range map[string]string{
		"dockerd":                     "/etc/docker/daemon.json",
		"dockerd --config-file /a -D": "/a",
		"/usr/bin/dockerd -H fd:// --config-file=/b/c": "/b/c",
	} {
		if got := configOf(strings.Fields(args)); got != want {
			t.Errorf("%s: %q, want %q", args, got, want)
		}
	}
}
