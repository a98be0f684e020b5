// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
)

// Pods is what a containerd's configuration says of the way from a pod to cgpu-runtime.
type Pods struct {
	Handlers []Handler // whose program is cgpu-runtime, by name
	Disabled bool      // the CRI plugin is off: no kubelet reaches this containerd
	OldCDI   bool      // too old for CDI, which it ignores without a word
	NVIDIA   []string  // runtimes that give a pod the GPUs which its variables name
	CDI      bool      // devices of CDI are added, out of the folder of cgpu-agent too
}

// Handler is a runtime with cgpu-runtime as its program, as a RuntimeClass names it.
type Handler struct {
	Name string
	// Forges is the pattern of pod_annotations by which the author of a pod could write what only a device plugin may; "": none.
	Forges      string
	Annotations bool // what a pod's author says of his share (cgpu.io/*) reaches cgpu-runtime
	Allocations bool // what a device plugin allocates reaches cgpu-runtime
}

// IsNVIDIA tells NVIDIA's runtime, of which there is one for each of its modes (.cdi, .legacy), by its program.
func IsNVIDIA(program string) bool {
	return strings.HasPrefix(path.Base(program), "nvidia-container-runtime")
}

// ContainerdPods reads it. version is containerd's; files are looked up in fsys, whose root is the machine's.
func ContainerdPods(fsys fs.FS, main string, version Version) (p Pods, err error) {
	c, err := loadContainerd(fsys, main, version)
	if err != nil {
		return p, err
	}
	p.Disabled = c.disabled()
	p.OldCDI = c.program.before(1, 7)
	dirs, set := getTable(c.tree, "plugins", c.plugin)["cdi_spec_dirs"].([]any)
	p.CDI = !p.OldCDI && !c.lacksCDI() && (!set || readsAgent(dirs))
	runtimes := getTable(c.tree, c.key("runtimes")...)
	for _, name := range slices.Sorted(maps.Keys(runtimes)) {
		base := path.Base(getString(runtimes, name, "options", "BinaryName"))
		if IsNVIDIA(base) {
			p.NVIDIA = append(p.NVIDIA, name)
		}
		if base != program {
			continue
		}
		h := Handler{Name: name}
		pods, _ := get(runtimes, name, "pod_annotations").([]any)
		if i := slices.IndexFunc(pods, forges); i >= 0 {
			h.Forges = fmt.Sprint(pods[i])
		}
		h.Annotations = slices.Contains(pods, any(annotations))
		containers, _ := get(runtimes, name, "container_annotations").([]any)
		h.Allocations = slices.ContainsFunc(containers, forges)
		p.Handlers = append(p.Handlers, h)
	}
	return p, nil
}
