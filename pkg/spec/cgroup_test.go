// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestCgroup(t *testing.T) {
	for text, want := range map[string]string{
		"":                                    "",
		"/":                                   "",
		"/docker/1":                           "/docker/1",
		"//docker/./x/../1/":                  "/docker/1",
		"docker/1":                            "/docker/1",
		"../docker/1":                         "/docker/1",
		"/a:b:c":                              "/a:b:c",
		"system.slice:docker:1":               "/system.slice/docker-1.scope",
		":docker:1":                           "/system.slice/docker-1.scope",
		"-.slice:docker:1":                    "/docker-1.scope",
		"kubepods-burstable-podx.slice:cri:1": "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podx.slice/cri-1.scope",
		"kubepods.slice::kubepods-podx.slice": "/kubepods.slice/kubepods-podx.slice",
	} {
		raw, _ := json.Marshal(map[string]any{"linux": map[string]string{"cgroupsPath": text}})
		doc, err := Decode(raw)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := doc.Cgroup(); got != want || err != nil {
			t.Errorf("%q: %q, %v, want %q", text, got, err, want)
		}
	}
	// Whoever starts a container may choose its slice (docker run --cgroup-parent), and its path grows with the square of the name.
	long := strings.Repeat("a-", 8<<10) + "b.slice"
	if got := cgroupAt(long + ":docker:1"); got != "/"+long+"/docker-1.scope" {
		t.Errorf("a name of %d bytes gives a path of %d", len(long), len(got))
	}
	for _, raw := range []string{"{}", `{"linux":null}`, `{"linux":{}}`, `{"linux":{"cgroupsPath":null}}`} {
		if doc, err := Decode([]byte(raw)); err != nil {
			t.Fatal(err)
		} else if got, err := doc.Cgroup(); got != "" || err != nil {
			t.Errorf("%s: %q, %v", raw, got, err)
		}
	}
	doc, err := Decode([]byte(`{"linux":{"cgroupsPath":7}}`))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := doc.Cgroup(); err == nil {
		t.Error("a number passes")
	}
}
