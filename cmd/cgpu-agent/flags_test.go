// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// A flag beats its variables, of which cgpu's own comes first.
func TestFlags(t *testing.T) {
	node := func(args ...string) string {
		t.Helper()
		f, rest, err := readFlags(append(args, "healthy", "--ready"))
		if err != nil || !slices.Equal(rest, []string{"healthy", "--ready"}) {
			t.Errorf("%q, %v", rest, err)
		}
		return f.values["node-name"]
	}
	t.Setenv("NODE_NAME", "pod's")
	if got := node(); got != "pod's" {
		t.Error(got)
	}
	t.Setenv("CGPU_AGENT_NODE_NAME", "own")
	if got := node(); got != "own" {
		t.Error(got)
	}
	for _, args := range [][]string{{"--node-name", "flag"}, {"--node-name=flag"}, {"-node-name", "x", "-node-name", "flag"}} {
		if got := node(args...); got != "flag" {
			t.Errorf("%q: %s", args, got)
		}
	}
	for _, args := range [][]string{{"x"}, {"--x"}, {"--node-name"}, {"--smi", "no"}} {
		if err := command(context.Background(), args); !isUsage(err) {
			t.Errorf("%q: %v", args, err)
		}
	}
	var help bytes.Buffer
	printHelp(&help)
	for _, o := range options {
		if !strings.Contains(help.String(), "--"+o.name+" "+o.metavar) {
			t.Errorf("no word of --%s", o.name)
		}
	}
}

// What calls methods by a name that is not known before has the linker keep all of them: see flags.go.
func TestLinksNoTemplates(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-tags", "grpcnotrace", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, heavy := range []string{"text/template", "html/template", "github.com/urfave/cli/v2"} {
		if slices.Contains(strings.Fields(string(out)), heavy) {
			t.Errorf("links %s", heavy)
		}
	}
}
