// SPDX-License-Identifier: Apache-2.0

// Package ledger is the node's record of all vGPUs, one JSON file under the run directory (/run/cgpu/ledger.json).
//
// It also keeps how each GPU is shared (sched.Card), where somebody has set that (cgpu policy).
//
// cgpu-runtime reserves in it before a container exists, cgpu-hook, cgpu-guard and cgpu gc release from it, cgpu reads
// and changes it, and each guard follows the changes. There is no daemon: every change happens under one flock and lands by an atomic
// rename, so a kill at any instruction leaves either the old or the new state.
package ledger

import (
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// Record is one container's reservation.
type Record struct {
	ID string `json:"id"`
	// Nonce is what the record is found by: 16 hex digits, new for every create, which no other record has.
	Nonce string `json:"nonce"`
	// Root is the folder of the low-level runtime's state, in which no other container has the ID. Empty where nobody knows: of cgpu run,
	// and where an older program wrote the record, or the ledger since.
	Root   string `json:"root,omitempty"`
	Bundle string `json:"bundle"`
	// Cgroup is the container's, from the root of the hierarchies, where config.json names one. No other record's is above or below it.
	Cgroup string `json:"cgroup,omitempty"`
	// Name is a human name where the spec tells one (CRI annotations), else empty.
	Name string `json:"name,omitempty"`
	// Owners are whom the record's memory counts for (Budget): "user:1000", "account:physics".
	Owners  []string  `json:"owners,omitempty"`
	Created time.Time `json:"created"`
	VGPUs   []VGPU    `json:"vgpus"`
	Native  []string  `json:"native,omitempty"` // UUIDs of whole GPUs in the same container
	// Allocated says by which allocations of Kubernetes the container has those GPUs; none where it asked for itself.
	Allocated []Allocation `json:"allocated,omitempty"`
	// ByPod are the annotations of the pod that were applied to the container while it ran (cgpu-agent). What is in here and
	// on the pod no more is set back.
	ByPod map[string]string `json:"byPod,omitempty"`
	// Socket receives the seccomp listener from runc; Control answers cgpu smi.
	Socket  string `json:"socket"`
	Control string `json:"control"`
	// GuardPID and GuardStart (clock ticks after boot, /proc/PID/stat field 22) identify the guard; 0 before it runs.
	GuardPID   int    `json:"guardPid,omitempty"`
	GuardStart uint64 `json:"guardStart,omitempty"`
	// LauncherPID and LauncherStart identify the runtime process that reserved; they decide whether a record without
	// a guard is still being created.
	LauncherPID   int    `json:"launcherPid"`
	LauncherStart uint64 `json:"launcherStart"`
	// InitPID and InitStart identify the container's first process. The guard sets them with Update when the first
	// seccomp listener arrives; 0 before. A guard may die before its container, whose processes then still hold
	// device memory, so a record is dead only when both are gone.
	InitPID   int    `json:"initPid,omitempty"`
	InitStart uint64 `json:"initStart,omitempty"`
	// Preload: no guard, the preload library enforces; GuardPID, Socket and Control are empty then.
	Preload bool `json:"preload,omitempty"`
	// DriverOnly, with Preload and DriverLimits: no library either, and no page.
	DriverOnly bool `json:"driverOnly,omitempty"`
	// DriverLimits: NVIDIA's driver limits the container's cgroup to the same memory (cgpu-hook started).
	DriverLimits bool `json:"driverLimits,omitempty"`
	// LimitedCgroup is the cgroup, below the root of cgroup v2, that its first process was in before its program began.
	LimitedCgroup string `json:"limitedCgroup,omitempty"`
	// Domain is the container's trust domain, whose members compute side by side through one MPS server; empty: none. DomainServer: it is
	// that server's record.
	Domain       string `json:"domain,omitempty"`
	DomainServer bool   `json:"domainServer,omitempty"`
	// Threads is the part of the multiprocessors, in percent, that a member's programs get when they start; 0: all. Seat is the number of
	// its folder at the domain's server (page.Seat), which no other member on the GPU has.
	Threads int `json:"threads,omitempty"`
	Seat    int `json:"seat,omitempty"`
	// Retired, of a domain's server: it is being ended, and takes no more members.
	Retired bool `json:"retired,omitempty"`
	// Page is the file of the container's vGPU page (package page); empty where it has none.
	Page string `json:"page,omitempty"`
	// Paused stops the container's GPU work until it is cleared (cgpu pause, cgpu resume).
	Paused bool `json:"paused,omitempty"`
}

// VGPU is the slice of one GPU.
type VGPU struct {
	UUID string `json:"uuid"`
	quota.Slice
}

// Allocation is one share of a GPU that was allocated to the container (package alloc).
type Allocation struct {
	ID   string `json:"id"`   // of the share
	UUID string `json:"uuid"` // of the GPU, which is among the record's VGPUs or its native ones
	// Containers may hold the share at the same time; 0 means 1.
	Containers int `json:"containers,omitempty"`
	// Given is the slice as it was allocated, which the container's may be less than, or not, later: no pod's author gets
	// beyond it (cgpu-agent applies annotations of running pods). Zero for a whole GPU.
	Given VGPU `json:"given,omitzero"`
	// Set is what administrators have set of the slice since (Change), and no pod's author gets beyond that either.
	Set Settings `json:"set,omitzero"`
	// Plugin: a device plugin allocated it, beside which the node may leave some choices to the pod's author.
	Plugin bool `json:"plugin,omitempty"`
}

// Settings are those of a slice that were set; nil is one that was not.
type Settings struct {
	Limit    *quota.Bytes    `json:"limit,omitempty"`
	Spill    *quota.Bytes    `json:"spill,omitempty"`
	Weight   *int            `json:"weight,omitempty"`
	Percent  *int            `json:"percent,omitempty"` // 0: none
	Priority *quota.Priority `json:"priority,omitempty"`
}
