// SPDX-License-Identifier: Apache-2.0

//go:build integration

package docs

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSteps(t *testing.T) {
	page := "# Title\n\n    $ not a block\n\n```console\n$ one \\\n    two\nout …\n\n$ quiet\n```\n```sh\n$ not run\n```\n" +
		"```console\n$ fails\n(exit status 125)\n$ fails too\nwhy\n(exit status 1)\n```\n"
	got, err := steps(page)
	if err != nil {
		t.Fatal(err)
	}
	want := []step{
		{line: 6, command: "one \\\n    two", want: []string{"out …", ""}},
		{line: 10, command: "quiet"},
		{line: 16, command: "fails", status: 125},
		{line: 18, command: "fails too", want: []string{"why"}, status: 1},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(step{})); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	for _, bad := range []string{"```console\nno prompt\n```", "```console\n$ never closed\n"} {
		if _, err := steps(bad); err == nil {
			t.Errorf("%q: accepted", bad)
		}
	}
}

func TestShown(t *testing.T) {
	for _, c := range []struct {
		want   []string
		output string
		is     bool
	}{
		{[]string{"a b"}, "a    b\n", true},
		{[]string{"a b"}, "a c\n", false},
		{[]string{"a b"}, "a b\nmore\n", false},
		{[]string{"a b", "…"}, "a b\nmore\nand more\n", true},
		{[]string{"a b", "…"}, "a b\n", true},
		{[]string{"…", "z"}, "a\nz\n", true},
		{[]string{"…", "z"}, "a\nz\nb\n", false},
		{[]string{"GPU-… (x)"}, "GPU-12 (x)", true},
		{[]string{"GPU-… (x)"}, "GPU-12 (y)", false},
		{[]string{"a.c"}, "abc", false},
		{nil, "", true},
	} {
		if got := shown(c.want, c.output); got != c.is {
			t.Errorf("shown(%q, %q) = %v", c.want, c.output, got)
		}
	}
}

func TestLooks(t *testing.T) {
	for command, want := range map[string]bool{
		"cgpu smi": true, "cgpu smi --json | jq .": true, "sudo cgpu policy": true, "cgpu policy 0 fixed": false, "docker run x": false,
		"docker logs a": true,
	} {
		if got := looks(command); got != want {
			t.Errorf("looks(%q) = %v", command, got)
		}
	}
}
