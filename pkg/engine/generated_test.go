// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"maps"
	"path"
	"slices"
	"strings"
	"testing"
	"text/template"
)

// TestGeneratedRestart: what is installed is there after k3s has written its file anew, and gone after uninstall and another start.
func TestGeneratedRestart(t *testing.T) {
	dir := path.Dir(K3sConfig)
	for _, name := range []string{"k3s-imports", "k3s-3-template", "k3s-3-own-template", "k3s-2-template"} {
		t.Run(name, func(t *testing.T) {
			s, _ := readScenario(t, "testdata/"+name+".txt")
			base := string(s.files[K3sConfig])
			source := dir + "/config.toml.tmpl"
			if strings.HasPrefix(name, "k3s-3") {
				source = dir + "/config-v3.toml.tmpl"
			}
			start := func(files map[string][]byte) map[string][]byte {
				text, has := files[source]
				if !has {
					text = []byte(baseTemplate)
				}
				whole := template.Must(template.New("").Parse(string(text)))
				template.Must(whole.New("base").Parse(base))
				var out bytes.Buffer
				if err := whole.Execute(&out, nil); err != nil {
					t.Fatal(err)
				}
				files = maps.Clone(files)
				files[K3sConfig] = out.Bytes()
				return files
			}
			program := func(files map[string][]byte) string {
				c, err := loadContainerd(root(files), K3sConfig, Version{Major: 2})
				if err != nil {
					t.Fatal(err)
				}
				return getString(c.tree, c.key("runtimes", "cgpu", "options", "BinaryName")...)
			}
			plan := func(verb string, files map[string][]byte) map[string][]byte {
				p, err := s.plan(verb, files)
				if err != nil {
					t.Fatal(err)
				}
				if slices.ContainsFunc(p.Edits, func(e Edit) bool { return e.Path == K3sConfig }) {
					t.Errorf("%s edits the file that is written anew", verb)
				}
				return applyTo(files, p)
			}
			before := start(s.files)
			after := start(plan("install", before))
			if program(after) != oursPath {
				t.Fatalf("after a start: %s", after[K3sConfig])
			}
			if again, err := s.plan("install", after); err != nil || len(again.Edits) > 0 {
				t.Errorf("a second install: %s", describe(again, err))
			}
			// Moved twice without a start in between: the last counts.
			s.path = "/opt/a/cgpu-runtime"
			moved := plan("install", after)
			s.path = "/opt/b/cgpu-runtime"
			if moved = start(plan("install", moved)); program(moved) != s.path {
				t.Errorf("moved: %s", moved[K3sConfig])
			}
			if left := start(plan("uninstall", moved)); !maps.EqualFunc(left, before, bytes.Equal) {
				t.Errorf("left: %q", left)
			}
		})
	}
}
