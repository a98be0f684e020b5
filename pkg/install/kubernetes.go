// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/engine"
)

// joinPods adds the edit of cgpu.toml to an engine's plan.
func joinPods(plan *engine.Plan, t Target, value string, asked bool) error {
	pods, err := withConfigFile(func(file string, text []byte) (engine.Plan, error) {
		return engine.InstallPods(file, text, value, asked)
	})
	if err != nil {
		return err
	}
	for _, e := range pods.Edits { // what is wrong in the file already would keep every container from starting
		if _, err := config.Parse(e.Path, e.After); err != nil {
			return err
		}
	}
	// cgpu.toml first: who is killed in between leaves no engine with a runtime from which pods may take GPUs that nobody allocated.
	first := pods.Edits
	pods.Edits = nil
	plan.Join(pods)
	plan.Edits = append(first, plan.Edits...)
	if t.Name == "crio" {
		// CRI-O copies every annotation of the pod into those of its containers (internal/factory/container), so that
		// cgpu-runtime cannot tell a device plugin's from the author's there.
		plan.Hints = append(plan.Hints,
			"below CRI-O only claims (the front end dra) work: it hands all annotations of a pod to the runtime, so those by which a device "+
				"plugin allocates are refused")
	}
	return nil
}

// leavePods plans the edit of cgpu.toml that belongs to an engine's plan of uninstall. Another runtime of ours needs what it says.
func leavePods(plan engine.Plan, name string) (engine.Plan, error) {
	pods, err := withConfigFile(engine.UninstallPods)
	if err != nil || len(pods.Edits) == 0 {
		return engine.Plan{}, err
	}
	for _, other := range slices.Sorted(maps.Keys(plan.Runtimes)) {
		if other != name {
			return engine.Plan{Hints: []string{fmt.Sprintf("%s: pods stays: runtime %q is cgpu's, too", pods.Edits[0].Path, other)}}, nil
		}
	}
	return pods, nil
}

// withConfigFile plans an edit of cgpu.toml.
func withConfigFile(plan func(file string, text []byte) (engine.Plan, error)) (engine.Plan, error) {
	file := device.ConfigFile()
	text, err := os.ReadFile(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		text = nil
	case err != nil:
		return engine.Plan{}, fmt.Errorf("%s: %w", file, errors.Unwrap(err))
	case text == nil:
		text = []byte{}
	}
	return plan(file, text)
}

// dropAllLeftovers is dropLeftovers for every file that install and uninstall write.
func dropAllLeftovers(config string, t Target) error {
	if t.Kubelet {
		if err := dropLeftovers(device.ConfigFile()); err != nil {
			return err
		}
	}
	return dropLeftovers(config)
}
