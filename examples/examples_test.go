// SPDX-License-Identifier: Apache-2.0

// Package examples holds what users copy to its word.
package examples

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/quota"
)

type service struct {
	Image       string            `json:"image"`
	Runtime     string            `json:"runtime"`
	Environment map[string]string `json:"environment"`
}

// TestExamples: each service asks for a vGPU in words that cgpu knows, and they fit together on one H200.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	page, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var compose struct {
			Services map[string]service `json:"services"`
		}
		if err := yaml.Unmarshal(text, &compose); err != nil || len(compose.Services) == 0 {
			t.Errorf("%s: %d services, %v", file, len(compose.Services), err)
		}
		if !strings.HasPrefix(string(text), "# ") || !strings.Contains(string(page), "("+file+")") {
			t.Errorf("%s: says not what it is for, or README.md does not list it", file)
		}
		for _, name := range slices.Sorted(maps.Keys(compose.Services)) {
			s := compose.Services[name]
			if s.Image == "" || s.Runtime != "cgpu" {
				t.Errorf("%s: %s: image %q, runtime %q", file, name, s.Image, s.Runtime)
			}
			var env []string
			for k, v := range s.Environment {
				env = append(env, k+"="+v)
			}
			q, err := quota.FromSpec(env, nil)
			if err != nil || q == nil || len(q.Ignored) > 0 {
				t.Errorf("%s: %s: %+v, %v", file, name, q, err)
				continue
			}
			if _, err := q.Memory.Limit(143771 * quota.MiB); err != nil {
				t.Errorf("%s: %s: %v", file, name, err)
			}
		}
	}
}

// TestObservability: what the containers are given is there, and Prometheus asks the port that `cgpu exporter` has.
func TestObservability(t *testing.T) {
	const folder = "observability/"
	text, err := os.ReadFile(folder + "compose.yaml")
	if err != nil {
		t.Fatal(err)
	}
	type file struct{ Content string }
	var compose struct {
		Services map[string]struct {
			Volumes []string
			Configs []struct{ Source string }
			Network string `json:"network_mode"`
		}
		Volumes map[string]any
		Configs map[string]file
	}
	if err := yaml.Unmarshal(text, &compose); err != nil || len(compose.Services) != 2 {
		t.Fatalf("%+v, %v", compose, err)
	}
	for name, s := range compose.Services {
		if s.Network != "host" {
			t.Errorf("%s: network %q, and the exporter answers on 127.0.0.1 alone", name, s.Network)
		}
		for _, v := range s.Volumes {
			from, _, _ := strings.Cut(v, ":")
			if _, named := compose.Volumes[from]; named {
				continue
			}
			if _, err := os.Stat(folder + from); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		for _, c := range s.Configs {
			var content map[string]any
			if err := yaml.Unmarshal([]byte(compose.Configs[c.Source].Content), &content); err != nil || len(content) == 0 {
				t.Errorf("%s: %s: %v, %v", name, c.Source, content, err)
			}
		}
	}
	command, err := os.ReadFile("../cmd/cgpu/exporter.go")
	if err != nil || !strings.Contains(string(command), `"127.0.0.1:9471"`) ||
		!strings.Contains(compose.Configs["prometheus"].Content, `"127.0.0.1:9471"`) {
		t.Errorf("cgpu exporter does not listen on 127.0.0.1:9471, or nobody asks it: %v", err)
	}
}

// TestCollector: the configuration names series and kinds of events that there are, and all kinds have a severity.
func TestCollector(t *testing.T) {
	text, err := os.ReadFile("observability/otel-collector.yaml")
	if err != nil {
		t.Fatal(err)
	}
	series, err := os.ReadFile("../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile(`"(cgpu_[a-z_]+)"`).FindAllSubmatch(text, -1)
	if len(names) < 10 {
		t.Errorf("%d names of series", len(names))
	}
	for _, m := range names {
		if !bytes.Contains(series, []byte("| `"+string(m[1])+"` |")) {
			t.Errorf("%s is no series of docs/metrics.md", m[1])
		}
	}
	var c struct {
		Receivers struct {
			Log struct {
				Include   []string
				Operators []struct {
					Severity struct{ Mapping map[string][]event.Kind }
				}
			} `json:"file_log"`
		}
	}
	if err := yaml.Unmarshal(text, &c); err != nil {
		t.Fatal(err)
	}
	log := c.Receivers.Log
	if want := []string{event.File("/run/cgpu")}; !slices.Equal(log.Include, want) {
		t.Errorf("it reads %q, want %q", log.Include, want)
	}
	kinds := slices.Sorted(slices.Values(slices.Concat(slices.Collect(maps.Values(log.Operators[0].Severity.Mapping))...)))
	if want := slices.Sorted(slices.Values(event.Kinds())); !slices.Equal(kinds, want) {
		t.Errorf("severities of %q, want those of %q", kinds, want)
	}
}
