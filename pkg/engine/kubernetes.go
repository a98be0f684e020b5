// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/opencgpu/cgpu/pkg/alloc"
)

// cdiLine switches CDI on in the CRI section. containerd 1.7 has it off; 2.0 to 2.3 have it on unless told otherwise, and
// 2.4 knows no such switch any more (containerd's RELEASES.md, deprecated configuration properties).
const cdiLine = "  enable_cdi = true"

// forges reports a pattern of pod_annotations by which the author of a pod could write what only a device plugin may.
// containerd matches each name of an annotation with path.Match (internal/cri/util, PassThroughAnnotations), in which "*"
// and "?" do not match "/": so "*" itself lets nothing of ours through, and "*/*" does.
func forges(pattern any) bool {
	text, ok := pattern.(string)
	if !ok {
		return true
	}
	for _, name := range []string{alloc.AnnotationShares, alloc.AnnotationPercent} {
		if match, err := path.Match(text, name); err == nil && match {
			return true
		}
	}
	// Names that a later version may have.
	domain, _, found := strings.Cut(text, "/")
	match, err := path.Match(domain, strings.TrimSuffix(alloc.Prefix, "/"))
	return found && err == nil && match
}

// lacksLists reports that a runtime of ours does not get what a device plugin allocates. It refuses lists by which a pod's
// author could allocate to himself, because they are somebody's on purpose: nothing of others is taken out. ours: cgpu
// install has written the runtime's table.
func (c *containerd) lacksLists(name string, ours bool) (bool, error) {
	runtimes := getTable(c.tree, c.key("runtimes")...)
	for _, other := range slices.Sorted(maps.Keys(runtimes)) {
		// Another handler with our program is as good a way to it.
		if other != name && path.Base(getString(runtimes, other, "options", "BinaryName")) != program {
			continue
		}
		pods, _ := get(runtimes, other, "pod_annotations").([]any)
		if i := slices.IndexFunc(pods, forges); i >= 0 {
			return false,
				fmt.Errorf("%s: runtime %q: pod_annotations has %q, by which the author of a pod could write %s annotations and give himself any "+
					"share: take it out; %q is enough",
					c.where(other), other, pods[i], alloc.Prefix, annotations)
		}
	}
	own := getTable(runtimes, name)
	if own == nil {
		return true, nil
	}
	pods, _ := own["pod_annotations"].([]any)
	containers, _ := own["container_annotations"].([]any)
	lacks := !slices.Contains(pods, any(annotations)) || !slices.ContainsFunc(containers, forges)
	if lacks && !ours {
		return false,
			fmt.Errorf("%s: runtime %q was not written by cgpu install and lacks lists: add pod_annotations = [%q] and container_annotations = "+
				"[%q, %q] to its table",
				c.where(name), name, annotations, annotations, allocations)
	}
	return lacks, nil
}

// lacksCDI reports that containerd would ignore CDI devices until it is told.
func (c *containerd) lacksCDI() bool {
	on, set := getTable(c.tree, "plugins", c.plugin)["enable_cdi"].(bool)
	switch {
	case c.program.before(1, 7): // does not know the switch
		return false
	case c.program.Major >= 2:
		return set && !on && c.program.before(2, 4)
	case c.version > 2:
		return set && !on
	}
	return !on
}

// readsAgent: the folder into which cgpu-agent writes is among containerd's cdi_spec_dirs.
func readsAgent(dirs []any) bool {
	return slices.Contains(dirs, any("/var/run/cdi")) || slices.Contains(dirs, any("/run/cdi"))
}

// hintKubernetes says what install cannot do.
func (c *containerd) hintKubernetes(p *Plan, name string) {
	if c.program.before(1, 7) {
		p.hint("containerd %d.%d has no CDI and ignores it without a word: claims (DRA) need 1.7 or later, and cgpu-agent refuses to offer "+
			"them on this node; the device plugin works",
			c.program.Major, c.program.Minor)
	}
	if dirs, set := getTable(c.tree, "plugins", c.plugin)["cdi_spec_dirs"].([]any); set && !readsAgent(dirs) {
		p.hint("cdi_spec_dirs is %s: cgpu-agent writes its files to /var/run/cdi: add that, or claims do not reach containers", listTOML(dirs))
	}
	if getTable(c.tree, c.key("runtimes", name)...) != nil {
		return
	}
	list, _ := c.handler(name)["pod_annotations"].([]any)
	if i := slices.IndexFunc(list, forges); i >= 0 {
		p.hint("pod_annotations of the runtime that ours is like has %s; ours does without, as it would let the author of a pod write %s "+
			"annotations", listTOML(list[i:i+1]), alloc.Prefix)
	}
}

func listTOML(list []any) string {
	text, _ := valueTOML(list)
	return text
}

// The values of pods in cgpu.toml that install sets.
const (
	PodsAllocated = "allocated" // a container of a pod gets what was allocated to it
	PodsGPUShare  = "gpushare"  // the same, also where gpushare's own device plugin allocated
)

// InstallPods plans the line pods = value in a cgpu.toml; text is nil where there is no file. asked: the user named the
// value, so that one that holds pods as tightly does not stay.
func InstallPods(file string, text []byte, value string, asked bool) (p Plan, err error) {
	d, err := parseTOML(file, text)
	if err != nil {
		return p, err
	}
	was, ok := d.tree["pods"].(string)
	if !ok && d.tree["pods"] != nil {
		return p, fmt.Errorf("%s: pods: want a string; cgpu does not start a container with it: repair it first", file)
	}
	if was == value || !asked && was == PodsGPUShare {
		return p, nil
	}
	after, said := d.set(quoteTOML(value), "pods")
	if !said {
		after = d.insertTop("pods = " + quoteTOML(value) + mark0("unset"))
	}
	if text == nil {
		after = append([]byte(created+"\n"), after...)
	}
	check, err := parseTOML(file, after)
	if changed := differences(d.tree, check.tree); err != nil || len(changed) != 1 || !slices.Equal(changed[0], []string{"pods"}) ||
		getString(check.tree, "pods") != value {
		return p, fmt.Errorf("%s: it has a form that cgpu install does not extend: set pods = %q there by hand", file, value)
	}
	p.Elsewhere = append(p.Elsewhere, fmt.Sprintf("%s: pods: %s → %q", file, orUnset(was), value))
	p.add(Edit{Path: file, Before: text, After: after})
	return p, nil
}

// UninstallPods plans to take that line out again, or to make it what it was.
func UninstallPods(file string, text []byte) (p Plan, err error) {
	if text == nil {
		return p, nil
	}
	for _, value := range []string{PodsAllocated, PodsGPUShare} {
		after, was, found := unsetString(text, "pods", value, func(string) bool { return true })
		if !found {
			continue
		}
		if strings.TrimSpace(string(after)) == created {
			after = nil
		}
		p.Elsewhere = append(p.Elsewhere, fmt.Sprintf("%s: pods: %q → %s", file, value, orUnset(was)))
		p.add(Edit{Path: file, Before: text, After: after})
		return p, nil
	}
	return p, nil
}

func orUnset(value string) string {
	if value == "" {
		return "(none set)"
	}
	return quoteTOML(value)
}

// Join adds what another plan changes.
func (p *Plan) Join(other Plan) {
	p.Edits = append(p.Edits, other.Edits...)
	p.Hints = append(p.Hints, other.Hints...)
	p.Elsewhere = append(p.Elsewhere, other.Elsewhere...)
}

// insertTop adds a line to the keys that stand before all tables: behind the last of them; if there is none, before the first
// table and its comment, or at the end.
func (d document) insertTop(line string) []byte {
	nl, end, at := lineEnd(d.text), len(d.text), 0
	if len(d.tables) > 0 {
		end = d.tables[0].from
	}
	for _, v := range d.values {
		if v.to > v.from && v.to <= end {
			at = max(at, v.to)
		}
	}
	switch {
	case at > 0: // a comment may stand behind the value
		if i := bytes.IndexByte(d.text[at:], '\n'); i >= 0 {
			at += i + 1
		} else {
			at = len(d.text)
		}
	default:
		at = end
		for len(d.tables) > 0 && at > 0 {
			from := bytes.LastIndexByte(d.text[:at-1], '\n') + 1
			if !bytes.HasPrefix(bytes.TrimLeft(d.text[from:at], " \t"), []byte("#")) {
				break
			}
			at = from
		}
	}
	if at > 0 && d.text[at-1] != '\n' {
		line = nl + line
	}
	return splice(d.text, at, at, line+nl)
}
