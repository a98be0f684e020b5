// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"strings"
	"testing"
	"testing/fstest"
)

// TestContainerdKeepsEdits: what others have written into our table is there after a second install.
func TestContainerdKeepsEdits(t *testing.T) {
	const main = "/etc/containerd/config.toml"
	install := func(text, path string) (string, error) {
		p, err := InstallContainerd(fstest.MapFS{main[1:]: {Data: []byte(text)}}, main, Version{Major: 1}, Request{Name: "cgpu", Path: path})
		if err != nil || len(p.Edits) == 0 {
			return "", err
		}
		return string(p.Edits[0].After), nil
	}
	text, err := install("version = 2\n", "/a/cgpu-runtime")
	if err != nil {
		t.Fatal(err)
	}
	edited := strings.Replace(text, "    BinaryName", "    SystemdCgroup = true\n    BinaryName", 1)
	edited = strings.Replace(edited, "  pod_annotations = [", "  snapshotter = \"zfs\"\n  pod_annotations = [\"mine/*\", ", 1)
	got, err := install(edited, "/b/cgpu-runtime")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"SystemdCgroup = true", `snapshotter = "zfs"`, `"mine/*"`, `BinaryName = "/b/cgpu-runtime"`} {
		if !strings.Contains(got, want) {
			t.Errorf("%s is not in\n%s", want, got)
		}
	}
	nested := strings.Replace(text, "    BinaryName", "    More = {a = 1}\n    BinaryName", 1)
	if got, err := install(nested, "/b/cgpu-runtime"); err == nil || !strings.Contains(err.Error(), "would be lost") {
		t.Errorf("a table of others: %v\n%s", err, got)
	}
}
