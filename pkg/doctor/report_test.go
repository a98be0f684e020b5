// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bytes"
	"strings"
	"testing"
)

func TestPrintReport(t *testing.T) {
	var out bytes.Buffer
	report := Report{Status: Fail, Checks: []Result{
		{Name: "kernel", Status: OK, Found: "Linux 6.8"},
		{Name: "a-long-name", Status: Fail, Found: "bro\x1bken", Remedy: "mend it"},
		{Name: "hmm", Status: Skip, Found: "no"},
		{Name: "mig", Status: Warn, Found: "on", Remedy: "off"},
		{Name: "gsp", Status: Warn, Found: "on", Remedy: "off"},
	}}
	err := PrintReport(&out, report, true)
	want := `ok    kernel       Linux 6.8
fail  a-long-name  bro?ken → mend it
skip  hmm          no
warn  mig          on → off
warn  gsp          on → off
doctor: 1 ok, 2 warnings, 1 failure, 1 skipped
`
	if err != nil || out.String() != want {
		t.Errorf("%v\n%s\nwant\n%s", err, &out, want)
	}
	out.Reset()
	if err := PrintReport(&out, report, false); err != nil || strings.Contains(out.String(), "kernel") ||
		strings.Contains(out.String(), "hmm") ||
		!strings.Contains(out.String(), "mend it") || !strings.Contains(out.String(), "1 ok, 2 warnings") {
		t.Errorf("%v\n%s", err, &out)
	}
}
