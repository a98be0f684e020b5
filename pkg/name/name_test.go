// SPDX-License-Identifier: Apache-2.0

package name

import (
	"os"
	"path/filepath"
	"testing"
)

// TestDockerFirst: annotations of a container of Docker are its author's.
func TestDockerFirst(t *testing.T) {
	dir := t.TempDir()
	own := filepath.Join(dir, "abcdef")
	if err := os.Mkdir(own, 0o700); err != nil {
		t.Fatal(err)
	}
	for path, text := range map[string]string{
		filepath.Join(own, "config.v2.json"): `{"ID":"abcdef","Name":"/mine"}`,
		filepath.Join(dir, "config.json"): `{"annotations":{"io.kubernetes.pod.name":"train-0","io.kubernetes.container.name":"main"},
			"mounts":[{"destination":"/etc/hostname","source":"` + own + `/hostname"}]}`,
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got := Of(dir, "abcdef"); got != "mine" {
		t.Errorf("%q, want %q", got, "mine")
	}
}

// TestPodman: the name is found by the place of the bundle, and before annotations, which are the author's.
func TestPodman(t *testing.T) {
	const list = `[{"id":"other","names":["not-me"]},{"id":"abcdef","names":["web"]}]`
	for _, c := range []struct{ bundle, file, text, want string }{
		{"abcdef/userdata", "containers.json", list, "web"},
		{"abcdef/userdata", "volatile-containers.json", list, "web"},
		{"abcdef/userdata", "containers.json", `[{"id":"abcdef"}]`, "a/b/c"},
		{"abcdef/userdata", "containers.json", `{`, "a/b/c"},
		{"fedcba/userdata", "containers.json", list, "a/b/c"},
		{"abcdef/data", "containers.json", list, "a/b/c"},
	} {
		dir := t.TempDir()
		bundle := filepath.Join(dir, c.bundle)
		if err := os.MkdirAll(bundle, 0o700); err != nil {
			t.Fatal(err)
		}
		for path, text := range map[string]string{
			filepath.Join(dir, c.file): c.text,
			filepath.Join(bundle,
				"config.json"): `{"annotations":{"io.kubernetes.pod.namespace":"a","io.kubernetes.pod.name":"b","io.kubernetes.container.name":"c"}}`,
		} {
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got := Of(bundle, "abcdef"); got != c.want {
			t.Errorf("%s, %s: %s: %q, want %q", c.bundle, c.file, c.text, got, c.want)
		}
	}
}

// Docker's names, and what must not be read, are tested in cmd/cgpu (TestDockerName).
func TestAnnotated(t *testing.T) {
	for text, want := range map[string]string{
		`{"annotations":{"io.kubernetes.pod.name":"train-0","io.kubernetes.container.name":"main","io.kubernetes.pod.namespace":"ml"}}`:                  "ml/train-0/main",
		`{"annotations":{"io.kubernetes.container.name":"main"}}`:                                                                                        "",
		`{"annotations":{"nerdctl/name":"web"}}`:                                                                                                         "",
		`{"annotations":{"nerdctl/name":"web","nerdctl/namespace":"default"}}`:                                                                           "",
		`{"annotations":{"nerdctl/name":"web","nerdctl/state-dir":"/var/lib/nerdctl/1935db59/containers/default/abcdef"}}`:                               "",
		`{"annotations":{"nerdctl/name":"web","nerdctl/namespace":"default","nerdctl/state-dir":"/var/lib/nerdctl/1935db59/containers/default/abcdef"}}`: "web",
		`{"annotations":{"nerdctl/name":"web","nerdctl/namespace":"default","nerdctl/state-dir":"/var/lib/nerdctl/1935db59/containers/default/fedcba"}}`: "",
		`{"annotations":{"nerdctl/name":"web","nerdctl/namespace":"default","nerdctl/state-dir":"containers/default/abcdef"}}`:                           "",
		`{}`: "",
		`{"`: "",
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := Of(dir, "abcdef"); got != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
	if got := Of("relative", "abcdef"); got != "" {
		t.Error(got)
	}
}
