// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/cmdline"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/testenv"
)

func TestComplete(t *testing.T) {
	n := nodetest.New(t)
	n.Reserve(ledger.Record{ID: "abcdef0123456789", Name: "default/pod/main",
		VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}})
	n.Reserve(ledger.Record{ID: "fedcba", Name: "$(reboot)", VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: quota.GiB}}}})
	for typed, want := range map[string]string{
		"sm":                             "smi",
		"re":                             "resume refresh",
		"__":                             "", // not for people
		"nothing ":                       "",
		"smi --wa":                       "--watch",
		"smi -":                          "--help --gpu --container --filter --output --json --list-gpus --watch",
		"smi -o ":                        "table plain wide json",
		"smi -o j":                       "json",
		"smi --output=w":                 "--output=wide",
		"smi --output = w":               "wide", // how bash takes it apart
		"smi --output =":                 "table plain wide json",
		"smi --filter state=pa":          "",
		"smi --filter priority":          "priority=best-effort priority=default priority=high",
		"smi --gpu ":                     "0 1",
		"smi ":                           "",
		"set ":                           "default/pod/main abcdef012345 fedcba",
		"set fed":                        "fedcba",
		"set --weight 3 ":                "default/pod/main abcdef012345 fedcba",
		"set fedcba ":                    "",
		"set fedcba --priority ":         "best-effort default high",
		"set fedcba --memory ":           "",
		"set fedcba --force -":           "--help --memory --spill --weight --percent --priority --threads --gpu --output --force",
		"inspect d":                      "default/pod/main",
		"policy ":                        "0 1 all",
		"policy 0 ":                      "fair preempt weight-preempt fixed soft native",
		"policy 0 fair ":                 "",
		"events --kind de":               "deleted denied",
		"events --follow --container fe": "fedcba",
		"completion ":                    "bash zsh fish",
		"install ":                       "docker containerd k3s rke2 crio podman",
		"run -- ":                        "",
	} {
		words := strings.Split(typed, " ")
		if typed == "smi --filter state=pa" { // zsh and fish leave it whole
			want = "state=paused"
		}
		var got []string
		for _, c := range cmdline.Complete(app(), words, cmdline.NodeCandidates(n.Dir)) {
			got = append(got, c.Value)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%q: %q, want %q", typed, got, want)
		}
	}
	if got := cmdline.Complete(app(), nil, cmdline.NodeCandidates(n.Dir)); got != nil {
		t.Errorf("nothing typed: %v", got)
	}
	if got := cmdline.Complete(app(), []string{"set", ""}, cmdline.NodeCandidates(t.TempDir())); got != nil {
		t.Errorf("a node without a ledger: %v", got)
	}
	if out := cgpu("__complete polic"); out != "policy\tshow or change how the containers of a GPU share its time\n" {
		t.Errorf("printed %q", out)
	}
}

// The shells themselves run the scripts. What stands for cgpu here is a script that shows how it was asked.
func TestCompletionScripts(t *testing.T) {
	dir := t.TempDir()
	stub := "#!/bin/sh\nshift\nlast=; for w; do last=$w; done\nprintf '%s\\ta note: (x)\\n' \"pod/$#$last\" 'two words'\n"
	if err := os.WriteFile(filepath.Join(dir, "cgpu"), []byte(stub), 0o755); err != nil {
		t.Fatal(err)
	}
	for shell, script := range map[string]string{
		"bash": `eval "$SCRIPT"; COMP_WORDS=(cgpu set we "") COMP_CWORD=3; _cgpu; printf '%s\n' "${COMPREPLY[@]}"; COMP_WORDS=(cgpu set 'a*') COMP_CWORD=2; _cgpu; printf '%s\n' "${COMPREPLY[@]}"`,
		"zsh":  `compdef() { :; }; _describe() { print -l -- ${(P)2}; }; _files() { print files; }; eval "$SCRIPT"; words=(cgpu set we ""); CURRENT=4; _cgpu; words=(cgpu set 'a*'); CURRENT=3; _cgpu`,
		"fish": `eval "$SCRIPT"; complete -C 'cgpu set we '; complete -C 'cgpu set a'`,
	} {
		t.Run(shell, func(t *testing.T) {
			path := testenv.NeedsProgram(t, shell)
			text := cgpu("completion " + shell)
			if shell == "fish" {
				file := filepath.Join(dir, "cgpu.fish")
				if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
				script = strings.Replace(script, `eval "$SCRIPT"`, "source "+file, 1)
			}
			cmd := exec.Command(path, "-c", script)
			cmd.Env = append(os.Environ(), "SCRIPT="+text, "PATH="+dir+":"+os.Getenv("PATH"), "HOME="+dir)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			last := "a*"
			if shell == "fish" {
				last = "a"
			}
			for _, want := range []string{"pod/3", "two words", "pod/2" + last} {
				if !strings.Contains(string(out), want) && !(shell == "fish" && strings.Contains(want, "two")) {
					t.Errorf("offered\n%s\nwant %s", out, want)
				}
			}
		})
	}
	for _, args := range []string{"completion", "completion tcsh", "completion bash zsh"} {
		if out := cgpu(args); !strings.Contains(out, "want bash, zsh or fish") {
			t.Errorf("%s: %s", args, out)
		}
	}
}
