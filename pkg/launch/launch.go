// SPDX-License-Identifier: Apache-2.0

// Package launch starts a guard for a container: what cgpu-runtime, for containers, and cgpu run, for bare processes, both do
// between the reservation and the first call.
//
// cgpu-runtime starts anew for every container of the node, so this package links no more than that program may.
package launch

import (
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/health"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/spec"
)

// Folders are those that an engine's PATH may lack; runc is in /usr/sbin on Debian.
var Folders = []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}

// RuntimeFolders are those where else a low-level runtime may be: CRI-O's own packages keep runc and crun in folders that are in
// nobody's PATH (cri-o/packaging, cri-o.spec).
var RuntimeFolders = append(slices.Clip(Folders), "/usr/libexec/crio", "/usr/local/libexec/crio")

// Nonce tells one create of a container from the next one of the same name. Not crypto/rand: it would make the
// program a third larger, and every runtime call pay for its self-tests.
func Nonce() (string, error) {
	var b [8]byte
	if n, err := unix.Getrandom(b[:], 0); err != nil || n != len(b) {
		return "", fmt.Errorf("launch: getrandom: %d bytes, %v", n, err)
	}
	return hex.EncodeToString(b[:]), nil
}

// GuardConfig tells the guard what it needs to know. In preload mode (simulated driver) it carries calls out and enforces
// nothing: every GPU is whole to it, and the page belongs to the limiter.
func GuardConfig(record ledger.Record, table *device.Table, runDir string) guardcfg.Config {
	c := guardcfg.Config{
		ID: record.ID, Nonce: record.Nonce, RunDir: runDir, Socket: record.Socket, Control: record.Control,
		Log:    LogFile(runDir, record),
		Driver: table.Driver, DriverVersion: table.DriverVersion,
		Page: record.Page, HostMemory: table.HostMemory, LauncherPID: record.LauncherPID, Settings: table.Config,
		Domain: record.Domain, DomainServer: record.DomainServer,
	}
	for _, g := range spec.NewPlan(record, table).GPUs {
		c.GPUs = append(c.GPUs, guardcfg.GPU{GPU: g.GPU, Native: g.Native, Limit: g.Limit, Spill: g.Spill})
	}
	if record.Preload {
		c.Page = ""
		for i := range c.GPUs {
			c.GPUs[i].Native, c.GPUs[i].Limit, c.GPUs[i].Spill = true, 0, 0
		}
	}
	if table.Driver == device.DriverSim {
		c.SimSocket = device.SimSocket(runDir)
	}
	c.ControlNode, c.UVMNode = commonNodes(table)
	for _, m := range table.Mounts {
		c.Hold = append(c.Hold, m.Host)
	}
	if library := device.Limiter(); library != "" {
		c.Hold = append(c.Hold, library)
	}
	return c
}

// LogFile is where the guard of a reservation writes its log, once it has something to tell.
func LogFile(runDir string, record ledger.Record) string {
	return filepath.Join(runDir, "log", record.ID[:min(len(record.ID), 12)]+"-"+record.Nonce+".log")
}

// LoadTable reads the node table, and has it made when it is missing or stale: that happens once per boot, driver or
// configuration change. Its GPUs say what is wrong with them, if that can be read.
func LoadTable(runDir string) (*device.Table, error) {
	table, err := device.Load(runDir)
	if errors.Is(err, device.ErrMissing) || errors.Is(err, device.ErrStale) {
		if err := Refresh(); err != nil {
			return nil, err
		}
		table, err = device.Load(runDir)
	}
	if err != nil {
		return table, err
	}
	table, _ = health.Marked(runDir, table)
	return table, nil
}
