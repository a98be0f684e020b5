// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/opencgpu/cgpu/pkg/device"
)

// A descriptor of a GPU's node can be sent to another container, and the device cgroup checks only who opens. So on a node where pods
// have what was allocated to them and nothing else, the containers of pods that have no GPU get a filter too: without notification,
// guard or record, it refuses NVIDIA's calls.

// sizeBit and typeBit are bits of an ioctl number (include/uapi/asm-generic/ioctl.h).
const (
	sizeBit = 1 << 16
	typeBit = 1 << 8
)

// withheld are the calls that make something of a driver's file, and the other half of all numbers: without RM_ALLOC and RM_CONTROL
// nobody has an RM client, without the others one cannot use the client of who sent the file, nor keep his memory alive.
//
// Ordinary programs make calls with the same low byte (FIONBIO has 0x21, TCGETS2 0x2a, TUNGETSNDBUF 0xd3, webcams have 0x4a), so the filter
// looks at one or two bits of the size as well, which RM compares as a whole, and of the type: UVM's numbers have none. What the
// driver ignores is ignored. Numbers and sizes are those of nv_escape.h, nv-ioctl-numbers.h and uvm_ioctl.h. Of the 3100 requests in
// Linux 6.1's and libdrm 2.4.114's headers five are refused: BTRFS_IOC_QUOTA_CTL, QGROUP_ASSIGN, QGROUP_LIMIT and SET_FEATURES, which
// take CAP_SYS_ADMIN, and FDSETPRM of floppies.
//
// What stops is chosen: of the bits that tell a call from ordinary ones those for which what passes needs the fewest cubes, since each is
// three rules for libseccomp, one for each architecture. What passes is computed from it: smallestCover(others(stop)) in cover_test.go,
// by TestWithheldDerived, which prints the list to paste when stop has changed. TestWithheld holds stop to the driver's calls and to those
// of ordinary programs, TestWithheldHalves the halves to each other.
var withheld = covers{
	stop: []cube{
		{0xff | 32*sizeBit, 0x27 | 32*sizeBit},         // RM_ALLOC_MEMORY, 56 bytes
		{0xff | 16*sizeBit, 0x28 | 16*sizeBit},         // RM_ALLOC_OBJECT, 20
		{0xff | 16*sizeBit, 0x29 | 16*sizeBit},         // RM_FREE, 16
		{0xff | (32+4)*sizeBit, 0x2a | 32*sizeBit},     // RM_CONTROL, 32
		{0xff | (32+4)*sizeBit, 0x2b | 32*sizeBit},     // RM_ALLOC, 32, 40 or 48
		{0xff | 16*sizeBit, 0x34 | 16*sizeBit},         // RM_DUP_OBJECT, 28
		{0xff | 16*sizeBit, 0x35 | 16*sizeBit},         // RM_SHARE, 24
		{0xff | (32+4)*sizeBit, 0x39 | 32*sizeBit},     // RM_I2C_ACCESS, 32
		{0xff | (32+4)*sizeBit, 0x4a | 32*sizeBit},     // RM_VID_HEAP_CONTROL, 184
		{0xff | 64*sizeBit, 0x4d | 64*sizeBit},         // RM_ACCESS_REGISTRY, 72
		{0xff | (32+16)*sizeBit, 0x54 | 48*sizeBit},    // RM_ALLOC_CONTEXT_DMA2, 56
		{0xff | (32+16)*sizeBit, 0x57 | 48*sizeBit},    // RM_MAP_MEMORY_DMA, 56
		{0xff | 64*sizeBit, 0x57 | 64*sizeBit},         // RM_MAP_MEMORY_DMA, 64
		{0xff | 16*sizeBit, 0xce | 16*sizeBit},         // ALLOC_OS_EVENT, 16
		{0xff | 16*sizeBit, 0xd3 | 16*sizeBit},         // IOCTL_XFER_CMD, 16: any other one
		{0xff | 32*sizeBit, 0xd9 | 32*sizeBit},         // EXPORT_TO_DMABUF_FD, 2600 or 2608
		{0xff | 0x2000*sizeBit, 0x01 | 0x2000*sizeBit}, // UVM_INITIALIZE, 0x30000001
		{0xff | 0xc0*typeBit, 0x21},                    // UVM_MAP_EXTERNAL_ALLOCATION, 33
		{0xff | 0xc0*typeBit, 0x22},                    // UVM_FREE, 34
		{0xff | 0xc0*typeBit, 0x42},                    // UVM_UNMAP_EXTERNAL, 66
		{0xff | 0xc0*typeBit, 0x4e},                    // UVM_ALLOC_DEVICE_P2P, 78
	},
	allow: []cube{
		{0x0f, 0x00},
		{0x0f, 0x06},
		{0x19, 0x18},
		{0x1e, 0x04},
		{0x2b, 0x0b},
		{0x33, 0x00},
		{0x33, 0x03},
		{0x3d, 0x09},
		{0x4c, 0x0c},
		{0x52, 0x12},
		{0x59, 0x41},
		{0x60, 0x60},
		{0x61, 0x00},
		{0x85, 0x80},
		{0x85, 0x85},
		{0x8a, 0x80},
		{0x8f, 0x03},
		{0x9c, 0x10},
		{0xb3, 0x11},
		{0xc0, 0x80},
		{0x402c, 0x4020},
		{0x408e, 0x4002},
		{0x40d6, 0x4046},
		{0x802c, 0x8020},
		{0x808e, 0x8002},
		{0x80d6, 0x8046},
		{0x4000e, 0x4000a},
		{0x40098, 0x40018},
		{0x10001a, 0x10},
		{0x10005a, 0x08},
		{0x100082, 0x82},
		{0x20000e, 0x0a},
		{0x200016, 0x10},
		{0x200052, 0x50},
		{0x200054, 0x04},
		{0x4000ca, 0x48},
		{0x5000d0, 0x50},
		{0x6000d0, 0x50},
		{0x200000a6, 0x00},
	},
}

// podMarks are texts of which one is in the config.json of every container that a CRI engine makes for a pod.
var podMarks = [][]byte{[]byte("io.kubernetes.cri.container-type"), []byte("io.kubernetes.cri-o.ContainerType")}

// MayBePod says whether config.json can belong to a container of a pod; a search for bytes, as MayAsk.
func MayBePod(raw []byte) bool {
	return slices.ContainsFunc(podMarks, func(mark []byte) bool { return bytes.Contains(raw, mark) })
}

// Withhold edits the config.json of a pod's container that has no GPU, so that what others send it of theirs is of no use. False: the
// document is as it was, because the container is not such a one, or needs no edit.
//
// Not touched are: the pause container, which runs the node's own program; privileged ones and those with CAP_SYS_ADMIN outside of a
// user namespace, which can open the nodes themselves; and those with a GPU by other ways (a CDI file or device plugin that is not ours).
func Withhold(doc *Document) (edited bool, err error) {
	// Without the decoder of package encoding/json where that can be: its first use of a type takes long, and this is a new process.
	// Names of annotations that differ in case only are two, and a pod's author may choose them.
	annotations, err := doc.root.sub("annotations", false)
	if annotations == nil || err != nil {
		return false, err
	}
	kinds := map[string]string{}
	for _, mark := range podMarks {
		if raw := annotations.get(string(mark)); raw != nil {
			if kinds[string(mark)], err = unquote(raw); err != nil {
				return false, fmt.Errorf("spec: annotations: %w", err)
			}
		}
	}
	if !IsPod(kinds) {
		return false, nil
	}
	admin, err := doc.admin()
	if err != nil || admin {
		return false, err
	}
	devices, err := doc.list("devices", "linux")
	if err != nil {
		return false, fmt.Errorf("spec: %w", err)
	}
	if slices.ContainsFunc(devices, func(raw []byte) bool { return speaksOf(raw, "nvidia") }) {
		nodes, _, err := readNodes(doc)
		if err != nil {
			return false, fmt.Errorf("spec: %w", err)
		}
		if slices.ContainsFunc(nodes, func(n specs.LinuxDevice) bool { return strings.HasPrefix(n.Path, "/dev/nvidia") }) {
			return false, nil
		}
	}
	profile, err := doc.profile()
	if err == nil {
		refused := uint(1) // EPERM
		edited, err = profile.split(withheld, specs.LinuxSyscall{Action: specs.ActErrno, ErrnoRet: &refused})
	}
	if err != nil {
		return false, fmt.Errorf("spec: seccomp: %w", err)
	}
	return edited, nil
}

// admin says whether a process of the container can have CAP_SYS_ADMIN, and over more than a user namespace of its own.
func (d *Document) admin() (bool, error) {
	namespaces, err := d.list("namespaces", "linux")
	if err != nil || slices.ContainsFunc(namespaces, func(raw []byte) bool { return speaksOf(raw, `"user"`) }) {
		return false, err
	}
	capabilities, err := d.within("process", "capabilities")
	if capabilities == nil || err != nil {
		return false, err
	}
	bounding, err := elements(capabilities.get("bounding"))
	if err != nil {
		return false, fmt.Errorf("spec: process.capabilities.bounding: %w", err)
	}
	for _, raw := range bounding {
		if name, err := unquote(raw); err != nil || name == "CAP_SYS_ADMIN" {
			return err == nil, err
		}
	}
	return false, nil
}

// WithholdsFrom says whether a node whose cgpu.toml has this value of pods keeps the driver's calls from pods without a GPU.
func WithholdsFrom(pods string) bool {
	return pods == device.PodsAllocated || pods == device.PodsGPUShare
}
