// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"io/fs"
	"path"
	"strconv"
	"strings"

	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/opencgpu/cgpu/pkg/device"
)

// Places looks the GPUs up in sysfs. What is not there (the simulated driver's GPUs never are) stays unknown.
func Places(sys fs.ReadLinkFS, t *device.Table) map[string]Place {
	places := map[string]Place{}
	for _, g := range t.GPUs {
		var p Place
		if a, err := deviceattribute.GetPCIeRootAttributeByPCIBusID(g.BusID, deviceattribute.WithFS(sys)); err == nil {
			p.PCIeRoot = *a.Value.StringValue
		}
		raw, err := fs.ReadFile(sys, path.Join("bus/pci/devices", g.BusID, "numa_node"))
		if err == nil {
			// The kernel says -1 where the machine has no NUMA.
			if n, err := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 32); err == nil && n >= 0 {
				p.NUMANode = &n
			}
		}
		places[g.BusID] = p
	}
	return places
}
