// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/golden"
	"github.com/opencgpu/cgpu/pkg/manual"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

// TestManual: docs/cli.md says what the commands say.
func TestManual(t *testing.T) {
	var b bytes.Buffer
	if err := manual.Markdown(&b, app()); err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "../../../docs/cli.md", b.Bytes())
}

// TestHelp: every command has examples, and describes itself and its flags.
func TestHelp(t *testing.T) {
	for _, m := range manual.Of(app()) {
		if len(m.Examples) == 0 {
			t.Errorf("%s --help has no example", m.Name)
		}
		for _, e := range m.Examples {
			if !strings.Contains(e, "cgpu") {
				t.Errorf("%s --help: example %q does not use cgpu", m.Name, e)
			}
		}
		if m.Usage == "" || strings.HasSuffix(m.Usage, ".") {
			t.Errorf("%s: usage %q: want a sentence without its full stop", m.Name, m.Usage)
		}
		for _, f := range m.Flags {
			if f.Usage == "" {
				t.Errorf("%s %s: says nothing", m.Name, f.Names)
			}
		}
	}
}

// TestMan: the pages are there, groff has nothing to complain of, and what is read is what was written.
func TestMan(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "man1")
	if out := cgpu("man " + dir); out != "The man pages are in "+dir+": man -l "+dir+"/cgpu.1 shows the first\n" {
		t.Fatal(out)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.1"))
	if err != nil || len(files) != len(manual.Of(app()))+1 {
		t.Errorf("%d pages, %v", len(files), err)
	}
	groff := testenv.NeedsProgram(t, "groff")
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
			for _, want := range []string{"cgpu-smi - show the GPUs", "--filter KEY=VALUE",
				"cgpu smi --json | jq '.gpus[].vgpus[] | {id, used_bytes, limit_bytes}'"} {
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
