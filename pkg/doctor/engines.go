// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"

	setup "github.com/opencgpu/cgpu/pkg/engine"
)

// engine is a container engine: where its configuration lies and how to read it.
type engine struct {
	name    string
	program string
	files   []string // the first is the main one; the others are patterns of drop-ins, later ones win
	read    func(text []byte, into *runtimes) error
	reload  string // what makes it read its configuration again
}

// runtimes is what an engine's configuration says of runtimes.
type runtimes struct {
	paths   map[string]string // name → program
	byName  string            // the default
	imports []string          // of containerd: further files, as patterns
}

var engines = []engine{
	{"docker", "dockerd", []string{"/etc/docker/daemon.json"}, readDocker, "systemctl reload docker"},
	{"containerd", "containerd", []string{setup.ContainerdConfig, "/etc/containerd/conf.d/*.toml", setup.K3sConfig, setup.RKE2Config},
		readContainerd, "systemctl restart containerd (k3s, rke2-server …)"},
	{"crio", "crio", []string{"/etc/crio/crio.conf", "/etc/crio/crio.conf.d/*"}, readCRIO, "systemctl restart crio"},
	{"podman", "podman", []string{"/usr/share/containers/containers.conf", "/etc/containers/containers.conf",
		"/etc/containers/containers.conf.d/*.conf"}, readPodman, ""},
}

var engineChecks = func() []Check {
	var list []Check
	for _, e := range engines {
		list = append(list, Check{Name: e.name,
			Means: "The configuration of " + e.name + " names cgpu-runtime as a runtime, and that program is there. Skipped where " + e.name +
				" does not use cgpu.",
			Remedy: "cgpu install " + e.name, Run: func(h *Host) Result { return h.checkEngine(e) }})
	}
	return append(list,
		Check{Name: "engines", Means: "At least one engine can start containers through cgpu-runtime.",
			Remedy: "cgpu install docker, or containerd, k3s, rke2, crio, podman", Run: checkEngines},
		Check{Name: "toolkit",
			Means: "NVIDIA's container toolkit, where it is installed, does not stand in cgpu's way: it may serve other containers, but not " +
				"stack on cgpu-runtime nor give every container the whole card.",
			Remedy: "see docs/install.md: cgpu injects the driver files itself", Run: checkToolkit})
}()

// readDocker reads a daemon.json.
func readDocker(text []byte, into *runtimes) error {
	if len(strings.TrimSpace(string(text))) == 0 {
		return nil
	}
	var f struct {
		Runtimes map[string]struct {
			Path string `json:"path"`
		} `json:"runtimes"`
		Default string `json:"default-runtime"`
	}
	if err := json.Unmarshal(text, &f); err != nil {
		return err
	}
	for name, r := range f.Runtimes {
		into.paths[name] = r.Path
	}
	into.byName = cmp.Or(f.Default, into.byName)
	return nil
}

// readContainerd reads a config.toml of format 1 to 4: the runtimes are in the CRI plugin, which has had several names.
func readContainerd(text []byte, into *runtimes) error {
	var f struct {
		Imports []string       `toml:"imports"`
		Plugins map[string]any `toml:"plugins"`
	}
	if err := toml.Unmarshal(text, &f); err != nil {
		return tomlError(err)
	}
	into.imports = append(into.imports, f.Imports...)
	for _, plugin := range []string{"cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"} {
		c, _ := f.Plugins[plugin].(map[string]any)
		c, _ = c["containerd"].(map[string]any)
		list, _ := c["runtimes"].(map[string]any)
		for name, r := range list {
			r, _ := r.(map[string]any)
			options, _ := r["options"].(map[string]any)
			path, _ := options["BinaryName"].(string)
			into.paths[name] = path
		}
		if name, _ := c["default_runtime_name"].(string); name != "" {
			into.byName = name
		}
	}
	return nil
}

func readCRIO(text []byte, into *runtimes) error {
	var f struct {
		CRIO struct {
			Runtime struct {
				Default  string `toml:"default_runtime"`
				Runtimes map[string]struct {
					Path string `toml:"runtime_path"`
				} `toml:"runtimes"`
			} `toml:"runtime"`
		} `toml:"crio"`
	}
	if err := toml.Unmarshal(text, &f); err != nil {
		return tomlError(err)
	}
	for name, r := range f.CRIO.Runtime.Runtimes {
		into.paths[name] = r.Path
	}
	into.byName = cmp.Or(f.CRIO.Runtime.Default, into.byName)
	return nil
}

func readPodman(text []byte, into *runtimes) error {
	var f struct {
		Engine struct {
			Default  string              `toml:"runtime"`
			Runtimes map[string][]string `toml:"runtimes"`
		} `toml:"engine"`
	}
	if err := toml.Unmarshal(text, &f); err != nil {
		return tomlError(err)
	}
	for name, paths := range f.Engine.Runtimes {
		if len(paths) > 0 {
			into.paths[name] = paths[0]
		}
	}
	into.byName = cmp.Or(f.Engine.Default, into.byName)
	return nil
}

// tomlError is an error of the decoder with its line.
func tomlError(err error) error {
	if d, isDecode := errors.AsType[*toml.DecodeError](err); isDecode {
		row, _ := d.Position()
		return fmt.Errorf("line %d: %s", row, strings.TrimPrefix(d.Error(), "toml: "))
	}
	return err
}

// cgpuRuntimes are the names by which runtimes that are cgpu-runtime go, sorted.
func (r runtimes) cgpu() []string {
	var names []string
	for name, path := range r.paths {
		if filepath.Base(path) == "cgpu-runtime" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// readEngine reads an engine's configuration. found: there is one.
func (h *Host) readEngine(e engine) (r runtimes, found bool, err error) {
	r.paths = map[string]string{}
	queue := e.files
	if path := h.Engines[e.name]; path != "" {
		queue = []string{path}
	}
	read := map[string]bool{}
	for len(queue) > 0 && len(read) < 100 { // imports may go round
		pattern := queue[0]
		queue = queue[1:]
		files, _ := filepath.Glob(h.at(pattern))
		for _, file := range files {
			if read[file] {
				continue
			}
			read[file] = true
			text, err := readSome(file)
			if err == nil {
				err = e.read(text, &r)
			}
			if err != nil {
				return r, true, fmt.Errorf("%s: %w", file, err)
			}
			found = true
			for _, more := range r.imports {
				if !filepath.IsAbs(more) { // to the folder of the file that names it
					more = filepath.Join(strings.TrimPrefix(filepath.Dir(file), strings.TrimSuffix(h.Root, "/")), more)
				}
				queue = append(queue, more)
			}
			r.imports = nil
		}
	}
	return r, found, nil
}

func (h *Host) checkEngine(e engine) Result {
	_, named := h.Engines[e.name]
	r, found, err := h.readEngine(e)
	if len(h.Engines) > 0 && !named {
		return skip("not asked for by --engine")
	}
	installed := h.program(e.program) != ""
	switch {
	case named && !found && err == nil:
		return fail("%s is not there", h.Engines[e.name]).but("name the file that %s is started with", e.name)
	case !installed && !found:
		return skip("not installed")
	case err != nil:
		return fail("%v", err).but("repair it: %s does not start with it", e.name)
	}
	names := r.cgpu()
	if len(names) == 0 {
		return skip("does not use cgpu-runtime; cgpu install %s makes it", e.name)
	}
	for _, name := range names {
		path := r.paths[name]
		if filepath.IsAbs(path) {
			path = h.at(path)
		} else {
			path = h.program(path)
		}
		info, err := os.Stat(path)
		if err != nil || info.Mode()&0o111 == 0 {
			return fail("runtime %s is %s, where no program is", name, r.paths[name]).
				but("cgpu install %s, or correct the path; then %s", e.name, cmp.Or(e.reload, "start the container again"))
		}
		if own, err := os.Stat(filepath.Join(h.Bin, "cgpu-runtime")); err == nil && !os.SameFile(own, info) {
			return warn("runtime %s is %s, which is not the one beside this cgpu (%s)", name, r.paths[name], h.Bin).
				but("remove one of the two installations")
		}
	}
	if e.name == "docker" && h.dockerLacks(names) {
		return warn("%s is in its configuration, but the dockerd that runs does not know it", strings.Join(names, ", ")).but("%s", e.reload)
	}
	by := "not the default: " + strings.Join(names, ", ") + " must be asked for"
	if slices.Contains(names, r.byName) {
		by = "the default"
	}
	return ok("runtime %s, %s", strings.Join(names, ", "), by)
}

// dockerLacks asks the dockerd that runs which runtimes it knows. One that does not answer is no fault here.
func (h *Host) dockerLacks(names []string) bool {
	docker := h.program("docker")
	if docker == "" || len(h.Engines) > 0 && h.DockerHost == "" { // the dockerd that answers may be another than the one whose file was named
		return false
	}
	text, err := output(docker, "info", "--format", "{{json .Runtimes}}")
	return err == nil && lacks(text, names)
}

// lacks says that an answer lists runtimes, and none of those named.
func lacks(text string, names []string) bool {
	var known map[string]any
	if json.Unmarshal([]byte(text), &known) != nil || len(known) == 0 {
		return false
	}
	return !slices.ContainsFunc(names, func(n string) bool { _, found := known[n]; return found })
}

func checkEngines(h *Host) Result {
	var names []string
	for _, e := range engines {
		if _, named := h.Engines[e.name]; len(h.Engines) > 0 && !named {
			continue
		}
		if r, _, err := h.readEngine(e); err == nil && len(r.cgpu()) > 0 {
			names = append(names, e.name)
		}
	}
	if len(names) == 0 {
		return warn("none uses cgpu-runtime: no container gets a slice")
	}
	return ok("%s", strings.Join(names, ", "))
}

// Files of NVIDIA's container toolkit.
const (
	toolkitConfig = "/etc/nvidia-container-runtime/config.toml"
	toolkitHook   = "oci-nvidia-hook.json"
)

func checkToolkit(h *Host) Result {
	for _, dir := range []string{"/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"} {
		if path := filepath.Join(dir, toolkitHook); h.there(path) {
			return warn("%s gives every container of podman or CRI-O that sets NVIDIA_VISIBLE_DEVICES the whole card", path).
				but("remove the file, and use CDI for containers without a quota")
		}
	}
	text, found := h.text(toolkitConfig)
	if !found {
		if h.program("nvidia-container-runtime") == "" && h.program("nvidia-ctk") == "" {
			return ok("not installed, and not needed")
		}
		return ok("installed, without %s; cgpu does not use it", toolkitConfig)
	}
	return judgeToolkit(text)
}

// judgeToolkit judges its config.toml.
func judgeToolkit(text string) Result {
	var f struct {
		Runtime struct {
			Mode     string   `toml:"mode"`
			Runtimes []string `toml:"runtimes"`
		} `toml:"nvidia-container-runtime"`
	}
	if err := toml.Unmarshal([]byte(text), &f); err != nil {
		return warn("%s: %v", toolkitConfig, tomlError(err)).but("repair it: nvidia-container-runtime does not start with it")
	}
	for _, r := range f.Runtime.Runtimes {
		if filepath.Base(r) == "cgpu-runtime" {
			return fail("%s runs cgpu-runtime below nvidia-container-runtime, which adds whole cards after it", toolkitConfig).
				but("take cgpu-runtime out of runtimes in that file, and make it a runtime of the engine")
		}
	}
	return ok("installed, mode %s; it serves containers that are started with its own runtime", cmp.Or(f.Runtime.Mode, "auto"))
}

// EngineNames are the engines whose configuration is looked at.
func EngineNames() []string {
	var names []string
	for _, e := range engines {
		names = append(names, e.name)
	}
	return names
}
