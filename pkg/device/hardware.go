// SPDX-License-Identifier: Apache-2.0

package device

import "github.com/opencgpu/cgpu/pkg/quota"

// Hardware is what NVML says of a GPU. nil is what it does not say.
type Hardware struct {
	Temperature *float64 `json:"temperature,omitempty"` // in degrees Celsius
	Power       *float64 `json:"power,omitempty"`       // in watts
	// ECC errors since the driver was loaded.
	Corrected   *uint64 `json:"corrected,omitempty"`
	Uncorrected *uint64 `json:"uncorrected,omitempty"`
	Xids        *uint64 `json:"xids,omitempty"` // critical ones, since somebody counts
	// NewXids are told by themselves, in lines that answer nothing: who reports an Xid may be stuck at the next question.
	NewXids []uint64 `json:"newXids,omitempty"`
	// Asked for by HealthLine alone: whether the driver cannot reach the GPU, could not replace a bad row of its memory, and wants it to be
	// reset or the node to be booted.
	Lost        bool   `json:"lost,omitempty"`
	RemapFailed bool   `json:"remapFailed,omitempty"`
	Recovery    string `json:"recovery,omitempty"`
	// Asked for by MemoryLine alone: what the driver has given out of the GPU's memory.
	Used *quota.Bytes `json:"used,omitempty"`
}

// What cgpu-refresh -hardware is asked with. What pkg/health goes by is cheaper. MemoryLine is followed by the indices of GPUs, each after
// a space: of no other is asked, since NVML wakes those that nobody uses, for seconds.
const (
	HardwareLine = ""
	HealthLine   = "health"
	MemoryLine   = "memory"
	// LimitsLine is followed by a space and a list in JSON of UUID=CGROUP. The answer is by these, with what the driver counts as used of
	// the memory limit that it has for the cgroup.
	LimitsLine = "limits"
)
