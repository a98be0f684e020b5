// SPDX-License-Identifier: Apache-2.0

package rm

// Call is one ioctl on an NVIDIA node, taken apart: the outer structure and the blocks behind its pointers, all private
// copies. The guard builds it from a container's memory, checks it, and hands it to a driver: the real one writes the
// blocks' addresses into place and makes the system call, the simulated one works on the bytes.
type Call struct {
	Cmd    uint32  // ioctl number as issued (low 32 bits)
	Outer  []byte  // the structure that the ioctl's argument points at
	Blocks []Block // memory behind pointers, parents before children
}

// Block is the memory behind one pointer.
type Block struct {
	In   int    // where the pointer sits: -1 in Outer, else the index of an earlier block
	Off  int    // byte offset of the pointer there
	Addr uint64 // what the pointer held: an address in the container
	Data []byte
}

// Parent is the memory that a block's pointer sits in.
func (c *Call) Parent(b Block) []byte {
	if b.In < 0 {
		return c.Outer
	}
	return c.Blocks[b.In].Data
}

// NR is the number that the driver dispatches on (nvidia_ioctl in kernel-open/nvidia/nv.c looks at NR and SIZE only).
func (c *Call) NR() uint32 { return c.Cmd & 0xff }

// Size is the size field of the ioctl number.
func (c *Call) Size() int { return int(c.Cmd>>16) & 0x3fff }
