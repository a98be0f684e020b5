// SPDX-License-Identifier: Apache-2.0

// Package spec edits a container's OCI config.json so that the container gets the GPUs granted to it and nothing else:
// device nodes, device cgroup rules, driver files, the limiter, variables, the seccomp listener, hooks and annotations.
//
// cgpu-runtime calls Decode and Apply between reserving in the ledger and executing runc; cgpu spec calls them for its
// dry run. The package is pure: it opens no file. Every concern is one small edit in a file of its own, and what no
// edit touches stays as the engine wrote it, byte for byte.
package spec

import (
	"fmt"
	"path/filepath"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// Plan is what was decided for one container. Apply writes it into the container's config.json.
type Plan struct {
	ID    string
	Nonce string
	// GPUs are the granted ones, sliced and native.
	GPUs []GPU
	// Common are the nodes that every container with a GPU needs: nvidiactl and nvidia-uvm.
	Common []device.Node
	// Hidden are nodes of GPUs that were not granted; they are taken out wherever an engine or injector put them.
	Hidden []device.Node
	Mounts []device.Mount // driver files
	// HookMounts has the createContainer hook mount ordinary driver files.
	HookMounts bool
	hooked     []specs.Mount // which these are
	Links      []device.Link // made by the createContainer hook
	LibDirs    []string      // named by the createContainer hook in the container's /etc/ld.so.conf.d
	// Libraries are put into the container's ld cache by the createContainer hook.
	Libraries []device.Library
	Env       []string // added where the container does not set the variable itself
	// Limiter is libcgpu.so on the host; empty: the container gets none. The container sees it as LimiterPath.
	Limiter string
	// Page is the container's vGPU page on the host; empty: none. PageWritable is for preload mode.
	Page         string
	PageWritable bool
	// Preload is the file that becomes the container's /etc/ld.so.preload, on the host; empty: the container's own stays
	// (an image with musl, which does not read it).
	Preload string
	// Socket is where the guard waits for the seccomp listener; empty where there is no guard.
	Socket string
	// DriverLimits has NVIDIA's driver limit the memory of the container's cgroup, which cgpu-hook sees to.
	DriverLimits bool
	// Hook is the absolute path of cgpu-hook on the host.
	Hook   string
	RunDir string
	// Domain is the trust domain; empty: none. DomainServer: it is its MPS server.
	Domain       string
	DomainServer bool
	// Seat, of a member, is the number of its folder at the server.
	Seat int
	// Version of cgpu, for the record.
	Version string
}

// GPU is one granted GPU.
type GPU struct {
	device.GPU
	Native      bool // whole card
	quota.Slice      // of a sliced one
}

// NewPlan grants what a reservation holds: the GPUs of record, and the driver files of the node. Hook, RunDir, Version,
// Limiter and Preload are the caller's to fill in.
func NewPlan(record ledger.Record, table *device.Table) Plan {
	p := Plan{
		ID: record.ID, Nonce: record.Nonce, Socket: record.Socket, Page: record.Page, PageWritable: record.Preload && !record.DriverOnly,
		DriverLimits: record.DriverLimits, Domain: record.Domain, DomainServer: record.DomainServer, Seat: record.Seat,
		Common: table.Nodes, Mounts: table.Mounts, HookMounts: table.HookMounts, Links: table.Links, LibDirs: table.LibDirs,
		Libraries: table.Libraries, Env: table.Env,
	}
	for _, g := range table.GPUs {
		slice := slices.IndexFunc(record.VGPUs, func(v ledger.VGPU) bool { return v.UUID == g.UUID })
		switch {
		case slice >= 0:
			v := record.VGPUs[slice]
			p.GPUs = append(p.GPUs, GPU{GPU: g, Slice: v.Slice})
		case slices.Contains(record.Native, g.UUID):
			p.GPUs = append(p.GPUs, GPU{GPU: g, Native: true})
		default:
			p.Hidden = append(p.Hidden, g.Node)
		}
	}
	return p
}

// PipeVariable tells libcuda where its domain's server is.
const PipeVariable = "CUDA_MPS_PIPE_DIRECTORY=" + page.PipesPath

// IsMember: the container is a member of a domain.
func (p *Plan) IsMember() bool { return p.Domain != "" && !p.DomainServer }

// Pipes is the folder on the host that is to be seen at page.PipesPath: of a domain's server all of it, of a member its seat; empty: none.
func (p *Plan) Pipes() string {
	if p.Domain == "" || len(p.GPUs) == 0 {
		return ""
	}
	pipes := page.Pipes(p.RunDir, p.GPUs[0].UUID, p.Domain)
	if p.DomainServer {
		return pipes
	}
	return page.Seat(filepath.Join(pipes, page.Members), p.Seat)
}

// Nodes are the device nodes that the container gets.
func (p *Plan) Nodes() []device.Node {
	nodes := make([]device.Node, 0, len(p.Common)+len(p.GPUs))
	nodes = append(nodes, p.Common...)
	for _, g := range p.GPUs {
		nodes = append(nodes, g.Node)
	}
	return nodes
}

// Apply edits doc as p says. After an error doc is half edited and must not be used.
func Apply(doc *Document, p Plan) error {
	if pipes := p.Pipes(); pipes != "" {
		p.Mounts = append(slices.Clip(p.Mounts), device.Mount{Host: pipes, Container: page.PipesPath, Options: dataOptions})
		p.Env = append(slices.Clip(p.Env), PipeVariable)
	}
	// The root of another user namespace may not reach a driver file for which the runtime, that root's parent, opens it.
	namespaces, err := doc.list("namespaces", "linux")
	if err != nil {
		return fmt.Errorf("spec: %w", err)
	}
	p.HookMounts = p.HookMounts && !slices.ContainsFunc(namespaces, func(raw []byte) bool { return speaksOf(raw, `"user"`) })
	for _, edit := range []struct {
		name string
		do   func(*Document, *Plan) error
	}{
		{"devices", editDevices},
		{"device rules", editRules},
		{"mounts", editMounts},
		{"env", editEnv},
		{"limiter", editLimiter},
		{"seccomp", editSeccomp},
		{"hooks", editHooks},
		{"annotations", editAnnotations},
	} {
		if err := edit.do(doc, &p); err != nil {
			return fmt.Errorf("spec: %s: %w", edit.name, err)
		}
	}
	return nil
}
