// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/opencgpu/cgpu/pkg/terminal"
)

// PrintReport prints a line for each check, or for those that are not well, and one about all.
func PrintReport(w io.Writer, r Report, all bool) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, c := range r.Checks {
		if !all && c.Status != Warn && c.Status != Fail {
			continue
		}
		remedy := ""
		if c.Remedy != "" {
			remedy = " → " + c.Remedy
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\n", c.Status, c.Name, terminal.Printable(c.Found+remedy))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	words := map[Status]string{OK: "ok", Warn: "warning", Fail: "failure", Skip: "skipped"}
	var counts []string
	for _, s := range []Status{OK, Warn, Fail, Skip} {
		text := fmt.Sprintf("%d %s", r.Count(s), words[s])
		if s == Warn || s == Fail {
			text = terminal.Plural(r.Count(s), words[s])
		}
		counts = append(counts, text)
	}
	_, err := fmt.Fprintf(w, "doctor: %s\n", strings.Join(counts, ", "))
	return err
}
