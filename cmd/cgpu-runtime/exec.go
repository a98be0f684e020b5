// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// joins finds the file of --process and the container in the arguments of exec; empty where they are not. at is where in rest the
// file is named.
func (c call) joins() (process, id string, at int) {
	rest := c.grammar.read(c.rest, c.grammar.exec, func(name, value string, i int) {
		if name == "process" || name == "p" {
			process, at = value, i
		}
	})
	if len(rest) > 0 {
		id = rest[0]
	}
	return process, id, at
}

// join puts the limiter into the environment of a process that an engine starts in a container of ours, and returns the arguments
// that do. Engines write that environment from what they know, and what create added is not in it. (Without --process the runtime
// takes the environment from config.json, where it is.)
//
// The file is the caller's, who may use it again: the runtime gets one in memory. Nothing is done where there is any doubt: a glibc
// image has the limiter in /etc/ld.so.preload as well, and the guard holds. Nor is there an error: a health check that runs every few
// seconds must not fail by our fault, and for containers of others it costs one look into the ledger.
func join(c call, runDir string) []string {
	process, id, at := c.joins()
	if process == "" || id == "" || strings.Contains(id, "/") || !c.limited(id, runDir) {
		return c.args
	}
	if info, err := os.Stat(process); err != nil || !info.Mode().IsRegular() { // a pipe is read only once
		return c.args
	}
	raw, err := readFile(process)
	if err != nil {
		return c.args
	}
	if raw, err = spec.PreloadProcess(raw); err != nil {
		return c.args
	}
	file, err := inMemory(raw)
	if err != nil {
		return c.args
	}
	args := slices.Clone(c.args)
	named := &args[len(args)-len(c.rest)+at]
	*named = strings.TrimSuffix(*named, process) + file
	return args
}

// inMemory gives the path of a file that only this process has, and what it becomes.
func inMemory(content []byte) (path string, err error) {
	fd, err := unix.MemfdCreate("cgpu-process", unix.MFD_CLOEXEC)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	if n, err := unix.Write(fd, content); err != nil || n < len(content) {
		return "", errors.Join(err, io.ErrShortWrite)
	}
	// High, since --preserve-fds counts from 3.
	kept, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD, 512)
	return "/proc/self/fd/" + strconv.Itoa(kept), err
}

// limited says whether a container has the limiter: it is in the ledger, and its config.json was given the limiter.
func (c *call) limited(id, runDir string) bool {
	record := c.record(id, runDir)
	if record == nil || record.Page == "" {
		return false
	}
	// In the engine's bundle it was an older version that wrote it.
	for _, bundle := range []string{page.Bundle(runDir, record.Nonce), record.Bundle} {
		config, err := readFile(filepath.Join(bundle, "config.json"))
		if err == nil && bytes.Contains(config, []byte(`"LD_PRELOAD=`+spec.LimiterPath)) {
			return true
		}
	}
	return false
}

// record is that of a container of ours; nil: it is none.
func (c *call) record(id, runDir string) *ledger.Record {
	// Decoding takes longer than all else, so first a search for bytes, for any container of ours and for this one.
	raw, err := readFile(ledger.File(runDir))
	if err != nil || !bytes.Contains(raw, []byte(`"`+id+`"`)) {
		return nil
	}
	records, _ := ledger.Open(runDir).List()
	for i := range records { // two engines may each have a container called "web"
		if records[i].ID == id && c.created(&records[i]) {
			return &records[i]
		}
	}
	return nil
}

// created says whether the state that the low-level runtime keeps of a container has the hooks that we made for our record.
func (c *call) created(record *ledger.Record) bool {
	for _, state := range c.states(record.ID) {
		if _, err := os.Stat(state.file); err != nil {
			continue
		}
		if state.maker == "crun" { // which keeps config.json beside it
			state.file = filepath.Join(filepath.Dir(state.file), "config.json")
		}
		raw, err := readFile(state.file)
		return err == nil && bytes.Contains(raw, []byte(`"`+record.Nonce+`"`))
	}
	return false
}
