// SPDX-License-Identifier: Apache-2.0

package manual

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/urfave/cli/v2"
)

func TestManualOf(t *testing.T) {
	got := pageOf("cgpu", &cli.Command{Name: "x", Usage: "do it", ArgsUsage: " ",
		Description: "One\ntwo.\n\nThree:\n   a  b\n   c\nfour\n\nExamples:\n   cgpu x\n   cgpu x | wc",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "o", Aliases: []string{"output"}, Usage: "`FORMAT`: table or json", Value: "table"},
			&cli.BoolFlag{Name: "force", Usage: "do it"}, &cli.BoolFlag{Name: "secret", Hidden: true},
			&cli.IntFlag{Name: "n", Usage: "so many", Value: 50}, &cli.IntFlag{Name: "m", Usage: "`N` more", DefaultText: "all"},
			&cli.StringSliceFlag{Name: "gpu", Usage: "only `GPU`"},
		}})
	want := Page{Name: "cgpu x", Usage: "do it",
		text:     []paragraph{{"One two.", false}, {"Three:", false}, {"   a  b\n   c", true}, {"four", false}},
		Examples: []string{"cgpu x", "cgpu x | wc"},
		Flags: []Flag{{"-o, --output", "FORMAT", "FORMAT: table or json", "table"}, {"--force", "", "do it", ""},
			{"-n", "VALUE", "so many", "50"},
			{"-m", "N", "N more", "all"}, {"--gpu", "GPU", "only GPU", ""}}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(Page{}, paragraph{}, Flag{})); diff != "" {
		t.Error(diff)
	}
}

func TestRoff(t *testing.T) {
	for in, want := range map[string]string{".SH": `\&.SH`, "'x": `\&'x`, `a\n-b`: `a\en\-b`, "plain": "plain"} {
		if got := roffLine(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}
