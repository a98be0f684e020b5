// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"maps"
	"testing"
	"testing/fstest"
)

// TestRuntimes: uninstall tells which runtimes are ours, also those that a template has and k3s has yet to read.
func TestRuntimes(t *testing.T) {
	ours := func(name string) Request { return Request{Name: name, Path: "/x/" + name + "/cgpu-runtime"} }
	for name, c := range map[string]struct {
		file, text string
		install    func(fsys fstest.MapFS, r Request) (Plan, error)
		uninstall  func(fsys fstest.MapFS, name string) (Plan, error)
	}{
		"containerd": {ContainerdConfig,
			"version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.x]\noptions.BinaryName = '/usr/bin/y'\n",
			func(fsys fstest.MapFS, r Request) (Plan, error) {
				return InstallContainerd(fsys, ContainerdConfig, Version{Major: 2}, r)
			},
			func(fsys fstest.MapFS, name string) (Plan, error) {
				return UninstallContainerd(fsys, ContainerdConfig, Version{Major: 2}, name)
			}},
		"k3s": {K3sConfig, "version = 2\n",
			func(fsys fstest.MapFS, r Request) (Plan, error) { return InstallGenerated(fsys, K3sConfig, r) },
			func(fsys fstest.MapFS, name string) (Plan, error) { return UninstallGenerated(fsys, K3sConfig, name) }},
		"crio": {"/etc/crio/crio.conf", "[crio.runtime.runtimes.x]\nruntime_path = '/usr/bin/y'\n",
			func(fsys fstest.MapFS, r Request) (Plan, error) { return InstallCRIO(fsys, CRIOConfig(r.Name), r) },
			func(fsys fstest.MapFS, name string) (Plan, error) {
				return UninstallCRIO(fsys, CRIOConfig(name), name)
			}},
	} {
		t.Run(name, func(t *testing.T) {
			fsys := fstest.MapFS{c.file[1:]: {Data: []byte(c.text)}}
			for _, r := range []Request{ours("a"), ours("b")} {
				p, err := c.install(fsys, r)
				if err != nil {
					t.Fatal(err)
				}
				for _, e := range p.Edits {
					fsys[e.Path[1:]] = &fstest.MapFile{Data: e.After}
				}
			}
			p, err := c.uninstall(fsys, "a")
			if want := map[string]string{"a": ours("a").Path, "b": ours("b").Path}; err != nil || !maps.Equal(p.Runtimes, want) {
				t.Errorf("%v, %v, want %v", p.Runtimes, err, want)
			}
		})
	}
}
