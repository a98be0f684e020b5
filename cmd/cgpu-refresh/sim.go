// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha1"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

// simNodeDir holds the simulated driver's device nodes. It is the same for every run directory: a node stands for a name
// in the container, and which driver answers is decided by the guard.
const simNodeDir = "/dev/cgpu-sim"

// simulated fills the table from the configuration, makes the nodes, writes the table, and sees to it that the server
// runs with it.
func (r refresh) simulated(t *device.Table, c config.Sim, old *device.Table, before device.Key) error {
	t.DriverVersion, t.GPUs = c.DriverVersion, simGPUs(c)
	s := simServer{runDir: r.runDir, program: filepath.Join(filepath.Dir(r.helper), "cgpu-sim"), say: r.say}
	running := s.runs()
	current, err := s.serves(t, old)
	if err != nil {
		return err
	}
	if running && !current {
		records, err := ledger.Open(r.runDir).List()
		if err != nil {
			return err
		}
		if len(records) > 0 && old != nil && old.Driver == device.DriverSim {
			// As on a real machine: nobody exchanges cards below running containers.
			r.warn("the GPUs in [sim] differ from those that cgpu-sim serves, and %d containers hold vGPUs on it: "+
				"keeping the old ones; stop the containers, then cgpu refresh --force", len(records))
			t.DriverVersion, t.GPUs = old.DriverVersion, old.GPUs
		} else {
			r.say("the GPUs in [sim] differ from those that cgpu-sim serves, and no vGPU is reserved: starting it anew")
			if err := s.stop(); err != nil {
				return err
			}
			running = false
		}
	}
	if err := simNodes(t, r.simDir); err != nil {
		return err
	}
	// The server reads its GPUs from the table, so the table comes first. If the server then does not start, the
	// table is stale for every reader.
	if err := r.save(t, before, ""); err != nil {
		return err
	}
	if running {
		return nil
	}
	return s.start()
}

// simGPUs are the configured GPUs with everything filled in that a real one has.
func simGPUs(c config.Sim) []device.GPU {
	var list []device.GPU
	for i, g := range c.GPUs {
		if g.UUID == "" {
			g.UUID = simUUID(i)
		}
		if g.BusID == "" {
			g.BusID = fmt.Sprintf("0000:%02x:00.0", i+1)
		}
		list = append(list, device.GPU{Index: i, UUID: g.UUID, Minor: i, BusID: g.BusID, Name: g.Name, Memory: g.Memory})
	}
	return list
}

// simUUID is the same for the same index on every node and boot (a version 5 UUID), so that a UUID in a script stays
// right.
func simUUID(index int) string {
	h := sha1.Sum(fmt.Appendf(nil, "cgpu simulated GPU %d", index))
	h[6] = h[6]&0x0f | 0x50
	h[8] = h[8]&0x3f | 0x80
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", h[0:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

// simNodes makes the nodes in dir and puts them into the table.
//
// Each is a node of its own for the device behind /dev/random: the guard knows a file by its inode and follows it with
// epoll, which /dev/null cannot do; a program that reaches one without a guard meets a device that knows none of the ioctls.
func simNodes(t *device.Table, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	add := func(name string) (device.Node, error) {
		host := filepath.Join(dir, name)
		return device.Node{Path: "/dev/" + name, HostPath: host, Major: 1, Minor: 8, Bind: true}, makeNode(host, 0o666, 1<<8|8)
	}
	t.Nodes = nil
	for _, name := range []string{"nvidiactl", "nvidia-uvm"} {
		n, err := add(name)
		if err != nil {
			return err
		}
		t.Nodes = append(t.Nodes, n)
	}
	for i := range t.GPUs {
		var err error
		if t.GPUs[i].Node, err = add(fmt.Sprintf("nvidia%d", t.GPUs[i].Minor)); err != nil {
			return err
		}
	}
	return nil
}

// makeNode makes a character device. A right one is left alone, because running guards know it by its inode; anything else is replaced.
func makeNode(path string, mode uint32, dev uint64) error {
	var st syscall.Stat_t
	err := syscall.Lstat(path, &st)
	if err == nil && st.Mode == syscall.S_IFCHR|mode && st.Rdev == dev {
		return nil
	}
	fault := func(what string, err error) error {
		if err == nil {
			return nil
		}
		return &fs.PathError{Op: what, Path: path, Err: err}
	}
	if err == nil && st.Mode&syscall.S_IFMT == syscall.S_IFDIR {
		return fault("mknod", fmt.Errorf("%w: a folder is in the way; remove it", syscall.EISDIR))
	}
	temp := fmt.Sprintf("%s.%d", path, os.Getpid()) // a device has no content for pkg/atomicfile to write
	defer os.Remove(temp)
	if err := syscall.Mknod(temp, syscall.S_IFCHR|mode, int(dev)); err != nil {
		return fault("mknod", fmt.Errorf("%w: want root with CAP_MKNOD", err))
	}
	if err := os.Chmod(temp, os.FileMode(mode)); err != nil { // whatever the umask
		return err
	}
	return fault("rename", os.Rename(temp, path))
}
