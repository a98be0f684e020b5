// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/device"
)

// hostNode describes a character device of the host that keeps its path in the container.
func hostNode(path string) (device.Node, error) {
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		return device.Node{}, fmt.Errorf("%s: %w", path, err)
	}
	if st.Mode&syscall.S_IFMT != syscall.S_IFCHR {
		return device.Node{}, fmt.Errorf("%s: no character device", path)
	}
	return device.Node{Path: path, HostPath: path, Major: device.Major(st.Rdev), Minor: device.Minor(st.Rdev)}, nil
}
