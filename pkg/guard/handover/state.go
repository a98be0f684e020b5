// SPDX-License-Identifier: Apache-2.0

// Package handover is what a guard leaves to the program that takes its place (cgpu upgrade): a State, as JSON with a version.
//
// Its types are the format. They are apart from those that a guard works with, so that these can change: package guard translates
// (snapshot.go, restore.go). A field that is added keeps the version, if a guard that does not know it does right without; else the
// version grows, and what came before is read for as long as anybody has it (Decode, testdata). References are places in lists of State,
// counted from 1: 0 is none.
package handover

import (
	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// Version is of the state that is written.
const Version = 1

// Versions are those that are read.
func Versions() []int { return []int{1} }

// State is all that a container's guard knows and has, at a moment when no call is under way. Numbers of descriptors are the process' own:
// it stays the same, only its program changes.
type State struct {
	Version int             `json:"version"`
	Config  guardcfg.Config `json:"config"`
	Process Process         `json:"process"`
	Account Account         `json:"account"`
	Files   []File          `json:"files,omitempty"`
	// Processes and Tasks are those of the container that have made calls.
	Processes []TaskProcess `json:"processes,omitempty"`
	Tasks     []Task        `json:"tasks,omitempty"`
	Managed   Managed       `json:"managed"`
	Outside   Outside       `json:"outside"`
	Bill      Bill          `json:"bill"`
	GPUTime   []GPUTime     `json:"gpuTime,omitempty"`
	Rescuer   *Rescuer      `json:"rescuer,omitempty"`
}

// Process is the guard's own.
type Process struct {
	// Seccomp and Control are its sockets, Listeners the filters' descriptors, Tally the file of its counters, Sim the connection to the
	// simulated driver; 0: there is none.
	Seccomp   int    `json:"seccomp"`
	Control   int    `json:"control"`
	Listeners []int  `json:"listeners"`
	Tally     int    `json:"tally,omitempty"`
	Ledger    int    `json:"ledger,omitempty"` // by which it is followed
	Sim       int    `json:"sim,omitempty"`
	SimNext   uint64 `json:"simNext,omitempty"` // the last request on it
	GPUNodes  []int  `json:"gpuNodes,omitempty"`
	Held      []int  `json:"held,omitempty"` // files that no tenant shall have a lease on

	RM        *RMClient         `json:"rm,omitempty"`
	OldRM     []RMClient        `json:"old_rm,omitempty"` // of guards that were killed, for windows that they have made
	BAR1      []uint64          `json:"bar1,omitempty"`
	Instances map[uint32]int    `json:"instances,omitempty"`
	Buffers   []ContextBuffer   `json:"buffers,omitempty"`
	Counts    map[string]uint64 `json:"counts,omitempty"`

	// Reply is the connection of who asked for the hand-over, Parked when the container's calls began to wait (CLOCK_MONOTONIC), Tried for
	// how long they had waited shortly before, until the state for the child was written (ns), Tries how often both were done. Trial is the
	// child by which the program was tried, Keeper the guard's keeper before: both are killed (Bury); 0: there is none to wait for.
	Reply  int   `json:"reply,omitempty"`
	Parked int64 `json:"parked,omitempty"`
	Tried  int64 `json:"tried,omitempty"`
	Tries  int   `json:"tries,omitempty"`
	Nice   *int  `json:"nice,omitempty"` // the guard's nice value, while it is not urgent
	Trial  int   `json:"trial,omitempty"`
	Keeper int   `json:"keeper,omitempty"`

	InitPID   int    `json:"initPid"`
	InitStart uint64 `json:"initStart,omitempty"`
	Procs     string `json:"procs,omitempty"` // folders of the container's cgroup
	CPU       string `json:"cpu,omitempty"`
	Quota     string `json:"quota,omitempty"`
	DevDevice uint64 `json:"devDevice,omitempty"`
	DevFirst  uint64 `json:"devFirst,omitempty"`
	// Times are in nanoseconds of Unix time; 0: never.
	BeganAt     int64          `json:"beganAt,omitempty"`
	AstrayAt    int64          `json:"astrayAt,omitempty"`
	AllEndedAt  int64          `json:"allEndedAt,omitempty"`
	AuditUntil  int64          `json:"auditUntil,omitempty"`
	WindowsRest int64          `json:"windowsRest,omitempty"`
	Roots       []Root         `json:"roots,omitempty"`
	Record      *ledger.Record `json:"record,omitempty"` // the container's, as events told it last
}

// Root is a root alloc that is settled, and whose thread may not have left the call.
type Root struct {
	TID   int       `json:"tid"`
	Args  [3]uint64 `json:"args"`
	Since int64     `json:"since"`
}

// RMClient is the guard's own.
type RMClient struct {
	FD         int      `json:"fd"`
	File       uint32   `json:"file,omitempty"` // with the simulated driver
	Handle     uint32   `json:"handle"`
	Devices    []uint32 `json:"devices"`
	Subdevices []uint32 `json:"subdevices"`
	Next       uint32   `json:"next"`
}

// ContextBuffer is how large a buffer of contexts is on a GPU.
type ContextBuffer struct {
	GPU    int    `json:"gpu"`
	Buffer uint32 `json:"buffer"`
	Size   uint64 `json:"size"`
}

// Account is what the container holds.
type Account struct {
	GPUs     []GPU      `json:"gpus"`
	Charges  []Charge   `json:"charges,omitempty"`
	Clients  []Client   `json:"clients,omitempty"`
	Objects  []Object   `json:"objects,omitempty"`
	Windows  []Window   `json:"windows,omitempty"`
	DMA      []DMA      `json:"dma,omitempty"`
	Retained []Retained `json:"retained,omitempty"`
	Loose    []int      `json:"loose,omitempty"` // windows that are over
	Runlists []Runlist  `json:"runlists,omitempty"`

	HostUsed  uint64 `json:"hostUsed,omitempty"`
	Windowed  int    `json:"windowed,omitempty"` // windows that are counted
	Zombies   int    `json:"zombies,omitempty"`
	Exported  int64  `json:"exported,omitempty"`
	UVMMaps   int64  `json:"uvmMaps,omitempty"`
	PoolUsed  uint64 `json:"poolUsed,omitempty"`
	PoolTaken uint64 `json:"poolTaken,omitempty"`
}

// GPU is what the container may have of one, and has.
type GPU struct {
	Limit   uint64 `json:"limit"`
	Native  bool   `json:"native,omitempty"`
	Used    uint64 `json:"used,omitempty"`
	Peak    uint64 `json:"peak,omitempty"`
	Denied  uint64 `json:"denied,omitempty"`
	Managed uint64 `json:"managed,omitempty"`
	Spill   uint64 `json:"spill,omitempty"`
	Spilled uint64 `json:"spilled,omitempty"`
	Windows uint64 `json:"windows,omitempty"`

	Firmware     int `json:"firmware,omitempty"`
	Events       int `json:"events,omitempty"`
	Encoders     int `json:"encoders,omitempty"`
	Surfaces     int `json:"surfaces,omitempty"`
	TSGs         int `json:"tsgs,omitempty"`
	VASpaces     int `json:"vaSpaces,omitempty"`
	Channels     int `json:"channels,omitempty"`
	KeptChannels int `json:"keptChannels,omitempty"`
}

// Charge is memory that is charged, with what refers to it.
type Charge struct {
	GPU        int    `json:"gpu,omitempty"`
	Size       uint64 `json:"size,omitempty"`
	Handles    int    `json:"handles,omitempty"`
	References int    `json:"references,omitempty"`
	Windows    int    `json:"windows,omitempty"`
	Length     uint64 `json:"length,omitempty"`
	Spilled    bool   `json:"spilled,omitempty"`
	Host       bool   `json:"host,omitempty"`
	Tables     bool   `json:"tables,omitempty"`
	Page       uint64 `json:"page,omitempty"`
	Fabric     bool   `json:"fabric,omitempty"`
	Fabrics    int    `json:"fabrics,omitempty"`
	Flexible   uint64 `json:"flexible,omitempty"`
}

// Client is an RM client of the container's.
type Client struct {
	Handle   uint32              `json:"handle"`
	PID      int                 `json:"pid"`
	File     int                 `json:"file,omitempty"`
	EUID     int                 `json:"euid"`
	Ending   bool                `json:"ending,omitempty"`
	Seen     [3]int              `json:"seen"` // process, thread and descriptor where its file was found last
	Policies []Policy            `json:"policies,omitempty"`
	Events   map[uint32]WeakFile `json:"events,omitempty"`
}

// Policy is what others may do with an object.
type Policy struct {
	Object uint32 `json:"object"`
	All    uint32 `json:"all,omitempty"`
	User   uint32 `json:"user,omitempty"`
}

// WeakFile is an open file that is followed, without keeping it open.
type WeakFile struct {
	Epoll int `json:"epoll"`
	FD    int `json:"fd"` // the number that it had when it was registered there
}

// Object is a handle of a client's.
type Object struct {
	Client        int       `json:"client"`
	Handle        uint32    `json:"handle"`
	Parent        uint32    `json:"parent,omitempty"`
	Class         uint32    `json:"class,omitempty"`
	Kind          string    `json:"kind"`
	CountsOn      int       `json:"countsOn"`
	GPU           int       `json:"gpu"` // -1: it does not say
	Charge        int       `json:"charge,omitempty"`
	SecondCharge  int       `json:"secondCharge,omitempty"`
	Length        uint64    `json:"length,omitempty"`
	Size          uint64    `json:"size,omitempty"`
	Page          uint64    `json:"page,omitempty"`
	Space         uint32    `json:"space,omitempty"`
	ContextShare  uint32    `json:"contextShare,omitempty"`
	ID            uint32    `json:"id,omitempty"`
	Retained      int       `json:"retained,omitempty"`
	Spilled       bool      `json:"spilled,omitempty"`
	Host          bool      `json:"host,omitempty"`
	MadeInTask    bool      `json:"madeInTask,omitempty"`
	Doubtful      bool      `json:"doubtful,omitempty"`
	Flexible      bool      `json:"flexible,omitempty"`
	Unbound       bool      `json:"unbound,omitempty"`
	Scheduled     bool      `json:"scheduled,omitempty"`
	Graphics      bool      `json:"graphics,omitempty"`
	Context       bool      `json:"context,omitempty"`
	GFXP          bool      `json:"gfxp,omitempty"`
	Preempts      bool      `json:"preempts,omitempty"`
	Draws         bool      `json:"draws,omitempty"`
	Shared        bool      `json:"shared,omitempty"`
	Legacy        bool      `json:"legacy,omitempty"`
	Lender        string    `json:"lender,omitempty"` // of a channel group that is lent: the server's record, and the group's number there
	LentGroup     int       `json:"lentGroup,omitempty"`
	Group         int       `json:"group,omitempty"` // of a channel group: which; 0, as before it had a number: one of its own
	UserdMemory   uint32    `json:"userdMemory,omitempty"`
	UserdOffset   uint64    `json:"userdOffset,omitempty"`
	RunlistGPU    int       `json:"runlistGpu,omitempty"`
	RunlistEngine uint32    `json:"runlistEngine,omitempty"`
	Engine        uint32    `json:"engine,omitempty"`
	Streams       *Streams  `json:"streams,omitempty"`
	Notifiers     [2]uint32 `json:"notifiers,omitzero"`
	Notifies      []int     `json:"notifies,omitempty"` // channels
	Windows       []int     `json:"windows,omitempty"`
	KeptWindows   []int     `json:"keptWindows,omitempty"`
}

// Streams are those of a profiler object.
type Streams struct {
	Asked bool   `json:"asked,omitempty"`
	Given uint64 `json:"given,omitempty"`
}

// Window is memory mapped for the processor, or kept for a channel.
type Window struct {
	Address uint64    `json:"address,omitempty"`
	Handle  uint32    `json:"handle"`
	GPU     int       `json:"gpu,omitempty"`
	Size    uint64    `json:"size,omitempty"`
	Charge  int       `json:"charge,omitempty"`
	Kept    bool      `json:"kept,omitempty"`
	File    *WeakFile `json:"file,omitempty"`
	Own     uint32    `json:"own,omitempty"` // the one of OldRM that has it; 0: RM
}

// DMA is memory mapped into a range of GPU addresses.
type DMA struct {
	Mapper  int    `json:"mapper"` // objects
	Memory  int    `json:"memory"`
	Device  uint32 `json:"device"`
	Address uint64 `json:"address"`
	Length  uint64 `json:"length"`
	GPU     int    `json:"gpu,omitempty"`
	Tables  uint64 `json:"tables,omitempty"`
}

// Retained is what UVM keeps of a channel.
type Retained struct {
	Calls         int    `json:"calls"`
	Context       int    `json:"context,omitempty"` // a charge
	Channel       int    `json:"channel,omitempty"` // an object; 0: it is freed
	RunlistGPU    int    `json:"runlistGpu,omitempty"`
	RunlistEngine uint32 `json:"runlistEngine,omitempty"`
	CountsOn      int    `json:"countsOn,omitempty"`
}

// Runlist is how many channels there are on an engine.
type Runlist struct {
	GPU    int    `json:"gpu"`
	Engine uint32 `json:"engine"`
	N      int    `json:"n"`
}

// File is an open file of the container that is followed.
type File struct {
	Kind       string       `json:"kind"`
	Minor      int          `json:"minor,omitempty"`
	Weak       *WeakFile    `json:"weak,omitempty"`
	Strong     int          `json:"strong,omitempty"` // descriptor; 0: none
	Closed     bool         `json:"closed,omitempty"` // for good, as was seen
	Registered bool         `json:"registered,omitempty"`
	Rooted     bool         `json:"rooted,omitempty"`
	Clients    int          `json:"clients,omitempty"`
	Exporter   bool         `json:"exporter,omitempty"`
	Zombies    bool         `json:"zombies,omitempty"`
	Sim        uint32       `json:"sim,omitempty"`
	Owners     []int        `json:"owners,omitempty"`
	Exports    []Export     `json:"exports,omitempty"`
	Maps       []UVMMap     `json:"maps,omitempty"`
	Spaces     []UUID       `json:"spaces,omitempty"`
	Channels   []UVMChannel `json:"channels,omitempty"`
	Ranges     []UVMRange   `json:"ranges,omitempty"`
	Groups     []uint64     `json:"groups,omitempty"`
}

// UUID is a GPU's as UVM has it.
type UUID [16]byte

// Export is what a file holds at a position.
type Export struct {
	There  bool   `json:"there,omitempty"`
	Charge int    `json:"charge,omitempty"`
	Fabric bool   `json:"fabric,omitempty"`
	Size   uint64 `json:"size,omitempty"`
}

// UVMMap is a mapping in a UVM address space.
type UVMMap struct {
	Base   uint64 `json:"base"`
	End    uint64 `json:"end"`
	GPU    UUID   `json:"gpu"`
	Charge int    `json:"charge,omitempty"`
	Tables int    `json:"tables,omitempty"`
}

// UVMChannel is a registered channel.
type UVMChannel struct {
	Client uint32 `json:"client"`
	Handle uint32 `json:"handle"`
	GPU    UUID   `json:"gpu"`
	Kept   int    `json:"kept"` // a Retained
}

// UVMRange is a range of addresses that a call has made.
type UVMRange struct {
	Base   uint64 `json:"base"`
	End    uint64 `json:"end"`
	Host   uint64 `json:"host,omitempty"`
	GPU    UUID   `json:"gpu,omitzero"`
	Tables []int  `json:"tables,omitempty"`
}

// TaskProcess is a process of the container.
type TaskProcess struct {
	PID   int    `json:"pid"`
	NSPID int    `json:"nspid"`
	Name  string `json:"name,omitempty"`
	PidFD int    `json:"pidfd"`
}

// Task is a thread for which an answer is kept.
type Task struct {
	TID   int    `json:"tid"`
	PID   int    `json:"pid"`
	PidFD int    `json:"pidfd,omitempty"` // of the thread; 0: the kernel has none
	Saved *Saved `json:"saved,omitempty"`
	Last  *Last  `json:"last,omitempty"`
}

// Saved is an answer that found nobody.
type Saved struct {
	Args     [3]uint64 `json:"args"`
	Out      []Part    `json:"out,omitempty"`
	Before   []Part    `json:"before,omitempty"`
	Resume   bool      `json:"resume,omitempty"`
	Errno    int       `json:"errno,omitempty"`
	Lost     bool      `json:"lost,omitempty"`
	Repeated bool      `json:"repeated,omitempty"`
	Blocks   int       `json:"blocks,omitempty"`
	Size     int64     `json:"size"` // what keeping it counts for
}

// Part is memory of a thread.
type Part struct {
	Address uint64 `json:"address"`
	Data    []byte `json:"data"`
}

// Last is the last answer that made or dropped something.
type Last struct {
	Args  [3]uint64 `json:"args"`
	Outer []byte    `json:"outer,omitempty"`
	Block []byte    `json:"block,omitempty"`
}

// Managed is managed memory.
type Managed struct {
	Spans []Span `json:"spans,omitempty"`
	Over  bool   `json:"over,omitempty"`
	Last  int    `json:"killed,omitempty"`
	CPU   int64  `json:"cpu,omitempty"`
}

// Span is a range of it.
type Span struct {
	PID       int    `json:"pid"`
	Base      uint64 `json:"base"`
	End       uint64 `json:"end"`
	Agreed    bool   `json:"agreed,omitempty"`
	Announced int64  `json:"announced,omitempty"`
}

// Outside is what is known of processes beyond the container.
type Outside struct {
	Clean        []Outsider `json:"clean,omitempty"`
	Everywhere   int64      `json:"everywhere,omitempty"`
	SuspectAfter int64      `json:"suspectAfter,omitempty"`
}

// Outsider is a process.
type Outsider struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"`
}

// Bill is what the container owes its guard.
type Bill struct {
	Calls    Bucket `json:"calls"`
	Free     Bucket `json:"free"`
	Quota    Bucket `json:"quota"`
	Searches Bucket `json:"searches"`
	Slow     Bucket `json:"slow"`
}

// Bucket has tokens.
type Bucket struct {
	PerSecond float64 `json:"perSecond,omitempty"`
	Tokens    float64 `json:"tokens,omitempty"`
	Last      int64   `json:"last,omitempty"`
}

// GPUTime is what package gpusched has of a GPU.
type GPUTime struct {
	GPU     int              `json:"gpu"`
	Active  bool             `json:"active,omitempty"`
	Place   int              `json:"place,omitempty"` // on the GPU's page; 0: none
	Off     bool             `json:"off,omitempty"`
	OffAll  bool             `json:"offAll,omitempty"`
	Refused int              `json:"refused,omitempty"`
	Drift   uint64           `json:"drift,omitempty"`
	Lost    []LostFile       `json:"lost,omitempty"`
	Local   sched.LocalState `json:"local"`
}

// LostFile is a client whose file is not found.
type LostFile struct {
	Client uint32 `json:"client"`
	Since  int64  `json:"since"`
	Looked int64  `json:"looked"`
	Off    bool   `json:"off,omitempty"`
}

// Rescuer is the process that resumes what is paused, should this one be killed. It waits for the end of the pipe.
type Rescuer struct {
	PID  int  `json:"pid"`
	Pipe int  `json:"pipe"` // 0: none
	Gone bool `json:"gone,omitempty"`
}
