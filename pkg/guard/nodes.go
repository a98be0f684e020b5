// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// nodeKind is the device node that a file was opened on.
type nodeKind = rmclient.NodeKind

const (
	nodeOther   = rmclient.NodeOther
	nodeControl = rmclient.NodeControl
	nodeGPU     = rmclient.NodeGPU
	nodeUVM     = rmclient.NodeUVM
)

// nodeTable recognises the device nodes by what fstat says of an open file.
type nodeTable struct {
	byRdev  map[uint64]node // real driver: the character device number
	byInode map[inode]node  // simulated driver: every node is the same device, each has its own inode
}

type inode struct{ dev, ino uint64 }

type node struct {
	kind  nodeKind
	minor int
}

// gpuIdentity is how RM names a GPU of the container.
type gpuIdentity struct {
	rmclient.Address
	minor int
}

// gpuUUID is a GPU as UVM has it.
type gpuUUID [16]byte

// majorNVIDIA is NV_MAJOR_DEVICE_NUMBER, kernel-open/common/inc/nv-chardev-numbers.h.
const majorNVIDIA = 195

// classify tells what an open file is. foreign: it is a GPU that this container was not given.
func (t *nodeTable) classify(fd int) (n node, foreign bool, err error) {
	var st unix.Stat_t
	if _, _, e := unix.RawSyscall(unix.SYS_FSTAT, uintptr(fd), uintptr(unsafe.Pointer(&st)), 0); e != 0 {
		return node{}, false, os.NewSyscallError("fstat", e)
	}
	if t.byInode != nil {
		return t.byInode[inode{st.Dev, st.Ino}], false, nil
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR {
		return node{}, false, nil
	}
	n, ok := t.byRdev[st.Rdev]
	if !ok && unix.Major(st.Rdev) == majorNVIDIA {
		return node{}, true, nil
	}
	return n, false, nil
}

func (t *nodeTable) has(st *unix.Stat_t) bool {
	if t.byInode != nil {
		_, ok := t.byInode[inode{st.Dev, st.Ino}]
		return ok
	}
	_, ok := t.byRdev[st.Rdev]
	return ok
}

func identify(busID string, minor int) (gpuIdentity, error) {
	a, err := rmclient.ParseAddress(busID)
	return gpuIdentity{a, minor}, err
}

// openNodes learns how files of the container's nodes look and, with hold, keeps its GPUs' open.
func (g *Guard) openNodes(hold bool) error {
	sim := g.cfg.Driver == device.DriverSim
	if sim {
		g.nodes.byInode = map[inode]node{}
	} else {
		g.nodes.byRdev = map[uint64]node{}
	}
	add := func(n device.Node, kind nodeKind, minor int, keep bool) error {
		flags := unix.O_RDWR | unix.O_CLOEXEC
		var st unix.Stat_t
		if keep && hold && !sim {
			fd, err := unix.Open(n.HostPath, flags, 0)
			if err != nil {
				return fmt.Errorf("open %s: %w", n.HostPath, err)
			}
			g.gpuNodes = append(g.gpuNodes, fd)
			if err := unix.Fstat(fd, &st); err != nil {
				return fmt.Errorf("stat %s: %w", n.HostPath, err)
			}
		} else if err := unix.Stat(n.HostPath, &st); err != nil {
			return fmt.Errorf("stat %s: %w; run `cgpu refresh`", n.HostPath, err)
		}
		if sim {
			g.nodes.byInode[inode{st.Dev, st.Ino}] = node{kind, minor}
		} else {
			g.nodes.byRdev[st.Rdev] = node{kind, minor}
		}
		return nil
	}
	if err := add(g.cfg.ControlNode, nodeControl, 0, false); err != nil {
		return err
	}
	if g.cfg.UVMNode.HostPath != "" {
		if err := add(g.cfg.UVMNode, nodeUVM, 0, false); err != nil {
			return err
		}
	}
	for _, x := range g.cfg.GPUs {
		if err := add(x.Node, nodeGPU, x.Minor, true); err != nil {
			return err
		}
	}
	return nil
}

func (g *Guard) ownsGPUID(id uint32) bool {
	for _, x := range g.gpus {
		if x.ID() == id {
			return true
		}
	}
	return false
}

func (g *Guard) ownsMinor(minor int) bool {
	for _, x := range g.gpus {
		if x.minor == minor {
			return true
		}
	}
	return false
}

func (g *Guard) ownsBus(domain, bus, slot uint32) bool {
	for _, x := range g.gpus {
		if x.Address == (rmclient.Address{Domain: domain, Bus: bus, Slot: slot}) {
			return true
		}
	}
	return false
}

// gpuByUUID finds a GPU of the container.
func (g *Guard) gpuByUUID(uuid gpuUUID) (gpu int, ok bool) {
	for i, x := range g.cfg.GPUs {
		if id, ok := uuidOf(x); ok && id == uuid {
			return i, true
		}
	}
	return 0, false
}

// uuidOf is a GPU's UUID as UVM has it.
func uuidOf(gpu GPU) (id gpuUUID, ok bool) {
	b, err := hex.DecodeString(strings.ReplaceAll(strings.TrimPrefix(gpu.UUID, "GPU-"), "-", ""))
	if err != nil || len(b) != len(id) {
		return id, false
	}
	return gpuUUID(b), true
}
