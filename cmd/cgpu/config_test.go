package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
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
		"config chekc":                  "want check [FILE]",
		"config":                        "want check [FILE]",
		"config check --frob":           "config: --frob: no such option",
	} {
		if out := cgpu(args); !strings.Contains(out, want) {
			t.Errorf("cgpu %s: printed %s, want %s", args, out, want)
		}
	}
	t.Setenv("CGPU_CONFIG", filepath.Join(dir, "none"))
	if out := cgpu("config check"); !strings.Contains(out, "none is not there: the defaults hold") {
		t.Error(out)
	}
}

// A broken cgpu.toml is what nobody's container starts with: smi says so, and shows the GPUs all the same.
func TestSmiNamesBrokenConfig(t *testing.T) {
	newNode(t)
	bad := filepath.Join(t.TempDir(), "cgpu.toml")
	if err := os.WriteFile(bad, []byte("max_isnt = 3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("CGPU_CONFIG", bad)
	if out := cgpu("smi"); !strings.Contains(out, "until this is mended: config: "+bad+":1: unknown key max_isnt") || !strings.Contains(out, "Tesla T4") {
		t.Error(out)
	}
}
