// SPDX-License-Identifier: Apache-2.0

// Package quota turns what a container asked for (ALIYUN_COM_GPU_* variables and cgpu.io/ annotations) into a Quota.
//
// Where cgpu.toml enables them it also reads what other systems call the same (dialect.go).
//
// It is pure: it opens no file and knows no GPU of this node. cgpu-runtime calls FromSpec for every container that is
// created, then Resolve with the node's GPUs; cgpu spec calls both for its dry run.
package quota

import "strconv"

// Quota is what one container asked for. A nil *Quota means that the container did not ask for a vGPU: leave it alone.
type Quota struct {
	// Memory is the limit asked for on each sliced GPU that PerGPU and Named say nothing of; zero where only these say something.
	Memory Memory
	// PerGPU are limits of single sliced GPUs, by their position in the container: ascending by index. 0: Memory. Only
	// dialects make any.
	PerGPU []Bytes
	// Named are limits of single sliced GPUs by their UUIDs, or how these begin.
	Named []NamedLimit
	// Visible names the GPUs to slice; the zero Selector means that none was named and the node places the container.
	Visible Selector
	// Native names GPUs given whole beside the sliced ones (mixed layout: in NVIDIA_VISIBLE_DEVICES, not in Visible).
	Native Selector
	// Slice is what was asked beside the memory, of each sliced GPU: its Limit is zero, and so is a Weight that was not asked. Priority
	// is PriorityDefault then.
	Slice
	// NoLimiter leaves the preload library (libcgpu.so) out of the container.
	NoLimiter bool
	// Domain is the trust domain that the container's processes compute side by side in, through its MPS server; empty: none. DomainServer:
	// it is the one with that server, which no container can ask for.
	Domain       string
	DomainServer bool
	// Threads is the part of the GPU's multiprocessors that its programs in the domain use, in percent; 0: all.
	Threads int
	// Asked maps each variable or annotation that was used to its value, for the record and for messages.
	Asked map[string]string
	// Dialects are the other systems' ways in which the container asked; Unmapped are those of Asked that have no meaning
	// in cgpu.
	Dialects []Dialect
	Unmapped []string
	// Ignored tells what looks as if it were for cgpu, and does nothing.
	Ignored []string
	// from is the word of a dialect that a key was read from, for messages.
	from map[key]setting
}

// Slice is what a container has of a GPU. Whoever keeps or hands on one embeds it, and its form in JSON is that of the ledger's records,
// which outlive versions: what is added is left out where it is zero.
type Slice struct {
	Limit Bytes `json:"limit"`           // of memory
	Spill Bytes `json:"spill,omitempty"` // host memory beyond Limit, served as device memory
	Share
}

// Weigh gives the slice the default weight where it has none.
func (s *Slice) Weigh() {
	s.Weight = max(s.Weight, 1)
}

// NamedLimit is the limit of one GPU.
type NamedLimit struct {
	ID    string
	Limit Bytes
}

// Memory is a limit not yet bound to a card: either Fixed bytes, or the fraction Num/Den of the card.
type Memory struct {
	Fixed    Bytes
	Num, Den uint64
}

// Selector names GPUs: All of them, or IDs (decimal indices, UUIDs or unique UUID prefixes).
type Selector struct {
	All bool
	IDs []string
}

// IsZero reports that nothing was named.
func (s Selector) IsZero() bool { return !s.All && len(s.IDs) == 0 }

// Priority is a scheduling level.
type Priority int

// String is the name that ParsePriority reads.
func (p Priority) String() string {
	if p < 0 || int(p) >= len(priorityNames) {
		return strconv.Itoa(int(p))
	}
	return priorityNames[p]
}

// Priorities, low to high.
const (
	PriorityBestEffort Priority = 0
	PriorityDefault    Priority = 1
	PriorityHigh       Priority = 2
)

// GPU is what Resolve needs to know of a physical GPU.
type GPU struct {
	Index  int
	UUID   string
	Memory Bytes // total, as NVML reports it
}

// Grant is one sliced GPU with its limit in bytes (whole MiB).
type Grant struct {
	Index int
	Limit Bytes
}
