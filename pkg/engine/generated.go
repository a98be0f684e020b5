// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// The configurations of the containerd that k3s and RKE2 bring along.
const (
	K3sConfig  = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"
	RKE2Config = "/var/lib/rancher/rke2/agent/etc/containerd/config.toml"
)

// generated is such a configuration. It is written anew at each start, from the template beside it or from a built-in one that the template
// may include, so that what is ours goes elsewhere: into the folder that the file imports, or into the template.
type generated struct {
	config   string
	text     []byte
	program  Version
	imports  bool // containerd merges what it imports, and there is a folder for it
	template string
	source   []byte // the template's text; nil: there is none
}

// baseTemplate is all of a template that changes nothing.
const baseTemplate = "{{ template \"base\" . }}\n"

func readGenerated(fsys fs.FS, config, name string) (g generated, err error) {
	g.config = config
	g.text, err = fs.ReadFile(fsys, strings.TrimPrefix(config, "/"))
	if errors.Is(err, fs.ErrNotExist) {
		return g, fmt.Errorf("%s: it is not there: start k3s or RKE2 once, which write it, or name the file of another --data-dir with --config",
			config)
	} else if err != nil {
		return g, fmt.Errorf("%s: %w", config, bare(err))
	}
	c, err := loadContainerd(fsys, config, Version{})
	if err != nil {
		return g, err
	}
	g.template = path.Join(path.Dir(config), "config.toml.tmpl")
	if c.version > 2 { // which only containerd 2 reads
		g.program = Version{Major: 2}
		g.template = path.Join(path.Dir(config), "config-v3.toml.tmpl")
	}
	c.program = g.program
	g.imports = c.dropIn(fsys, Request{Name: name, generated: true}) != ""
	g.source, err = readIfThere(fsys, g.template)
	return g, err
}

func readIfThere(fsys fs.FS, file string) ([]byte, error) {
	text, err := fs.ReadFile(fsys, strings.TrimPrefix(file, "/"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("%s: %w", file, bare(err))
	}
	return append([]byte{}, text...), nil
}

// InstallGenerated plans the edit for a containerd whose configuration is written anew at each start. fsys is the machine's root.
func InstallGenerated(fsys fs.FS, config string, r Request) (p Plan, err error) {
	g, err := readGenerated(fsys, config, r.Name)
	if err != nil {
		return p, err
	}
	r.generated = true
	_, _, ours := block(g.source, r.Name)
	if g.imports && !ours {
		if p, err = InstallContainerd(fsys, config, g.program, r); err == nil && slices.ContainsFunc(p.Edits, g.lost) {
			return Plan{}, fmt.Errorf("%s: it names runtime %q, but cgpu install has not written that: change it in %s", config, r.Name, g.template)
		}
		return p, err
	}
	// As it will be written: what is ours in it now is of the template that was.
	source := without(g.text, r.Name)
	if ours {
		from, to, _ := block(g.source, r.Name)
		source = append(source, g.source[from:to]...)
	}
	view := overlay{fsys, []Edit{{Path: config, After: source}}}
	if c, err := loadContainerd(view, config, g.program); err != nil {
		return p, err
	} else if r.Default && c.byName() != r.Name {
		return p,
			fmt.Errorf("%s: the default runtime is written into it before what a template can add: leave out --default, and name "+
				"runtimeClassName: %s in pods", config, r.Name)
	}
	r.noCDI = true
	if p, err = InstallContainerd(view, config, g.program, r); err != nil {
		return p, err
	}
	i := slices.IndexFunc(p.Edits, g.lost)
	if i < 0 {
		return p, nil
	}
	after := p.Edits[i].After
	from, to, found := block(after, r.Name)
	if !found || !bytes.Equal(without(after, r.Name), without(source, r.Name)) || bytes.Contains(after[from:to], []byte("{{")) {
		return Plan{},
			fmt.Errorf("%s: what cgpu install would change cannot be said in a template: add the runtime to %s by hand, as in docs/install.md",
				config, g.template)
	}
	body := strings.TrimSpace(strings.ReplaceAll(string(after[from:to]), "\r\n", "\n"))
	body = strings.TrimSuffix(strings.TrimPrefix(body, beginMark(r.Name)+"\n"), endMark(r.Name))
	text := g.source
	if text == nil {
		text = []byte(created + "\n" + baseTemplate)
	}
	p.Edits[i] = Edit{Path: g.template, Before: g.source, After: appendBlock(text, r.Name, body), Ours: ours}
	p.done("written by %s", g.template)
	return p, nil
}

// lost: the next start would undo the edit.
func (g generated) lost(e Edit) bool { return e.Path == g.config }

// without is a text without our part for a runtime.
func without(text []byte, name string) []byte {
	if from, to, found := block(text, name); found {
		return splice(text, from, to, "")
	}
	return slices.Clone(text)
}

// UninstallGenerated plans to take our part out of templates and imported files.
func UninstallGenerated(fsys fs.FS, config, name string) (p Plan, err error) {
	g, err := readGenerated(fsys, config, name)
	if err != nil {
		return p, err
	}
	view := overlay{fsys, []Edit{{Path: config, After: without(g.text, name)}}}
	if p, err = UninstallContainerd(view, config, g.program, name); err != nil {
		return p, err
	}
	now, err := loadContainerd(fsys, config, g.program)
	if err != nil {
		return p, err
	}
	p.foundIn(now.tree, name)
	for _, file := range []string{"config.toml.tmpl", "config-v3.toml.tmpl"} { // of before an upgrade, too
		file = path.Join(path.Dir(config), file)
		text, err := readIfThere(fsys, file)
		if err != nil {
			return p, err
		}
		for _, part := range blocks(text) { // which may wait for the service's next start
			p.foundIn(part, name)
		}
		if _, _, found := block(text, name); !found {
			continue
		}
		e := Edit{Path: file, Before: text, After: without(text, name)}
		if strings.TrimSpace(string(e.After)) == strings.TrimSpace(created+"\n"+baseTemplate) {
			e.After = nil
		}
		p.add(e)
		p.done("runtime %s taken out of %s", name, file)
	}
	return p, nil
}
