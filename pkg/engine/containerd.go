// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"

	"github.com/opencgpu/cgpu/pkg/alloc"
)

// ContainerdConfig is where containerd reads its configuration.
const ContainerdConfig = "/etc/containerd/config.toml"

// The CRI plugin, which starts the containers of Kubernetes, by version of the configuration. Version 4,
// which containerd 2.4 writes, has moved other sections than this one.
var criPlugin = map[int64]string{2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime", 4: "io.containerd.cri.v1.runtime"}

// Version is an engine's; the zero value is unknown.
type Version struct{ Major, Minor int }

// before reports a version that is known and older.
func (v Version) before(major, minor int) bool {
	return v.Major > 0 && (v.Major < major || v.Major == major && v.Minor < minor)
}

// ContainerdVersion reads the output of `containerd --version`.
func ContainerdVersion(text string) Version {
	for word := range strings.FieldsSeq(text) {
		if v, err := version.ParseGeneric(word); err == nil {
			return Version{int(v.Major()), int(v.Minor())}
		}
	}
	return Version{}
}

// containerd is its configuration: all files in the order in which they are read, later ones winning.
type containerd struct {
	program Version
	files   []document
	missing bool // the main file is not there
	silent  bool // no file says anything
	version int64
	plugin  string // CRI's
	tree    map[string]any
}

// loadContainerd reads the main file and what it imports. Files are looked up in fsys, whose root is the machine's.
func loadContainerd(fsys fs.FS, main string, program Version) (c containerd, err error) {
	c.program = program
	pending := []string{main}
	for len(pending) > 0 {
		file := pending[0]
		pending = pending[1:]
		if slices.ContainsFunc(c.files, func(d document) bool { return d.path == file }) {
			continue // imports may go round
		}
		text, err := fs.ReadFile(fsys, strings.TrimPrefix(file, "/"))
		if file == main && errors.Is(err, fs.ErrNotExist) {
			c.missing = true
		} else if err != nil {
			return c, fmt.Errorf("%s: %w", file, bare(err))
		}
		d, err := parseTOML(file, text)
		if err != nil {
			return c, err
		}
		c.files = append(c.files, d)
		imports, _ := d.tree["imports"].([]any)
		for _, i := range imports {
			pattern, _ := i.(string)
			pending = append(pending, expand(fsys, file, pattern)...)
		}
	}
	return c, c.readFiles()
}

// bare is an error of the file system without its operation and path, which the caller names.
func bare(err error) error {
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return e.Err
	}
	return err
}

// expand finds the files that an import names: relative to the file that names them; only * is a pattern.
func expand(fsys fs.FS, file, pattern string) []string {
	pattern = path.Clean(pattern)
	if !path.IsAbs(pattern) {
		pattern = path.Join(path.Dir(file), pattern)
	}
	if !strings.Contains(pattern, "*") {
		return []string{pattern}
	}
	matches, err := fs.Glob(fsys, strings.TrimPrefix(pattern, "/"))
	if err != nil {
		return nil
	}
	for i := range matches {
		matches[i] = "/" + matches[i]
	}
	return matches
}

// readFiles finds out what the files say together.
func (c *containerd) readFiles() error {
	c.silent, c.version = true, 0
	for _, d := range c.files {
		if v, ok := d.tree["version"].(int64); ok && v != 0 {
			c.version = v
		}
		c.silent = c.silent && len(d.tree) == 0
	}
	main := c.files[0].path
	if c.silent {
		c.version = 2 // which all read
		if c.program.Major >= 2 {
			c.version = 3
		}
	}
	c.plugin = criPlugin[c.version]
	switch {
	case c.version < 2:
		return fmt.Errorf("%s: this is configuration version 1 (it does not say version = 2), in which plugins have other names: convert it "+
			"first "+
			"(containerd 2.x: containerd config migrate; by hand: version = 2, and plugins and disabled plugins by their full names, such as %s)",
			main, criPlugin[2])
	case c.plugin == "":
		return fmt.Errorf("%s: version = %d: cgpu knows configurations 2 to 4; add the runtime by hand, as in docs/install.md", main, c.version)
	case c.version > 2 && c.program.Major == 1:
		return fmt.Errorf("%s: version = %d, but the containerd in PATH is 1.x, which does not start with it: repair it first", main, c.version)
	}
	c.tree = map[string]any{}
	for _, d := range c.files {
		if c.replaces() {
			// A later file's section replaces that of an earlier one as a whole.
			if section, has := getTable(d.tree, "plugins")[c.plugin]; has {
				c.tree = mergeTOML(c.tree, map[string]any{"plugins": map[string]any{c.plugin: nil}})
				c.tree = mergeTOML(c.tree, map[string]any{"plugins": map[string]any{c.plugin: section}})
			}
			continue
		}
		c.tree = mergeTOML(c.tree, d.tree)
	}
	return nil
}

// replaces: containerd before 2.0 takes the CRI section from the last file that has one, and forgets its built-in runc where
// that section names any runtime. Unknown versions are treated so too, because it does no harm with later ones.
func (c *containerd) replaces() bool { return c.program.Major < 2 && c.version == 2 }

func (c *containerd) key(more ...string) []string {
	return append([]string{"plugins", c.plugin, "containerd"}, more...)
}

func (c *containerd) byName() string { return getString(c.tree, c.key("default_runtime_name")...) }

// owner is the file to edit: the last that says what counts, else the main one. That is the whole CRI section where later ones
// replace it, else the default's name, if that is to change.
func (c *containerd) owner(setDefault bool) int {
	for i := len(c.files) - 1; i > 0; i-- {
		tree := c.files[i].tree
		if c.replaces() && getTable(tree, "plugins")[c.plugin] != nil ||
			!c.replaces() && setDefault && get(tree, c.key("default_runtime_name")...) != nil {
			return i
		}
	}
	return 0
}

// dropIn is where a small file of ours is read, for a containerd that merges; "" where nothing is imported by pattern.
func (c *containerd) dropIn(fsys fs.FS, r Request) string {
	if c.replaces() || c.program.Major < 2 {
		return ""
	}
	main := c.files[0]
	imports, _ := main.tree["imports"].([]any)
	for _, i := range imports {
		pattern, _ := i.(string)
		if !path.IsAbs(pattern) {
			pattern = path.Join(path.Dir(main.path), pattern)
		}
		dir := path.Dir(pattern)
		if path.Base(pattern) != "*.toml" || strings.Contains(dir, "*") {
			continue
		}
		if info, err := fs.Stat(fsys, strings.TrimPrefix(dir, "/")); err == nil && info.IsDir() || r.generated && errors.Is(err, fs.ErrNotExist) {
			return path.Join(dir, "99-"+r.Name+".toml")
		}
	}
	return ""
}

// handler is the runtime whose options ours takes over: the default one, or runc, or crun.
func (c *containerd) handler(except string) map[string]any {
	for _, name := range []string{c.byName(), "runc", "crun"} {
		h := getTable(c.tree, c.key("runtimes", name)...)
		if name != "" && name != except && h != nil && cmp.Or(getString(h, "runtime_type"), runcShim) == runcShim {
			return h
		}
	}
	return nil
}

const (
	runcShim    = "io.containerd.runc.v2"
	annotations = "cgpu.io/*" // a pod's annotations reach the runtime only if they are listed
	allocations = alloc.Prefix + "*"
	runcNote    = "# containerd 1.x forgets its own runc when another runtime is named."
)

// block is what our part of the file says. withDefault: the table that names the default stands in no file.
func (c *containerd) block(r Request, withDefault, withVersion, withRunc, withCDI bool) string {
	var b strings.Builder
	if withVersion {
		fmt.Fprintf(&b, "version = %d\n\n", c.version)
	}
	line := func(indent, key string, v any) {
		if text, ok := valueTOML(v); ok {
			fmt.Fprintf(&b, "%s%s = %s\n", indent, keyTOML(key), text)
		}
	}
	if withCDI {
		fmt.Fprintf(&b, "[%s]\n%s\n\n", keyTOML("plugins", c.plugin), cdiLine)
	}
	if withDefault {
		fmt.Fprintf(&b, "[%s]\n", keyTOML(c.key()...))
		line("  ", "default_runtime_name", r.Name)
		b.WriteString("\n")
	}
	if withRunc || c.replaces() && len(getTable(c.tree, c.key("runtimes")...)) == 0 {
		fmt.Fprintf(&b, "%s\n[%s]\n", runcNote, keyTOML(c.key("runtimes", "runc")...))
		line("  ", "runtime_type", runcShim)
		b.WriteString("\n")
	}
	// What others have since written into our table stays.
	own := getTable(c.tree, c.key("runtimes", r.Name)...)
	model := own
	if own == nil {
		model = c.handler(r.Name)
	}
	table := map[string]any{}
	for k, v := range model {
		if own != nil && k != "options" {
			table[k] = v
			continue
		}
		// What names another program or shim is not for ours.
		if !slices.Contains([]string{"options", "runtime_path", "runtime_engine", "runtime_root"}, k) {
			table[k] = v
		}
	}
	if own == nil {
		table["runtime_type"] = runcShim
		if list, _ := table["pod_annotations"].([]any); len(list) > 0 {
			table["pod_annotations"] = slices.DeleteFunc(slices.Clone(list), forges)
		}
	}
	add := func(key, pattern string) {
		if list, _ := table[key].([]any); !slices.Contains(list, any(pattern)) {
			table[key] = append(slices.Clip(list), pattern)
		}
	}
	add("pod_annotations", annotations)
	add("container_annotations", annotations)
	if r.Kubernetes {
		add("container_annotations", allocations)
	}
	options := map[string]any{}
	maps.Copy(options, getTable(model, "options"))
	options["BinaryName"] = r.Path
	fmt.Fprintf(&b, "[%s]\n", keyTOML(c.key("runtimes", r.Name)...))
	for _, k := range slices.Sorted(maps.Keys(table)) {
		line("  ", k, table[k])
	}
	fmt.Fprintf(&b, "\n  [%s]\n", keyTOML(c.key("runtimes", r.Name, "options")...))
	for _, k := range slices.Sorted(maps.Keys(options)) {
		line("    ", k, options[k])
	}
	return b.String()
}

// InstallContainerd plans the edit of containerd's configuration. fsys is the machine's root; program is containerd's version.
func InstallContainerd(fsys fs.FS, main string, program Version, r Request) (p Plan, err error) {
	c, err := loadContainerd(fsys, main, program)
	if err != nil {
		return p, err
	}
	if c.missing {
		for file, name := range map[string]string{K3sConfig: "k3s", RKE2Config: "rke2"} {
			if _, err := fs.Stat(fsys, strings.TrimPrefix(file, "/")); err == nil {
				p.hint("%s has a containerd of its own, which does not read this file: cgpu install %[1]s", name)
			}
		}
	}
	if c.disabled() {
		p.hint("the CRI plugin is disabled in this configuration (disabled_plugins): Kubernetes does not reach the runtime; Docker and ctr do " +
			"not need it there")
	}
	mine := slices.IndexFunc(c.files, func(d document) bool { _, _, found := block(d.text, r.Name); return found })
	has := getString(c.tree, c.key("runtimes", r.Name, "options", "BinaryName")...)
	there := getTable(c.tree, c.key("runtimes", r.Name)...) != nil
	if there && mine < 0 && has != r.Path {
		return p, otherPath(c.where(r.Name), r.Name, has, r.Path)
	}
	setDefault := r.Default && c.byName() != r.Name
	var lists, setCDI bool
	if r.Kubernetes {
		if lists, err = c.lacksLists(r.Name, mine >= 0); err != nil {
			return p, err
		}
		setCDI = c.lacksCDI() && !r.noCDI
		if c.lacksCDI() && r.noCDI {
			p.hint("CDI is off, and a template cannot switch it on: claims (DRA) need a version with containerd 2; the device plugin works")
		}
		c.hintKubernetes(&p, r.Name)
	}
	if there && has == r.Path && !setDefault && !lists && !setCDI {
		return p, nil
	}

	if there && mine >= 0 {
		for _, key := range [][]string{c.key("runtimes", r.Name), c.key("runtimes", r.Name, "options")} {
			for k, v := range getTable(c.tree, key...) {
				if _, ok := valueTOML(v); !ok && k != "options" {
					return p,
						fmt.Errorf("%s: %s was added to what cgpu install wrote, and would be lost; change the runtime by hand, as in docs/install.md",
							c.files[mine].path, keyTOML(append(key, k)...))
				}
			}
		}
	}

	at := mine
	if mine < 0 || !there { // or in a file that another one has since replaced
		at = c.owner(setDefault)
	}
	target := c.files[at]
	before := target.text
	if c.missing && at == 0 {
		before = nil
	}
	addBlock := !there || has != r.Path || lists
	if drop := c.dropIn(fsys, r); drop != "" && mine < 0 && addBlock {
		if _, err := fs.Stat(fsys, strings.TrimPrefix(drop, "/")); err == nil {
			return p, fmt.Errorf("%s: it is there, but cgpu install has not written it; move it away", drop)
		}
		target, before = document{path: drop}, nil
	}
	text := target.text
	withVersion := c.silent && before != nil // a file without a word, perhaps with comments
	if before == nil {
		text = fmt.Appendf(nil, "%s\nversion = %d\n", created, c.version)
	}
	inBlock, cdiInBlock := false, false
	if setDefault {
		d, err := parseTOML(target.path, text)
		if err != nil {
			return p, err
		}
		var said bool
		if text, said = d.setString(r.Name, c.key("default_runtime_name")...); !said {
			inBlock = true
		}
		p.done("default runtime: %s → %s", orOwn(c.byName()), r.Name)
	}
	if setCDI {
		d, err := parseTOML(target.path, text)
		if err != nil {
			return p, err
		}
		var said bool
		if text, said = d.set("true", "plugins", c.plugin, "enable_cdi"); !said {
			cdiInBlock = true
		}
		p.done("CDI: on (enable_cdi), by which claims reach containers")
	}
	if addBlock || inBlock || cdiInBlock {
		body := ""
		switch {
		case addBlock && there && has != r.Path:
			p.done("runtime %s: %s → %s", r.Name, has, r.Path)
		case addBlock && there:
			p.done("runtime %s: lists of annotations for Kubernetes", r.Name)
		case addBlock:
			p.done("runtime %s: %s", r.Name, r.Path)
		}
		// Made by hand: only the default and CDI are to say.
		if !addBlock && mine < 0 {
			if cdiInBlock {
				body = fmt.Sprintf("[%s]\n%s\n", keyTOML("plugins", c.plugin), cdiLine)
			}
			if inBlock {
				body += fmt.Sprintf("[%s]\n  default_runtime_name = %s\n", keyTOML(c.key()...), quoteTOML(r.Name))
			}
		} else {
			body = c.block(r, inBlock || c.blockHasDefault(mine, r.Name), withVersion || c.blockHasVersion(mine, r.Name),
				c.blockHas(mine, r.Name, runcNote),
				cdiInBlock || c.blockHas(mine, r.Name, cdiLine))
		}
		text = appendBlock(text, r.Name, body)
	}
	p.add(Edit{Path: target.path, Before: before, After: text})
	return p, c.verify(fsys, p, func(after *containerd) error {
		if getString(after.tree, after.key("runtimes", r.Name, "options", "BinaryName")...) != r.Path || r.Default && after.byName() != r.Name {
			return fmt.Errorf("%s: another file of the configuration overrides it (%s): take it out there", target.path, c.where(r.Name))
		}
		if setCDI && after.lacksCDI() {
			return fmt.Errorf("%s: another file of the configuration says enable_cdi = false: take it out there", target.path)
		}
		return nil
	}, r.Name)
}

// blockHasDefault: our part in a file names the default.
func (c *containerd) blockHasDefault(file int, name string) bool {
	return c.blockHas(file, name, "  default_runtime_name = "+quoteTOML(name))
}

// blockHasVersion: our part says the configuration's version, because the file said nothing.
func (c *containerd) blockHasVersion(file int, name string) bool {
	return c.blockHas(file, name, fmt.Sprintf("version = %d", c.version))
}

func (c *containerd) blockHas(file int, name, line string) bool {
	if file < 0 {
		return false
	}
	from, to, found := block(c.files[file].text, name)
	return found && slices.Contains(strings.Split(strings.ReplaceAll(string(c.files[file].text[from:to]), "\r", ""), "\n"), line)
}

// where names the files that speak of a runtime, or of the default.
func (c *containerd) where(name string) string {
	var list []string
	for _, d := range c.files {
		if get(d.tree, c.key("runtimes", name)...) != nil || get(d.tree, c.key("default_runtime_name")...) != nil {
			list = append(list, d.path)
		}
	}
	if len(list) == 0 {
		return c.files[0].path
	}
	return strings.Join(list, ", ")
}

// disabled reports that the configuration turns the CRI off.
func (c *containerd) disabled() bool {
	for _, d := range c.files {
		list, _ := d.tree["disabled_plugins"].([]any)
		for _, p := range list {
			if slices.Contains([]any{"cri", criPlugin[2], criPlugin[3]}, p) {
				return true
			}
		}
	}
	return false
}

// verify reads the configuration as it will be: only what is ours may differ.
func (c *containerd) verify(fsys fs.FS, p Plan, check func(*containerd) error, name string) error {
	after, err := loadContainerd(overlay{fsys, p.Edits}, c.files[0].path, c.program)
	if bad, ok := errors.AsType[*badTOML](err); ok {
		return fmt.Errorf("the file has a form that cgpu install does not extend, such as an inline table; add the runtime by hand, as in "+
			"docs/install.md (edited, it would be wrong: %s)", bad.what)
	}
	if err != nil {
		return err
	}
	if c.version != after.version && !after.silent {
		return fmt.Errorf("%s: the edit would change its version from %d to %d; add the runtime by hand, as in docs/install.md", c.files[0].path,
			c.version, after.version)
	}
	if foreign := Foreign(c.tree, after.tree, name); foreign != "" {
		return fmt.Errorf("%s: the edit would change %s as well; change the runtime by hand, as in docs/install.md", p.Edits[0].Path, foreign)
	}
	return check(&after)
}

// Foreign names the first difference between two configurations of containerd that is none of a runtime of ours: neither its
// table, nor the default's name, nor CDI's switch, nor the list of files; "" if there is none. It is for files and for what
// `containerd config dump` prints.
func Foreign(before, after map[string]any, name string) string {
	for _, key := range differences(before, after) {
		switch {
		case len(key) == 1 && (key[0] == "imports" || key[0] == "version"):
		case len(key) >= 4 && key[0] == "plugins" && key[2] == "containerd" && key[3] == "default_runtime_name":
		case len(key) == 3 && key[0] == "plugins" && key[2] == "enable_cdi":
		case len(key) >= 5 && key[0] == "plugins" && key[2] == "containerd" && key[3] == "runtimes" && key[4] == name:
		// Ours as well: containerd 1.x has to be told of its own runc, and says the same when it is not.
		case len(key) == 6 && key[0] == "plugins" && key[3] == "runtimes" && key[4] == "runc" && key[5] == "runtime_type" &&
			len(getTable(before, key[:4]...))*len(getTable(after, key[:4]...)) == 0:
		default:
			return keyTOML(key...)
		}
	}
	return ""
}

// Named reports the program of a runtime, and the default, in a configuration of containerd.
func Named(tree map[string]any, name string) (program, byName string) {
	for _, plugin := range []string{criPlugin[2], criPlugin[3]} {
		section := getTable(tree, "plugins", plugin, "containerd")
		program = cmp.Or(program, getString(section, "runtimes", name, "options", "BinaryName"))
		byName = cmp.Or(byName, getString(section, "default_runtime_name"))
	}
	return program, byName
}

// foundIn notes the runtimes of a configuration of containerd.
func (p *Plan) foundIn(tree map[string]any, asked string) {
	for _, plugin := range []string{criPlugin[2], criPlugin[3]} {
		for name := range getTable(tree, "plugins", plugin, "containerd", "runtimes") {
			has, _ := Named(tree, name)
			p.found(name, asked, has)
		}
	}
}

// CRIDisabled reports that a configuration of containerd does without the CRI plugin, whose section says nothing then.
func CRIDisabled(tree map[string]any) bool {
	c := containerd{files: []document{{tree: tree}}}
	disabled := c.disabled()
	return disabled
}

// UninstallContainerd plans to take our part out of every file that has it.
func UninstallContainerd(fsys fs.FS, main string, program Version, name string) (p Plan, err error) {
	c, err := loadContainerd(fsys, main, program)
	if err != nil {
		return p, err
	}
	p.foundIn(c.tree, name)
	there := getTable(c.tree, c.key("runtimes", name)...) != nil
	for _, d := range c.files {
		text := d.text
		defaultWas, hadDefault := "", c.blockHasDefault(slices.IndexFunc(c.files, func(f document) bool { return f.path == d.path }), name)
		from, to, found := block(text, name)
		if found {
			text = splice(text, from, to, c.stays(text[from:to], name))
		}
		keep := func(was string) bool {
			known := slices.Contains(taken, was) || getTable(c.tree, c.key("runtimes", was)...) != nil
			if !known {
				p.hint("the default runtime was %q, which is no longer in the configuration: containerd's own is the default now", was)
			}
			return known
		}
		text, was, set := unsetString(text, "default_runtime_name", name, keep)
		if set {
			defaultWas, hadDefault = was, true
		}
		text, _, noCDI := unset(text, "enable_cdi", "true", func(any) bool { return true })
		if !found && !set && !noCDI {
			continue
		}
		if noCDI {
			p.done("CDI: as it was before")
		}
		if hadDefault {
			p.done("default runtime: %s → %s", name, orOwn(defaultWas))
		}
		if found && there {
			p.done("runtime %s taken out", name)
		}
		e := Edit{Path: d.path, Before: d.text, After: text}
		if onlyVersion(text) {
			e.After = nil
		}
		p.add(e)
	}
	if len(p.Edits) == 0 {
		if there {
			return p, fmt.Errorf("%s: runtime %q was not written by cgpu install; take its tables out by hand", c.where(name), name)
		}
		return p, nil
	}
	return p, c.verify(fsys, p, func(after *containerd) error {
		if after.byName() == name && getTable(after.tree, after.key("runtimes", name)...) == nil {
			return fmt.Errorf("%s: default_runtime_name is %q by hand: containerd would not start; name another there first", c.where(name), name)
		}
		return nil
	}, name)
}

// stays is what of our part has to stay: the table for runc, where others have since added runtimes.
func (c *containerd) stays(part []byte, name string) string {
	from := bytes.Index(part, []byte(runcNote))
	runtimes := maps.Clone(getTable(c.tree, c.key("runtimes")...))
	delete(runtimes, name)
	delete(runtimes, "runc")
	if from < 0 || len(runtimes) == 0 {
		return ""
	}
	nl := lineEnd(part)
	table, _, _ := strings.Cut(string(part[from:]), nl+nl)
	return nl + table + nl
}

// onlyVersion reports a file of ours in which nothing else is.
func onlyVersion(text []byte) bool {
	return regexp.MustCompile(`^` + regexp.QuoteMeta(created) + `\r?\nversion = \d+\r?\n\s*$`).Match(text)
}

// overlay is a file system with planned edits.
type overlay struct {
	fs.FS
	edits []Edit
}

func (o overlay) ReadFile(name string) ([]byte, error) {
	for _, e := range o.edits {
		if e.Path == "/"+name {
			if e.After == nil {
				return nil, fs.ErrNotExist
			}
			return e.After, nil
		}
	}
	return fs.ReadFile(o.FS, name)
}

func (o overlay) Glob(pattern string) ([]string, error) {
	matches, err := fs.Glob(o.FS, pattern)
	for _, e := range o.edits {
		name := strings.TrimPrefix(e.Path, "/")
		if ok, _ := filepath.Match(pattern, name); !ok {
			continue
		}
		matches = slices.DeleteFunc(matches, func(m string) bool { return m == name })
		if e.After != nil {
			matches = append(matches, name)
		}
	}
	slices.Sort(matches)
	return matches, err
}
