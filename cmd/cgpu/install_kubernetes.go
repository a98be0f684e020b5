package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/engine"
)

// podsFlag is what --pods names, for --kubernetes.
func podsFlag(c *cli.Context, t target) (string, error) {
	if !c.Bool("kubernetes") {
		if c.IsSet("pods") {
			return "", usageError{fmt.Errorf("install: --pods %q: only with --kubernetes", c.String("pods"))}
		}
		return "", nil
	}
	if !t.kubelet {
		return "", usageError{fmt.Errorf("install: --kubernetes: %s does not start the containers of pods: want containerd, k3s, rke2 or crio", t.name)}
	}
	value := cmp.Or(c.String("pods"), engine.PodsAllocated)
	if value != engine.PodsAllocated && value != engine.PodsGPUShare {
		return "", usageError{fmt.Errorf("install: --pods %q: want %q or %q", value, engine.PodsAllocated, engine.PodsGPUShare)}
	}
	return value, nil
}

// joinPods adds the edit of cgpu.toml to an engine's plan.
func joinPods(plan *engine.Plan, t target, value string, asked bool) error {
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
	plan.Join(pods)
	if t.name == "crio" {
		// CRI-O copies every annotation of the pod into those of its containers (internal/factory/container), so that
		// cgpu-runtime cannot tell a device plugin's from the author's there.
		plan.Hints = append(plan.Hints, "below CRI-O only claims (the front end dra) work: it hands all annotations of a pod to the runtime, so those by which a device plugin allocates are refused")
	}
	return nil
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
func dropAllLeftovers(config string, t target) error {
	if t.kubelet {
		if err := dropLeftovers(device.ConfigFile()); err != nil {
			return err
		}
	}
	return dropLeftovers(config)
}
