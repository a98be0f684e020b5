// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// FuzzHandle feeds arbitrary structures to the handlers of escapes, with arbitrary memory behind their pointers. Nothing
// may panic, the account stays within the limit, and the driver sees no pointer that the container chose.
func FuzzHandle(f *testing.F) {
	memory := make([]byte, 128)
	rm.PutU32(memory, rm.MemoryOwner, 1)
	rm.PutU64(memory, rm.MemorySize, 4<<20)
	rm.PutU64(memory, rm.MemoryAddress, 0x1234)
	f.Add(uint8(rm.EscAlloc), fakeAlloc(fakeDevice, 0, classVidmem, nil), memory, uint8(16), false)
	f.Add(uint8(rm.EscAlloc), fakeAlloc(fakeDevice, 0, 0xa06c, nil), make([]byte, 20), uint8(16), false)
	for _, x := range []struct {
		cmd  uint32
		size int
	}{{0x20801303, 1028}, {0x20801301, 16}, {0x101, 40}, {0x202, 40}, {0x215, 132}, {0x288, 3076}, {0x274, 272},
		{0x2080018d, 3812}, {0x2080018e, 14408}, {0x20802096, 55888}, {0x3d05, 24}, {0x3d06, 20}, {0x3d0b, 2132}, {0x127, 176}} {
		o := fakeControlCall(fakeDevice, x.cmd, nil)
		rm.PutU32(o, rm.ControlParamsSize, uint32(x.size))
		f.Add(uint8(rm.EscControl), o, make([]byte, x.size), uint8(16), false)
	}
	for nr, size := range map[uint32]int{rm.EscFree: 16, rm.EscDupObject: 28, rm.EscShare: 24, rm.EscVidHeapControl: 184,
		rm.EscAllocMemory: 56, rm.EscCardInfo: 144, rm.EscRegisterFD: 4, rm.EscStatusCode: 12, rm.EscAttachGPUs: 8, rm.EscExportDMABuf: 2608} {
		o := make([]byte, size)
		rm.PutU32(o, 0, fakeClient)
		f.Add(uint8(nr), o, []byte{}, uint8(0), false)
	}
	heap := make([]byte, rm.HeapSize)
	rm.PutU32(heap, rm.HeapRoot, fakeClient)
	rm.PutU32(heap, rm.HeapParent, fakeDevice)
	rm.PutU32(heap, rm.HeapFunction, rm.HeapFnAllocTiled)
	rm.PutU32(heap, rm.HeapTiledHeight, 1<<31)
	rm.PutU32(heap, rm.HeapTiledPitch, 1<<31)
	f.Add(uint8(rm.EscVidHeapControl), heap, []byte{}, uint8(0), false)
	large := bytes.Clone(memory) // goes to the host
	rm.PutU64(large, rm.MemorySize, 20<<20)
	f.Add(uint8(rm.EscAlloc), fakeAlloc(fakeDevice, 0, classVidmem, nil), large, uint8(16), false)
	f.Add(uint8(rm.EscAlloc), fakeAlloc(fakeDevice, 0, classVidmem, nil), large, uint8(16), true)

	d := &fakeDriver{}
	g := newFakeGuard(f, d)
	c := newFakeCall(f, g, fakeControl)
	c.fuzzed = true
	f.Fuzz(func(t *testing.T, nr uint8, outer, block []byte, ptr uint8, refuse bool) {
		if len(outer) == 0 || len(outer) >= 1<<14 || len(block) > 1<<17 {
			return
		}
		cmd := uint32(testCmd(uint32(nr), len(outer)))
		if !g.abi.RMShaped(cmd) || uint32(nr) == rm.EscXferCmd {
			return
		}
		if class, ok := g.abi.Class(rm.U32(outer, rm.AllocClass)); nr == rm.EscAlloc && ok && class.Kind == rm.ClassRoot {
			return // goes on after the call, in the background; TestRootAlloc has it
		}
		g.account = newAccount(g.cfg.GPUs)
		withClient(g)
		g.account.setLimits(0, 16*quota.MiB, testSpill)
		d.answer = func(_ Target, call *rm.Call) syscall.Errno {
			if err := pointersCovered(g.abi, call); err != nil {
				t.Error(err)
			}
			if refuse {
				return unix.EIO
			}
			return 0
		}
		if int(ptr) <= len(outer)-8 && len(block) > 0 {
			putPointer(outer, int(ptr), block)
		}
		rep := c.do(cmd, outer, block)
		u := g.account.usage(0)
		if u.used > u.limit || u.spilled > u.spill {
			t.Errorf("used %v, spilled %v", u.used, u.spilled)
		}
		if refuse && !rep.resume && uint32(nr) != rm.EscFree && (u.used != 8*quota.MiB || u.spilled != 0) {
			t.Errorf("used %v, spilled %v after a call that failed", u.used, u.spilled)
		}
		runtime.KeepAlive(block)
	})
}

// FuzzTakeFilter sends arbitrary messages to the socket where runc sends the listener.
func FuzzTakeFilter(f *testing.F) {
	good, _ := json.Marshal(specs.ContainerProcessState{Fds: []string{specs.SeccompFdName}, Pid: 1, Metadata: `{"nonce":"n"}`})
	f.Add(good)
	f.Add([]byte(`{"fds":["x","seccompFd"],"metadata":"{\"nonce\":\"n\"}"}`))
	f.Add([]byte(`{"fds":["seccompFd"],"metadata":"{\"nonce\":\"other\"}"}`))
	f.Add([]byte(`{`))
	f.Add([]byte(`null`))
	g := newFakeGuard(f, &fakeDriver{})
	f.Fuzz(func(t *testing.T, message []byte) {
		if len(message) == 0 {
			return
		}
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		file := os.NewFile(uintptr(pair[1]), "pair")
		conn, err := net.FileConn(file)
		file.Close()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
		go func() {
			defer unix.Close(pair[0])
			// A descriptor that is no listener: nothing that comes this way may be served.
			if unix.Sendmsg(pair[0], message[:1], unix.UnixRights(0), nil, 0) == nil {
				for rest := message[1:]; len(rest) > 0; {
					n, err := unix.Write(pair[0], rest)
					if err != nil {
						return
					}
					rest = rest[n:]
				}
			}
		}()
		if err := g.receiveFilter(conn.(*net.UnixConn)); err == nil {
			t.Error("served a descriptor that is no listener")
		}
		if g.listeners != 0 {
			t.Error("a listener is counted")
		}
	})
}

// FuzzParseMaps reads arbitrary text as the maps of a process. What it finds are ranges, and as a whole line says.
func FuzzParseMaps(f *testing.F) {
	f.Add([]byte("7fa2e6000000-7fa2f6000000 rw-s 7fa2e6000000 00:06 144 /dev/nvidia-uvm\n"))
	f.Add([]byte("00010000-00020000 rw-s 00010000\n00400000-00401000 r-xp 00000000 08:01 1 /bin/x\n"))
	f.Add([]byte("-\n- \n1-\n1-2 rw-s\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		list, _ := parseMaps(bytes.NewReader(text))
		if len(list) > bytes.Count(text, []byte("\n"))+1 {
			t.Errorf("%d ranges", len(list))
		}
		for _, s := range list {
			if s.base == 0 || s.end <= s.base || s.agreed || !s.announced.IsZero() {
				t.Errorf("%+v", s)
			}
			if line := fmt.Sprintf("%08x", s.base); !bytes.Contains(bytes.ToLower(text), []byte(strings.TrimLeft(line, "0"))) {
				t.Errorf("%s is not in the text", line)
			}
		}
	})
}

// FuzzSpans changes lists by arbitrary ranges: they stay in order, and what is put in is there.
func FuzzSpans(f *testing.F) {
	f.Add([]byte{1, 0, 9, 0, 3, 5, 1, 4, 200})
	f.Fuzz(func(t *testing.T, steps []byte) {
		var list []span
		for ; len(steps) >= 3; steps = steps[3:] {
			base, end := uint64(steps[1]), uint64(steps[1])+uint64(steps[2])+1
			before, held := totalSize(list), overlapSize(list, base, end)
			if steps[0]&1 == 0 {
				list = cutRange(list, base, end)
				if totalSize(list) != before-held || overlapSize(list, base, end) != 0 {
					t.Fatalf("%d-%d is not out of %+v", base, end, list)
				}
			} else {
				list = insertSpan(list, span{base: base, end: end, agreed: steps[0]&2 != 0})
				if totalSize(list) != before-held+quota.Bytes(end-base) || overlapSize(list, base, end) != quota.Bytes(end-base) {
					t.Fatalf("%d-%d is not in %+v", base, end, list)
				}
			}
			for i := range list {
				if list[i].end <= list[i].base || i > 0 && list[i].base < list[i-1].end {
					t.Fatalf("not in order: %+v", list)
				}
			}
		}
	})
}

// BenchmarkHandle is the guard's own part of a call: no notification, no driver, memory of this process.
func BenchmarkHandle(b *testing.B) {
	memory := make([]byte, 128)
	rm.PutU32(memory, rm.MemoryOwner, 1)
	rm.PutU64(memory, rm.MemorySize, 4<<20)
	info, flat := make([]byte, 1028), make([]byte, 32)
	rm.PutU32(info, 0, 4)
	defer func() { runtime.KeepAlive(memory); runtime.KeepAlive(info); runtime.KeepAlive(flat) }()
	for _, x := range []struct {
		name string
		nr   uint32
		o    []byte
	}{
		{"alloc", rm.EscAlloc, fakeAlloc(fakeDevice, 0x5c000077, classVidmem, memory)},
		{"control", rm.EscControl, fakeControlCall(fakeDevice, 0x503c0104, flat)},
		{"fbinfo", rm.EscControl, fakeControlCall(fakeDevice, controlFBInfoV2, info)},
		{"free", rm.EscFree, fakeFree(0x5c000099)},
	} {
		b.Run(x.name, func(b *testing.B) {
			g := withClient(newFakeGuard(b, silentDriver{}))
			c := newFakeCall(b, g, fakeControl)
			cmd := uint32(testCmd(x.nr, len(x.o)))
			addr := uint64(uintptr(unsafe.Pointer(&x.o[0])))
			c.notif.Args = [6]uint64{uint64(c.fd), uint64(cmd), addr}
			parts := make([]memoryPart, 0, maxParts)
			b.ReportAllocs()
			for b.Loop() {
				c.trappedCall = trappedCall{guard: g, notif: c.notif, task: c.task, mem: c.mem, fd: c.fd, node: c.node,
					call: rm.Call{Blocks: c.call.Blocks[:0]}, before: c.before[:0]}
				c.mem.reset()
				if !c.loadOuter(cmd, addr, len(x.o)) {
					b.Fatal("load")
				}
				rep := g.onEscape(&c.trappedCall)
				if rep.errno != 0 || c.failed(rep) {
					b.Fatal(rep, c.call.Outer)
				}
				writeMemory(c.task.tid, c.changedParts(parts))
				c.task.lastAnswer.record(&c.trappedCall)
			}
		})
	}
}

// silentDriver does nothing, so that a benchmark counts the guard's allocations only.
type silentDriver struct{ rmclient.Kernel }

func (silentDriver) Exec(Target, *rm.Call) syscall.Errno { return 0 }

func fakeFree(handle uint32) []byte {
	o := make([]byte, rm.FreeSize)
	rm.PutU32(o, rm.FreeRoot, fakeClient)
	rm.PutU32(o, rm.FreeObject, handle)
	return o
}
