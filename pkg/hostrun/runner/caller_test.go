// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"os"
	"strings"
	"testing"
)

func TestCleanEnvironment(t *testing.T) {
	for name, value := range map[string]string{"PATH": "/home/ann/bin", "LD_LIBRARY_PATH": "/home/ann", "SUDO_UID": "1",
		"CGPU_RUN_DIR": "/x", "CGPU_CONFIG": ""} {
		t.Setenv(name, value)
	}
	saved := envOf()
	t.Cleanup(func() { restoreEnv(t, saved) })
	CleanEnvironment()
	got := envOf()
	if len(got) != 3 || got["PATH"] != "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" || got["SUDO_UID"] != "1" ||
		got["CGPU_RUN_DIR"] != "/x" {
		t.Errorf("%v", got)
	}
}

func envOf() map[string]string {
	env := map[string]string{}
	for _, e := range os.Environ() {
		name, value, _ := strings.Cut(e, "=")
		env[name] = value
	}
	return env
}

func restoreEnv(t *testing.T, env map[string]string) {
	t.Helper()
	for name, value := range env {
		if err := os.Setenv(name, value); err != nil {
			t.Error(err)
		}
	}
}
