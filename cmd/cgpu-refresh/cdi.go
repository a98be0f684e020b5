// SPDX-License-Identifier: Apache-2.0

package main

import (
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/opencgpu/cgpu/pkg/device"
)

// driverFiles is what a container needs of the driver beside device nodes.
type driverFiles struct {
	mounts    []device.Mount
	links     []device.Link
	libDirs   []string
	libraries []device.Library
	env       []string
}

// translate takes the driver files out of CDI edits.
//
// Device nodes are left out: a vGPU container gets nvidiactl, nvidia-uvm and its own GPUs, which the table knows from
// NVML, and neither nvidia-modeset, nvidia-uvm-tools, capabilities nor DRM nodes (docs/internals/graphics.md says why).
// Of the hooks only what two of them were asked to do is taken over, for our one hook to do: create-symlinks and
// update-ldcache (nvidia-container-toolkit, internal/discover/{symlinks,ldconfig}.go). NVIDIA_VISIBLE_DEVICES is set by
// pkg/spec.
func translate(edits *specs.ContainerEdits) driverFiles {
	var d driverFiles
	for _, m := range edits.Mounts {
		if m == nil || m.Type != "" && m.Type != "bind" {
			continue
		}
		mount := device.Mount{Host: m.HostPath, Container: m.ContainerPath, Options: slices.Clone(m.Options)}
		if !slices.ContainsFunc(d.mounts, func(o device.Mount) bool { return o.Container == mount.Container }) {
			d.mounts = append(d.mounts, mount)
		}
	}
	for _, h := range edits.Hooks {
		if h == nil || len(h.Args) < 2 {
			continue
		}
		switch h.Args[1] {
		case "create-symlinks":
			for _, v := range flagValues(h.Args[2:], "--link") {
				target, path, ok := strings.Cut(v, "::")
				link := device.Link{Target: target, Path: filepath.Clean(path)}
				if ok && target != "" && filepath.IsAbs(path) && !slices.Contains(d.links, link) {
					d.links = append(d.links, link)
				}
			}
		case "update-ldcache":
			for _, dir := range flagValues(h.Args[2:], "--folder") {
				if dir = filepath.Clean(dir); filepath.IsAbs(dir) && !slices.Contains(d.libDirs, dir) {
					d.libDirs = append(d.libDirs, dir)
				}
			}
		}
	}
	for _, e := range edits.Env {
		if name, _, ok := strings.Cut(e, "="); ok && name != "NVIDIA_VISIBLE_DEVICES" {
			d.env = append(d.env, e)
		}
	}
	return d
}

// libcuda is the driver's CUDA library among the mounts, or empty.
func (d driverFiles) libcuda(driverVersion string) string {
	for _, m := range d.mounts {
		if filepath.Base(m.Host) == "libcuda.so."+driverVersion {
			return m.Host
		}
	}
	return ""
}

// flagValues returns the values of a flag that may be written "--name value" and "--name=value".
func flagValues(args []string, name string) []string {
	var values []string
	for i := 0; i < len(args); i++ {
		if v, ok := strings.CutPrefix(args[i], name+"="); ok {
			values = append(values, v)
		} else if args[i] == name && i+1 < len(args) {
			i++
			values = append(values, args[i])
		}
	}
	return values
}
