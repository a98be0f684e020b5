package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
)

// containerd's CRI puts a container's name into its annotations, and so the ledger has it. CRI-O and nerdctl use annotations of
// their own, which are looked up in the bundle. Docker tells a runtime no name. But it mounts /etc/hostname and its like from the folder where it keeps the container's own record, config.v2.json (moby,
// daemon/container: hostname path, ConfigV2 file), which has the name, also after docker rename.

// maxContainerFile bounds what is read of config.json and config.v2.json.
const maxContainerFile = 4 << 20

// maxName bounds a name.
const maxName = 256

// bundle is what is read of a config.json.
type bundle struct {
	Annotations map[string]string `json:"annotations"`
	Mounts      []mount           `json:"mounts"`
}

type mount struct {
	Destination string `json:"destination"`
	Source      string `json:"source"`
}

// bundleName is what its bundle, or Docker, calls a container; "" where nothing tells.
func bundleName(r ledger.Record) string {
	var b bundle
	if !filepath.IsAbs(r.Bundle) || !readJSON(filepath.Join(r.Bundle, "config.json"), &b) {
		return ""
	}
	if name := annotatedName(b.Annotations); name != "" {
		return name
	}
	return dockerName(r.ID, b.Mounts)
}

// annotatedName is a name by annotations: namespace/pod/container of Kubernetes (CRI-O), or nerdctl's.
func annotatedName(a map[string]string) string {
	name := ""
	if pod, container := a["io.kubernetes.pod.name"], a["io.kubernetes.container.name"]; pod != "" && container != "" {
		name = a["io.kubernetes.pod.namespace"] + "/" + pod + "/" + container
	} else {
		name = a["nerdctl/name"]
	}
	if len(name) > maxName {
		return ""
	}
	return name
}

// dockerName is what Docker calls a container with these mounts.
func dockerName(id string, mounts []mount) string {
	for _, m := range mounts {
		dir, file := filepath.Split(m.Source)
		if !slices.Contains([]string{"hostname", "hosts", "resolv.conf"}, file) || m.Destination != "/etc/"+file ||
			!filepath.IsAbs(dir) || filepath.Base(dir) != id {
			continue
		}
		var docker struct{ ID, Name string }
		if !readJSON(filepath.Join(dir, "config.v2.json"), &docker) || docker.ID != id {
			continue
		}
		if name := strings.TrimPrefix(docker.Name, "/"); name != "" && len(name) <= maxName {
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
	text, err := io.ReadAll(io.LimitReader(f, maxContainerFile+1))
	return err == nil && len(text) <= maxContainerFile && json.Unmarshal(text, v) == nil
}

// named is a record with the name for people: the ledger's, else the bundle's or Docker's.
func named(r ledger.Record) ledger.Record {
	if r.Name == "" {
		r.Name = bundleName(r)
	}
	return r
}

// findContainer finds a container as ledger.Find does, and by the engine's name. A name that is also the beginning of another
// container's ID means neither: whoever chooses a name must not get a command that was meant for another.
func findContainer(book *ledger.Ledger, container string) (ledger.Record, error) {
	found, err := book.Find(container)
	if err != nil && !errors.Is(err, ledger.ErrNotFound) || err == nil && found.ID == container {
		return named(found), err
	}
	records, lerr := book.List()
	if lerr != nil {
		return ledger.Record{}, lerr
	}
	fits := []ledger.Record{}
	if err == nil {
		fits = append(fits, named(found))
	}
	for _, r := range records {
		if (err != nil || r.ID != found.ID) && r.Name == "" && bundleName(r) == container {
			fits = append(fits, named(r))
		}
	}
	switch len(fits) {
	case 0:
		return ledger.Record{}, err
	case 1:
		return fits[0], nil
	}
	return ledger.Record{}, fmt.Errorf("container %q: may be %s%s or %s%s: give the beginning of an ID that only one has", container,
		shortID(fits[0].ID), label(fits[0]), shortID(fits[1].ID), label(fits[1]))
}
