// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"path/filepath"
	"testing"

	"github.com/opencgpu/cgpu/test/node"
)

// TestRefusals: whoever types docker run reads why it was refused, and nothing of the container is left.
func TestRefusals(t *testing.T) {
	gpus(t)
	const mem = "ALIYUN_COM_GPU_MEM_CONTAINER"
	tests := []struct {
		name    string
		env     []string
		opts    []string
		reasons []string
	}{
		{"text", quotaOf("7x", "", "0"), nil, []string{mem, `7x`}},
		{"zero", quotaOf("0", "15", "0"), nil, []string{mem}},
		{"negative", quotaOf("-1", "15", "0"), nil, []string{mem, `-1`}},
		{"empty", quotaOf("", "15", "0"), nil, []string{mem}},
		{"more than the card", quotaOf("16", "15", "0"), nil, []string{`16`, `15`}},
		{"larger than the card", sizeOf("9999GiB"), nil, []string{`9999|GPU`}},
		{"overflow", quotaOf("99999999999999999999", "", "0"), nil, []string{mem}},
		{"unknown GPU", quotaOf("6", "15", "7"), nil, []string{`ALIYUN_COM_GPU_VISIBLE_DEVICES`, `7`}},
		{"unknown UUID", quotaOf("6", "15", "GPU-ffffffff"), nil, []string{`GPU-ffffffff`}},
		{"the same GPU twice", quotaOf("6", "15", "0,0"), nil, []string{`0,0|twice|duplicate`}},
		{"DEV is text", quotaOf("6", "many", "0"), nil, []string{`ALIYUN_COM_GPU_MEM_DEV`, `many`}},
		{"weight", append(quotaOf("1", "", "0"), "ALIYUN_COM_GPU_SCHD_WEIGHT=x"), nil, []string{`SCHD_WEIGHT`}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			noTrace(t)
			c := container{env: test.env, opts: test.opts, cmd: []string{"true"}}
			wantRefused(t, c.try(t), test.reasons...)
		})
	}
}

// TestTwoValues: one variable with two values has no sure meaning. (The docker command itself lets the last win.)
func TestTwoValues(t *testing.T) {
	noTrace(t)
	bundle := t.TempDir()
	quotaBundle(t, bundle, append(sizeOf("1GiB"), sizeOf("2GiB")[0]), "true")
	r := lab.Run(nil, filepath.Join(lab.Bin, "cgpu-runtime"), "--root", t.TempDir(), "run", "--bundle", bundle, "two-values")
	wantRefused(t, r, `ALIYUN_COM_GPU_MEM_CONTAINER`, `1GiB`, `2GiB`)
}

// TestAdmission: limits that do not fit the card together are refused, and fit again once the first is gone.
func TestAdmission(t *testing.T) {
	noTrace(t)
	gpus(t)
	first := container{env: quotaOf("10", "15", "0"), cmd: []string{"sleep", "600"}}.start(t)
	second := container{env: sixOfFifteen, cmd: []string{"true"}}
	wantRefused(t, second.try(t), `MiB`, `GPU`)
	container{env: quotaOf("5", "15", "0"), cmd: []string{"true"}}.run(t)
	docker(t, "rm", "-f", first)
	noRecord(t, first)
	second.run(t)
}

// TestNestedCgroup: no vGPU's cgroup is below another's, whatever the engine was told; beside it is fine.
func TestNestedCgroup(t *testing.T) {
	noTrace(t)
	first := container{env: sizeOf("1GiB"), cmd: []string{"sleep", "600"}}.start(t)
	cgroup := cgroupOf(t, first)
	for path, reasons := range map[string][]string{
		cgroup + "/below":                     {`cgroupsPath`, cgroup, `--cgroup-parent`},
		filepath.Dir(cgroup) + "/cgpu-beside": nil,
	} {
		bundle := t.TempDir()
		err := lab.Bundle(bundle, func(spec map[string]any) {
			node.SetProcess(spec, sizeOf("1GiB"), "true")
			spec["linux"].(map[string]any)["cgroupsPath"] = path
		})
		if err != nil {
			t.Fatal(err)
		}
		r := lab.Run(nil, filepath.Join(lab.Bin, "cgpu-runtime"), "--root", t.TempDir(), "run", "--bundle", bundle, "nested-cgroup")
		if reasons != nil {
			wantRefused(t, r, reasons...)
		} else if r.Code != 0 {
			t.Error(r)
		}
	}
	if more := belowCgroup(t, first); more != nil {
		wantRefused(t, container{env: sizeOf("1GiB"), opts: more, cmd: []string{"true"}}.try(t), `cgroupsPath`)
	}
}

// TestOnlyMemoryMakesItOurs: visible devices without a size ask for nothing, and the container stays native.
func TestOnlyMemoryMakesItOurs(t *testing.T) {
	noTrace(t)
	container{env: []string{"ALIYUN_COM_GPU_VISIBLE_DEVICES=7"}, cmd: []string{"true"}}.run(t)
	container{env: append(sizeOf("7x"), "CGPU_DISABLE=true"), cmd: []string{"true"}}.run(t)
}
