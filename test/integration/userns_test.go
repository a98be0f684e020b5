// SPDX-License-Identifier: Apache-2.0

//go:build integration

package integration

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/testenv"
	"github.com/opencgpu/cgpu/test/node"
)

// TestUserNamespace: a container with a user namespace is held to its share. Where its root folder belongs to the host's root, runc makes
// no places for mounts in it, as it is the namespace's root by then: what such a folder lacks is refused, and leaves nothing behind.
func TestUserNamespace(t *testing.T) {
	const places = "mkdir -p rootfs/run/cgpu && touch rootfs/run/cgpu/libcgpu.so rootfs/run/cgpu/vgpu"
	for name, c := range map[string]struct{ prepare, quota, refused string }{
		"the namespace's":                    {"chown -R 100000:100000 rootfs", "256MiB", ""},
		"the host's, without a quota":        {"true", "", ""},
		"the host's":                         {"true", "256MiB", ": permission denied"},
		"the host's, with places for mounts": {places, "256MiB", ""},
	} {
		t.Run(name, func(t *testing.T) {
			if lab.Driver != device.DriverSim && c.prepare == places {
				testenv.Skip(t, "on a GPU: the real driver's files need more places")
			}
			noTrace(t)
			dir := t.TempDir()
			for parent := dir; parent != os.TempDir(); parent = filepath.Dir(parent) {
				if err := os.Chmod(parent, 0o755); err != nil {
					t.Fatal(err)
				}
			}
			run(t, "sh", "-c", `cd "$0" && runc spec && cd "$0" && mkdir -p rootfs/bin rootfs/proc rootfs/sys rootfs/dev rootfs/run rootfs/etc &&
				cp "$(command -v cgpu-probe)" rootfs/bin && `+c.prepare, dir)
			writeUserNamespace(t, filepath.Join(dir, "config.json"), c.quota)
			r := lab.Run(nil, "cgpu-runtime", "--root", filepath.Join(dir, "state"), "run", "--bundle", dir, "cgpu-userns")
			checkUserNamespace(t, r, c.quota, c.refused)
		})
	}
}

func writeUserNamespace(t *testing.T, file, quota string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	type object = map[string]any
	var config object
	if err := json.Unmarshal(text, &config); err != nil {
		t.Fatal(err)
	}
	process, linux := config["process"].(object), config["linux"].(object)
	process["terminal"], process["args"] = false, []string{"/bin/cgpu-probe", "self"}
	if quota != "" {
		process["env"] = sizeOf(quota)
	}
	ids := []object{{"containerID": 0, "hostID": 100000, "size": 65536}}
	linux["uidMappings"], linux["gidMappings"] = ids, ids
	linux["namespaces"] = append(linux["namespaces"].([]any), object{"type": "user"})
	if text, err = json.Marshal(config); err == nil {
		err = os.WriteFile(file, text, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func checkUserNamespace(t *testing.T, r node.Result, quota, refused string) {
	t.Helper()
	switch out := r.Stdout + r.Stderr; {
	case refused != "":
		if r.Code == 0 || !strings.Contains(out, refused) {
			t.Errorf("want %q: %v", refused, r)
		}
	case quota == "":
		if strings.Contains(out, "page=ok") || !strings.Contains(out, "seccomp=") {
			t.Error(r)
		}
	case r.Code != 0 || !strings.Contains(out, "page_limit_mib=256") || !strings.Contains(out, "enforcement=guard"):
		t.Error(r)
	}
}
