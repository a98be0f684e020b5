// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/dryrun"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node/nodetest"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// TestSpecOfRunning: what the container itself has reserved is free for it, and what another of the same ID has is not.
func TestSpecOfRunning(t *testing.T) {
	n := nodetest.New(t)
	memory := nodetest.Table(t).GPUs[0].Memory
	mine, other := t.TempDir(), t.TempDir()
	raw, err := os.ReadFile("../../pkg/dryrun/testdata/docker20-plain.json")
	if err != nil {
		t.Fatal(err)
	}
	most := fmt.Sprintf("ALIYUN_COM_GPU_MEM_CONTAINER=%dMiB", memory/2/quota.MiB)
	n.Reserve(ledger.Record{ID: "web", Nonce: "1111111111111111", Root: "/run/a", Bundle: mine,
		VGPUs: []ledger.VGPU{{UUID: nodetest.T4, Slice: quota.Slice{Limit: memory * 3 / 4}}}})
	for folder, fits := range map[string]bool{mine: true, other: false} {
		d := dryrun.DryRun{RunDir: n.Dir, Hook: "/h", ID: "web", Folder: folder}
		if _, _, err := d.Edit(raw, []string{most, "ALIYUN_COM_GPU_VISIBLE_DEVICES=0"}); (err == nil) != fits {
			t.Errorf("%s: %v, want that it fits: %v", folder, err, fits)
		}
	}
}

// TestCommandLine runs the commands as main does.
func TestCommandLine(t *testing.T) {
	const config = "../../pkg/dryrun/testdata/docker20-plain.json"
	t.Setenv("CGPU_RUN_DIR", t.TempDir())
	for _, tt := range []struct {
		args  string
		out   string // in standard output
		err   string // in the error, or
		note  string // in standard error
		usage bool
	}{
		{args: "version", out: "cgpu unknown"},
		{args: "gc", out: "nothing to remove"},
		{args: "", out: "COMMANDS"},
		{args: "spec --help", out: "Examples"},
		{args: "smi", err: "no node table"},
		{args: "frobnicate", err: "no such command", usage: true},
		{args: "sim", err: `"sim": no such command; did you mean smi? (cgpu help lists them)`, usage: true},
		{args: "--frob", err: "--frob: no such option (cgpu help lists them)", usage: true},
		{args: "help", out: "COMMANDS"},
		{args: "help spec", out: "Examples"},
		{args: "help sim", err: "did you mean smi?", usage: true},
		{args: "--version", out: "cgpu unknown"},
		{args: "smi --gpus 0", err: "smi: --gpus: no such option; did you mean --gpu? (cgpu smi --help lists them)", usage: true},
		{args: "set a --weigth 3", err: "set: --weigth: no such option; did you mean --weight?", usage: true},
		{args: "smi -L -i 0", err: "no node table"},
		{args: "policy -o xml", err: "want table or json", usage: true},
		{args: "smi -o xml", err: "want table, plain, wide or json", usage: true},
		{args: "smi --frob", err: "frob", usage: true},
		{args: "smi now", err: "want no arguments", usage: true},
		{args: "smi 2 --watch 3", err: "want no arguments", usage: true},
		{args: "smi --watch=2 3", err: "want no arguments", usage: true},
		{args: "smi --watch 0", err: "want 0.1 to 3600 seconds", usage: true},
		{args: "smi --watch=nan", err: "want 0.1 to 3600 seconds", usage: true},
		{args: "smi --watch", err: "no node table"},
		{args: "smi --watch 0.5 --json", err: "no node table"},
		{args: "smi -o wide --json", err: "want one of them", usage: true},
		{args: "set", err: "want one CONTAINER", usage: true},
		{args: "set a b --weight 3", err: "want one CONTAINER", usage: true},
		{args: "set a", err: "nothing to change", usage: true},
		{args: "set a --gpu 0 --force", err: "nothing to change", usage: true},
		{args: "set a --weight 0", err: "--weight 0: want 1 to 64", usage: true},
		{args: "set a --weight 65", err: "--weight 65: want 1 to 64", usage: true},
		{args: "set a --weight x", err: `set: --weight "x": want a whole number (see cgpu set --help)`, usage: true},
		{args: "set a --weight", err: "set: --weight: wants a value (see cgpu set --help)", usage: true},
		{args: "set a --percent 0", err: `--percent "0": want 1 to 100, or none`, usage: true},
		{args: "set a --percent 101", err: "want 1 to 100, or none", usage: true},
		{args: "set a --memory 8TB", err: `--memory "8TB": is no size; want a size such as 8GiB`, usage: true},
		{args: "set a --memory 8gb", err: "no node table"},
		{args: "set a --spill 4", err: "no node table"},
		{args: "set a --spill lots", err: `--spill "lots": is no size`, usage: true},
		{args: "set a --priority top", err: `--priority "top": want best-effort, default or high`, usage: true},
		{args: "set a --weight 3", err: "no node table"},
		{args: "policy", err: "no node table"},
		{args: "policy 0 best", err: `policy "best": want fair, preempt`, usage: true},
		{args: "policy 0 fair 3", err: `"3": want [GPU|all [POLICY]]`, usage: true},
		{args: "policy --max-inst 3", err: "of which GPU", usage: true},
		{args: "policy 0 --max-inst 65", err: "--max-inst 65: want 1 to 64", usage: true},
		{args: "policy 0 --prio-ratio 19", err: "--prio-ratio 19: want 20 to 99", usage: true},
		{args: "pause", err: "want one CONTAINER", usage: true},
		{args: "resume a b", err: "want one CONTAINER", usage: true},
		{args: "pause a", err: "no such container"},
		{args: "gc now", err: "want no arguments", usage: true},
		{args: "spec", err: "either --bundle", usage: true},
		{args: "spec --bundle a --config b", err: "either --bundle", usage: true},
		{args: "spec --config " + config + " -e NAME", err: "want VAR=VALUE", usage: true},
		{args: "spec --bundle /nowhere", err: "/nowhere/config.json"},
		{args: "spec --config " + config, out: `"ociVersion"`, note: "passed through unchanged"},
		{args: "spec --config " + config + " -e ALIYUN_COM_GPU_MEM_CONTAINER=6", err: "no node table"},
		{args: "spec --explain --table ../../pkg/node/nodetest/node.json --config " + config +
			" -e ALIYUN_COM_GPU_MEM_CONTAINER=6 -e ALIYUN_COM_GPU_VISIBLE_DEVICES=0,1",
			out: "VISIBLE_DEVICES=0,1\n"}, // one variable, not two
	} {
		var out, note bytes.Buffer
		a := app()
		a.Writer, a.ErrWriter = &out, &note
		err := run(a, append([]string{"cgpu"}, strings.Fields(tt.args)...))
		_, usage := errors.AsType[usageError](err)
		switch {
		case (err != nil) != (tt.err != "") || usage != tt.usage:
			t.Errorf("cgpu %s: error %v (of usage: %v), want %q", tt.args, err, usage, tt.err)
		case err != nil && !strings.Contains(err.Error(), tt.err):
			t.Errorf("cgpu %s: error %v, want %q", tt.args, err, tt.err)
		case !strings.Contains(out.String(), tt.out) || !strings.Contains(note.String(), tt.note):
			t.Errorf("cgpu %s: printed %q and %q, want %q and %q", tt.args, out.String(), note.String(), tt.out, tt.note)
		}
	}
}
