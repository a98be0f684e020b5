// Package ledger is the node's record of all vGPUs, one JSON file under the run directory (/run/cgpu/ledger.json).
//
// It also keeps how each GPU is shared (sched.Card), where somebody has set that (cgpu policy).
//
// cgpu-runtime reserves in it before a container exists, cgpu-hook, cgpu-guard and cgpu gc release from it, cgpu reads
// and changes it, and each guard follows the changes. There is no daemon: every change happens under one flock and lands by an atomic rename, so a kill at
// any instruction leaves either the old or the new state.
package ledger

import (
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// Record is one container's reservation.
type Record struct {
	ID     string `json:"id"`
	Nonce  string `json:"nonce"` // 16 hex digits, new for every create of the same ID
	Bundle string `json:"bundle"`
	// Name is a human name where the spec tells one (CRI annotations), else empty.
	Name    string    `json:"name,omitempty"`
	Created time.Time `json:"created"`
	VGPUs   []VGPU    `json:"vgpus"`
	Native  []string  `json:"native,omitempty"` // UUIDs of whole GPUs in the same container
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
	// Page is the file of the container's vGPU page (package page); empty where it has none.
	Page string `json:"page,omitempty"`
	// Paused stops the container's GPU work until it is cleared (cgpu pause, cgpu resume).
	Paused bool `json:"paused,omitempty"`
}

// VGPU is the slice of one GPU.
type VGPU struct {
	UUID     string         `json:"uuid"`
	Limit    quota.Bytes    `json:"limit"`
	Spill    quota.Bytes    `json:"spill,omitempty"` // host memory beyond Limit
	Weight   int            `json:"weight"`          // ≥ 1
	Percent  int            `json:"percent,omitempty"`
	Priority quota.Priority `json:"priority"`
}

// Share is what the slice asks of the GPU's time.
func (v VGPU) Share() sched.Share {
	return sched.Share{Weight: max(v.Weight, 1), Percent: v.Percent, Priority: v.Priority}
}
