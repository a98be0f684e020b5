// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"encoding/json"
	"fmt"
	"path"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/opencgpu/cgpu/pkg/page"
)

// Own is what a container mounts itself over places that matter to the limiter. Each is the destination of a mount, empty
// where there is none.
type Own struct {
	// ReadOnly is above the place of the limiter and its page: no place for a mount can be made in it.
	ReadOnly string
	// Preload is at /etc/ld.so.preload or above it: the file, or the folder that it would be in, is the user's.
	Preload string
	// Loader is above the folders in which images have their dynamic loader: what the image has says nothing then.
	Loader string
}

// Own finds the container's own mounts over the limiter's places.
func (d *Document) Own() (Own, error) {
	var own Own
	raw, err := d.list("mounts")
	if err != nil {
		return own, fmt.Errorf("spec: %w", err)
	}
	for i := range raw {
		var m specs.Mount
		if err := json.Unmarshal(raw[i], &m); err != nil {
			return own, fmt.Errorf("spec: mounts[%d]: %w", i, err)
		}
		to := path.Clean("/" + m.Destination)
		if within(page.Path, to) && to != page.Path && readOnly(m.Options) {
			own.ReadOnly = to
		}
		if within(preloadPath, to) {
			own.Preload = to
		}
		for _, folder := range []string{"/lib", "/lib64", "/usr/lib", "/usr/lib64"} {
			if within(folder, to) {
				own.Loader = to
			}
		}
	}
	return own, nil
}

// within says whether name is folder or lies in it.
func within(name, folder string) bool {
	return folder == "/" || name == folder || strings.HasPrefix(name, folder+"/")
}

// readOnly says whether a mount with these options is; of them the last one counts.
func readOnly(options []string) (is bool) {
	for _, o := range options {
		switch o {
		case "ro", "rro":
			is = true
		case "rw", "rrw":
			is = false
		}
	}
	return is
}
