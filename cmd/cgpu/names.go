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

// A CRI engine puts a container's name into its annotations, and so the ledger has it. Docker tells a runtime no name. But
// it mounts /etc/hostname and its like from the folder where it keeps the container's own record, config.v2.json (moby,
// daemon/container: hostname path, ConfigV2 file), which has the name, also after docker rename.

// maxContainerFile bounds what is read of config.json and config.v2.json.
const maxContainerFile = 4 << 20

// maxName bounds a name.
const maxName = 256

// dockerName is what Docker calls a container; "" where nothing tells.
func dockerName(r ledger.Record) string {
	var spec struct {
		Mounts []struct {
			Destination string `json:"destination"`
			Source      string `json:"source"`
		} `json:"mounts"`
	}
	if !filepath.IsAbs(r.Bundle) || !readJSON(filepath.Join(r.Bundle, "config.json"), &spec) {
		return ""
	}
	for _, m := range spec.Mounts {
		dir, file := filepath.Split(m.Source)
		if !slices.Contains([]string{"hostname", "hosts", "resolv.conf"}, file) || m.Destination != "/etc/"+file ||
			!filepath.IsAbs(dir) || filepath.Base(dir) != r.ID {
			continue
		}
		var docker struct{ ID, Name string }
		if !readJSON(filepath.Join(dir, "config.v2.json"), &docker) || docker.ID != r.ID {
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

// named is a record with the name for people: the ledger's, else Docker's.
func named(r ledger.Record) ledger.Record {
	if r.Name == "" {
		r.Name = dockerName(r)
	}
	return r
}

// findContainer finds a container as ledger.Find does, and by Docker's name. A name that is also the beginning of another
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
		if (err != nil || r.ID != found.ID) && r.Name == "" && dockerName(r) == container {
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
