package spec

// cube is the set of ioctl numbers x with x & mask == value.
type cube struct{ mask, value uint32 }

// has says whether x is in c.
func (c cube) has(x uint32) bool { return x&c.mask == c.value }

// covers splits the ioctl numbers in two: those that do not just pass (the guard gets them, or they are refused) and those that do. Both lists
// cover their half exactly and touch nothing of the other, because seccomp rules that overlap with different actions
// have no defined winner.
type covers struct{ stop, allow []cube }

// trapped are the smallest covers for rm.TrappedNRs. Every cube is one seccomp rule and a few BPF instructions on each
// ioctl of the container. TestTrapped computes them anew and compares; it prints the list to paste when
// rm.TrappedNRs has changed.
var trapped = covers{
	stop: []cube{
		{0xef, 0x29},
		{0xf7, 0x21},
		{0xf7, 0x22},
		{0xf7, 0x42},
		{0xf7, 0xd1},
		{0xfb, 0x4a},
		{0xfc, 0x28},
		{0xfe, 0x34},
		{0xfe, 0xc8},
		{0xfe, 0xd2},
		{0xfe, 0xd4},
		{0xff, 0x27},
		{0xff, 0x41},
		{0xff, 0x4d},
	},
	allow: []cube{
		{0x0f, 0x00},
		{0x0f, 0x06},
		{0x17, 0x10},
		{0x1e, 0x04},
		{0x47, 0x47},
		{0x4c, 0x0c},
		{0x60, 0x00},
		{0x60, 0x60},
		{0x8a, 0x8a},
		{0x8c, 0x8c},
		{0x8f, 0x03},
		{0x92, 0x12},
		{0x98, 0x80},
		{0x9c, 0x10},
		{0xc0, 0x80},
		{0xc3, 0x40},
		{0xcd, 0x49},
		{0xd0, 0x50},
	},
}
