// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
)

func TestConfigCheck(t *testing.T) {
	dir := t.TempDir()
	good, bad := filepath.Join(dir, "good.toml"), filepath.Join(dir, "bad.toml")
	for path, text := range map[string]string{good: `max_spill = "64g"`, bad: "driver = \"sim\"\nmax_isnt = 3\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("CGPU_CONFIG", bad)
	for args, want := range map[string]string{
		"config check " + good:          good + " is good\n",
		"config check":                  "error: config: " + bad + ":2: unknown key max_isnt",
		"config check " + bad:           "unknown key max_isnt",
		"config check " + dir + "/none": "no such file",
		"config check a b":              "error: config: want check [FILE]; see cgpu config --help",
		"config chekc":                  "config: want check [FILE]; did you mean check?; see cgpu config --help",
		"config":                        "want check [FILE]",
		"config check --frob":           "config: --frob: no such option",
	} {
		if out := cgpu(args); !strings.Contains(out, want) {
			t.Errorf("cgpu %s: printed %s, want %s", args, out, want)
		}
	}
	// A script gets the fault as JSON, and the exit status all the same.
	out := cgpu("config check -o json " + bad)
	text, rest, _ := strings.Cut(out, "\nerror: ")
	var broken configView
	if err := json.Unmarshal([]byte(text), &broken); err != nil || !broken.Present ||
		!strings.Contains(broken.Fault, bad+":2: unknown key max_isnt") ||
		!strings.Contains(rest, "max_isnt") {
		t.Errorf("%v: %s", err, out)
	}
	t.Setenv("CGPU_CONFIG", filepath.Join(dir, "none"))
	if out := cgpu("config check"); !strings.Contains(out, "none is not there: the defaults hold") {
		t.Error(out)
	}
	for path, present := range map[string]bool{good: true, filepath.Join(dir, "none"): false} {
		t.Setenv("CGPU_CONFIG", path)
		var v configView
		if fromJSON(t, "config check -o json", &v); v != (configView{File: path, Present: present}) {
			t.Errorf("%+v", v)
		}
	}
}

// A broken cgpu.toml is what nobody's container starts with: smi says so, and shows the GPUs all the same.
func TestSmiNamesBrokenConfig(t *testing.T) {
	nodetest.New(t)
	bad := filepath.Join(t.TempDir(), "cgpu.toml")
	if err := os.WriteFile(bad, []byte("max_isnt = 3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("CGPU_CONFIG", bad)
	if out := cgpu("smi"); !strings.Contains(out, "until this is mended: config: "+bad+":1: unknown key max_isnt") ||
		!strings.Contains(out, "Tesla T4") {
		t.Error(out)
	}
}

// The cgpu.toml that the quick starts have one write is good, and makes the GPUs that they show.
func TestQuickstartConfig(t *testing.T) {
	for _, path := range []string{"../../docs/quickstart.md", "../../docs/quickstart.zh-CN.md"} {
		page, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		_, rest, _ := strings.Cut(string(page), "/etc/cgpu/cgpu.toml <<'END'\n")
		text, _, ok := strings.Cut(rest, "END\n")
		c, err := config.Parse(path, []byte(text))
		if !ok || err != nil || c.Driver != device.DriverSim || len(c.Sim.GPUs) != 2 {
			t.Errorf("%s: %+v, %v", path, c.Sim, err)
		}
		for _, g := range c.Sim.GPUs {
			if !strings.Contains(string(page), g.Memory.String()+"  ") {
				t.Errorf("%s: no output shows a GPU of %v", path, g.Memory)
			}
		}
	}
}
