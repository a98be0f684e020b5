// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"fmt"
	"path"
	"strings"
)

// Cgroup is the container's cgroup by linux.cgroupsPath, as a path from the root of the hierarchies; empty where config.json names none.
func (d *Document) Cgroup() (string, error) {
	linux, err := d.within("linux")
	if linux == nil || err != nil {
		return "", err
	}
	raw := linux.get("cgroupsPath")
	if raw == nil {
		return "", nil
	}
	text, err := unquote(raw)
	if err != nil {
		return "", fmt.Errorf("spec: linux.cgroupsPath: %w", err)
	}
	return cgroupAt(text), nil
}

// cgroupAt reads a cgroupsPath: a path, or SLICE:PREFIX:NAME for systemd (runc, libcontainer/cgroups/systemd: getUnitName, ExpandSlice).
// A relative path is below a cgroup of runc's own, which is as good as the root here: what is compared was made by the same engine.
func cgroupAt(text string) string {
	parts := strings.Split(text, ":")
	if len(parts) == 3 && !strings.HasPrefix(text, "/") {
		unit := parts[2]
		if !strings.HasSuffix(unit, ".slice") {
			unit = parts[1] + "-" + unit + ".scope"
		}
		text = sliceAt(parts[0]) + "/" + unit
	}
	if text = path.Clean("/" + text); text == "/" {
		return ""
	}
	return text
}

// maxUnit is the longest name of a unit (systemd, src/basic/unit-def.h: UNIT_NAME_MAX, with the 0 at its end).
const maxUnit = 255

// sliceAt is the path of a slice, in whose name are those above it: b-c.slice is in b.slice. What systemd refuses as too long stays as it
// is: the path of 1 MiB of dashes would have half a terabyte.
func sliceAt(name string) string {
	if name == "" {
		name = "system.slice"
	}
	if len(name) > maxUnit {
		return "/" + name
	}
	name = strings.TrimSuffix(name, ".slice")
	at := ""
	for i := range len(name) {
		if name[i] == '-' && i > 0 {
			at += "/" + name[:i] + ".slice"
		}
	}
	if name == "-" { // the root's
		return ""
	}
	return at + "/" + name + ".slice"
}
