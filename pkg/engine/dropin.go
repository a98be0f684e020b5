// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// dropInEngine is an engine that merges small files, so that ours is a file of its own and no other is touched.
type dropInEngine struct {
	name string
	// before are the files read before the folder that ours is in, and pattern those that count in it.
	before  []string
	pattern string
	// programKey and defaultKey are where a runtime's program and the default's name stand.
	programKey func(name string) []string
	defaultKey []string
	body       func(r Request, asDefault bool, model map[string]any) string
	model      func(tree map[string]any) map[string]any // the runtime whose options ours takes over
}

// CRIOConfig is our file for CRI-O.
func CRIOConfig(name string) string { return "/etc/crio/crio.conf.d/99-" + name + ".conf" }

// CRI-O joins the runtimes of all its files: they are read over its own, by name. It reads every file of the folder, so no
// backup may lie there; a file that is ours needs none.
var crio = dropInEngine{
	name:       "CRI-O",
	before:     []string{"../crio.conf"},
	pattern:    "*",
	programKey: func(name string) []string { return []string{"crio", "runtime", "runtimes", name, "runtime_path"} },
	defaultKey: []string{"crio", "runtime", "default_runtime"},
	model: func(tree map[string]any) map[string]any {
		for _, name := range []string{getString(tree, "crio", "runtime", "default_runtime"), "runc", "crun"} {
			if h := getTable(tree, "crio", "runtime", "runtimes", name); h != nil && cmp.Or(getString(h, "runtime_type"), "oci") == "oci" {
				return h
			}
		}
		return nil
	},
	body: func(r Request, asDefault bool, model map[string]any) string {
		var b strings.Builder
		if asDefault {
			fmt.Fprintf(&b, "[crio.runtime]\ndefault_runtime = %s\n\n", quoteTOML(r.Name))
		}
		fmt.Fprintf(&b, "[%s]\nruntime_path = %s\nruntime_type = \"oci\"\n", keyTOML("crio", "runtime", "runtimes", r.Name), quoteTOML(r.Path))
		for _, key := range []string{"allowed_annotations", "monitor_path", "monitor_cgroup", "monitor_env", "runtime_root",
			"privileged_without_host_devices"} {
			if text, ok := valueTOML(model[key]); ok {
				fmt.Fprintf(&b, "%s = %s\n", key, text)
			}
		}
		return b.String()
	},
}

// PodmanConfig is our file for podman.
func PodmanConfig(name string) string {
	return "/etc/containers/containers.conf.d/99-" + name + ".conf"
}

// Podman, too, joins the runtimes of its files by name.
var podman = dropInEngine{
	name:       "podman",
	before:     []string{"/usr/share/containers/containers.conf", "../containers.conf"},
	pattern:    "*.conf",
	programKey: func(name string) []string { return []string{"engine", "runtimes", name} },
	defaultKey: []string{"engine", "runtime"},
	model:      func(map[string]any) map[string]any { return nil },
	body: func(r Request, asDefault bool, _ map[string]any) string {
		text := ""
		if asDefault {
			text = fmt.Sprintf("[engine]\nruntime = %s\n\n", quoteTOML(r.Name))
		}
		return text + fmt.Sprintf("[engine.runtimes]\n%s = [%s]\n", keyTOML(r.Name), quoteTOML(r.Path))
	},
}

// InstallCRIO plans our file for CRI-O; fsys is the machine's root.
func InstallCRIO(fsys fs.FS, file string, r Request) (Plan, error) {
	return crio.install(fsys, file, r)
}

// UninstallCRIO plans its removal.
func UninstallCRIO(fsys fs.FS, file, name string) (Plan, error) {
	return crio.uninstall(fsys, file, name)
}

// InstallPodman plans our file for podman.
func InstallPodman(fsys fs.FS, file string, r Request) (Plan, error) {
	return podman.install(fsys, file, r)
}

// UninstallPodman plans its removal.
func UninstallPodman(fsys fs.FS, file, name string) (Plan, error) {
	return podman.uninstall(fsys, file, name)
}

// dropInMark is the first line of a file that is ours.
func dropInMark(name string) string {
	return fmt.Sprintf("%sruntime %q; cgpu uninstall removes this file", mark, name)
}

// found is what an engine's files say.
type found struct {
	own    []byte // the text of our file; nil: there is none
	others map[string]any
	byHand string // the file that names the runtime, and is not ours
	last   string // the file that names the default after ours
	byName string // the default without our file
}

func (e dropInEngine) readFiles(fsys fs.FS, file, name string) (f found, err error) {
	dir := path.Dir(file)
	files := make([]string, 0, len(e.before)+8)
	for _, b := range e.before {
		if !path.IsAbs(b) {
			b = path.Join(dir, b)
		}
		files = append(files, b)
	}
	matches, err := fs.Glob(fsys, strings.TrimPrefix(path.Join(dir, e.pattern), "/"))
	if err != nil {
		return f, fmt.Errorf("%s: %w", dir, err)
	}
	for _, m := range matches {
		files = append(files, "/"+m)
	}
	for _, p := range files {
		if p == file || Leftover(path.Base(p)) {
			continue
		}
		if info, err := fs.Stat(fsys, strings.TrimPrefix(p, "/")); err == nil && info.IsDir() {
			continue
		}
		text, err := fs.ReadFile(fsys, strings.TrimPrefix(p, "/"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return f, fmt.Errorf("%s: %w", p, bare(err))
		}
		d, err := parseTOML(p, text)
		if err != nil {
			return f, err
		}
		if get(d.tree, e.programKey(name)...) != nil {
			f.byHand = p
		}
		if getString(d.tree, e.defaultKey...) != "" && path.Dir(p) == dir && p > file {
			f.last = p
		}
		f.others = mergeTOML(f.others, d.tree)
	}
	f.byName = getString(f.others, e.defaultKey...)
	f.own, err = fs.ReadFile(fsys, strings.TrimPrefix(file, "/"))
	if errors.Is(err, fs.ErrNotExist) {
		f.own = nil
	} else if err != nil {
		return f, fmt.Errorf("%s: %w", file, bare(err))
	} else if !bytes.HasPrefix(f.own, []byte(dropInMark(name))) {
		return f, fmt.Errorf("%s: it is there, but cgpu install has not written it; move it away", file)
	}
	return f, nil
}

// program is what a tree names for a runtime: a string, or a list of which the first that is there is taken.
func (e dropInEngine) program(tree map[string]any, name string) string {
	switch v := get(tree, e.programKey(name)...).(type) {
	case string:
		return v
	case []any:
		if len(v) > 0 {
			s, _ := v[0].(string)
			return s
		}
	}
	return ""
}

func (e dropInEngine) install(fsys fs.FS, file string, r Request) (p Plan, err error) {
	f, err := e.readFiles(fsys, file, r.Name)
	if err != nil {
		return p, err
	}
	if f.byHand != "" {
		has := e.program(f.others, r.Name)
		if has != r.Path {
			return p, otherPath(f.byHand, r.Name, has, r.Path)
		}
		if f.own == nil && (!r.Default || f.byName == r.Name) {
			return p, nil
		}
	}
	var own document
	if f.own != nil {
		if own, err = parseTOML(file, f.own); err != nil {
			return p, err
		}
	}
	wasDefault := getString(own.tree, e.defaultKey...) == r.Name
	asDefault := r.Default || wasDefault
	if asDefault && f.last != "" && f.byName != r.Name {
		return p, fmt.Errorf("%s: it names the default runtime %q, and is read after %s: take it out there, or leave out --default", f.last,
			f.byName, path.Base(file))
	}
	text := []byte(dropInMark(r.Name) + "\n" + e.body(r, asDefault, e.model(f.others)))
	if has := e.program(own.tree, r.Name); has != r.Path {
		if has == "" {
			p.done("runtime %s: %s", r.Name, r.Path)
		} else {
			p.done("runtime %s: %s → %s", r.Name, has, r.Path)
		}
	}
	if asDefault && !wasDefault {
		p.done("default runtime: %s → %s", orOwn(f.byName), r.Name)
	}
	p.add(Edit{Path: file, Before: f.own, After: text})
	if len(p.Edits) > 0 && len(p.Done) == 0 {
		p.done("runtime %s: options as %s has them now", r.Name, e.name)
	}
	return p, nil
}

func (e dropInEngine) uninstall(fsys fs.FS, file, name string) (p Plan, err error) {
	f, err := e.readFiles(fsys, file, name)
	if err != nil {
		return p, err
	}
	own, _ := parseTOML(file, f.own) //nolint:errcheck // a file that is no TOML goes as well
	for _, tree := range []map[string]any{f.others, own.tree} {
		key := e.programKey("")
		for other := range getTable(tree, key[:slices.Index(key, "")]...) {
			p.found(other, name, e.program(tree, other))
		}
	}
	if f.byName == name && (f.byHand == "" || f.own == nil) {
		return p,
			fmt.Errorf("%s: its configuration names %q as the default runtime by hand: %[1]s would not start a container; name another there first",
				e.name, name)
	}
	switch {
	case f.own != nil:
		p.done("runtime %s taken out", name)
		p.add(Edit{Path: file, Before: f.own})
	case f.byHand != "":
		return p, fmt.Errorf("%s: runtime %q was not written by cgpu install; take it out by hand", f.byHand, name)
	}
	return p, nil
}
