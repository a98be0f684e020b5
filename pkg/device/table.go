// SPDX-License-Identifier: Apache-2.0

// Package device knows the node's physical GPUs and the driver files that a container needs to use them.
//
// cgpu-refresh writes the Table once per boot, driver or configuration change; cgpu-runtime, cgpu-guard and cgpu only
// read it, because asking NVML costs 12 to 140 ms and the runtime starts for every container of the node.
package device

import (
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// TableVersion is the format of node.json; a reader refuses any other.
const TableVersion = 1

// Driver kinds.
const (
	DriverNVIDIA = "nvidia"
	DriverSim    = "sim"
)

// Table is the node as the runtime sees it. It is stored as JSON in <run dir>/node.json.
type Table struct {
	Version       int    `json:"version"`
	Driver        string `json:"driver"`        // DriverNVIDIA or DriverSim
	DriverVersion string `json:"driverVersion"` // such as "580.159.04"; for the simulated driver the version it imitates
	GPUs          []GPU  `json:"gpus"`          // ascending by Index
	// Nodes are the device nodes every vGPU container gets beside its GPUs: nvidiactl and nvidia-uvm.
	Nodes  []Node  `json:"nodes"`
	Mounts []Mount `json:"mounts,omitempty"` // driver libraries and binaries (nvcdi); none for the simulated driver
	// HookMounts: a hook can mount them so that each is read-only before it is seen (package mount).
	HookMounts bool   `json:"hookMounts,omitempty"`
	Links      []Link `json:"links,omitempty"` // symbolic links to make in the container
	// LibDirs are folders of driver libraries in the container.
	LibDirs []string `json:"libDirs,omitempty"`
	// Libraries are what the container's ld cache must have.
	Libraries []Library `json:"libraries,omitempty"`
	Env       []string  `json:"env,omitempty"`
	// HostMemory is the machine's (MemTotal of /proc/meminfo).
	HostMemory quota.Bytes `json:"hostMemory,omitempty"`
	// Hook is where cgpu-hook is on this machine: the CDI specs of claims name it, which cgpu-agent writes in a container.
	Hook string `json:"hook,omitempty"`
	// DriverRoot is driver_root of the cgpu.toml that the table was made from.
	DriverRoot string `json:"driverRoot,omitempty"`
	Config     Config `json:"config"`
	Key        Key    `json:"key"`
}

// GPU is one physical GPU.
type GPU struct {
	Index  int         `json:"index"`
	UUID   string      `json:"uuid"` // "GPU-…"
	Minor  int         `json:"minor"`
	BusID  string      `json:"busId"` // "0000:01:00.0", domain in four digits or more
	Name   string      `json:"name"`
	Memory quota.Bytes `json:"memory"` // total, as NVML reports it
	Node   Node        `json:"node"`
	// What schedulers select by; empty where the driver does not tell.
	Architecture      string `json:"architecture,omitempty"`      // "Hopper"
	ComputeCapability string `json:"computeCapability,omitempty"` // "9.0"
	// NVLink is the same for GPUs of the node that reach each other by NVLink, and empty for a GPU that reaches no other.
	NVLink string `json:"nvlink,omitempty"`
	// Fault is why the GPU is unhealthy (pkg/health), in tables for those who give out GPUs; it is not in node.json.
	Fault string `json:"-"`
}

// Node is a character device in the container.
type Node struct {
	Path     string `json:"path"`     // in the container: /dev/nvidia0
	HostPath string `json:"hostPath"` // on the host; with the simulated driver a node of ours under /dev/cgpu-sim
	Major    uint32 `json:"major"`
	Minor    uint32 `json:"minor"`
	// Bind says that the node must be bind mounted from HostPath instead of made by the runtime (simulated driver:
	// the guard knows the file by its inode).
	Bind bool `json:"bind,omitempty"`
}

// Mount is a read-only bind mount of a driver file.
type Mount struct {
	Host      string   `json:"host"`
	Container string   `json:"container"`
	Options   []string `json:"options"`
}

// Link is a symbolic link in the container.
type Link struct {
	Target string `json:"target"`
	Path   string `json:"path"`
}

// Library is a name under which the container's dynamic linker finds a driver library.
type Library struct {
	Name  string `json:"name"`
	Path  string `json:"path"`  // of the mount
	Flags int32  `json:"flags"` // as in an ld cache: ldcache.X8664 and so on
}

// Config is the part of cgpu.toml that the runtime and the guard need, with defaults filled in.
type Config struct {
	// Runtimes are the low-level runtimes to look for, in order: names in PATH or absolute paths.
	Runtimes           []string      `json:"runtimes"`
	Overcommit         float64       `json:"overcommit"` // sum of limits on a GPU ≤ Overcommit × its memory; 1 by default
	MaxInst            int           `json:"maxInst"`    // containers per GPU, where its card in the ledger says nothing else
	Placement          string        `json:"placement"`  // "binpack" or "spread"
	AllowUnknownDriver bool          `json:"allowUnknownDriver,omitempty"`
	ContextOverhead    quota.Bytes   `json:"contextOverhead"` // hidden memory charged for each CUDA context
	GuardStartTimeout  time.Duration `json:"guardStartTimeout"`
	MaxClients         int           `json:"maxClients"`  // RM clients per container
	MaxTSGs            int           `json:"maxTsgs"`     // channel groups per container and GPU
	MaxChannels        int           `json:"maxChannels"` // channels per container and GPU
	// CallsPerSecond and CallsBurst bound the trapped calls of one container: each takes time of the guard's and of the driver's.
	CallsPerSecond int `json:"callsPerSecond"`
	CallsBurst     int `json:"callsBurst"`
	// Policy and PrioRatio are, with MaxInst, the card of a GPU that has none in the ledger.
	Policy    sched.Policy `json:"policy"`
	PrioRatio int          `json:"prioRatio"` // percent
	// A channel group runs for BaseTimeslice × weight at a time, less where a round of all would pass MaxRound, and never
	// less than MinTimeslice, unless a high-priority container is busy: then for HighPrioTimeslice.
	BaseTimeslice     time.Duration `json:"baseTimeslice"`
	MinTimeslice      time.Duration `json:"minTimeslice"`
	MaxRound          time.Duration `json:"maxRound"`
	HighPrioTimeslice time.Duration `json:"highPrioTimeslice"`
	// MaxLoss is the most that preemptions take of a GPU's time, in percent, so that programs that wait for each kernel get theirs; 0 in
	// what an older version wrote.
	MaxLoss int `json:"maxLoss,omitempty"`
	// CapCycle is the node-wide cycle in which containers with a hard cap have their slots.
	CapCycle time.Duration `json:"capCycle"`
	// Enforcement is EnforceGuard, EnforcePreload or EnforceDriver.
	Enforcement string `json:"enforcement"`
	// DriverLimits has NVIDIA's driver limit the memory of containers' cgroups: too, or with EnforceDriver alone.
	DriverLimits bool `json:"driverLimits,omitempty"`
	// Managed says what managed memory (cudaMallocManaged) is to a quota: ManagedLimit, ManagedDeny or ManagedAllow.
	Managed string `json:"managed"`
	// HMM leaves heterogeneous memory management on: ordinary host memory may then move to the GPU, uncounted.
	HMM bool `json:"hmm,omitempty"`
	// Domains are the trust domains; none: there are none.
	Domains []Domain `json:"domains,omitempty"`
	// Profiling lets containers read the GPU's hardware counters, which count what neighbours do, too.
	Profiling bool `json:"profiling,omitempty"`
	// Graphics lets containers draw (Vulkan, OpenGL): a draw, or a dispatch of such a context, is not interrupted when its time is over.
	Graphics bool `json:"graphics,omitempty"`
	// Keeper has a guard that is killed replaced by another one.
	Keeper bool `json:"keeper,omitempty"`
	// MaxSpill bounds the sum of all containers' spill, SpillReserve is host memory that spilling leaves free.
	MaxSpill     Part `json:"maxSpill"`
	SpillReserve Part `json:"spillReserve"`
	// MaxHostMemory bounds the host memory that the driver makes for one container, beside its spill.
	MaxHostMemory Part `json:"maxHostMemory"`
	// Headroom is memory of each GPU, and HeadroomCores percent of its time, that no scheduler of Kubernetes is told of: running pods are
	// raised into it.
	Headroom      Part `json:"headroom,omitzero"`
	HeadroomCores int  `json:"headroomCores,omitempty"`
	// Dialects are the other systems' variables and annotations that containers of this node may ask with.
	Dialects []quota.Dialect `json:"dialects,omitempty"`
	// Pods is PodsAny, PodsAllocated or PodsGPUShare; empty: PodsAny.
	Pods string `json:"pods,omitempty"`
	// PodSettings are what a pod's author may choose himself beside a device plugin's allocation.
	PodSettings []quota.Choice `json:"podSettings,omitempty"`
	// PodResources is the socket of the kubelet's API of that name, for PodsGPUShare.
	PodResources string `json:"podResources,omitempty"`
	// NoSwitchRecords does without the driver's records of context switches.
	NoSwitchRecords bool `json:"noSwitchRecords,omitempty"`
	// Health says what follows for a GPU that is unhealthy: HealthOn, HealthOff or HealthEvict; empty: HealthOn.
	Health           string   `json:"health,omitempty"`
	HealthIgnoreXids []uint64 `json:"healthIgnoreXids,omitempty"`
}

// What follows for a GPU that is unhealthy.
const (
	HealthOn    = "on"    // no new containers
	HealthOff   = "off"   // nothing; cgpu health and cgpu events tell
	HealthEvict = "evict" // no new containers, and pods that have it by a claim of DRA are ended
)

// Ways of enforcement.
const (
	EnforceGuard   = "guard"
	EnforcePreload = "preload"
	EnforceDriver  = "driver" // limits = "driver" in cgpu.toml: neither guard nor library
)

// Who limits memory, as cgpu.toml has it.
const (
	LimitsGuard  = "guard"  // the guard, or the library in its place
	LimitsBoth   = "both"   // the driver, too
	LimitsDriver = "driver" // the driver alone
)

// How containers of pods get GPUs. Others, such as Docker's, are as ever.
const (
	PodsAny       = "any"       // as they ask for themselves, or as was allocated
	PodsAllocated = "allocated" // as was allocated (package alloc), and in no other way
	PodsGPUShare  = "gpushare"  // as was allocated, also by a device plugin that sets nothing but gpushare's variables
)

// What managed memory is to a quota.
const (
	ManagedLimit = "limit" // counted
	ManagedDeny  = "deny"  // refused
	ManagedAllow = "allow" // not looked at
)

// Part is an amount of memory: Bytes, or Percent of the machine's.
type Part struct {
	Bytes   quota.Bytes `json:"bytes,omitempty"`
	Percent int         `json:"percent,omitempty"`
}

// Of is the part of a machine with so much memory.
func (p Part) Of(total quota.Bytes) quota.Bytes {
	if p.Percent > 0 {
		percent := quota.Bytes(p.Percent)
		return total/100*percent + total%100*percent/100 // exact, and below 2^64 on the way
	}
	return p.Bytes
}

// MostHeadroom is the most that is kept of a GPU as headroom, in percent of its memory and of its time.
const MostHeadroom = 50

// HeadroomOf is what is kept of a GPU's memory.
func HeadroomOf(c Config, g GPU) quota.Bytes {
	return min(c.Headroom.Of(g.Memory), Part{Percent: MostHeadroom}.Of(g.Memory))
}

// Promised is how much of a GPU's memory schedulers may give out.
func Promised(c Config, g GPU) quota.Bytes {
	all := g.Memory
	if c.Overcommit > 1 {
		all = quota.Bytes(min(float64(g.Memory)*c.Overcommit, 1<<62))
	}
	return all - HeadroomOf(c, g)
}

// Card is how a GPU is shared that has no settings of its own in the ledger.
func (c Config) Card() sched.Card {
	return sched.Card{Policy: c.Policy, MaxInst: c.MaxInst, PrioRatio: c.PrioRatio}
}

// Unguarded is the setting of cgpu.toml by which containers have no guard; empty where they have one.
func (c Config) Unguarded() string {
	switch c.Enforcement {
	case EnforcePreload:
		return `enforcement = "preload"`
	case EnforceDriver:
		return `limits = "driver"`
	}
	return ""
}

// Limits is who limits memory: LimitsGuard, LimitsBoth or LimitsDriver.
func (c Config) Limits() string {
	switch {
	case c.Enforcement == EnforceDriver:
		return LimitsDriver
	case c.DriverLimits:
		return LimitsBoth
	}
	return LimitsGuard
}

// Guarded says whether containers of the node have a guard. With the simulated driver they always do: somebody must play the kernel.
func (t *Table) Guarded() bool {
	return t.Config.Unguarded() == "" || t.Driver == DriverSim
}

// Key says what the table was made from; the table is stale when any of it differs from the node's present state.
type Key struct {
	BootID        string    `json:"bootId"`
	DriverFile    string    `json:"driverFile,omitempty"` // /proc/driver/nvidia/version
	DriverText    string    `json:"driverText,omitempty"` // its content
	DriverGPUs    []string  `json:"driverGpus,omitempty"` // folders of /proc/driver/nvidia/gpus: the GPUs bound to the driver
	Library       string    `json:"library,omitempty"`    // libcuda.so.<version>
	LibraryTime   time.Time `json:"libraryTime,omitzero"`
	LibrarySize   int64     `json:"librarySize,omitempty"`
	ConfigFile    string    `json:"configFile"`
	ConfigTime    time.Time `json:"configTime,omitzero"` // zero: no file
	ConfigSize    int64     `json:"configSize,omitempty"`
	RefreshHelper string    `json:"refreshHelper,omitempty"` // the program that wrote the table: an upgrade may know more
	HelperTime    time.Time `json:"helperTime,omitzero"`
	HelperSize    int64     `json:"helperSize,omitempty"`
}
