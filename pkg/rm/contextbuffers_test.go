// SPDX-License-Identifier: Apache-2.0

package rm

import "testing"

func TestContextMemory(t *testing.T) {
	sizes := map[uint32]uint64{0x0: 3<<20 + 1, 0x9: 300 << 10, 0x10: 200 << 10, 0xb: 5 << 20, 0xc: 1, 0xd: 64 << 10, 0xe: 0,
		0xf: 65 << 10, 0x19: 4096}
	told := func(b uint32) (uint64, bool) { n, ok := sizes[b]; return n, ok }
	// The main buffer with 64 headers is less than 4 MiB, the next more than 256 KiB, the last less.
	if n, ok := ContextMemory(told); !ok || n != 4<<20+4<<20+256<<10 {
		t.Errorf("a context takes %d, %v", n, ok)
	}
	if n, ok := GFXPMemory(told); !ok || n != 5<<20+(1+1+0+2+1)*64<<10 {
		t.Errorf("graphics preemption takes %d, %v", n, ok)
	}
	sizes[0x0] = 4 << 20 // with the headers no more
	if n, _ := ContextMemory(told); n != 512<<20+4<<20+256<<10 {
		t.Errorf("a context takes %d", n)
	}
	delete(sizes, 0x0)
	delete(sizes, 0x19)
	if _, ok := ContextMemory(told); ok {
		t.Error("a context of a size that the driver does not tell")
	}
	if _, ok := GFXPMemory(told); ok {
		t.Error("graphics preemption of a size that the driver does not tell")
	}
}
