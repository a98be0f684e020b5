// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/testenv"
	"github.com/opencgpu/cgpu/test/node"
)

// mode is a way in which a container's memory limit is enforced.
type mode struct {
	name    string
	probe   string   // the program that plays the tenant
	env     []string // of containers
	config  []string // lines of cgpu.toml
	preload bool     // there is no guard that enforces
}

// The library needs a program that calls through the C library; to a guard the static one, which no library sees, is the
// harder case.
var (
	guarded   = mode{name: "guard", probe: "cgpu-probe-libc"}
	guardOnly = mode{name: "guard alone", probe: "cgpu-probe", env: []string{"CGPU_LIMITER=off"}}
	preloaded = mode{name: "preload", probe: "cgpu-probe-libc", config: []string{`enforcement = "preload"`}, preload: true}
	allModes  = []mode{guarded, guardOnly, preloaded}
)

// eachMode runs a test in every mode.
func eachMode(t *testing.T, test func(t *testing.T, m mode)) {
	for _, m := range allModes {
		t.Run(m.name, func(t *testing.T) {
			withConfig(t, m.config...)
			test(t, m)
		})
	}
}

// of is a container in this mode.
func (m mode) of(c container) container {
	c.env = slices.Concat(c.env, m.env)
	c.cmd = m.words(c.cmd)
	return c
}

// words puts the mode's program into a command line.
func (m mode) words(cmd []string) []string {
	cmd = slices.Clone(cmd)
	for i, word := range cmd {
		if word == "cgpu-probe" {
			cmd[i] = m.probe
		}
	}
	return cmd
}

// holding starts a container that allocates size and keeps it.
func (m mode) holding(t *testing.T, c container, size string) string {
	t.Helper()
	c.cmd = []string{"cgpu-probe", "hold", size}
	return m.of(c).ready(t)
}

// exec is execIn in this mode.
func (m mode) exec(id string, cmd ...string) node.Result { return execIn(id, m.words(cmd)...) }

// spawn starts a command in a running container and leaves it alone.
func (m mode) spawn(t *testing.T, id string, cmd ...string) {
	t.Helper()
	docker(t, append([]string{"exec", "-d", id}, m.words(cmd)...)...)
}

// withConfig puts lines before those of cgpu.toml until the test ends. Containers read it when they are created.
func withConfig(t *testing.T, lines ...string) {
	t.Helper()
	if len(lines) == 0 {
		return
	}
	path := os.Getenv("CGPU_CONFIG")
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	write := func(text []byte) {
		if err := os.WriteFile(path, text, 0o644); err != nil {
			t.Fatal(err)
		}
		if r := lab.Run(nil, filepath.Join(lab.Bin, "cgpu-refresh")); r.Code != 0 {
			t.Fatal(r)
		}
	}
	t.Cleanup(func() { write(before) })
	write([]byte(strings.Join(lines, "\n") + "\n" + string(before)))
}

// cannot says what preload mode cannot do of what a test is about. In the other modes the test goes on.
func (m mode) cannot(t *testing.T, why string) {
	t.Helper()
	if m.preload {
		testenv.Skip(t, "preload mode cannot do it", why)
	}
}

// playsLimiter is how a program maps managed memory as one with the limiter does. The node of the simulated driver cannot be
// mapped, so there the static program says itself what the limiter would.
func playsLimiter(size string, more ...string) []string {
	if lab.Driver == device.DriverSim {
		return append([]string{"cgpu-probe", "managed", size, "--announce"}, more...)
	}
	return append([]string{"cgpu-probe-libc", "managed", size}, more...)
}
