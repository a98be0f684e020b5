// SPDX-License-Identifier: Apache-2.0

//go:build integration

package docs

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/testenv"
	"sigs.k8s.io/yaml"
)

// TestCompose runs the services of examples/compose.yaml as docker compose would; the private node has no Compose.
func TestCompose(t *testing.T) {
	if lab.Driver != "sim" {
		testenv.Skip(t, "on a GPU: the images of examples/compose.yaml are those of the simulated driver")
	}
	var compose struct {
		Services map[string]struct {
			Runtime     string            `json:"runtime"`
			Environment map[string]string `json:"environment"`
			Command     string            `json:"command"`
		} `json:"services"`
	}
	if err := yaml.Unmarshal([]byte(read(t, "../../examples/compose.yaml")), &compose); err != nil {
		t.Fatal(err)
	}
	env := rootShell(t)
	t.Cleanup(func() { clean(t, env) })
	for _, name := range slices.Sorted(maps.Keys(compose.Services)) {
		s := compose.Services[name]
		args := []string{"docker", "run", "-d", "--name", name, "--network", "none", "--runtime", s.Runtime}
		for k, v := range s.Environment {
			args = append(args, "-e", k+"="+v)
		}
		args = append(append(args, "probe"), strings.Fields(s.Command)...)
		if r := lab.Run(env, args...); r.Code != 0 {
			t.Fatalf("%s: %s", name, r)
		}
	}
	r := lab.Run(env, "cgpu", "smi", "--json")
	var v struct {
		GPUs []struct {
			VGPUs []struct {
				Name   string
				Limit  int
				Weight int
			}
		}
	}
	if err := json.Unmarshal([]byte(r.All()), &v); err != nil || len(v.GPUs) == 0 {
		t.Fatalf("%v: %s", err, r)
	}
	weights := map[string]int{}
	for _, x := range v.GPUs[0].VGPUs {
		if x.Limit != 6<<30 {
			t.Errorf("%s: limit %d", x.Name, x.Limit)
		}
		weights[x.Name] = x.Weight
	}
	if want := map[string]int{"web": 3, "batch": 1}; !maps.Equal(weights, want) {
		t.Errorf("weights %v, want %v: %s", weights, want, r)
	}
}
