// SPDX-License-Identifier: Apache-2.0

// Package sim is a driver in Go that behaves as NVIDIA's resource manager does towards an unprivileged process: RM
// clients bound to the file they were made on, devices, memory with a capacity, references, channel groups.
//
// The guard talks to it where it would make ioctls on a real driver (driver = "sim" in cgpu.toml), so that every path of
// cgpu — docker, containerd, seccomp, accounting, death of a container — runs on a machine without a GPU. A container's
// guard holds one Session: in tests directly on a Driver, else through Dial to the server of cmd/cgpu-sim, which serves
// one Driver for the whole node. What a session opened goes away with it, as a process' files do in the kernel.
//
// Each card has a graphics engine that computes in time (package runlist): channel groups of engine type 0 and 1 share it by
// their timeslices, once GPFIFO_SCHEDULE let them; FIFO_DISABLE_CHANNELS pauses them. What they compute, a process says with CtrlSubmit.
//
// The layouts are those of NVIDIA's open kernel modules; upstream symbols are named where they are used.
package sim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// DefaultContextCost is what RM takes for a channel group on the graphics engine without any RM_ALLOC of memory:
// 12.66 MiB measured on an H200, here as whole 64 KiB pages.
const DefaultContextCost = 203 * 64 * quota.KiB

// DefaultTimesliceUs is RM's timeslice of a new channel group (kfifoChannelGroupGetDefaultTimeslice_GV100).
const DefaultTimesliceUs = 1024

// maxObjects bounds the driver's own memory against an endless loop of allocations.
const maxObjects = 1 << 20

// Config describes the simulated machine.
type Config struct {
	// DriverVersion is the version to imitate, such as "580.159.04".
	DriverVersion string
	GPUs          []GPU
	// ContextCost is the hidden memory of a channel group with engineType 1; zero means DefaultContextCost.
	ContextCost quota.Bytes
	Delay       Delay
	// Clock is the time by which the engines compute, from any start on; nil: the time since New. It must not go back nor
	// call the driver, and is called by one goroutine at a time.
	Clock func() time.Duration
}

// GPU is one simulated card.
type GPU struct {
	Index, Minor      int
	UUID, BusID, Name string
	Memory            quota.Bytes
}

// Delay makes calls slow, to test what waits for them. Only the call itself waits, not the calls beside it.
type Delay struct {
	Alloc   time.Duration `json:"alloc"`   // device memory by RM_ALLOC or RM_VID_HEAP_CONTROL
	Free    time.Duration `json:"free"`    // RM_FREE
	Control time.Duration `json:"control"` // RM_CONTROL
	Other   time.Duration `json:"other"`   // every other escape
}

// NodeKind is the device node a file was opened on.
type NodeKind uint8

// Nodes.
const (
	Control NodeKind = iota // /dev/nvidiactl
	GPUNode                 // /dev/nvidia<minor>
	UVM                     // /dev/nvidia-uvm
)

// FileID names one open file description of the driver. Where a structure carries a descriptor number of an nvidiactl
// file (REGISTER_FD), the caller puts the FileID there.
type FileID uint32

// Driver is the simulated kernel driver. All methods are safe for concurrent use.
type Driver struct {
	version     string
	abi         *rm.ABI
	contextCost quota.Bytes
	clock       func() time.Duration

	mu       sync.Mutex
	delay    Delay
	gpus     []*gpu // by device instance
	files    map[FileID]*file
	clients  map[uint32]*client
	exports  map[exportKey][]*memory
	events   []osEvent
	nextFile FileID
	// nextClient is the next client handle; RM hands them out consecutively.
	nextClient uint32
	// nextAddress is where the next mapping goes.
	nextAddress uint64
	objects     int
	channels    uint32 // that were ever made
	faults      int
	stray       int // writes of channels to memory that was free
	sessions    uint64
}

// gpu is a card and what is allocated on it.
type gpu struct {
	GPU
	id                uint32 // RM's gpuId
	domain, bus, slot uint32
	used              quota.Bytes // allocated + hidden
	allocated         quota.Bytes // class 0x40
	hidden            quota.Bytes // context costs and page tables
	pool              quota.Bytes // of hidden: page tables that a call took and did not use
	bar1              quota.Bytes // what windows take of it
	kept              int         // channels that UVM retains
	userShared        memory      // the page of RM_USER_SHARED_DATA, one for all clients: how often it was duped
	global            vaspace     // of all devices that have none of their own, whosever they are (gpugrpGetGlobalVASpace)
	engine            *engine
	xids              []uint64 // that were reported, in their order
	lost              bool     // off the bus: what is there stays, and nothing of it answers
}

// reserve counts n bytes of the card as used, if they are free.
func (g *gpu) reserve(n quota.Bytes) bool {
	if n > g.Memory-g.used {
		return false
	}
	g.used += n
	return true
}

// reserveHidden takes what no allocation shows.
func (g *gpu) reserveHidden(n quota.Bytes) bool {
	if !g.reserve(n) {
		return false
	}
	g.hidden += n
	return true
}

// release gives it back.
func (g *gpu) release(n quota.Bytes) {
	g.used -= n
	g.hidden -= n
}

// file is an open file description.
type file struct {
	id       FileID
	session  uint64
	kind     NodeKind
	minor    int
	attached bool       // ATTACH_GPUS_TO_FD was done
	identity *file      // REGISTER_FD: whose clients this file may use (ctl_nvfp)
	clients  []*client  // made on this file
	window   *window    // what it is prepared to be mapped for, once
	pages    *hostPages // what of host memory that is
	space               // of nvidia-uvm
}

// owner is the file whose clients f may use.
func (f *file) owner() *file {
	if f.identity != nil {
		return f.identity
	}
	return f
}

// New makes a driver. It refuses a table in which two GPUs have the same minor, bus or UUID, and driver versions whose
// structures pkg/rm does not know.
func New(cfg Config) (*Driver, error) {
	abi, err := rm.ForDriver(cfg.DriverVersion, false)
	if err != nil {
		return nil, fmt.Errorf("sim: %w", err)
	}
	d := &Driver{
		version: cfg.DriverVersion, abi: abi, contextCost: cfg.ContextCost, delay: cfg.Delay,
		files: map[FileID]*file{}, clients: map[uint32]*client{}, exports: map[exportKey][]*memory{},
		nextFile: 1, nextClient: firstClient, nextAddress: 1 << 32,
	}
	if d.clock = cfg.Clock; d.clock == nil {
		start := time.Now()
		d.clock = func() time.Duration { return time.Since(start) }
	}
	if d.contextCost == 0 {
		d.contextCost = DefaultContextCost
	}
	if len(cfg.GPUs) == 0 {
		return nil, errors.New("sim: no GPU in the configuration; add at least one")
	}
	if len(cfg.GPUs) > maxGPUs {
		return nil, fmt.Errorf("sim: %d GPUs in the configuration: want at most %d", len(cfg.GPUs), maxGPUs)
	}
	for _, c := range cfg.GPUs {
		g := &gpu{GPU: c, engine: newEngine(), userShared: memory{refs: 1}}
		if _, err := fmt.Sscanf(c.BusID, "%x:%x:%x", &g.domain, &g.bus, &g.slot); err != nil || g.domain > 0xffff ||
			g.bus > 0xff || g.slot > 0x1f {
			return nil, fmt.Errorf("sim: GPU %d: bus id %q: want a PCI address such as 0000:01:00.0", c.Index, c.BusID)
		}
		if _, err := uuidBytes(c.UUID); err != nil {
			return nil, fmt.Errorf("sim: GPU %d: %w", c.Index, err)
		}
		g.id = g.domain<<16 | g.bus<<8 | g.slot
		if slices.ContainsFunc(d.gpus, func(o *gpu) bool { return o.id == g.id || o.Minor == g.Minor || o.UUID == g.UUID }) {
			return nil, fmt.Errorf("sim: GPU %d: its minor %d, bus id %s or UUID %s is another GPU's", c.Index, c.Minor, c.BusID, c.UUID)
		}
		d.gpus = append(d.gpus, g)
	}
	return d, nil
}

// SetDelay changes the delays of later calls.
func (d *Driver) SetDelay(delay Delay) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.delay = delay
}

// Session is what one executor (a container's guard) may do with the driver.
type Session struct {
	d      *Driver
	id     uint64
	minors []int
	ctx    context.Context
	cancel context.CancelFunc
}

// Session starts a session whose executor has the GPU nodes with these minors open: devices of other GPUs cannot be
// allocated (nv_is_gpu_accessible in kernel-open/nvidia/nv.c).
func (d *Driver) Session(minors []int) *Session {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sessions++
	ctx, cancel := context.WithCancel(context.Background())
	return &Session{d: d, id: d.sessions, minors: slices.Clone(minors), ctx: ctx, cancel: cancel}
}

// OpenFile opens a node. The minor counts for GPUNode only and must be one of the session's.
func (s *Session) OpenFile(node NodeKind, minor int) (FileID, error) {
	d := s.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if s.ctx.Err() != nil {
		return 0, errClosed
	}
	switch node {
	case Control, UVM:
		minor = 0
	case GPUNode:
		if !slices.Contains(s.minors, minor) || d.byMinor(minor) == nil {
			return 0, fmt.Errorf("sim: open GPU node %d: %w", minor, syscall.ENXIO)
		}
	default:
		return 0, fmt.Errorf("sim: open node kind %d: %w", node, syscall.EINVAL)
	}
	f := &file{id: d.nextFile, session: s.id, kind: node, minor: minor}
	d.nextFile++
	d.files[f.id] = f
	return f.id, nil
}

// CloseFile is the last close of a file: its clients are freed with everything below them.
func (s *Session) CloseFile(id FileID) error {
	d := s.d
	d.mu.Lock()
	defer d.mu.Unlock()
	f := d.files[id]
	if f == nil || f.session != s.id {
		return fmt.Errorf("sim: close file %d: %w", id, syscall.EBADF)
	}
	d.tick()
	d.closeFile(f)
	return nil
}

// CloseOthers closes all files of the session but some.
func (s *Session) CloseOthers(known []FileID) {
	d := s.d
	d.mu.Lock()
	defer d.mu.Unlock()
	s.closeFiles(known)
}

// closeFiles closes all of the session's files but some. The driver is locked.
func (s *Session) closeFiles(but []FileID) {
	s.d.tick()
	for _, f := range s.d.files {
		if f.session == s.id && !slices.Contains(but, f.id) {
			s.d.closeFile(f)
		}
	}
}

func (d *Driver) closeFile(f *file) {
	d.endSpace(&f.space)
	for _, c := range slices.Clone(f.clients) {
		d.freeClient(c)
	}
	d.events = slices.DeleteFunc(d.events, func(e osEvent) bool { return e.file == f })
	for _, other := range d.files {
		if other.identity == f {
			other.identity = nil
		}
	}
	delete(d.files, f.id)
}

// CloseExport is the last close of an exported descriptor: the memory behind key loses the reference. A key that names
// nothing is no error.
func (s *Session) CloseExport(key int32) error {
	d := s.d
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closeExport(exportKey{s.id, key})
	return nil
}

// Close closes everything the session opened, as the kernel does when a process dies. A call in progress ends first.
func (s *Session) Close() error {
	d := s.d
	d.mu.Lock()
	defer d.mu.Unlock()
	s.cancel()
	s.closeFiles(nil)
	for k := range d.exports {
		if k.session == s.id {
			d.closeExport(k)
		}
	}
	return nil
}

// Ioctl executes one call on a file for the process pid (its tgid in the initial namespace; RM's ProcID) and its thread
// tid. Call's outer structure and blocks are read and written as RM does with the caller's memory. As with the real
// driver, most refusals are in the structure's status and the errno is 0.
func (s *Session) Ioctl(id FileID, pid, tid int32, call *rm.Call) syscall.Errno {
	d := s.d
	d.mu.Lock()
	wait := d.delayOf(call)
	d.mu.Unlock()
	if wait > 0 {
		t := time.NewTimer(wait)
		defer t.Stop()
		select {
		case <-t.C:
		case <-s.ctx.Done():
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	f := d.files[id]
	if s.ctx.Err() != nil || f == nil || f.session != s.id {
		return syscall.EBADF
	}
	d.tick()
	return d.dispatch(&request{s: s, d: d, f: f, pid: pid, tid: tid, call: call})
}

var errClosed = fmt.Errorf("sim: session is closed: %w", syscall.EBADF)

func (d *Driver) byMinor(minor int) *gpu {
	for _, g := range d.gpus {
		if g.Minor == minor {
			return g
		}
	}
	return nil
}

func (d *Driver) byID(id uint32) (*gpu, int) {
	for i, g := range d.gpus {
		if g.id == id {
			return g, i
		}
	}
	return nil, 0
}
