// SPDX-License-Identifier: Apache-2.0

// Package schema is the JSON that commands print for scripts and that cgpu-agent answers at /v1/smi: types, and nothing that fills them,
// so that who only reads it links nothing else. A name ends with its unit, parts are percent, and what has a name is no number.
// docs/json.md is made from it. What guards answer (package api), the ledger and the page have forms of their own.
package schema

import (
	"math"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// Version goes up when a field is renamed, taken away or means something else. Fields may be added under the same one.
const Version = 2

// Percent is a part of a GPU's time, with a tenth.
type Percent float64

// PercentOf is a part in thousandths as one in hundredths.
func PercentOf(p sched.Permille) Percent { return Percent(p) / 10 }

// Seconds is a time.
type Seconds float64

// SecondsOf is a duration in seconds. One division: what Duration.Seconds adds up prints as 1.2345678900000001.
func SecondsOf(d time.Duration) Seconds { return Seconds(float64(d) / 1e9) }

// Duration is the time as Go counts it.
func (s Seconds) Duration() time.Duration { return time.Duration(math.Round(float64(s) * 1e9)) }

// Node is a node's GPUs and who shares them.
type Node struct {
	Schema        int    `json:"schema"` // version of this page
	Driver        string `json:"driver"` // "nvidia" or "sim"
	DriverVersion string `json:"driver_version"`
	Stale         string `json:"stale,omitempty"` // why node.json describes the past
	Watched       bool   `json:"watched"`         // somebody watches the health of the GPUs (cgpu health watch), and what he finds can be read
	GPUs          []GPU  `json:"gpus"`
}

// GPU is one of a node's.
type GPU struct {
	Index    int         `json:"index"` // as NVML counts
	UUID     string      `json:"uuid"`
	BusID    string      `json:"bus_id"`
	Name     string      `json:"name"`
	Total    quota.Bytes `json:"total_bytes"`
	Reserved quota.Bytes `json:"reserved_bytes"` // sum of the limits
	Used     quota.Bytes `json:"used_bytes"`     // sum of what vGPUs use
	// Outside is what the driver has given out beside that, at least: to programs outside cgpu, and a little to cgpu itself. Absent where
	// that is not known, and of a GPU that no container has.
	Outside *quota.Bytes `json:"outside_bytes,omitempty"`
	Policy  string       `json:"policy"`   // in effect
	MaxInst int          `json:"max_inst"` // containers that may share it
	// PrioRatio is the most that high-priority containers get while others want the GPU.
	PrioRatio Percent `json:"prio_ratio_percent"`
	Promised  Percent `json:"promised_percent"` // sum of the hard caps
	// Utilization is the sum of what vGPUs used of the last second; absent where no guard can tell.
	Utilization *Percent `json:"utilization_percent,omitempty"`
	Fault       string   `json:"fault,omitempty"` // why it is unhealthy
	VGPUs       []VGPU   `json:"vgpus"`           // in the order of their creation
}

// VGPU is one container's share of one GPU.
type VGPU struct {
	ID    string `json:"id"`
	Nonce string `json:"nonce,omitempty"` // of the reservation: no other container has it
	Root  string `json:"root,omitempty"`  // of the low-level runtime's state, in which no other container has the ID
	// SharedID: another container of the node has the ID, too, under another root.
	SharedID bool `json:"shared_id,omitempty"`

	Name    string    `json:"name,omitempty"`
	Created time.Time `json:"created"`
	State   string    `json:"state"`            // as cgpu smi --filter has them, with spaces
	Native  bool      `json:"native,omitempty"` // the whole GPU, without a limit
	// Enforcement is who keeps the container to its limits: "guard", "preload", or "driver".
	Enforcement string `json:"enforcement"`
	// DriverLimits: NVIDIA's driver limits the memory of its cgroup; beside enforcement, unless that is "driver".
	DriverLimits bool `json:"driver_limits,omitempty"`
	// Domain is the trust domain that it computes in, or whose MPS server it is.
	Domain       string      `json:"domain,omitempty"`
	DomainServer bool        `json:"domain_server,omitempty"` // it is that server
	Threads      int         `json:"threads,omitempty"`       // percent of the multiprocessors, of a member; absent: all
	Limit        quota.Bytes `json:"limit_bytes"`
	Used         quota.Bytes `json:"used_bytes"`
	Managed      quota.Bytes `json:"managed_bytes"` // the part of used_bytes that is managed memory
	Spill        quota.Bytes `json:"spill_bytes"`   // host memory allowed beyond limit_bytes
	Spilled      quota.Bytes `json:"spilled_bytes"` // used of it; not in used_bytes
	Peak         quota.Bytes `json:"peak_bytes"`
	Denied       uint64      `json:"denied"` // allocations refused because of the limit
	Weight       int         `json:"weight,omitempty"`
	Percent      int         `json:"percent,omitempty"`  // as asked
	Priority     string      `json:"priority,omitempty"` // best-effort, default or high; absent of a whole GPU
	Paused       bool        `json:"paused,omitempty"`   // by cgpu pause
	GuardPID     int         `json:"guard_pid,omitempty"`
	InitPID      int         `json:"init_pid,omitempty"`
	Processes    []Process   `json:"processes"`
	// Compute is what the guard says of the GPU's time; absent where it says nothing.
	Compute *Compute `json:"compute,omitempty"`
	// Calls are of the whole container; they are repeated for each of its GPUs.
	Calls Calls `json:"calls"`
}

// Process is a process of a container on one GPU.
type Process struct {
	PID   int         `json:"pid"`   // on the host
	NSPID int         `json:"nspid"` // in the container
	Name  string      `json:"name"`
	Used  quota.Bytes `json:"used_bytes"`
}

// Compute is the GPU time of one vGPU, since the container's start unless said otherwise.
type Compute struct {
	Policy   string  `json:"policy"` // in effect on the GPU
	Weight   int     `json:"weight"`
	Percent  int     `json:"percent,omitempty"` // as asked
	Priority string  `json:"priority"`
	Cap      Percent `json:"cap_percent,omitempty"` // hard cap; absent: none
	Paused   bool    `json:"paused,omitempty"`
	TSGs     int     `json:"tsgs"` // channel groups on the graphics engine
	Busy     int     `json:"busy"` // of those, with work lately
	Slice    Seconds `json:"slice_seconds"`
	// Ruled is false while no arbiter decides about the GPU's time, though the container has work.
	Ruled bool `json:"ruled"`
	// What follows comes from the driver's context-switch records. Exact is false where it gives none.
	Exact       bool    `json:"exact"`
	Utilization Percent `json:"utilization_percent"` // of the GPU's time, in about the last second
	Entitled    Percent `json:"entitled_percent"`    // what it should have been
	GPUTime     Seconds `json:"gpu_time_seconds"`    // on the engine
	Waiting     Seconds `json:"waiting_seconds"`     // switched out in the middle of work
	Throttled   Seconds `json:"throttled_seconds"`   // with work, while a hard cap, a turn or cgpu pause kept it off
	Switches    uint64  `json:"switches"`            // times that it was switched in
	Preemptions uint64  `json:"preemptions"`         // of the times that it was switched out, those at the end of its timeslice
	Pauses      uint64  `json:"pauses"`              // by a hard cap or cgpu pause
	Granted     Seconds `json:"granted_seconds"`     // what its share of the GPU's busy time would have been
}

// Calls count trapped calls since the start.
type Calls struct {
	Trapped         uint64 `json:"trapped"`
	Denied          uint64 `json:"denied"`
	Interrupted     uint64 `json:"interrupted"`      // carried out while a signal took the caller away
	Replayed        uint64 `json:"replayed"`         // of those, answered when the call came again
	Undone          uint64 `json:"undone"`           // of those, taken back because it did not
	Throttled       uint64 `json:"throttled"`        // delayed by the rate limit
	Killed          uint64 `json:"killed"`           // clients freed because of uncharged memory
	ProcessesKilled uint64 `json:"processes_killed"` // for managed memory beyond the limit
	Spills          uint64 `json:"spills"`           // allocations that went to host memory
}

// GPUProcess is a process on one GPU, with the container that it is of.
type GPUProcess struct {
	Container string      `json:"container"`
	Nonce     string      `json:"nonce,omitempty"`
	Name      string      `json:"name,omitempty"` // of the container
	GPU       int         `json:"gpu"`
	UUID      string      `json:"uuid"`
	PID       int         `json:"pid"`   // on the host
	NSPID     int         `json:"nspid"` // in the container
	Used      quota.Bytes `json:"used_bytes"`
	Process   string      `json:"process"`
}

// Policy is how a GPU is shared.
type Policy struct {
	GPU        int     `json:"gpu"`
	Name       string  `json:"name"`
	UUID       string  `json:"uuid"`
	Policy     string  `json:"policy"` // in effect
	SetBy      string  `json:"set_by"` // "cgpu policy" or "cgpu.toml"
	MaxInst    int     `json:"max_inst"`
	PrioRatio  Percent `json:"prio_ratio_percent"`
	Containers int     `json:"containers"`
	Promised   Percent `json:"promised_percent"` // sum of the hard caps
}

// Guard is what a guard says of its container; in preload mode, what the page does.
type Guard struct {
	GuardPID  int              `json:"guard_pid"`
	InitPID   int              `json:"init_pid"`  // the container's first process, on the host; 0 before it is known
	Listeners int              `json:"listeners"` // live seccomp filters: the container's own and one for each exec
	VGPUs     []GuardVGPU      `json:"vgpus"`
	Processes []GuardedProcess `json:"processes"`
	Calls     Calls            `json:"calls"`
}

// GuardVGPU is the memory of one vGPU. A native one has no limit.
type GuardVGPU struct {
	Index   int         `json:"index"`
	UUID    string      `json:"uuid"`
	Native  bool        `json:"native,omitempty"`
	Limit   quota.Bytes `json:"limit_bytes"`
	Used    quota.Bytes `json:"used_bytes"`
	Managed quota.Bytes `json:"managed_bytes"` // the part of used_bytes that is managed memory
	Spill   quota.Bytes `json:"spill_bytes"`   // host memory allowed beyond limit_bytes
	Spilled quota.Bytes `json:"spilled_bytes"` // used of it; not in used_bytes
	Peak    quota.Bytes `json:"peak_bytes"`
	Denied  uint64      `json:"denied"`            // allocations refused because of the limit
	Compute *Compute    `json:"compute,omitempty"` // as cgpu smi prints it
}

// GuardedProcess is a process that has used the GPU.
type GuardedProcess struct {
	PID     int           `json:"pid"`   // on the host
	NSPID   int           `json:"nspid"` // in the container
	Name    string        `json:"name"`
	Clients int           `json:"clients"`
	Used    []quota.Bytes `json:"used_bytes"` // in the order of vgpus
}

// Page is a container's vGPU page.
type Page struct {
	Path   string     `json:"path"`
	Flags  []string   `json:"flags"`
	Change uint32     `json:"change"`
	VGPUs  []PageVGPU `json:"vgpus"`
}

// PageVGPU is a vGPU on it.
type PageVGPU struct {
	Minor     uint32      `json:"minor"`
	Native    bool        `json:"native,omitempty"`
	Weight    uint32      `json:"weight"`
	Limit     quota.Bytes `json:"limit_bytes"`
	Used      quota.Bytes `json:"used_bytes"`
	Managed   quota.Bytes `json:"managed_bytes"`
	Spill     quota.Bytes `json:"spill_bytes"`
	Spilled   quota.Bytes `json:"spilled_bytes"`
	Timeslice Seconds     `json:"timeslice_seconds,omitempty"`
	Processes int         `json:"processes,omitempty"` // with a slot, in preload mode
}

// Log is the end of a guard's log.
type Log struct {
	Path  string   `json:"path"`
	Lines []string `json:"lines"`
	Error string   `json:"error,omitempty"` // why it could not be read
}

// Upgrade is what came of cgpu upgrade.
type Upgrade struct {
	Containers []UpgradedContainer `json:"containers"`
}

// UpgradedContainer is what came of one container.
type UpgradedContainer struct {
	ID      string  `json:"id"`
	Outcome string  `json:"outcome"`       // upgraded, already, failed, gone, preload, skipped
	Stall   Seconds `json:"stall_seconds"` // for how long its GPU calls waited, the last time that it was tried
	Tries   int     `json:"tries"`
	Error   string  `json:"error,omitempty"`
}

// Install is what `cgpu install` or `cgpu uninstall` has done.
type Install struct {
	Schema  int    `json:"schema"` // version of this page
	Engine  string `json:"engine"`
	Runtime string `json:"runtime"` // its name
	Config  string `json:"config"`  // the engine's file
	DryRun  bool   `json:"dry_run"` // nothing was changed
	// what was changed, or would be; empty where there is nothing to change
	Files []InstallFile `json:"files"`
	// what is printed without -o json, but for the diff of a dry run: what was added, what to do next
	Lines []string `json:"lines"`
}

// InstallFile is a file that was changed.
type InstallFile struct {
	Path   string `json:"path"`
	Change string `json:"change"`         // made, edited or removed
	Diff   string `json:"diff,omitempty"` // of a dry run
}

// KMFile is a file of `cgpu km`.
type KMFile struct {
	Path string `json:"path"` // below the mount point
	Text string `json:"text"` // what is read there
}
