// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// withhold gives a pod's container without a GPU the filter that makes driver files which others send it useless. The containers
// outside of pods cost a search for bytes, and those of nodes with pods = "any" a look into the node table as text.
//
// A container that cannot be given the filter starts without: it asked for nothing, and the guard of whoever sends it files looks for
// their holders. (Its profile permits ioctl by a comparison that cannot be combined, or has a listener of its own. Such profiles are
// files of the node's administrator.) But when config.json cannot be written it does not start, as without us; nor where it cannot be
// read, as what is too large for us is not for runc.
func withhold(file bundleFile, raw []byte, runDir string) error {
	if !spec.MayBePod(raw) || !withholds(runDir) {
		return nil
	}
	doc, err := spec.Decode(raw)
	if err != nil {
		return fmt.Errorf("cgpu-runtime: a pod's container on a node with pods = \"allocated\" or \"gpushare\" in cgpu.toml wants a filter in "+
			"its config.json: %w", err)
	}
	edited, err := spec.Withhold(doc)
	tellUnheld(runDir, err)
	if !edited {
		return nil
	}
	return file.replace(doc.Encode())
}

// refuseRestore refuses to bring back from a checkpoint what would then have no filter: its processes come with those that they had, and
// their image may be anybody's (containerd 2.1 and CRI-O make containers of checkpoints that a pod names as its image).
func refuseRestore(c call, runDir string) error {
	raw, err := readFile(c.config)
	if err != nil || !spec.MayBePod(raw) || !withholds(runDir) {
		return nil
	}
	err = errors.New("cgpu-runtime: a pod's container is not restored from a checkpoint on a node with pods = \"allocated\" or \"gpushare\" " +
		"in cgpu.toml: it would be without the filter that keeps others' GPU files from it: start it from an image")
	_ = event.Refuse(runDir, event.Event{Container: c.id, Text: err.Error()})
	return err
}

// tellUnheld tells the administrator of a container that has not got the filter.
func tellUnheld(runDir string, err error) {
	if err != nil {
		_ = event.Append(runDir, event.Event{Kind: event.Warning,
			Text: "a pod's container without a GPU starts without the filter that makes others' GPU files useless: " + err.Error()})
	}
}

// withholds says whether the node has pods = "allocated" or "gpushare". The node table tells; without one it is cgpu.toml, as text:
// any mention counts, and a file that cannot be read does, because a filter too many costs nothing.
func withholds(runDir string) bool {
	if raw, err := readFile(device.TableFile(runDir)); err == nil {
		return spec.WithholdsFrom(spec.String(raw, "config", "pods"))
	}
	text, err := readFile(device.ConfigFile())
	switch {
	case errors.Is(err, unix.ENOENT):
		return false
	case err != nil:
		return true
	}
	for line := range strings.Lines(string(text)) {
		line, _, _ = strings.Cut(line, "#")
		if strings.Contains(line, device.PodsAllocated) || strings.Contains(line, device.PodsGPUShare) {
			return true
		}
	}
	return false
}
