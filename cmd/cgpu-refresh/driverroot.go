// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
)

// driverRoots are where a driver may be that the machine's own root does not have: a folder with what would else be in /. NVIDIA's GPU
// Operator has the root of its driver container there, Flatcar and Talos the driver that goes with their kernel.
var driverRoots = []string{"/run/nvidia/driver", "/opt/nvidia/current", "/usr/local/glibc"}

// libraryFolders are where a driver's libraries may be below such a root. The dynamic linker's cache there is nvcdi's to read.
var libraryFolders = []string{
	"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu",
	"usr/lib/x86_64-linux-gnu/nvidia/current", "usr/lib/aarch64-linux-gnu/nvidia/current", "usr/lib", "lib64", "lib",
}

const nvmlFile = "libnvidia-ml.so.1"

// place is a driver that may be there: its root, and the library by which it is asked.
type place struct {
	root    string
	library string // empty: where the dynamic linker finds it
}

// places are where to look for the driver, in this order. configured is driver_root of cgpu.toml: only there, if it is said.
func places(configured string, known, dirs []string) []place {
	var list []place
	if configured == "" || configured == "/" {
		list = append(list, place{root: "/"})
		for _, dir := range dirs {
			if path := filepath.Join(dir, nvmlFile); exists(path) {
				list = append(list, place{"/", path})
			}
		}
	}
	switch configured {
	case "/":
		known = nil
	case "":
	default:
		known = []string{configured}
	}
	for _, root := range known {
		// nvcdi resolves links, and takes for a part of the root what begins like it.
		root, err := filepath.EvalSymlinks(root)
		if err != nil {
			continue
		}
		for _, dir := range below(root) {
			if path := filepath.Join(dir, nvmlFile); exists(path) {
				list = append(list, place{root, path})
			}
		}
	}
	return list
}

// below are the library folders that a root has.
func below(root string) []string {
	var dirs []string
	for _, folder := range libraryFolders {
		if dir := filepath.Join(root, folder); exists(dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// modules is what the kernel's modules of the driver say of their device nodes.
type modules struct {
	devices string   // /proc/devices
	params  string   // /proc/driver/nvidia/params
	gpus    []string // /proc/driver/nvidia/gpus/*/information
}

func readModules(proc string) modules {
	text := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil {
			return "" // not loaded
		}
		return string(b)
	}
	m := modules{devices: text(filepath.Join(proc, "devices")), params: text(filepath.Join(proc, "driver/nvidia/params"))}
	files, _ := filepath.Glob(filepath.Join(proc, "driver/nvidia/gpus/*/information")) // the pattern is ours
	for _, file := range files {
		m.gpus = append(m.gpus, text(file))
	}
	return m
}

// Fixed numbers of the driver's (nv-chardev-numbers.h, uvm_common.h).
const (
	controlMinor = 255
	uvmMinor     = 0
)

// nodes are the device nodes of what is loaded, as nvidia-modprobe would make them.
func (m modules) nodes() []device.Node {
	if m.param("ModifyDeviceFiles", 1) == 0 { // the administrator makes them
		return nil
	}
	var list []device.Node
	add := func(path string, minor uint64, names ...string) {
		for _, name := range names {
			if major, ok := m.major(name); ok {
				list = append(list, device.Node{Path: path, Major: major, Minor: uint32(minor)})
				return
			}
		}
	}
	add("/dev/nvidiactl", controlMinor, "nvidiactl", "nvidia", "nvidia-frontend")
	add("/dev/nvidia-uvm", uvmMinor, "nvidia-uvm")
	for _, text := range m.gpus {
		if minor, ok := lineValue(text, "Device Minor"); ok && minor < controlMinor {
			add(fmt.Sprintf("/dev/nvidia%d", minor), minor, "nvidia", "nvidia-frontend")
		}
	}
	return list
}

// major finds a character device's number by its name.
func (m modules) major(name string) (uint32, bool) {
	characters, _, _ := strings.Cut(m.devices, "Block devices:")
	for line := range strings.Lines(characters) {
		number, driver, _ := strings.Cut(strings.TrimSpace(line), " ")
		if n, err := strconv.ParseUint(number, 10, 12); err == nil && driver == name {
			return uint32(n), true
		}
	}
	return 0, false
}

func (m modules) param(name string, otherwise uint64) uint64 {
	if n, ok := lineValue(m.params, name); ok {
		return n
	}
	return otherwise
}

// lineValue reads the number of a line "Name: 3".
func lineValue(text, name string) (uint64, bool) {
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			n, err := strconv.ParseUint(strings.TrimSpace(value), 10, 32)
			return n, err == nil
		}
	}
	return 0, false
}

// makeNodes makes those that dev, the machine's folder, lacks: a driver container has a /dev of its own, and nvidia-modprobe, which would
// make them, is in that container.
func (m modules) makeNodes(dev string) error {
	mode, uid, gid := uint32(m.param("DeviceFileMode", 0o666)), int(m.param("DeviceFileUID", 0)), int(m.param("DeviceFileGID", 0))
	for _, n := range m.nodes() {
		path := filepath.Join(dev, filepath.Base(n.Path))
		if exists(path) {
			continue
		}
		if err := makeNode(path, mode, unix.Mkdev(n.Major, n.Minor)); err != nil {
			return err
		}
		if err := os.Chown(path, uid, gid); err != nil {
			return err
		}
	}
	return nil
}

func exists(path string) bool {
	var st syscall.Stat_t
	return syscall.Stat(path, &st) == nil
}
