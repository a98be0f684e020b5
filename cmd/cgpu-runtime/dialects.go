package main

import (
	"slices"
	"strings"

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
	text, err := readFile(device.ConfigFile())
	if err != nil {
		return nil
	}
	named := slices.DeleteFunc(slices.Clone(may), func(d quota.Dialect) bool { return !enables(string(text), d) })
	if len(named) == 0 {
		return nil
	}
	if table, err = launch.LoadTable(runDir); err == nil {
		return among(table)
	}
	return named
}

// enables says whether a cgpu.toml, which may be broken, has d in its list of dialects.
func enables(text string, d quota.Dialect) bool {
	for line := range strings.Lines(text) {
		list, ok := strings.CutPrefix(strings.TrimSpace(line), "dialects")
		if !ok {
			continue
		}
		// The list may go on over lines, up to its bracket; without one it is broken, and all of the file counts.
		_, rest, _ := strings.Cut(text, line)
		list, _, _ = strings.Cut(list+rest, "]")
		return strings.Contains(list, `"`+string(d)+`"`) || strings.Contains(list, "'"+string(d)+"'")
	}
	return false
}
