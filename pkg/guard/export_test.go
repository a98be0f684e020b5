// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/binary"
	"os"
	"slices"
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// exportFile is a nvidiactl file of the container to export into.
func exportFile(t *testing.T) (fd int, closeIt func()) {
	t.Helper()
	f, err := os.OpenFile(fakeControl, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return int(f.Fd()), func() { f.Close() }
}

func exportCall(fd, index int, objects ...uint32) []byte {
	p := make([]byte, 2128)
	rm.PutU32(p, 0, uint32(fd))
	for i, h := range objects {
		rm.PutU32(p, exportObjectsList+4*i, h)
	}
	binary.LittleEndian.PutUint16(p[exportObjectsCount:], uint16(len(objects)))
	binary.LittleEndian.PutUint16(p[exportObjectsIndex:], uint16(index))
	return p
}

func importCall(fd, index int, objects ...uint32) []byte {
	p := make([]byte, 652)
	rm.PutU32(p, 0, uint32(fd))
	rm.PutU32(p, importObjectsParent, fakeDevice)
	for i, h := range objects {
		rm.PutU32(p, importObjectsList+4*i, h)
	}
	binary.LittleEndian.PutUint16(p[importObjectsCount:], uint16(len(objects)))
	binary.LittleEndian.PutUint16(p[importObjectsIndex:], uint16(index))
	return p
}

// TestExportPositions: a file holds objects by position, and only some of them are device memory.
func TestExportPositions(t *testing.T) {
	const host, again = 0x5c000010, 0x5c000020
	used := func(g *Guard) quota.Bytes { return g.account.usage(0).used }
	vidmem := func(types ...byte) func(call *rm.Call) { // what the driver says of imported objects
		return func(call *rm.Call) {
			if rm.U32(call.Outer, rm.ControlCmd) == 0x3d0c {
				copy(call.Blocks[0].Data[importObjectsTypes:], types)
			}
		}
	}
	prepare := func(t *testing.T, f func(*rm.Call)) (*Guard, func(cmd uint32, p []byte)) {
		g := withClient(newFakeGuard(t, answering(0, f)))
		g.account.addObject(fakeClient, object{handle: host, parent: fakeDevice, class: classSystem, kind: rm.ClassSysmem, gpu: noGPU},
			noGPU, 0, 0)
		c := newFakeCall(t, g, fakeControl)
		return g, func(cmd uint32, p []byte) {
			t.Helper()
			o := fakeControlCall(fakeClient, cmd, p)
			if rep := c.escape(rm.EscControl, o, p); rep != replyDone || rm.U32(o, rm.ControlStatus) != rm.StatusOK {
				t.Fatalf("%#x: %v %s", cmd, rep, rm.StatusName(rm.U32(o, rm.ControlStatus)))
			}
		}
	}
	free := func(g *Guard, handles ...uint32) {
		for _, h := range handles {
			g.account.freeObject(fakeClient, h)
		}
	}
	t.Run("an empty position takes no handle away", func(t *testing.T) {
		g, control := prepare(t, vidmem(importTypeNone, 2))
		fd, _ := exportFile(t)
		control(0x3d0b, exportCall(fd, 1, host))
		control(0x3d0c, importCall(fd, 0, fakeMemory, again)) // nothing at 0: fakeMemory is what it was
		if used(g) != 8*quota.MiB {
			t.Errorf("%v charged for 8 MiB that are held", used(g))
		}
	})
	t.Run("host memory before device memory", func(t *testing.T) {
		g, control := prepare(t, vidmem(2, 1))
		fd, closeIt := exportFile(t)
		control(0x3d0b, exportCall(fd, 0, host, fakeMemory))
		control(0x3d0c, importCall(fd, 0, again, again+1))
		free(g, fakeMemory, host, again)
		closeIt()
		g.sweep()
		if used(g) != 8*quota.MiB {
			t.Errorf("%v charged while an imported handle holds 8 MiB", used(g))
		}
		free(g, again+1)
		if used(g) != 0 {
			t.Errorf("%v charged for nothing", used(g))
		}
	})
	t.Run("not in order", func(t *testing.T) {
		g, control := prepare(t, vidmem(1))
		fd, closeIt := exportFile(t)
		control(0x3d0b, exportCall(fd, 3, fakeMemory))
		control(0x3d0b, exportCall(fd, 0, host))
		control(0x3d0c, importCall(fd, 3, again))
		free(g, fakeMemory)
		closeIt()
		g.sweep()
		if used(g) != 8*quota.MiB {
			t.Errorf("%v charged while an imported handle holds 8 MiB", used(g))
		}
	})
	t.Run("again and again", func(t *testing.T) {
		g, control := prepare(t, nil)
		fd, _ := exportFile(t)
		for range 100 {
			control(0x3d0b, exportCall(fd, 0, fakeMemory, fakeMemory))
		}
		if f := g.files.snapshot()[0]; len(f.exports) != 2 {
			t.Errorf("the guard remembers %d objects in a file of two", len(f.exports))
		}
		free(g, fakeMemory)
		if used(g) != 8*quota.MiB {
			t.Errorf("%v charged while the file holds 8 MiB", used(g))
		}
		control(0x3d0b, exportCall(fd, 0, host, host)) // the driver lets go of what was there
		if used(g) != 0 {
			t.Errorf("%v charged for nothing", used(g))
		}
	})
}

// TestExportOneByOne: of several objects the driver gets one at a time. Where one is refused, those before it are in the file.
func TestExportOneByOne(t *testing.T) {
	const none = 0x5c000099
	var seen [][3]uint32 // count, index, object
	g := withClient(newFakeGuard(t, &fakeDriver{answer: func(_ Target, call *rm.Call) syscall.Errno {
		p := call.Blocks[0].Data
		object := rm.U32(p, exportObjectsList)
		seen = append(seen, [3]uint32{uint32(rm.U16(p, exportObjectsCount)), uint32(rm.U16(p, exportObjectsIndex)), object})
		if rm.U32(p, exportObjectsList+4) != 0 {
			t.Error("the driver sees a second object")
		}
		if object == none {
			rm.PutU32(call.Outer, rm.ControlStatus, rm.StatusObjectNotFound)
		}
		return 0
	}}))
	g.account.addObject(fakeClient, memoryObject(none, fakeDevice), noGPU, 0, 0)
	c := newFakeCall(t, g, fakeControl)
	fd, closeIt := exportFile(t)
	p := exportCall(fd, 3, fakeMemory, 0, fakeMemory, none, fakeMemory)
	before := slices.Clone(p)
	o := fakeControlCall(fakeClient, 0x3d0b, p)
	c.escape(rm.EscControl, o, p)
	if rm.U32(o, rm.ControlStatus) != rm.StatusObjectNotFound || !slices.Equal(p, before) {
		t.Errorf("%s, %x", rm.StatusName(rm.U32(o, rm.ControlStatus)), p[exportObjectsList:][:20])
	}
	if want := [][3]uint32{{1, 3, fakeMemory}, {1, 4, 0}, {1, 5, fakeMemory}, {1, 6, none}}; !slices.Equal(seen, want) {
		t.Errorf("the driver saw %x", seen)
	}
	ch := g.account.clients[fakeClient].objects[fakeMemory].charge
	if ch.references != 2 {
		t.Errorf("%d references by the file, want 2", ch.references)
	}
	g.account.freeObject(fakeClient, fakeMemory)
	if used := g.account.usage(0).used; used != 8*quota.MiB {
		t.Errorf("%v charged while the file holds 8 MiB", used)
	}
	closeIt()
	if g.sweep(); g.account.usage(0).used != 0 {
		t.Errorf("%v charged for nothing", g.account.usage(0).used)
	}
}
