package main

import (
	"bytes"
	"maps"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/doctor"
)

// The whole command is tested in test/integration: it starts itself again, which a test's program must not.

func TestDoctorUsage(t *testing.T) {
	for args, want := range map[string]string{
		"doctor -o yaml":                               `doctor: -o "yaml": want table or json`,
		"doctor now":                                   `doctor: "now": want no arguments`,
		"doctor --engine moby=/x":                      `"moby" is no engine: want NAME=FILE with one of docker, containerd, crio, podman`,
		"doctor --engine docker":                       `--engine "docker": want docker=FILE with an absolute path`,
		"doctor --engine docker=daemon.json":           `want docker=FILE with an absolute path`,
		"doctor --engine docker=/a,docker=/b --bad":    `doctor: --bad: no such option (cgpu doctor --help lists them)`,
		"doctor --try harder":                          `doctor: --try "harder": this is for doctor's own children`,
		"doctor --engine docker=/a --engine docker=/b": "docker is given twice",
	} {
		if out := cgpu(args); !strings.Contains(out, "error: ") || !strings.Contains(out, want) {
			t.Errorf("cgpu %s: printed %s, want %s", args, out, want)
		}
	}
	if out := cgpu("doctor --help"); !strings.Contains(out, "Examples:") || strings.Contains(out, "--try") {
		t.Error(out)
	}
	files, err := engineFiles([]string{"docker=/a,b", "crio=/c=d"})
	if want := map[string]string{"docker": "/a,b", "crio": "/c=d"}; err != nil || !maps.Equal(files, want) {
		t.Errorf("%v, %v", files, err)
	}
}

func TestPrintReport(t *testing.T) {
	var out bytes.Buffer
	report := doctor.Report{Status: doctor.Fail, Checks: []doctor.Result{
		{Name: "kernel", Status: doctor.OK, Found: "Linux 6.8"},
		{Name: "a-long-name", Status: doctor.Fail, Found: "bro\x1bken", Remedy: "mend it"},
		{Name: "hmm", Status: doctor.Skip, Found: "no"},
		{Name: "mig", Status: doctor.Warn, Found: "on", Remedy: "off"},
		{Name: "gsp", Status: doctor.Warn, Found: "on", Remedy: "off"},
	}}
	err := printReport(&out, report, true)
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
	if err := printReport(&out, report, false); err != nil || strings.Contains(out.String(), "kernel") || strings.Contains(out.String(), "hmm") ||
		!strings.Contains(out.String(), "mend it") || !strings.Contains(out.String(), "1 ok, 2 warnings") {
		t.Errorf("%v\n%s", err, &out)
	}
}
