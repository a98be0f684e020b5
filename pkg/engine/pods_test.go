// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

func TestContainerdPods(t *testing.T) {
	const (
		v2    = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n"
		v3    = "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\"]\n"
		in2   = "[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes."
		in3   = "[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes."
		lists = "  pod_annotations = [\"cgpu.io/*\"]\n  container_annotations = [\"cgpu.io/*\", \"alloc.cgpu.io/*\"]\n"
	)
	ours := func(in, name, lines string) string {
		return in + name + "]\n" + lines + in + name + ".options]\n  BinaryName = \"/usr/bin/cgpu-runtime\"\n"
	}
	good := []Handler{{Name: "cgpu", Annotations: true, Allocations: true}}
	for name, tt := range map[string]struct {
		text    string
		version Version
		want    Pods
	}{
		"as installed, 2.1":       {v3 + ours(in3, "cgpu", lists), Version{2, 1}, Pods{Handlers: good, CDI: true}},
		"as installed, 1.7":       {v2 + "enable_cdi = true\n" + ours(in2, "cgpu", lists), Version{1, 7}, Pods{Handlers: good, CDI: true}},
		"1.7 without the switch":  {v2 + ours(in2, "cgpu", lists), Version{1, 7}, Pods{Handlers: good}},
		"1.6":                     {v2 + "enable_cdi = true\n" + ours(in2, "cgpu", lists), Version{1, 6}, Pods{Handlers: good, OldCDI: true}},
		"unknown version, format": {v3 + ours(in3, "cgpu", lists), Version{}, Pods{Handlers: good, CDI: true}},
		"switched off":            {v3 + "enable_cdi = false\n", Version{2, 1}, Pods{}},
		"2.4 has no switch":       {v3 + "enable_cdi = false\n", Version{2, 4}, Pods{CDI: true}},
		"another folder":          {v3 + "cdi_spec_dirs = [\"/etc/cdi\"]\n", Version{2, 1}, Pods{}},
		"its folder":              {v3 + "cdi_spec_dirs = [\"/etc/cdi\", \"/run/cdi\"]\n", Version{2, 1}, Pods{CDI: true}},
		"no kubelet":              {"version = 3\ndisabled_plugins = [\"cri\"]\n", Version{2, 1}, Pods{CDI: true, Disabled: true}},
		"without --kubernetes": {v3 + ours(in3, "cgpu", "  pod_annotations = [\"cgpu.io/*\"]\n  container_annotations = [\"cgpu.io/*\"]\n"),
			Version{2, 1},
			Pods{Handlers: []Handler{{Name: "cgpu", Annotations: true}}, CDI: true}},
		"no lists": {v3 + ours(in3, "vgpu", ""), Version{2, 1}, Pods{Handlers: []Handler{{Name: "vgpu"}}, CDI: true}},
		"forged": {v3 + ours(in3, "cgpu", lists) + ours(in3, "b", "  pod_annotations = [\"x\", \"*/*\"]\n"), Version{2, 1},
			Pods{Handlers: []Handler{{Name: "b", Forges: "*/*"}, good[0]}, CDI: true}},
		"NVIDIA's": {v3 + ours(in3, "cgpu", lists) + in3 +
			"nvidia.options]\n  BinaryName = \"/usr/local/nvidia/toolkit/nvidia-container-runtime\"\n" +
			in3 + "gold.options]\n  BinaryName = \"nvidia-container-runtime.cdi\"\n", Version{2, 1},
			Pods{Handlers: good, NVIDIA: []string{"gold", "nvidia"}, CDI: true}},
		"others' handlers": {v3 + in3 + "runc]\n  pod_annotations = [\"*/*\"]\n", Version{2, 1}, Pods{CDI: true}},
	} {
		fsys := fstest.MapFS{"etc/containerd/config.toml": {Data: []byte(tt.text)}}
		got, err := ContainerdPods(fsys, ContainerdConfig, tt.version)
		if err != nil || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s: %+v, %v\nwant %+v", name, got, err, tt.want)
		}
	}
	if got, err := ContainerdPods(fstest.MapFS{}, ContainerdConfig, Version{2, 1}); err != nil || !got.CDI || got.Handlers != nil {
		t.Errorf("without a file: %+v, %v", got, err)
	}
	if _, err := ContainerdPods(fstest.MapFS{"etc/containerd/config.toml": {Data: []byte("version = 1\n")}}, ContainerdConfig,
		Version{}); err == nil {
		t.Error("format 1 is taken")
	}
}

// TestPodsAsInstalled: doctor finds nothing to say of what install has written, in every case of testdata that install takes.
func TestPodsAsInstalled(t *testing.T) {
	files, err := filepath.Glob("testdata/k8s-*.txt")
	if err != nil {
		t.Fatal(err)
	}
	tried := 0
	for _, file := range files {
		s, _ := readScenario(t, file)
		if s.verb != "install" || s.engine != "containerd" || !s.kubernetes {
			continue
		}
		plan, err := s.plan("install", s.files)
		if err != nil {
			continue // refused, which TestGolden compares
		}
		tried++
		got, err := ContainerdPods(root(applyTo(s.files, plan)), ContainerdConfig, s.program)
		otherDirs := strings.Contains(s.want, "cdi_spec_dirs is") // install does not change these, and says so
		ours := slices.IndexFunc(got.Handlers, func(h Handler) bool { return h == Handler{Name: s.name, Annotations: true, Allocations: true} })
		if err != nil || ours < 0 || got.CDI == (got.OldCDI || otherDirs) ||
			slices.ContainsFunc(got.Handlers, func(h Handler) bool { return h.Forges != "" }) {
			t.Errorf("%s: %+v, %v", file, got, err)
		}
	}
	if tried < 8 {
		t.Errorf("only %d cases were tried", tried)
	}
}
