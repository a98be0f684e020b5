// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// shortDriver makes a short system call in the place of the driver's, and makes handles up.
type shortDriver struct {
	silentDriver
	last atomic.Uint32
}

func (d *shortDriver) Exec(t Target, call *rm.Call) syscall.Errno {
	_, _, _ = unix.Syscall(unix.SYS_IOCTL, uintptr(t.FD), 0x5202ff, uintptr(unsafe.Pointer(&call.Outer[0])))
	if call.NR() == rm.EscAlloc && !rm.UVMShaped(call.Cmd) {
		rm.PutU32(call.Outer, rm.AllocObject, 0x60000000+d.last.Add(1))
	}
	return 0
}

const trappedRange = 0x5c000009

const (
	trapWaved = iota
	trapControl
	trapMemory
	trapUVM
	trapDMA
)

// trapped is a call and the one that takes it back, if there is one.
type trapped struct {
	fd   int
	cmds [2]uintptr
	args [2][]byte
}

func newTrapped(kind int, abi *rm.ABI, ctl, uvm int, params []byte) (c trapped) {
	c.fd = ctl
	first, second := &c.args[0], &c.args[1]
	switch kind {
	case trapWaved:
		*first, c.cmds[0] = make([]byte, 4), 3<<30|4<<16|'x'<<8|rm.EscControl
	case trapControl:
		*first = fakeControlCall(fakeDevice, 0x503c0104, params[:32])
		c.cmds[0] = testCmd(rm.EscControl, len(*first))
	case trapMemory:
		rm.PutU32(params, rm.MemoryOwner, 1)
		rm.PutU64(params, rm.MemorySize, 2<<20)
		*first, *second = fakeAlloc(fakeDevice, 0, classVidmem, params), fakeFree(0)
		c.cmds = [2]uintptr{testCmd(rm.EscAlloc, len(*first)), testCmd(rm.EscFree, len(*second))}
	case trapUVM:
		form, _ := abi.UVM(rm.UVMMapExternal)
		drop, _ := abi.UVM(rm.UVMUnmapExternal)
		*first, *second = make([]byte, form.Size), make([]byte, drop.Size)
		rm.PutU64(*first, form.FD-uvmMapCount, 1)
		rm.PutU32(*first, form.FD, uint32(ctl))
		rm.PutU32(*first, form.Client, fakeClient)
		rm.PutU32(*first, form.Object, fakeMemory)
		for _, o := range c.args {
			rm.PutU64(o, form.Base, 1<<32)
			rm.PutU64(o, form.Length, 2<<20)
		}
		c.fd, c.cmds = uvm, [2]uintptr{uintptr(rm.UVMMapExternal), uintptr(rm.UVMUnmapExternal)}
	case trapDMA:
		*first, *second = make([]byte, 64), make([]byte, 48)
		for _, o := range c.args {
			rm.PutU32(o, rm.DMAClient, fakeClient)
			rm.PutU32(o, rm.DMADevice, fakeDevice)
			rm.PutU32(o, rm.DMAMapper, trappedRange)
			rm.PutU32(o, rm.DMAMemory, fakeMemory)
		}
		rm.PutU64(*first, rm.DMAMapLength, 2<<20)
		c.cmds = [2]uintptr{testCmd(rm.EscMapDMA, len(*first)), testCmd(rm.EscUnmapDMA, len(*second))}
	}
	return c
}

// trappedCalls makes so many calls of a kind and takes each back. → ns of the first (tenth percentile, median) and of the second
func trappedCalls(s *childState, a []int) (string, error) {
	ctl, err := s.open("nvidiactl", unix.O_CLOEXEC)
	if err != nil {
		return "", err
	}
	defer unix.Close(ctl)
	uvm, err := s.open("nvidia-uvm", unix.O_CLOEXEC)
	if err != nil {
		return "", err
	}
	defer unix.Close(uvm)
	abi, err := rm.ForDriver(testVersion, false)
	if err != nil {
		return "", err
	}
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	kind := a[0]
	var took [2][]time.Duration
	for range a[1] {
		c := newTrapped(kind, abi, ctl, uvm, make([]byte, 128))
		for i, o := range c.args {
			if o == nil {
				continue
			}
			if kind == trapMemory && i == 1 {
				rm.PutU32(o, rm.FreeObject, rm.U32(c.args[0], rm.AllocObject))
			}
			begin := time.Now()
			e := rawIoctl(c.fd, c.cmds[i], o)
			took[i] = append(took[i], time.Since(begin))
			if e != 0 && kind != trapWaved {
				return "", e
			}
		}
	}
	var out []string
	for _, list := range took {
		slices.Sort(list)
		if n := len(list); n > 0 {
			out = append(out, strconv.Itoa(int(list[n/10])), strconv.Itoa(int(list[n/2])))
		}
	}
	return strings.Join(out, " "), nil
}

// BenchmarkTrapped is a call of another process, notification included. Only the driver is missing.
func BenchmarkTrapped(b *testing.B) {
	for name, kept := range map[string]bool{"": false, "kept-": true} {
		benchmarkTrapped(b, name, kept)
	}
}

func benchmarkTrapped(b *testing.B, prefix string, kept bool) {
	dir := makeNodes(b)
	uvm := filepath.Join(dir, "nvidia-uvm")
	if err := unix.Unlink(uvm); err != nil {
		b.Fatal(err)
	}
	if err := unix.Mknod(uvm, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 9))); err != nil {
		b.Fatal(err)
	}
	g := withClient(newFakeGuard(b, &shortDriver{}))
	g.monitor, g.filters = newMonitor(), map[*listener]bool{}
	g.account.addObject(fakeClient, object{handle: trappedRange, parent: fakeDevice, class: classVirtual, kind: rm.ClassVirtual, gpu: noGPU},
		noGPU, 0, 0)
	if kept {
		if err := g.newKeep(nil); err != nil {
			b.Fatal(err)
		}
	}
	c := startChild(b, g, dir, withEnv("GODEBUG=asyncpreemptoff=1"))
	for kind, name := range map[int]string{trapWaved: "waved", trapControl: "control", trapMemory: "memory", trapUVM: "uvm", trapDMA: "dma"} {
		b.Run(prefix+name, func(b *testing.B) {
			b.ReportAllocs()
			took := c.do("trapped", kind, b.N)
			for i, unit := range []string{"p10-ns", "p50-ns", "back-p10-ns", "back-p50-ns"}[:len(took)] {
				b.ReportMetric(float64(took[i]), unit)
			}
		})
	}
}
