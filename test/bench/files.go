// SPDX-License-Identifier: Apache-2.0

//go:build integration

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/test/node"
)

// elfLibc6 marks a library for x86-64 in glibc's ld.so.cache.
const elfLibc6 = 0x303

// bringFiles gives the node of the simulated driver so many files as the real one brings into a container: libraries with two links and two
// names each. A start then has the mounts and the hook's work that it has on a real node.
func bringFiles(lab *node.Node, number int) error {
	table, err := device.Load(lab.RunDir)
	if err != nil {
		return err
	}
	const folder = "/usr/lib/x86_64-linux-gnu"
	for i := range number {
		name := fmt.Sprintf("libnvidia-bench%d.so", i)
		host := filepath.Join(lab.Dir, "driver", name+".580.159.04")
		if err := os.MkdirAll(filepath.Dir(host), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(host, make([]byte, 4096), 0o644); err != nil {
			return err
		}
		at := filepath.Join(folder, filepath.Base(host))
		table.Mounts = append(table.Mounts, device.Mount{Host: host, Container: at,
			Options: []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}})
		table.Links = append(table.Links, device.Link{Target: name + ".1", Path: filepath.Join(folder, name)},
			device.Link{Target: filepath.Base(host), Path: filepath.Join(folder, name+".1")})
		table.Libraries = append(table.Libraries, device.Library{Name: name + ".1", Path: at, Flags: elfLibc6},
			device.Library{Name: name, Path: at, Flags: elfLibc6})
	}
	table.LibDirs = append(table.LibDirs, folder)
	text, err := json.Marshal(table)
	if err != nil {
		return err
	}
	return os.WriteFile(device.TableFile(lab.RunDir), text, 0o644)
}
