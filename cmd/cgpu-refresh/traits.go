// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/opencgpu/cgpu/pkg/device"
)

// architectures are NVML's numbers (nvml.h, NVML_DEVICE_ARCH_*).
var architectures = map[nvml.DeviceArchitecture]string{
	nvml.DEVICE_ARCH_KEPLER:    "Kepler",
	nvml.DEVICE_ARCH_MAXWELL:   "Maxwell",
	nvml.DEVICE_ARCH_PASCAL:    "Pascal",
	nvml.DEVICE_ARCH_VOLTA:     "Volta",
	nvml.DEVICE_ARCH_TURING:    "Turing",
	nvml.DEVICE_ARCH_AMPERE:    "Ampere",
	nvml.DEVICE_ARCH_ADA:       "Ada Lovelace",
	nvml.DEVICE_ARCH_HOPPER:    "Hopper",
	nvml.DEVICE_ARCH_BLACKWELL: "Blackwell",
	nvml.DEVICE_ARCH_RUBIN:     "Rubin",
}

// unguarded GPUs are told of work through a page of the driver's that is mapped by the channel's handle (open modules,
// arch/maxwell/kernel_channel_gm107.c), and a guard maps memory alone: no program of theirs could make a context.
var unguarded = map[string]bool{"Kepler": true, "Maxwell": true, "Pascal": true}

// traits are what schedulers select by. What the driver does not tell stays empty.
func traits(d nvml.Device, has func(symbol string) error) (architecture, capability string) {
	if has("nvmlDeviceGetArchitecture") == nil {
		if a, ret := d.GetArchitecture(); ret == nvml.SUCCESS {
			architecture = architectures[a]
		}
	}
	if has("nvmlDeviceGetCudaComputeCapability") == nil {
		if major, minor, ret := d.GetCudaComputeCapability(); ret == nvml.SUCCESS {
			capability = fmt.Sprintf("%d.%d", major, minor)
		}
	}
	return architecture, capability
}

// nvlinks names the groups of GPUs that reach each other by NVLink: directly, or through the node's NVSwitches, which connect
// all GPUs that are linked to them.
func nvlinks(lib nvml.Interface, list []device.GPU, has func(symbol string) error) {
	for _, symbol := range []string{"nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetNvLinkRemoteDeviceType"} {
		if has(symbol) != nil {
			return
		}
	}
	peers := make([][]string, len(list))
	for i, g := range list {
		if d, ret := lib.DeviceGetHandleByIndex(g.Index); ret == nvml.SUCCESS {
			peers[i] = linkedTo(d)
		}
	}
	for i, group := range groups(list, peers) {
		list[i].NVLink = group
	}
}

// aSwitch stands for all NVSwitches of the node among the peers of a GPU.
const aSwitch = "switch"

// linkedTo are the PCI addresses at the other end of a GPU's links, or aSwitch.
func linkedTo(d nvml.Device) []string {
	var peers []string
	for link := range nvml.NVLINK_MAX_LINKS {
		state, ret := d.GetNvLinkState(link)
		if ret != nvml.SUCCESS { // no such link, or no NVLink at all
			break
		}
		if state != nvml.FEATURE_ENABLED {
			continue
		}
		kind, ret := d.GetNvLinkRemoteDeviceType(link)
		switch {
		case ret != nvml.SUCCESS:
		case kind == nvml.NVLINK_DEVICE_TYPE_SWITCH:
			return []string{aSwitch} // where one link goes to a switch all do
		case kind == nvml.NVLINK_DEVICE_TYPE_GPU:
			if pci, ret := d.GetNvLinkRemotePciInfo(link); ret == nvml.SUCCESS {
				peers = append(peers, fmt.Sprintf("%04x:%02x:%02x.0", pci.Domain, pci.Bus, pci.Device))
			}
		}
	}
	return peers
}

// groups names for each GPU the group that it is in, by the index of the group's first GPU; empty for a GPU that is alone.
func groups(list []device.GPU, peers [][]string) []string {
	first := make([]int, len(list)) // the position of the first GPU that i is known to reach
	for i := range first {
		first[i] = i
	}
	join := func(i, j int) {
		from, to := max(first[i], first[j]), min(first[i], first[j])
		for k := range first {
			if first[k] == from {
				first[k] = to
			}
		}
	}
	switched := -1
	for i := range list {
		for _, p := range peers[i] {
			if p == aSwitch {
				if switched < 0 {
					switched = i
				}
				join(i, switched)
			} else if j := slices.IndexFunc(list, func(g device.GPU) bool { return g.BusID == p }); j >= 0 {
				join(i, j)
			}
		}
	}
	names := make([]string, len(list))
	for i := range list {
		for j := range list {
			if i != j && first[i] == first[j] {
				names[i] = fmt.Sprintf("nvlink%d", list[first[i]].Index)
			}
		}
	}
	return names
}
