// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/cmdline"
)

func TestFlagsFirst(t *testing.T) {
	for in, want := range map[string]string{
		"":                               "",
		"web":                            "-- web",
		"web --weight 3":                 "--weight 3 -- web",
		"--weight 3 web":                 "--weight 3 -- web",
		"web --weight=3 --force x":       "--weight=3 --force -- web x",
		"a --percent none b --gpu 1 c":   "--percent none --gpu 1 -- a b c",
		"a -- --force":                   "-- a --force",
		"a --unknown b":                  "--unknown -- a b",
		"a -weight 3":                    "-weight 3 -- a",
		"a --weight":                     "--weight",
		"a -":                            "-- a -",
		"a --weight -1":                  "--weight -1 -- a",
		"a --help":                       "--help -- a",
		"--priority high -- web --force": "--priority high -- web --force",
	} {
		if got := strings.Join(cmdline.FlagsFirst(setCommand().Flags, strings.Fields(in)), " "); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
	if got := strings.Join(cmdline.FlagsFirst(smiCommand().Flags, strings.Fields("--watch 2 -o wide --json")),
		" "); got != "--watch -o wide --json -- 2" {
		t.Errorf("a flag that may stand alone: %q", got)
	}
}
