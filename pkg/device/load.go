// SPDX-License-Identifier: Apache-2.0

package device

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
)

// The two ways in which a table asks for cgpu-refresh. Any other error of Load is a fault that a refresh cannot mend.
var (
	ErrMissing = errors.New("no node table")
	ErrStale   = errors.New("node table is stale")
)

// maxTable bounds node.json: 16 GPUs and 200 driver files take about 60 KiB.
const maxTable = 4 << 20

// Load reads the table of a run directory and checks that it still describes this node.
//
// With ErrStale it returns the stale table too, for readers that only show it. A good table costs two reads of kernel
// files and a stat for each device node and key file.
func Load(runDir string) (*Table, error) {
	return kernel.load(runDir, ConfigFile())
}

func (s sources) load(runDir, configFile string) (*Table, error) {
	t, err := read(TableFile(runDir))
	if err != nil {
		return nil, err
	}
	stale := func(why string) (*Table, error) {
		return t, fmt.Errorf("device: %s: %w: %s", TableFile(runDir), ErrStale, why)
	}
	now, err := s.readKey(t.Driver, configFile, t.Key.RefreshHelper, t.Key.Library)
	if err != nil {
		return nil, err
	}
	if why := t.Key.differs(now); why != "" {
		return stale(why)
	}
	for n := range t.nodes() {
		if why := n.differs(); why != "" {
			return stale(why)
		}
	}
	if t.Driver == DriverSim {
		if err := dial(SimSocket(runDir)); err != nil {
			return stale(fmt.Sprintf("the simulated driver does not answer on %s: %v", SimSocket(runDir), err))
		}
	}
	return t, nil
}

// read reads a table that only root could have written.
func read(path string) (*Table, error) {
	f, err := os.Open(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("device: %s: %w", path, ErrMissing)
	case err != nil:
		return nil, fmt.Errorf("device: %w", err)
	}
	defer f.Close()
	if err := trusted(f); err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(f, maxTable+1))
	if err != nil {
		return nil, fmt.Errorf("device: %w", err)
	}
	if len(text) > maxTable {
		return nil, fmt.Errorf("device: %s: more than %d bytes; remove it and run cgpu refresh", path, maxTable)
	}
	return decode(path, text)
}

// decode reads and validates a table; what another version of cgpu wrote is stale.
func decode(path string, text []byte) (*Table, error) {
	t := new(Table)
	err := json.Unmarshal(text, t) // it goes on behind a value of another type: the version is known
	switch {
	case err != nil && t.Version == 0:
		err = fmt.Errorf("not JSON: %w", err)
	case t.Version != TableVersion:
		err = fmt.Errorf("format %d, want %d", t.Version, TableVersion)
	case err == nil:
		err = t.Validate()
	}
	if err != nil {
		return nil, fmt.Errorf("device: %s: %w: %w", path, ErrStale, err)
	}
	return t, nil
}

// trusted refuses a table that somebody else could have written: it names the files that are mounted into containers.
func trusted(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("device: %w", err)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.Mode().IsRegular() || st.Uid != 0 && int(st.Uid) != os.Geteuid() || info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("device: %s: mode %v, owner %d: want a file that only root may write; remove it and run cgpu refresh",
			f.Name(), info.Mode(), st.Uid)
	}
	return nil
}

// differs says how the file at HostPath is not the node that the table tells of; empty when it is. A driver module that
// was loaded anew may have another major number.
func (n Node) differs() string {
	var st syscall.Stat_t
	if err := syscall.Stat(n.HostPath, &st); err != nil {
		return fmt.Sprintf("%s: %v", n.HostPath, err)
	}
	if st.Mode&syscall.S_IFMT != syscall.S_IFCHR {
		return n.HostPath + " is no character device"
	}
	if major, minor := Major(st.Rdev), Minor(st.Rdev); major != n.Major || minor != n.Minor {
		return fmt.Sprintf("%s is device %d:%d, was %d:%d", n.HostPath, major, minor, n.Major, n.Minor)
	}
	return ""
}

// Major is the major number of a device as stat reports it (glibc's gnu_dev_major).
func Major(dev uint64) uint32 { return uint32(dev>>8&0xfff | dev>>32&^0xfff) }

// Minor is the minor number of a device as stat reports it (glibc's gnu_dev_minor).
func Minor(dev uint64) uint32 { return uint32(dev&0xff | dev>>12&^0xff) }

// dial finds out whether something accepts connections on a UNIX socket. It does without package net, which would make
// cgpu-runtime a third larger.
func dial(path string) error {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	err = syscall.Connect(fd, &syscall.SockaddrUnix{Name: path})
	// A full queue is a server's; and who may not connect (cgpu smi by a user) cannot tell.
	if err == syscall.EAGAIN || err == syscall.EACCES {
		return nil
	}
	return err
}
