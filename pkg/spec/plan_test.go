// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// TestApply compares whole results with golden files. After a wanted change: go test ./pkg/spec -run TestApply -update,
// then read the difference.
func TestApply(t *testing.T) {
	one := plan(map[int]quota.Bytes{0: 2014 * quota.MiB})
	for _, test := range []struct {
		input, golden string
		plan          Plan
	}{
		{"docker20-cgpu-env", "docker20-cgpu-env", one},
		{"docker20-cgpu-env", "docker20-cgpu-env.sim", simulated(one)},
		{"docker20-cgpu-env", "docker20-cgpu-env.limiter", withLimiter(one)},
		{"docker20-cgpu-env", "docker20-cgpu-env.musl", withoutPreload(withLimiter(one))},
		{"docker20-cgpu-env", "docker20-cgpu-env.preload", preloadMode(withLimiter(one))},
		{"docker20-cgpu-env", "docker20-cgpu-env.sim.preload", onSimulated(preloadMode(withLimiter(simulated(one))))},
		{"docker20-gpus-all-plus-env", "docker20-gpus-all-plus-env", plan(map[int]quota.Bytes{1: 6 * quota.GiB, 2: 0})},
		{"docker20-privileged-gpus", "docker20-privileged-gpus.sim", simulated(one)},
		{"docker20-seccomp-unconfined", "docker20-seccomp-unconfined", one},
		{"docker29-gpus-dev0-cgpu", "docker29-gpus-dev0-cgpu", one},
		{"docker29-privileged-gpus", "docker29-privileged-gpus", one},
		{"cri16-default", "cri16-default", one},
		{"cri16-default", "cri16-default.preload", preloadMode(withLimiter(one))},
		{"nvidia-ctk-h200-after-jit-cdi", "nvidia-ctk-h200-after-jit-cdi", one},
	} {
		t.Run(test.golden, func(t *testing.T) {
			doc := decode(t, recorded(t, test.input))
			if err := Apply(doc, test.plan); err != nil {
				t.Fatal(err)
			}
			var got bytes.Buffer
			if err := json.Indent(&got, doc.Encode(), "", "  "); err != nil {
				t.Fatal(err)
			}
			got.WriteByte('\n')
			golden := filepath.Join("testdata", "golden", test.golden+".json")
			if *update {
				if err := os.MkdirAll(filepath.Dir(golden), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(golden, got.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got.Bytes(), want) {
				t.Errorf("differs from %s:\n%s", golden, firstDifference(got.Bytes(), want))
			}
		})
	}
}

// firstDifference shows the first line that differs.
func firstDifference(got, want []byte) string {
	g, w := bytes.Split(got, []byte("\n")), bytes.Split(want, []byte("\n"))
	for i := range min(len(g), len(w)) {
		if !bytes.Equal(g[i], w[i]) {
			return "got  " + string(g[i]) + "\nwant " + string(w[i])
		}
	}
	return "one is longer"
}

func TestApplyRefuses(t *testing.T) {
	for name, raw := range map[string]string{
		"no process":         `{"linux":{}}`,
		"process not object": `{"process":[],"linux":{}}`,
		"env not array":      `{"process":{"env":"x"},"linux":{}}`,
		"devices not array":  `{"process":{},"linux":{"devices":{}}}`,
		"linux twice":        `{"process":{},"linux":{"seccomp":{},"seccomp":{}}}`,
		"hooks not array":    `{"process":{},"linux":{},"hooks":{"prestart":{}}}`,
		// six times as long in the state
		"long annotations": `{"process":{},"linux":{},"annotations":{"a":"` + strings.Repeat("<", 1<<18) + `"}}`,
		"own listener":     `{"process":{},"linux":{"seccomp":{"defaultAction":"SCMP_ACT_ALLOW","listenerPath":"/x"}}}`,
	} {
		doc, err := Decode([]byte(raw))
		if err == nil {
			err = Apply(doc, plan(map[int]quota.Bytes{0: quota.GiB}))
		}
		if err == nil {
			t.Errorf("%s: applied", name)
		}
	}
}

// TestAnyCase: what runc takes for a member is edited, under the name by which crun takes it too.
func TestAnyCase(t *testing.T) {
	doc := decode(t, []byte(`{ "Proce\u017f\u017f" : {"ENV":["A=b"]},"Linux":{"\u212aeep":1},"annotations":{"CGPU.io/x":"y"}}`))
	env, err := doc.Env()
	if err != nil || len(env) != 1 {
		t.Errorf("env: %q, %v", env, err)
	}
	if err := Apply(doc, plan(map[int]quota.Bytes{0: quota.GiB})); err != nil {
		t.Fatal(err)
	}
	got := string(doc.Encode())
	for _, want := range []string{`{ "process" : {"env":["A=b",`, `,"linux":{"\u212aeep":1,"devices":[`, `"CGPU.io/x":"y"`} {
		if !strings.Contains(got, want) {
			t.Errorf("%s is not in %s", want, got)
		}
	}
}

func TestNewPlan(t *testing.T) {
	table := &device.Table{GPUs: []device.GPU{gpu(0), gpu(1), gpu(2)}, Nodes: plan(nil).Common, Env: []string{"A=b"}}
	record := ledger.Record{
		ID: "c", Nonce: "n", Socket: "/s", Native: []string{gpu(2).UUID},
		VGPUs: []ledger.VGPU{{UUID: gpu(1).UUID, Slice: quota.Slice{Limit: quota.GiB}}},
	}
	p := NewPlan(record, table)
	if len(p.GPUs) != 2 || p.GPUs[0].Index != 1 || p.GPUs[0].Native || p.GPUs[0].Limit != quota.GiB ||
		p.GPUs[1].Index != 2 || !p.GPUs[1].Native {
		t.Errorf("GPUs %+v", p.GPUs)
	}
	if len(p.Hidden) != 1 || p.Hidden[0] != gpu(0).Node || len(p.Nodes()) != 4 || p.ID != "c" || p.Nonce != "n" || p.Socket != "/s" {
		t.Errorf("%+v", p)
	}
}

// TestHeld refuses to start a container that nothing would hold to its quota.
func TestHeld(t *testing.T) {
	good := preloadMode(withLimiter(plan(map[int]quota.Bytes{0: quota.GiB})))
	for name, change := range map[string]func(*Plan){
		"nothing":                    func(*Plan) {},
		"no limiter":                 func(p *Plan) { p.Limiter = "" },
		"no page":                    func(p *Plan) { p.Page = "" },
		"not asked":                  func(p *Plan) { p.PageWritable = false },
		"the driver too, no limiter": func(p *Plan) { p.Limiter, p.DriverLimits = "", true },
	} {
		p := good
		change(&p)
		if err := Apply(decode(t, recorded(t, "docker20-plain")), p); (err == nil) != (name == "nothing") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
