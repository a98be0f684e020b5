// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"encoding/json"
	"fmt"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/opencgpu/cgpu/pkg/device"
)

// isRuleOf says whether r is about the device d alone. An absent number means every one.
func isRuleOf(r specs.LinuxDeviceCgroup, d device.Node) bool {
	return r.Type == "c" && r.Major != nil && r.Minor != nil && *r.Major == int64(d.Major) && *r.Minor == int64(d.Minor)
}

// readRules decodes linux.resources.devices; raw are the same entries as written.
func readRules(doc *Document) (rules []specs.LinuxDeviceCgroup, raw [][]byte, err error) {
	raw, err = doc.list("devices", "linux", "resources")
	if err != nil {
		return nil, nil, err
	}
	rules = make([]specs.LinuxDeviceCgroup, len(raw))
	for i := range raw {
		if err := json.Unmarshal(raw[i], &rules[i]); err != nil {
			return nil, nil, fmt.Errorf("linux.resources.devices[%d]: %w", i, err)
		}
	}
	return rules, raw, nil
}

// editRules lets the container open the granted nodes and takes away permission for others of NVIDIA's.
//
// Ours come last, behind the engine's deny-all, for the last rule that matches wins. "rw" is enough: runc and crun
// allow mknod for every number, so that they can make the nodes, and opening is what counts. A rule for everything
// (privileged) stays, since other devices depend on it.
func editRules(doc *Document, p *Plan) error {
	rules, raw, err := readRules(doc)
	if err != nil {
		return err
	}
	var kept [][]byte
	for i, r := range rules {
		if !r.Allow || !p.replaces(r) {
			kept = append(kept, raw[i])
		}
	}
	done := map[[2]uint32]bool{}
	for _, d := range p.Nodes() {
		number := [2]uint32{d.Major, d.Minor}
		if done[number] {
			continue
		}
		done[number] = true
		major, minor := int64(d.Major), int64(d.Minor)
		b, err := json.Marshal(specs.LinuxDeviceCgroup{Allow: true, Type: "c", Major: &major, Minor: &minor, Access: "rw"})
		if err != nil {
			return err
		}
		kept = append(kept, b)
	}
	return doc.setList(kept, "devices", "linux", "resources")
}

// replaces says whether the permission r is one of NVIDIA's nodes: then it goes, and ours say what is allowed.
func (p *Plan) replaces(r specs.LinuxDeviceCgroup) bool {
	if r.Type != "c" || r.Major == nil || *r.Major < 0 {
		return false
	}
	if slices.ContainsFunc(p.Hidden, func(d device.Node) bool { return !d.Bind && isRuleOf(r, d) }) {
		return true
	}
	return slices.ContainsFunc(p.Nodes(), func(d device.Node) bool { return !d.Bind && *r.Major == int64(d.Major) })
}
