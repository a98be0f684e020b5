// SPDX-License-Identifier: Apache-2.0

//go:build integration

package docs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/testenv"
	"github.com/opencgpu/cgpu/test/node"
)

var lab *node.Node

func TestMain(m *testing.M) { node.Main(m, &lab) }

// TestDocs runs the commands of every page. Pages share the node, one after the other, so each begins without containers
// and with the policies of cgpu.toml.
func TestDocs(t *testing.T) {
	if lab.Driver != "sim" {
		testenv.Skip(t, "on a GPU: the pages show the GPUs of the simulated driver")
	}
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	top, err := filepath.Glob("../../README*.md")
	if err != nil {
		t.Fatal(err)
	}
	env := rootShell(t)
	ran := 0
	for _, path := range append(top, pages...) {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		list, err := steps(string(text))
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		if len(list) == 0 {
			continue
		}
		ran += len(list)
		t.Run(strings.TrimPrefix(path, "../../"), func(t *testing.T) {
			t.Cleanup(func() { clean(t, env) })
			for _, s := range list {
				if !run(t, env, path, s) {
					return // what follows builds on it
				}
			}
		})
	}
	if ran == 0 {
		t.Error("no page has a console block")
	}
}

// rootShell is an environment in which sudo does nothing, because the suite runs as root, and may lack sudo.
func rootShell(t *testing.T) []string {
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "sudo"), []byte("#!/bin/sh\nexec \"$@\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return []string{"PATH=" + bin + ":" + os.Getenv("PATH"), "HOME=" + t.TempDir(), "LC_ALL=C.UTF-8"}
}

// run gives one command as a user would. A command that only looks is given again for a minute until it shows what the
// page shows: a container's start and a share of the GPU's time take a moment, for readers too.
func run(t *testing.T, env []string, path string, s step) bool {
	t.Helper()
	var r node.Result
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(200 * time.Millisecond) {
		r = lab.RunFor(2*time.Minute, env, "bash", "-c", s.command)
		if r.Code == s.status && (s.want == nil || shown(s.want, r.All())) {
			return true
		}
		if !looks(s.command) || time.Now().After(deadline) {
			break
		}
	}
	t.Errorf("%s:%d: $ %s\nexit status %d, want %d\n--- shown\n%s\n--- printed\n%s", path, s.line, s.command, r.Code, s.status,
		strings.Join(s.want, "\n"), r.All())
	return false
}

// clean takes away what a page has left, and sees that nothing stays behind.
func clean(t *testing.T, env []string) {
	t.Helper()
	script := `docker ps -aq | xargs -r docker rm -f >/dev/null
		for i in $(seq 600); do [ "$(cgpu smi --json | jq '[.gpus[].vgpus[]] | length')" = 0 ] && break; sleep 0.1; done
		[ "$i" != 600 ] || { cgpu smi; exit 1; }
		cgpu policy all preempt --max-inst 20 --prio-ratio 99`
	if r := lab.Run(env, "bash", "-c", script); r.Code != 0 {
		t.Errorf("clean: %s", r)
	}
}
