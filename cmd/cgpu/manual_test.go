package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/golden"
)

// TestManual: docs/cli.md says what the commands say.
func TestManual(t *testing.T) {
	var b bytes.Buffer
	if err := markdown(&b, app()); err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "../../../docs/cli.md", b.Bytes())
}

// TestHelp: every command has examples, and describes itself and its flags.
func TestHelp(t *testing.T) {
	for _, m := range manualsOf(app()) {
		if len(m.examples) == 0 {
			t.Errorf("%s --help has no example", m.name)
		}
		for _, e := range m.examples {
			if !strings.Contains(e, "cgpu") {
				t.Errorf("%s --help: example %q does not use cgpu", m.name, e)
			}
		}
		if m.usage == "" || strings.HasSuffix(m.usage, ".") {
			t.Errorf("%s: usage %q: want a sentence without its full stop", m.name, m.usage)
		}
		for _, f := range m.flags {
			if f.usage == "" {
				t.Errorf("%s %s: says nothing", m.name, f.names)
			}
		}
	}
}

func TestManualOf(t *testing.T) {
	got := manualOf("cgpu", &cli.Command{Name: "x", Usage: "do it", ArgsUsage: " ", Description: "One\ntwo.\n\nThree:\n   a  b\n   c\nfour\n\nExamples:\n   cgpu x\n   cgpu x | wc",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "o", Aliases: []string{"output"}, Usage: "`FORMAT`: table or json", Value: "table"},
			&cli.BoolFlag{Name: "force", Usage: "do it"}, &cli.BoolFlag{Name: "secret", Hidden: true},
			&cli.IntFlag{Name: "n", Usage: "so many", Value: 50}, &cli.IntFlag{Name: "m", Usage: "`N` more", DefaultText: "all"},
			&cli.StringSliceFlag{Name: "gpu", Usage: "only `GPU`"},
		}})
	want := manual{name: "cgpu x", usage: "do it",
		text:     []paragraph{{"One two.", false}, {"Three:", false}, {"   a  b\n   c", true}, {"four", false}},
		examples: []string{"cgpu x", "cgpu x | wc"},
		flags: []manualFlag{{"-o, --output", "FORMAT", "FORMAT: table or json", "table"}, {"--force", "", "do it", ""}, {"-n", "VALUE", "so many", "50"},
			{"-m", "N", "N more", "all"}, {"--gpu", "GPU", "only GPU", ""}}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(manual{}, paragraph{}, manualFlag{})); diff != "" {
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

// TestMan: the pages are there, groff has nothing to complain of, and what is read is what was written.
func TestMan(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "man1")
	if out := cgpu("man " + dir); out != "" {
		t.Fatal(out)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.1"))
	if err != nil || len(files) != len(manualsOf(app()))+1 {
		t.Errorf("%d pages, %v", len(files), err)
	}
	groff, err := exec.LookPath("groff")
	if err != nil {
		t.Skip("no groff here")
	}
	for _, file := range files {
		cmd := exec.Command(groff, "-man", "-Tutf8", "-ww", "-P-cbou", "-rLL=100n", file)
		var said bytes.Buffer
		cmd.Stderr = &said
		out, err := cmd.Output()
		if err != nil || said.Len() > 0 {
			t.Errorf("%s: %v: %s", filepath.Base(file), err, said.String())
		}
		for _, part := range []string{"NAME", "SYNOPSIS", "DESCRIPTION", "SEE ALSO"} {
			if !strings.Contains(string(out), part+"\n") {
				t.Errorf("%s has no %s:\n%s", filepath.Base(file), part, out)
			}
		}
		if strings.HasSuffix(file, "cgpu-smi.1") {
			for _, want := range []string{"cgpu-smi - show the GPUs", "--filter KEY=VALUE", "cgpu smi --json | jq '.gpus[].vgpus[] | {id, used, limit}'"} {
				if !strings.Contains(string(out), want) {
					t.Errorf("cgpu-smi.1 shows no %q:\n%s", want, out)
				}
			}
		}
	}
	// A reader's own program takes a file too.
	if man, err := exec.LookPath("man"); err == nil {
		cmd := exec.Command(man, "-l", filepath.Join(dir, "cgpu.1"))
		cmd.Env = append(os.Environ(), "MANPAGER=cat", "PAGER=cat")
		if out, err := cmd.CombinedOutput(); err != nil && !strings.Contains(string(out), "minimized") {
			t.Errorf("man -l: %v: %s", err, out)
		}
	}
	for _, args := range []string{"man", "man a b"} {
		if out := cgpu(args); !strings.Contains(out, "want one FOLDER") {
			t.Errorf("%s: %s", args, out)
		}
	}
	if out := cgpu("man /dev/null/x"); !strings.Contains(out, "error: man: mkdir") {
		t.Error(out)
	}
}
