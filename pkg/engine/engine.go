// SPDX-License-Identifier: Apache-2.0

// Package engine edits the configuration of container engines: it adds cgpu-runtime as a runtime, makes it the default, and
// takes both out again. It is pure: the text of files goes in, edited text comes out; cmd/cgpu reads, writes and checks.
//
// The text that a user wrote stays as it is, byte for byte, and only what is ours is inserted. That is why
// nvidia-container-toolkit's pkg/config/engine is not used, which decodes a file and encodes it anew: that sorts the keys of
// daemon.json, loses the comments of TOML, fails on an empty daemon.json, and writes "args": [] into it, for which Docker
// puts a shell script around the runtime. For containerd it adds a drop-in file with a copy of the whole CRI section, whose
// later changes in the main file then have no effect.
package engine

import (
	"bytes"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Request is what to install.
type Request struct {
	Name    string // of the runtime, for docker run --runtime=NAME
	Path    string // of cgpu-runtime
	Default bool   // containers that name no runtime get it
	// Kubernetes: what cgpu-agent allocates reaches the runtime, and nothing else of that name does.
	Kubernetes bool

	generated bool // containerd's main file is written anew at each start, by one who makes the folder that it imports as well
	noCDI     bool // CDI cannot be switched on
}

// Edit is a change of one file.
type Edit struct {
	Path   string
	Before []byte // nil: there is no file
	After  []byte // nil: the file is to be removed
	// Note: the file is ours, a note for uninstall that no engine reads. It needs no backup.
	Note bool
	// Ours: a part of ours is in the file before, so that it is not the one of before the install.
	Ours bool
}

// Plan is what to change. No edits: all is as asked for.
type Plan struct {
	Edits []Edit
	Done  []string // what is different after it, for people
	Hints []string // what the user should know
	// Elsewhere are differences in files that are not the engine's, with their names.
	Elsewhere []string
	// Restart: a reload does not do.
	Restart bool
	// Runtimes are those that uninstall found, by name: the one that it was asked for, and all whose program is cgpu-runtime.
	Runtimes map[string]string
}

// found notes a runtime.
func (p *Plan) found(name, asked, has string) {
	if has == "" || name != asked && path.Base(has) != program {
		return
	}
	if p.Runtimes == nil {
		p.Runtimes = map[string]string{}
	}
	p.Runtimes[name] = has
}

// add puts an edit into the plan, if it is one.
func (p *Plan) add(e Edit) {
	e.Ours = e.Ours || bytes.Contains(e.Before, []byte(mark))
	if !bytes.Equal(e.Before, e.After) || (e.Before == nil) != (e.After == nil) {
		p.Edits = append(p.Edits, e)
	}
}

func (p *Plan) done(format string, args ...any) {
	p.Done = append(p.Done, fmt.Sprintf(format, args...))
}
func (p *Plan) hint(format string, args ...any) {
	p.Hints = append(p.Hints, fmt.Sprintf(format, args...))
}

// program is the file name of our runtime.
const program = "cgpu-runtime"

var (
	leftoverForm = regexp.MustCompile(`^\..+\.cgpu-[0-9]+$`)

	nameForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$`)
	// taken are names that engines give a meaning of their own.
	taken = []string{"runc", "crun", "kata", "runsc", "io.containerd.runc.v2", "io.containerd.runtime.v1.linux"}
)

// CheckName refuses what cannot be a runtime's name in every engine.
func CheckName(name string) error {
	if !nameForm.MatchString(name) {
		return errors.New("want letters, digits, '.', '_' and '-', at most 64, such as cgpu")
	}
	if slices.Contains(taken, name) {
		return errors.New("engines use this name for another runtime; want another, such as cgpu")
	}
	return nil
}

// CheckPath refuses what cannot be a program's path in every engine.
func CheckPath(file string) error {
	if !strings.HasPrefix(file, "/") {
		return errors.New("want an absolute path: engines have a working folder of their own")
	}
	if !utf8.ValidString(file) || strings.ContainsFunc(file, unicode.IsControl) {
		return errors.New("want a path without control characters, in UTF-8")
	}
	return nil
}

// otherPath refuses to replace a runtime that the user has made.
func otherPath(where, name, has, want string) error {
	return fmt.Errorf("%s: a runtime %q is there already, and its program is %q, not %q: it was not written by cgpu install; "+
		"take it out by hand, keep it with --runtime-path %[3]s, or choose another --name", where, name, has, want)
}

// Restorable reports that text is what the backup holds, but for white space that no engine looks at; it is JSON if json.
func Restorable(backup, text []byte, json bool) bool {
	if json {
		return bytes.Equal(compact(backup), compact(text))
	}
	return bytes.Equal(bytes.TrimSpace(backup), bytes.TrimSpace(text))
}

// Leftover reports the name of a file that a killed cgpu install was writing: .NAME.cgpu-NUMBER.
func Leftover(name string) bool { return leftoverForm.MatchString(name) }

// lineEnd is how the lines of a text end.
func lineEnd(text []byte) string {
	if bytes.Contains(text, []byte("\r\n")) {
		return "\r\n"
	}
	return "\n"
}

// withLineEnds gives lines the ends of a text.
func withLineEnds(lines, nl string) string {
	if nl == "\n" {
		return lines
	}
	return strings.ReplaceAll(lines, "\n", nl)
}

// splice replaces text[from:to]. What comes out is never nil, which would be no file.
func splice(text []byte, from, to int, with string) []byte {
	return append(append(append(make([]byte, 0, len(text)+len(with)), text[:from]...), with...), text[to:]...)
}
