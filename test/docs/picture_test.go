// SPDX-License-Identifier: Apache-2.0

//go:build integration

package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// The picture of cgpu smi shows what it prints today, whatever the numbers.
func TestPicture(t *testing.T) {
	if lab.Driver != "sim" {
		testenv.Skip(t, "on a GPU: the picture shows the GPUs of the simulated driver")
	}
	shown, err := os.ReadFile("../../docs/images/smi.txt")
	if err != nil {
		t.Fatal(err)
	}
	diff := ""
	for range 3 { // it gives its containers some seconds, of which a busy machine can make too few
		r := lab.Run(nil, filepath.Join(filepath.Dir(lab.Script), "svg", "smi.sh"))
		if r.Code != 0 {
			t.Fatal(r)
		}
		if diff = cmp.Diff(shape(string(shown)), shape(r.Stdout)); diff == "" {
			return
		}
	}
	t.Errorf("docs/images/smi.txt is not what cgpu smi shows (-picture +now); hack/svg/smi.sh tells how to draw it anew:\n%s", diff)
}

var (
	ids     = regexp.MustCompile(`\b[0-9a-f]{12}\b`)
	numbers = regexp.MustCompile(`[0-9][0-9.]*%?`)
	rules   = regexp.MustCompile(`[-=]{2,}`)
)

// shape is a table without its numbers, IDs and widths.
func shape(text string) []string {
	text = numbers.ReplaceAllString(ids.ReplaceAllString(text, "ID"), "N")
	return tidy(strings.Split(rules.ReplaceAllString(text, "--"), "\n"))
}
