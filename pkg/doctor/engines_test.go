// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
)

// runtimePath stands for cgpu-runtime's path in the texts below.
const runtimePath = "/bin/cgpu-runtime"

func TestReadEngines(t *testing.T) {
	for _, tt := range []struct {
		name, engine, text string
		names              []string // of runtimes that are cgpu-runtime
		byName             string
		err                string
	}{
		{"docker", "docker",
			`{"runtimes": {"cgpu": {"path": "/usr/local/bin/cgpu-runtime"}, "nvidia": {"path": "nvidia-container-runtime", "args": []}}, "unknown": 1}`, []string{"cgpu"}, "", ""},
		{"docker's default", "docker", `{"runtimes": {"vgpu": {"path": "cgpu-runtime"}}, "default-runtime": "vgpu"}`,
			[]string{"vgpu"}, "vgpu", ""},
		{"docker, empty", "docker", " \n", nil, "", ""},
		{"docker, no runtimes", "docker", `{"log-driver": "json-file"}`, nil, "", ""},
		{"docker, comment", "docker", "// x\n{}", nil, "", "invalid character"},
		{"containerd 1.x", "containerd",
			"version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\ndefault_runtime_name = " +
				"\"cgpu\"\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.cgpu]\nruntime_type = " +
				"\"io.containerd.runc.v2\"\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.cgpu.options]\nBinaryName = " +
				"\"/usr/local/bin/cgpu-runtime\"\n", []string{"cgpu"}, "cgpu", ""},
		{"containerd 2.x", "containerd",
			"version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.cgpu.options]\nBinaryName = " +
				"'/opt/cgpu-runtime'\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\n", []string{"cgpu"}, "", ""},
		{"containerd, format 1", "containerd", "[plugins.cri.containerd.runtimes.cgpu.options]\nBinaryName = \"cgpu-runtime\"\n",
			[]string{"cgpu"}, "", ""},
		{"containerd, other types", "containerd", "[plugins]\n\"io.containerd.grpc.v1.cri\" = 3\n", nil, "", ""},
		{"containerd, damaged", "containerd", "version = 2\n[plugins", nil, "", "line 2"},
		{"cri-o", "crio",
			"[crio.runtime]\ndefault_runtime = \"cgpu\"\n[crio.runtime.runtimes.cgpu]\nruntime_path = \"/usr/local/bin/cgpu-runtime\"\n",
			[]string{"cgpu"}, "cgpu", ""},
		{"podman", "podman", "[engine]\nruntime = \"crun\"\n[engine.runtimes]\ncgpu = [\"/usr/local/bin/cgpu-runtime\"]\ncrun = []\n",
			[]string{"cgpu"}, "crun", ""},
	} {
		i := slices.IndexFunc(engines, func(e engine) bool { return e.name == tt.engine })
		r := runtimes{paths: map[string]string{}}
		err := engines[i].read([]byte(tt.text), &r)
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%s: %v, want %s", tt.name, err, tt.err)
			}
			continue
		}
		if err != nil || !slices.Equal(r.cgpu(), tt.names) || r.byName != tt.byName {
			t.Errorf("%s: %v, %+v", tt.name, err, r)
		}
	}
}

func TestEngines(t *testing.T) {
	const program, docker = "#!/bin/sh\n", `{"runtimes": {"cgpu": {"path": "` + runtimePath + `"}}}`
	base := map[string]string{"bin/cgpu-runtime": program, "usr/bin/dockerd": program}
	with := func(more map[string]string) map[string]string {
		all := maps.Clone(base)
		maps.Copy(all, more)
		return all
	}
	containerd := func(name string) string {
		return "[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes." + name + ".options]\nBinaryName = \"" + runtimePath + "\"\n"
	}
	for _, tt := range []struct {
		name, engine string
		files        map[string]string
		status       Status
		says         string
		any          Status // of the check of all engines
	}{
		{"used", "docker", with(map[string]string{"etc/docker/daemon.json": docker}), OK, "must be asked for", OK},
		{"default", "docker", with(map[string]string{"etc/docker/daemon.json": strings.TrimSuffix(docker, "}") + `, "default-runtime": "cgpu"}`}),
			OK, "the default", OK},
		{"not used", "docker", with(map[string]string{"etc/docker/daemon.json": "{}"}), Skip, "cgpu install docker", Warn},
		{"no file", "docker", with(nil), Skip, "cgpu install docker", Warn},
		{"not installed", "docker", nil, Skip, "not installed", Warn},
		{"invalid", "docker", with(map[string]string{"etc/docker/daemon.json": "{"}), Fail, "does not start", Warn},
		{"no program", "docker", map[string]string{"etc/docker/daemon.json": docker, "usr/bin/dockerd": program}, Fail,
			"where no program is", OK},
		{"another installation", "docker", with(map[string]string{"opt/cgpu-runtime": "#!/bin/true\n",
			"etc/docker/daemon.json": strings.Replace(docker, runtimePath, "/opt/cgpu-runtime", 1)}), Warn, "two installations", OK},
		{"read", "docker", with(map[string]string{"etc/docker/daemon.json": docker,
			"usr/bin/docker": "#!/bin/sh\necho '{\"cgpu\":{},\"runc\":{}}'\n"}), OK, "runtime cgpu", OK},
		{"not read yet", "docker", with(map[string]string{"etc/docker/daemon.json": docker,
			"usr/bin/docker": "#!/bin/sh\necho '{\"runc\":{}}'\n"}), Warn, "systemctl reload docker", OK},
		{"not running", "docker", with(map[string]string{"etc/docker/daemon.json": docker, "usr/bin/docker": "#!/bin/sh\necho null; exit 1\n"}),
			OK, "runtime cgpu", OK},
		{"drop-in", "containerd", with(map[string]string{"etc/containerd/config.toml": "version = 2\n",
			"etc/containerd/conf.d/50-cgpu.toml": containerd("cgpu")}), OK, "runtime cgpu", OK},
		{"imports", "containerd", with(map[string]string{"etc/containerd/config.toml": "imports = [\"/srv/*.toml\", \"more/a.toml\"]\n",
			"srv/b.toml": containerd("vgpu"), "etc/containerd/more/a.toml": "imports = [\"/etc/containerd/config.toml\"]\n" + containerd("cgpu")}),
			OK, "runtime cgpu, vgpu", OK},
	} {
		h := files(t, tt.files)
		h.loaded, h.tableErr = true, device.ErrMissing
		i := slices.IndexFunc(engines, func(e engine) bool { return e.name == tt.engine })
		expect(t, tt.name, h.checkEngine(engines[i]), tt.status, tt.says)
		expect(t, tt.name, checkEngines(h), tt.any, "")
	}
	// A file that was named.
	h := files(t, with(map[string]string{"srv/daemon.json": docker, "etc/containerd/config.toml": containerd("cgpu")}))
	h.Engines = map[string]string{"docker": "/srv/daemon.json"}
	expect(t, "named", h.checkEngine(engines[0]), OK, "runtime cgpu")
	expect(t, "another", h.checkEngine(engines[1]), Skip, "--engine")
	expect(t, "of those named", checkEngines(h), OK, "docker")
	h.Engines["docker"] = "/srv/none.json"
	expect(t, "named, not there", h.checkEngine(engines[0]), Fail, "is not there")
}

func TestToolkit(t *testing.T) {
	expect(t, "none", checkToolkit(files(t, nil)), OK, "not installed")
	expect(t, "without configuration", checkToolkit(files(t, map[string]string{"usr/bin/nvidia-ctk": "#!/bin/sh\n"})), OK, "installed")
	expect(t, "hook", checkToolkit(files(t, map[string]string{"usr/share/containers/oci/hooks.d/oci-nvidia-hook.json": "{}"})), Warn, "CDI")
	for text, want := range map[string]Result{
		"": {Status: OK, Found: "mode auto"},
		"[nvidia-container-runtime]\nmode = \"cdi\"\nruntimes = [\"runc\"]\n":  {Status: OK, Found: "mode cdi"},
		"[nvidia-container-runtime]\nruntimes = [\"/usr/bin/cgpu-runtime\"]\n": {Status: Fail, Found: "below nvidia-container-runtime"},
		"[nvidia-container-runtime": {Status: Warn, Found: "line 1"},
	} {
		expect(t, text, checkToolkit(files(t, map[string]string{toolkitConfig: text})), want.Status, want.Found)
	}
}

// TestDocumented: docs/doctor.md has a row for each check, made from the checks themselves. Set CGPU_UPDATE to write them.
func TestDocumented(t *testing.T) {
	path := filepath.Join("..", "..", "docs", "doctor.md")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	const begin, end = "<!-- checks -->\n", "<!-- end of checks -->"
	before, rest, found := strings.Cut(string(text), begin)
	_, after, foundEnd := strings.Cut(rest, end)
	if !found || !foundEnd {
		t.Fatalf("%s: want the marks %q and %q", path, begin, end)
	}
	var table strings.Builder
	table.WriteString("| check | what it means | what to do |\n|---|---|---|\n")
	for _, c := range slices.Concat(Checks(), []Check{SelfTest()}, Measurements()) {
		table.WriteString("| `" + c.Name + "` | " + c.Means + " | " + c.Remedy + " |\n")
	}
	want := before + begin + table.String() + end + after
	if want == string(text) {
		return
	}
	if os.Getenv("CGPU_UPDATE") == "" {
		t.Fatalf("%s differs from the checks: CGPU_UPDATE=1 go test ./pkg/doctor writes them", path)
	}
	if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
		t.Fatal(err)
	}
}
