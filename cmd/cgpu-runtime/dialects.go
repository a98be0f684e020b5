package main

import (
	"slices"
	"strings"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/launch"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// dialects are the other systems' ways of asking that count on this node. may are those that the container may use: where
// there are none, nothing is looked at.
//
// The node table has the answer. Where there is no table to be had, cgpu.toml itself decides, as text: a container that asks
// for a slice in a dialect of this node must be refused then, not get whole GPUs, while one of a node without dialects is
// none of our business.
func dialects(runDir string, may []quota.Dialect) []quota.Dialect {
	if len(may) == 0 {
		return nil
	}
	if table, err := launch.LoadTable(runDir); err == nil {
		return table.Config.Dialects
	}
	text, err := readFile(device.ConfigFile())
	if err != nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(may), func(d quota.Dialect) bool { return !enables(string(text), d) })
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
