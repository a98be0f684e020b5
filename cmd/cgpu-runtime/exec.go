package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// joins finds the file of --process and the container in the arguments of exec; empty where they are not.
func (c call) joins() (process, id string) {
	rest := c.grammar.read(c.rest, c.grammar.exec, func(name, value string) {
		if name == "process" || name == "p" {
			process = value
		}
	})
	if len(rest) > 0 {
		id = rest[0]
	}
	return process, id
}

// join puts the limiter into the environment of a process that an engine starts in a container of ours. Engines write that
// environment from what they know, and what create added is not in it. (Without --process the runtime takes the
// environment from config.json, where it is.)
//
// The file is left alone where there is any doubt: a glibc image has the limiter in /etc/ld.so.preload as well, and the guard
// holds. Nor is there an error: a health check that runs every few seconds must not fail by our fault, and for containers of
// others it costs one look into the ledger.
func join(c call, runDir string) {
	process, id := c.joins()
	if process == "" || id == "" || strings.Contains(id, "/") || !c.limited(id, runDir) {
		return
	}
	if info, err := os.Lstat(process); err != nil || !info.Mode().IsRegular() {
		return
	}
	file := bundleFile{path: process}
	raw, err := readFile(process)
	if err != nil {
		return
	}
	if raw, err = spec.PreloadProcess(raw); err != nil {
		return
	}
	if staged, err := file.stage(raw); err == nil {
		_ = staged.commit()
	}
}

// limited says whether a container has the limiter: it is in the ledger, it is the one of this engine (two may each have
// a container called "web"), and its config.json was given the limiter.
func (c call) limited(id, runDir string) bool {
	// Decoding takes longer than all else, so first a search for bytes, for any container of ours and for this one.
	raw, err := readFile(ledger.File(runDir))
	if err != nil || !bytes.Contains(raw, []byte(`"`+id+`"`)) {
		return false
	}
	record, err := ledger.Open(runDir).Get(id)
	if err != nil || record.Page == "" || !c.created(record) {
		return false
	}
	config, err := readFile(filepath.Join(record.Bundle, "config.json"))
	return err == nil && bytes.Contains(config, []byte(`"LD_PRELOAD=`+spec.LimiterPath))
}

// created says whether the state that the low-level runtime keeps of a container names the bundle of our record.
func (c call) created(record ledger.Record) bool {
	for _, state := range c.states(record.ID) {
		if raw, err := readFile(state.file); err == nil {
			return bytes.Contains(raw, []byte(record.Bundle))
		}
	}
	return false
}
