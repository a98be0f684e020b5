// SPDX-License-Identifier: Apache-2.0

// Package name finds out what people call a container: what its engine does.
//
// containerd's CRI puts a container's name into its annotations, and so the ledger has it. CRI-O and nerdctl use annotations of
// their own, which are looked up here. Docker tells a runtime no name. But it mounts /etc/hostname and its like from the folder
// where it keeps the container's own record, config.v2.json (moby, daemon/container: hostname path, ConfigV2 file), which has the
// name, also after docker rename. Podman keeps such a record, too: its bundles lie in DIR/ID/userdata, and DIR/containers.json lists
// its containers with their names (containers/storage, container store). These records go first: whoever starts a container of Docker
// or podman may choose its annotations.
package name

import (
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// MaxFile bounds what is read of config.json, config.v2.json and containers.json.
const MaxFile = 4 << 20

// MaxLength bounds a name.
const MaxLength = 256

// bundle is what is read of a config.json.
type bundle struct {
	Annotations map[string]string `json:"annotations"`
	Mounts      []mount           `json:"mounts"`
}

type mount struct {
	Destination string `json:"destination"`
	Source      string `json:"source"`
}

// Of is what the engine calls the container with this bundle and ID; "" where nothing tells.
func Of(folder, id string) string {
	var b bundle
	if !filepath.IsAbs(folder) || !readJSON(filepath.Join(folder, "config.json"), &b) {
		return ""
	}
	if name := docker(id, b.Mounts); name != "" { // its annotations are what docker run --annotation says
		return name
	}
	if name := podman(folder, id); name != "" {
		return name
	}
	return annotated(id, b.Annotations)
}

// podman is what podman calls the container with this bundle. CRI-O has the same store, but its bundles lie elsewhere.
func podman(folder, id string) string {
	own := filepath.Dir(folder)
	if filepath.Base(folder) != "userdata" || filepath.Base(own) != id {
		return ""
	}
	// Those that podman run --rm has made are in the second, since podman 4.5.
	for _, file := range []string{"containers.json", "volatile-containers.json"} {
		var list []struct {
			ID    string
			Names []string
		}
		if !readJSON(filepath.Join(filepath.Dir(own), file), &list) {
			continue
		}
		for _, c := range list {
			if c.ID == id && len(c.Names) > 0 && len(c.Names[0]) <= MaxLength {
				return c.Names[0]
			}
		}
	}
	return ""
}

// annotated is a name by annotations: namespace/pod/container of Kubernetes (CRI-O), or nerdctl's.
func annotated(id string, a map[string]string) string {
	name := ""
	if pod, container := a["io.kubernetes.pod.name"], a["io.kubernetes.container.name"]; pod != "" && container != "" {
		name = a["io.kubernetes.pod.namespace"] + "/" + pod + "/" + container
	} else if nerdctl(id, a) {
		name = a["nerdctl/name"]
	}
	if len(name) > MaxLength {
		return ""
	}
	return name
}

// nerdctl tells whether nerdctl made these annotations: it adds the namespace and the container's folder, which ends with namespace
// and ID (nerdctl, pkg/labels: Namespace, StateDir). Who writes annotations of a container does not know the ID that it will get.
func nerdctl(id string, a map[string]string) bool {
	namespace, folder := a["nerdctl/namespace"], a["nerdctl/state-dir"]
	return id != "" && namespace != "" && filepath.IsAbs(folder) && strings.HasSuffix(folder, "/containers/"+namespace+"/"+id)
}

// docker is what Docker calls a container with these mounts.
func docker(id string, mounts []mount) string {
	for _, m := range mounts {
		dir, file := filepath.Split(m.Source)
		if !slices.Contains([]string{"hostname", "hosts", "resolv.conf"}, file) || m.Destination != "/etc/"+file ||
			!filepath.IsAbs(dir) || filepath.Base(dir) != id {
			continue
		}
		var record struct{ ID, Name string }
		if !readJSON(filepath.Join(dir, "config.v2.json"), &record) || record.ID != id {
			continue
		}
		if name := strings.TrimPrefix(record.Name, "/"); name != "" && len(name) <= MaxLength {
			return name
		}
	}
	return ""
}

// readJSON reads a file into v. A container's author may have named the path, so it is a plain file or none.
func readJSON(path string, v any) bool {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return false
	}
	text, err := io.ReadAll(io.LimitReader(f, MaxFile+1))
	return err == nil && len(text) <= MaxFile && json.Unmarshal(text, v) == nil
}
