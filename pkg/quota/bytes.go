// SPDX-License-Identifier: Apache-2.0

package quota

import "strconv"

// Bytes is an amount of memory in bytes. MiB and GiB are binary.
type Bytes uint64

// Binary units of memory.
const (
	KiB Bytes = 1 << 10
	MiB Bytes = 1 << 20
	GiB Bytes = 1 << 30
)

// MinMemory is the least limit of a vGPU's memory: who asks for less has rather mistaken the unit.
const MinMemory = 64 * MiB

// FloorMiB rounds b down to a whole MiB.
func (b Bytes) FloorMiB() Bytes { return b / MiB * MiB }

// String writes b as whole MiB where it is one ("6043MiB"), else as bytes ("123B").
func (b Bytes) String() string {
	if b%MiB == 0 {
		return strconv.FormatUint(uint64(b/MiB), 10) + "MiB"
	}
	return strconv.FormatUint(uint64(b), 10) + "B"
}
