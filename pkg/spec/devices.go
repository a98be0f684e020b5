// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"encoding/json"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/opencgpu/cgpu/pkg/device"
)

// isNode says whether n is the device d, under whatever path.
func isNode(n specs.LinuxDevice, d device.Node) bool {
	return character(n) && n.Major == int64(d.Major) && n.Minor == int64(d.Minor)
}

// character says whether n is a character device; "u" is an older name of the type.
func character(n specs.LinuxDevice) bool { return n.Type == "c" || n.Type == "u" }

// readNodes decodes linux.devices; raw are the same entries as written.
func readNodes(doc *Document) (nodes []specs.LinuxDevice, raw [][]byte, err error) {
	raw, err = doc.list("devices", "linux")
	if err != nil {
		return nil, nil, err
	}
	nodes = make([]specs.LinuxDevice, len(raw))
	for i := range raw {
		if err := json.Unmarshal(raw[i], &nodes[i]); err != nil {
			return nil, nil, fmt.Errorf("linux.devices[%d]: %w", i, err)
		}
	}
	return nodes, raw, nil
}

// editDevices makes the NVIDIA nodes of linux.devices exactly the granted ones.
//
// What an engine or injector put there beside them goes: other GPUs, and nodes that no vGPU container needs and that
// are ways around the guard (nvidia-modeset, nvidia-uvm-tools, nvidia-caps, an NVIDIA card's /dev/dri). A privileged
// container lists every node of the host; those of other devices stay.
func editDevices(doc *Document, p *Plan) error {
	nodes, raw, err := readNodes(doc)
	if err != nil {
		return err
	}
	granted := p.Nodes()
	have := map[string]bool{}
	var kept [][]byte
	for i, n := range nodes {
		keep, same := p.keeps(n, granted)
		if keep {
			kept = append(kept, raw[i])
		}
		if same {
			have[path.Clean(n.Path)] = true
		}
	}
	added := false
	for _, d := range granted {
		if d.Bind || have[d.Path] {
			continue
		}
		have[d.Path] = true
		mode, root := os.FileMode(0o666), uint32(0)
		b, err := json.Marshal(specs.LinuxDevice{
			Path: d.Path, Type: "c", Major: int64(d.Major), Minor: int64(d.Minor), FileMode: &mode, UID: &root, GID: &root,
		})
		if err != nil {
			return err
		}
		kept = append(kept, b)
		added = true
	}
	if len(kept) == len(raw) && !added {
		return nil
	}
	return doc.setList(kept, "devices", "linux")
}

// keeps decides on one entry of linux.devices; same says that it is a granted node as we would write it.
func (p *Plan) keeps(n specs.LinuxDevice, granted []device.Node) (keep, same bool) {
	clean := path.Clean(n.Path)
	for _, d := range granted {
		if clean == d.Path {
			same = !d.Bind && isNode(n, d)
			return same, same
		}
	}
	return !isNVIDIAName(clean) && !p.hides(n), false
}

// hides says whether n is a device of NVIDIA's driver that was not granted, whatever its path is.
func (p *Plan) hides(n specs.LinuxDevice) bool {
	// The simulated driver's nodes carry the numbers of /dev/null: those are not the driver's.
	if slices.ContainsFunc(p.Hidden, func(d device.Node) bool { return !d.Bind && isNode(n, d) }) {
		return true
	}
	granted := p.Nodes()
	if slices.ContainsFunc(granted, func(d device.Node) bool { return isNode(n, d) }) {
		return false
	}
	return slices.ContainsFunc(granted, func(d device.Node) bool {
		return !d.Bind && character(n) && n.Major == int64(d.Major)
	})
}

// isNVIDIAName says whether clean is a path that NVIDIA's driver uses for a node.
func isNVIDIAName(clean string) bool { return strings.HasPrefix(clean, "/dev/nvidia") }
