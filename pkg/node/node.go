// SPDX-License-Identifier: Apache-2.0

// Package node finds what people name on this node: its table, a GPU, a container.
package node

import (
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/health"
	"github.com/opencgpu/cgpu/pkg/launch"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

// Load loads this node's table for a command that acts by it. A missing or stale one is made anew, as the runtime does.
func Load(runDir string) (*device.Table, error) {
	t, err := device.Load(runDir)
	if !errors.Is(err, device.ErrMissing) && !errors.Is(err, device.ErrStale) {
		return marked(runDir, t, err)
	}
	if failed := launch.Refresh(); failed != nil {
		if strings.Contains(failed.Error(), fs.ErrPermission.Error()) { // which cgpu-refresh says as text
			failed = denied{failed}
		}
		return nil, fmt.Errorf("%w (%w)", failed, err)
	}
	t, err = device.Load(runDir)
	return marked(runDir, t, err)
}

// denied is a text that says so.
type denied struct{ error }

func (denied) Is(target error) bool { return target == fs.ErrPermission }

// marked is a table whose GPUs say what is wrong with them; cgpu health tells if that cannot be read.
func marked(runDir string, t *device.Table, err error) (*device.Table, error) {
	if err != nil {
		return t, err
	}
	t, _ = health.Marked(runDir, t)
	return t, nil
}

// LedgerGPUs puts GPUs in the ledger's terms.
func LedgerGPUs(t *device.Table) []ledger.GPU {
	var list []ledger.GPU
	for _, g := range t.GPUs {
		list = append(list, ledger.GPU{UUID: g.UUID, Index: g.Index, Memory: g.Memory})
	}
	return list
}

// FindGPU finds the GPU with an index, a UUID, or a unique beginning of a UUID.
func FindGPU(t *device.Table, name string) (device.GPU, error) {
	var found []device.GPU
	for _, g := range t.GPUs {
		if strconv.Itoa(g.Index) == name || strings.EqualFold(g.UUID, name) {
			return g, nil
		}
		if len(name) > len("GPU-") && len(name) < len(g.UUID) && strings.EqualFold(g.UUID[:len(name)], name) {
			found = append(found, g)
		}
	}
	switch len(found) {
	case 0:
		return device.GPU{}, fmt.Errorf("GPU %q: there is none: cgpu smi lists the %s of this machine", name, terminal.Plural(len(t.GPUs), "GPU"))
	case 1:
		return found[0], nil
	}
	return device.GPU{}, fmt.Errorf("GPU %q: is the beginning of more than one UUID, such as %s and %s: give more of it", name,
		found[0].UUID, found[1].UUID)
}

// FindGPUs finds several, with commas between their names.
func FindGPUs(t *device.Table, names string) (list []device.GPU, err error) {
	for name := range strings.SplitSeq(names, ",") {
		g, err := FindGPU(t, strings.TrimSpace(name))
		if err != nil {
			return nil, err
		}
		list = append(list, g)
	}
	return list, nil
}

// UUIDs are those of FindGPUs.
func UUIDs(t *device.Table, names string) (uuids []string, err error) {
	list, err := FindGPUs(t, names)
	for _, g := range list {
		uuids = append(uuids, g.UUID)
	}
	return uuids, err
}

// View gathers the view of a run directory; a missing table is made.
func View(runDir string) (snapshot.View, error) { return snapshot.Look(runDir, Load, nil) }
