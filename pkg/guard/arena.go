// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/guard/keeper"
)

// arena is scratch memory of one worker for the private copies of one call, outside the Go heap.
type arena struct {
	mem     []byte
	used    int
	release func() // nil: the memory is unmapped
}

// arenaSize holds two copies of the largest call: 16 KiB outer, 128 KiB parameters, 128 KiB behind pointers.
const arenaSize = keeper.FlightBody

func newArena() (*arena, error) {
	m, err := unix.Mmap(-1, 0, arenaSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	return &arena{mem: m}, nil
}

func (a *arena) unmap() {
	if a.release != nil {
		a.release()
		return
	}
	_ = unix.Munmap(a.mem)
}

func (a *arena) reset() { a.used = 0 }

// alloc returns n bytes, 16-byte aligned, with old content; nil if there is no room.
func (a *arena) alloc(n int) []byte {
	start := (a.used + 15) &^ 15
	if n < 0 || n > len(a.mem)-start {
		return nil
	}
	a.used = start + n
	return a.mem[start : start+n : start+n]
}
