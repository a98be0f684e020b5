// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"iter"
	"path/filepath"
	"strings"
)

// Validate checks what every reader of a table relies on.
func (t *Table) Validate() error {
	fault := func(format string, args ...any) error { return fmt.Errorf("device: node table: "+format, args...) }
	if t.Version != TableVersion {
		return fault("version %d, want %d", t.Version, TableVersion)
	}
	if t.Driver != DriverNVIDIA && t.Driver != DriverSim {
		return fault("driver %q, want %q or %q", t.Driver, DriverNVIDIA, DriverSim)
	}
	if err := t.Config.Card().Validate(); err != nil {
		return fault("config: %w", err)
	}
	seen := map[string]bool{}
	for i, g := range t.GPUs {
		switch {
		case g.Index < 0 || i > 0 && g.Index <= t.GPUs[i-1].Index:
			return fault("GPU %d: index %d is not above the one before", i, g.Index)
		case !IsUUID(g.UUID):
			return fault("GPU %d: uuid %q, want GPU- and a lower-case UUID", g.Index, g.UUID)
		case !IsBusID(g.BusID):
			return fault("GPU %d: bus id %q, want such as 0000:01:00.0", g.Index, g.BusID)
		case g.Minor < 0:
			return fault("GPU %d: minor %d", g.Index, g.Minor)
		case g.Memory == 0:
			return fault("GPU %d: no memory", g.Index)
		}
		for _, unique := range []string{g.UUID, g.BusID, fmt.Sprint("minor ", g.Minor)} {
			if seen[unique] {
				return fault("GPU %d: %s occurs twice", g.Index, unique)
			}
			seen[unique] = true
		}
	}
	for n := range t.nodes() {
		if !clean(n.Path) || !clean(n.HostPath) {
			return fault("device node %q at %q: want absolute paths", n.Path, n.HostPath)
		}
		if seen[n.Path] {
			return fault("device node %q occurs twice", n.Path)
		}
		seen[n.Path] = true
	}
	for _, m := range t.Mounts {
		if !clean(m.Host) || !clean(m.Container) {
			return fault("mount of %q at %q: want absolute paths", m.Host, m.Container)
		}
	}
	for _, l := range t.Links {
		if !clean(l.Path) || l.Target == "" {
			return fault("link %q to %q: want an absolute path and a target", l.Path, l.Target)
		}
	}
	for _, dir := range t.LibDirs {
		// Each becomes a line of a file below /etc/ld.so.conf.d.
		if !clean(dir) || strings.ContainsAny(dir, "\n#") {
			return fault("library folder %q: want an absolute path", dir)
		}
	}
	for _, l := range t.Libraries {
		if !clean(l.Path) || l.Name == "" || filepath.Base(l.Name) != l.Name {
			return fault("library %q at %q: want a file name and an absolute path", l.Name, l.Path)
		}
	}
	for _, e := range t.Env {
		if name, _, ok := strings.Cut(e, "="); !ok || name == "" {
			return fault("environment %q: want NAME=value", e)
		}
	}
	return nil
}

// nodes are all device nodes of the table.
func (t *Table) nodes() iter.Seq[Node] {
	return func(yield func(Node) bool) {
		for _, n := range t.Nodes {
			if !yield(n) {
				return
			}
		}
		for _, g := range t.GPUs {
			if !yield(g.Node) {
				return
			}
		}
	}
}

// clean reports an absolute path without "..", "//" and the like.
func clean(path string) bool { return filepath.IsAbs(path) && filepath.Clean(path) == path }

// IsUUID reports a GPU's UUID as NVML writes it.
func IsUUID(s string) bool { return shaped(s, "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx") }

// IsBusID reports a PCI address with a domain of four to eight digits.
func IsBusID(s string) bool {
	domain, rest, _ := strings.Cut(s, ":")
	return len(domain) >= 4 && len(domain) <= 8 && shaped(domain, "xxxxxxxx"[:len(domain)]) && shaped(rest, "xx:xx.x")
}

// shaped compares s with a pattern in which x stands for a lower-case hexadecimal digit. (Package regexp would compile
// its patterns at every start of cgpu-runtime.)
func shaped(s, pattern string) bool {
	if len(s) != len(pattern) {
		return false
	}
	for i := range len(s) {
		hex := '0' <= s[i] && s[i] <= '9' || 'a' <= s[i] && s[i] <= 'f'
		if pattern[i] == 'x' && !hex || pattern[i] != 'x' && s[i] != pattern[i] {
			return false
		}
	}
	return true
}
