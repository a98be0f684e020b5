// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/launch"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// dialects are those of may that count on this node. may are the dialects that the container may use: where there are none,
// nothing is looked at.
//
// The node table has the answer. Where the one that is there is not good, cgpu.toml itself decides, as text, before anything
// is waited for: the containers of a node without dialects are none of our business, and must not wait for a cgpu-refresh
// that hangs in a broken driver. One that asks for a slice in a dialect of this node waits, and is refused where no table is
// to be had: it must not get whole GPUs.
func dialects(runDir string, may []quota.Dialect) []quota.Dialect {
	if len(may) == 0 {
		return nil
	}
	among := func(table *device.Table) []quota.Dialect {
		return slices.DeleteFunc(slices.Clone(may), func(d quota.Dialect) bool { return !slices.Contains(table.Config.Dialects, d) })
	}
	table, err := device.Load(runDir)
	if err == nil {
		return among(table)
	}
	perhaps := named(may)
	if len(perhaps) == 0 {
		return nil
	}
	if table, err = launch.LoadTable(runDir); err == nil {
		return among(table)
	}
	return perhaps
}

// named are those of may that cgpu.toml may enable. A file that is there and cannot be read may enable all.
func named(may []quota.Dialect) []quota.Dialect {
	text, err := readFile(device.ConfigFile())
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case err != nil:
		return may
	}
	return slices.DeleteFunc(slices.Clone(may), func(d quota.Dialect) bool { return !enables(string(text), d) })
}

// enables says whether a cgpu.toml, which may be broken, can have d in its list of dialects. We link no TOML parser, and half
// of one would be wrong where it costs a limit. So any mention counts, of the list and of d in quotation marks, in whatever
// order: a wrong yes costs a refusal on a node that is broken anyhow. Only what is surely no mention is left out: lines
// of comment, and the driver, which has a dialect's name.
func enables(text string, d quota.Dialect) bool {
	list, name := false, false
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "#") || isDriver(line) {
			continue
		}
		// Written with escapes, a key or a name looks like none.
		if strings.Contains(line, `\u`) || strings.Contains(line, `\U`) || strings.Contains(line, `\x`) {
			return true
		}
		list = list || strings.Contains(strings.ToLower(line), "dialects")
		name = name || strings.Contains(line, `"`+string(d)+`"`) || strings.Contains(line, "'"+string(d)+"'")
	}
	return list && name
}

// isDriver reports a line that sets the driver to nvidia, and nothing else.
func isDriver(line string) bool {
	key, value, _ := strings.Cut(line, "=")
	value, _, _ = strings.Cut(value, "#")
	value = strings.TrimSpace(value)
	return strings.TrimSpace(key) == "driver" && (value == `"nvidia"` || value == "'nvidia'")
}
