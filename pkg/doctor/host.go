// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/launch"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// Host is the node that is looked at, and where on it.
type Host struct {
	Root       string // of the file system: "/", or a folder in tests
	RunDir     string
	ConfigFile string
	Bin        string // folder of our programs
	Limiter    string // libcgpu.so; empty: not found
	Version    string // of this program
	UID        int
	Path       string // PATH
	// Engines are configuration files to look at instead of the usual ones, by engine.
	Engines    map[string]string
	DockerHost string // DOCKER_HOST
	// Try starts this program again as a child that tries something: TryKernel or TryDriver.
	Try func(ctx context.Context, what string) (*exec.Cmd, error)
	// Containers says how the containers of records fare: asking guards is the business of package main.
	Containers func(*device.Table, []ledger.Record) []Container
	// Users are the containers of records, but those that are gone, with a slice of a GPU or all of it.
	Users func(t *device.Table, records []ledger.Record, uuid string) []GPUUser
	// Used is what the driver has given out of the memory of GPUs with some indices, by UUID.
	Used  func(gpus []int) (map[string]quota.Bytes, error)
	Force bool                             // measure also where others have work, or may want what is taken for it
	Log   func(format string, args ...any) // of what is measured; may be nil

	table    *device.Table // nil: none, or not one to rely on
	tableErr error
	loaded   bool
	config   config.Config
	records  []ledger.Record
	counted  bool // records are those of the ledger
	kernel   *KernelReport
	low      []lowLevel // low-level runtimes found
	kube     *kubernetes
	measured []measured
}

// lowLevel is a low-level runtime that is installed; version is what it says to --version.
type lowLevel struct{ path, version string }

// Container is how one container of the ledger fares.
type Container struct {
	Name  string // for people
	State string // as cgpu smi says it
	Dead  bool   // nothing of it runs any more
	Bad   bool   // its guard is gone or does not answer
	Alone bool   // it has contexts on a GPU about whose time nobody decides
}

// node is the table, read once. A stale one is returned with its error.
func (h *Host) node() (*device.Table, error) {
	if !h.loaded {
		h.table, h.tableErr = device.Load(h.RunDir)
		h.loaded = true
	}
	return h.table, h.tableErr
}

// settings are those of cgpu.toml, in effect or, before the first container, to come.
func (h *Host) settings() device.Config {
	if t, err := h.node(); err == nil {
		return t.Config
	}
	return h.config.Settings
}

// simulated says that the node runs on the simulated driver.
func (h *Host) simulated() bool {
	if t, err := h.node(); err == nil {
		return t.Driver == device.DriverSim
	}
	return h.config.Driver == device.DriverSim
}

// preload says that the preload library is to do what guards do.
func (h *Host) preload() bool { return h.settings().Enforcement == device.EnforcePreload }

// at is a path of the host.
func (h *Host) at(path string) string { return filepath.Join(h.Root, path) }

// maxText bounds what is read of a file; a daemon.json has some hundred bytes.
const maxText = 1 << 20

// text reads a small file; empty and false when it is not there or cannot be read.
func (h *Host) text(path string) (string, bool) {
	b, err := readSome(h.at(path))
	return strings.TrimSpace(string(b)), err == nil
}

func readSome(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || info.IsDir() {
		return nil, errors.Join(err, fs.ErrInvalid)
	}
	return io.ReadAll(io.LimitReader(f, maxText))
}

// there says whether a path of the host exists.
func (h *Host) there(path string) bool {
	_, err := os.Stat(h.at(path))
	return err == nil
}

// program finds an executable by name or absolute path, as cgpu-runtime does (findRuntime); empty when there is none.
func (h *Host) program(name string) string {
	candidates := []string{name}
	if !strings.Contains(name, "/") {
		candidates = nil
		for _, dir := range append(filepath.SplitList(h.Path), launch.RuntimeFolders...) {
			if filepath.IsAbs(dir) {
				candidates = append(candidates, filepath.Join(dir, name))
			}
		}
	}
	for _, path := range candidates {
		if info, err := os.Stat(h.at(path)); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return h.at(path)
		}
	}
	return ""
}

// output runs a program of the machine and returns what it printed.
func output(path string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), askTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	return strings.TrimSpace(string(out)), err
}
