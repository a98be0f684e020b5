// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
)

// DockerConfig is where dockerd reads its configuration.
const DockerConfig = "/etc/docker/daemon.json"

// DockerNote is the file beside a daemon.json in which install notes what uninstall has to know: JSON has no comments.
func DockerNote(config string) string { return config + ".cgpu-note" }

// dockerNote is that file's content.
type dockerNote struct {
	Created bool `json:"created,omitempty"` // the file was not there
	Added   bool `json:"added,omitempty"`   // the member "runtimes" was not there
	// Runtimes are ours by name.
	Runtimes map[string]dockerRuntime `json:"runtimes,omitempty"`
}

type dockerRuntime struct {
	// Default: install made it the default. Was is the one before, "" for none.
	Default bool   `json:"default,omitempty"`
	Was     string `json:"was,omitempty"`
}

func readDockerNote(path string, text []byte) (n dockerNote, err error) {
	if text != nil {
		if err := json.Unmarshal(text, &n); err != nil {
			return n,
				fmt.Errorf("%s: %w: it is what cgpu install noted for cgpu uninstall; remove it, and take cgpu out of the configuration by hand", path,
					err)
		}
	}
	if n.Runtimes == nil {
		n.Runtimes = map[string]dockerRuntime{}
	}
	return n, nil
}

func (n dockerNote) edit(path string, before []byte) Edit {
	e := Edit{Path: path, Before: before, Note: true}
	if len(n.Runtimes) > 0 {
		text, err := json.MarshalIndent(n, "", "  ")
		if err == nil {
			e.After = append(text, '\n')
		}
	}
	return e
}

// daemon is a daemon.json.
type daemon struct {
	path     string
	text     []byte
	top      object
	runtimes *object // nil: there is no such member
	layout   layout
	byName   string // the default, "" for dockerd's own
}

// parseDaemon reads a daemon.json; nothing is an empty object.
func parseDaemon(path string, text []byte) (d daemon, err error) {
	if len(bytes.TrimSpace(text)) == 0 {
		text = []byte("{}\n")
	}
	d = daemon{path: path, text: text}
	if d.top, err = parseObject(text); err != nil {
		return d, fmt.Errorf("%s: %w; dockerd does not start with it: repair it first", path, err)
	}
	d.layout = layoutOf(text, d.top)
	if i := d.top.find("runtimes"); i >= 0 {
		m := d.top.members[i]
		if text[m.value] != '{' {
			return d, fmt.Errorf("%s: \"runtimes\": want an object, {…}; dockerd does not start with it: repair it first", path)
		}
		o, err := objectAt(text, m.value)
		if err != nil {
			return d, fmt.Errorf("%s: \"runtimes\": %w", path, err)
		}
		d.runtimes = &o
	}
	if i := d.top.find("default-runtime"); i >= 0 {
		m := d.top.members[i]
		if err := json.Unmarshal(text[m.value:m.end], &d.byName); err != nil {
			return d, fmt.Errorf("%s: \"default-runtime\": want a string; dockerd does not start with it: repair it first", path)
		}
	}
	return d, nil
}

// program is the path of a runtime; has: there is such a runtime. One of a shim (runtimeType) has no path.
func (d daemon) program(name string) (path string, has bool) {
	if d.runtimes == nil {
		return "", false
	}
	i := d.runtimes.find(name)
	if i < 0 {
		return "", false
	}
	var r struct {
		Path string `json:"path"`
	}
	m := d.runtimes.members[i]
	if json.Unmarshal(d.text[m.value:m.end], &r) != nil {
		return "", true
	}
	return r.Path, true
}

// with is the daemon.json with another text, which is one of our making.
func (d daemon) with(text []byte) (daemon, error) { return parseDaemon(d.path, text) }

// setDefault names the default runtime; "" takes the member out.
func (d daemon) setDefault(name string) (daemon, error) {
	i := d.top.find("default-runtime")
	switch {
	case i < 0 && name == "":
		return d, nil
	case i < 0:
		return d.with(d.top.insert(d.text, d.layout, "default-runtime", value{text: name}))
	case name == "":
		return d.with(d.top.remove(d.text, i))
	}
	m := d.top.members[i]
	return d.with(splice(d.text, m.value, m.end, quoteJSON(name)))
}

// setRuntime adds a runtime or changes its path.
func (d daemon) setRuntime(name, path string) (daemon, error) {
	entry := value{key: "path", sub: &value{text: path}}
	if d.runtimes == nil {
		return d.with(d.top.insert(d.text, d.layout, "runtimes", value{key: name, sub: &entry}))
	}
	i := d.runtimes.find(name)
	if i < 0 {
		return d.with(d.runtimes.insert(d.text, d.layout, name, entry))
	}
	m := d.runtimes.members[i]
	o, err := objectAt(d.text, m.value)
	if err != nil {
		return d, err
	}
	if i := o.find("path"); i >= 0 {
		p := o.members[i]
		return d.with(splice(d.text, p.value, p.end, quoteJSON(path)))
	}
	return d, errors.New("a runtime without a path")
}

// InstallDocker plans the edit of a daemon.json. text and note are the files' contents, nil where there is none.
func InstallDocker(config string, text, note []byte, r Request) (p Plan, err error) {
	d, err := parseDaemon(config, text)
	if err != nil {
		return p, err
	}
	known, err := readDockerNote(DockerNote(config), note)
	if err != nil {
		return p, err
	}
	mine, isMine := known.Runtimes[r.Name]
	ours := slices.ContainsFunc(slices.Collect(maps.Keys(known.Runtimes)), func(name string) bool { _, has := d.program(name); return has })
	changed := false
	switch path, has := d.program(r.Name); {
	case has && path == r.Path:
	case has && !isMine:
		return p, otherPath(config, r.Name, path, r.Path)
	default:
		if !isMine {
			known.Created = known.Created || text == nil
			known.Added = known.Added || d.runtimes == nil
		}
		if d, err = d.setRuntime(r.Name, r.Path); err != nil {
			return p, fmt.Errorf("%s: runtime %q: %w", config, r.Name, err)
		}
		isMine, changed = true, true
		if has {
			p.done("runtime %s: %s → %s", r.Name, path, r.Path)
		} else {
			p.done("runtime %s: %s", r.Name, r.Path)
		}
	}
	if r.Default && d.byName != r.Name {
		mine = dockerRuntime{Default: true, Was: d.byName}
		p.done("default runtime: %s → %s", orOwn(d.byName), r.Name)
		if d, err = d.setDefault(r.Name); err != nil {
			return p, fmt.Errorf("%s: %w", config, err)
		}
		isMine, changed = true, true
	}
	if !changed {
		return p, nil
	}
	if isMine {
		known.Runtimes[r.Name] = mine
	}
	// The note first: if the second write fails, an entry that is not there does no harm.
	p.add(known.edit(DockerNote(config), note))
	p.add(Edit{Path: config, Before: text, After: d.text, Ours: ours})
	return p, nil
}

// orOwn is a default runtime for people.
func orOwn(name string) string {
	if name == "" {
		return "(none set)"
	}
	return name
}

// UninstallDocker plans to take a runtime out. One that was made by hand is ours as well if its program is cgpu-runtime.
func UninstallDocker(config string, text, note []byte, name string) (p Plan, err error) {
	d, err := parseDaemon(config, text)
	if err != nil {
		return p, err
	}
	known, err := readDockerNote(DockerNote(config), note)
	if err != nil {
		return p, err
	}
	mine, isMine := known.Runtimes[name]
	path, has := d.program(name)
	if has && !isMine && filepath.Base(path) != program {
		return p, fmt.Errorf("%s: runtime %q has the program %q, which is not %s: cgpu install has not written it; take it out by hand",
			config, name, path, program)
	}
	delete(known.Runtimes, name)
	if d.byName == name && (has || isMine) {
		was := mine.Was
		// shims need not be in the file
		if _, there := d.program(was); was != "" && !there && !slices.Contains(taken, was) && !strings.Contains(was, "io.containerd.") &&
			!strings.HasPrefix(was, "/") {
			p.hint("the default runtime was %q, which is no longer in the file: dockerd's own is the default now", was)
			was = ""
		}
		p.done("default runtime: %s → %s", name, orOwn(was))
		// A dockerd that reloads keeps a default that the file no longer names. 29 keeps the runtime with it; 20.10.24 crashes
		// where the file names other runtimes (a nil pointer in fillPlatformInfo).
		p.Restart = was == ""
		if d, err = d.setDefault(was); err != nil {
			return p, fmt.Errorf("%s: %w", config, err)
		}
	}
	if has {
		p.done("runtime %s taken out", name)
		after := d.runtimes.remove(d.text, d.runtimes.find(name))
		if len(d.runtimes.members) == 1 && known.Added {
			after = d.top.remove(d.text, d.top.find("runtimes"))
		}
		if d, err = d.with(after); err != nil {
			return p, fmt.Errorf("%s: %w", config, err)
		}
	}
	if len(p.Done) > 0 {
		e := Edit{Path: config, Before: text, After: d.text, Ours: isMine}
		if known.Created && len(d.top.members) == 0 {
			e.After = nil
		}
		p.add(e)
	}
	p.add(known.edit(DockerNote(config), note))
	return p, nil
}

// DockerFlags are options that a running dockerd was started with and that may not be in the file as well: it would not start.
func DockerFlags(args []string) []string {
	var found []string
	for _, flag := range []string{"--add-runtime", "--default-runtime"} {
		if slices.ContainsFunc(args, func(arg string) bool { return arg == flag || len(arg) > len(flag) && arg[:len(flag)+1] == flag+"=" }) {
			found = append(found, flag)
		}
	}
	return found
}

// DockerPidFile is where the dockerd of a configuration notes its process.
func DockerPidFile(text []byte) string {
	var c struct {
		PidFile string `json:"pidfile"`
	}
	if json.Unmarshal(text, &c) != nil || c.PidFile == "" {
		return "/var/run/docker.pid"
	}
	return c.PidFile
}
