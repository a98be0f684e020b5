// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"log/slog"
	"strings"
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

const (
	classProfiler = 0xb2cc
	fakeProfiler  = 0x5c000010
	streamAlloc   = 0xb0cc0105
	streamFree    = 0xb0cc0106
	streamBind    = 0xb0cc0107
	cacheFlush    = 0x2080130e
)

// profilerCalls are what Nsight Compute makes beyond what a CUDA program does, on an H200 under 580.159.04.
var profilerCalls = []struct {
	class, cmd uint32
	size       int
}{
	{class: 0x90cc}, {class: classProfiler, size: 8},
	{cmd: 0xb0cc0101, size: 1}, {cmd: 0xb0cc0103, size: 1}, {cmd: streamAlloc, size: 56}, {cmd: 0xb0cc0119, size: 1}, {cmd: streamBind},
	{cmd: 0xb0cc010a, size: 3980}, {cmd: 0xb0cc010d, size: 4}, {cmd: 0xb0cc010e, size: 256}, {cmd: 0xb0cc0301, size: 12},
	{cmd: 0xb0cc0302, size: 4},
	{cmd: streamFree, size: 4}, {cmd: cacheFlush, size: 4024}, {cmd: 0x2080a06d, size: 64}, {cmd: 0x2080a0c8, size: 64},
}

// TestProfiling: what reads hardware counters is refused, with a line in the log that says how to allow it, and passes where the
// node's settings do.
func TestProfiling(t *testing.T) {
	for _, allowed := range []bool{false, true} {
		d := answering(0, nil)
		g := withClient(newFakeGuard(t, d))
		var log bytes.Buffer
		g.log = slog.New(slog.NewTextHandler(&log, nil))
		g.cfg.Settings.Profiling = allowed
		f := newFakeCall(t, g, fakeControl)
		want, passes := uint32(rm.StatusInsufficientPermissions), 0
		if allowed {
			want, passes = rm.StatusOK, 1
		}
		for i, x := range profilerCalls {
			p := make([]byte, x.size)
			before := len(d.calls)
			var status uint32
			if x.class != 0 {
				o := fakeAlloc(fakeDevice, fakeProfiler-1+uint32(i), x.class, p)
				f.escape(rm.EscAlloc, o, p)
				status = rm.U32(o, 40)
			} else {
				o := fakeControlCall(fakeProfiler, x.cmd, p)
				f.escape(rm.EscControl, o, p)
				status = rm.U32(o, rm.ControlStatus)
			}
			if calls := len(d.calls) - before; status != want || calls != passes {
				t.Errorf("profiling = %v: %#x: %s, %d driver calls; want %s, %d",
					allowed, max(x.class, x.cmd), rm.StatusName(status), calls, rm.StatusName(want), passes)
			}
		}
		if n := strings.Count(log.String(), "profiling = true in cgpu.toml allows them"); n != 1-passes {
			t.Errorf("profiling = %v: the log names the remedy %d times:\n%s", allowed, n, log.String())
		}
	}
}

// newProfiler is a guard that allows profilers, with one, and functions that make calls on it: they answer with the status, and whether
// the driver was asked.
func newProfiler(t *testing.T, answer func(call *rm.Call)) (d *fakeDriver, alloc func(class uint32, p []byte) (uint32, bool),
	control func(object, cmd uint32, p []byte) (uint32, bool)) {
	d = answering(0, answer)
	g := withClient(newFakeGuard(t, d))
	g.cfg.Settings.Profiling = true
	f := newFakeCall(t, g, fakeControl)
	alloc = func(class uint32, p []byte) (uint32, bool) {
		before := len(d.calls)
		o := fakeAlloc(fakeDevice, fakeProfiler, class, p)
		f.escape(rm.EscAlloc, o, p)
		return rm.U32(o, 40), len(d.calls) > before
	}
	control = func(object, cmd uint32, p []byte) (uint32, bool) {
		before := len(d.calls)
		o := fakeControlCall(object, cmd, p)
		f.escape(rm.EscControl, o, p)
		return rm.U32(o, rm.ControlStatus), len(d.calls) > before
	}
	return d, alloc, control
}

// TestProfilerTarget: a profiler may be bound to a context of the container, not to another's.
func TestProfilerTarget(t *testing.T) {
	_, alloc, _ := newProfiler(t, nil)
	for _, x := range []struct {
		client, status uint32
	}{{0, rm.StatusOK}, {fakeClient, rm.StatusOK}, {0xc1d00099, rm.StatusInvalidClient}} {
		p := make([]byte, 8)
		putWords(p, 0, x.client, 0x5c000020)
		if status, asked := alloc(classProfiler, p); status != x.status || asked != (status == rm.StatusOK) {
			t.Errorf("target of client %#x: %s, driver asked: %v; want %s", x.client, rm.StatusName(status), asked, rm.StatusName(x.status))
		}
	}
}

// TestProfilerStreams: the driver follows what is at an index of a profiler's streams, so only those that it gave are named.
func TestProfilerStreams(t *testing.T) {
	const given = 3
	status := uint32(rm.StatusOK)
	d, alloc, control := newProfiler(t, nil)
	d.reset(func(call *rm.Call) {
		if call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == streamAlloc {
			rm.PutU32(call.Blocks[0].Data, rm.StreamAllocIndex, given)
		}
	})
	answer := d.answer
	d.answer = func(target Target, call *rm.Call) (e syscall.Errno) {
		e = answer(target, call)
		if call.NR() == rm.EscControl {
			rm.PutU32(call.Outer, rm.ControlStatus, status)
		}
		return e
	}
	index := func(i uint32) []byte {
		p := make([]byte, 4)
		rm.PutU32(p, rm.StreamFreeIndex, i)
		return p
	}
	if s, _ := alloc(classProfiler, make([]byte, 8)); s != rm.StatusOK {
		t.Fatal(rm.StatusName(s))
	}
	for _, x := range []struct {
		name   string
		object uint32
		cmd    uint32
		params []byte
		driver uint32 // answers so
		status uint32
		asked  bool
	}{
		{"nothing to free", fakeProfiler, streamFree, index(0), rm.StatusOK, rm.StatusInvalidArgument, false},
		{"bound without streams", fakeProfiler, streamBind, nil, rm.StatusOK, rm.StatusOK, true},
		{"one that fails", fakeProfiler, streamAlloc, make([]byte, 56), rm.StatusInvalidArgument, rm.StatusInvalidArgument, true},
		{"bound to what was not made", fakeProfiler, streamBind, nil, rm.StatusOK, rm.StatusInvalidState, false},
		{"free of what was not made", fakeProfiler, streamFree, index(given), rm.StatusOK, rm.StatusInvalidArgument, false},
		{"one", fakeProfiler, streamAlloc, make([]byte, 56), rm.StatusOK, rm.StatusOK, true},
		{"bound", fakeProfiler, streamBind, nil, rm.StatusOK, rm.StatusOK, true},
		{"free of another", fakeProfiler, streamFree, index(given - 1), rm.StatusOK, rm.StatusInvalidArgument, false},
		{"free of one with the same lowest bits", fakeProfiler, streamFree, index(given + 64), rm.StatusOK, rm.StatusInvalidArgument, false},
		{"free of the last number", fakeProfiler, streamFree, index(0xffffffff), rm.StatusOK, rm.StatusInvalidArgument, false},
		{"free", fakeProfiler, streamFree, index(given), rm.StatusOK, rm.StatusOK, true},
		{"of what is no profiler", fakeDevice, streamAlloc, make([]byte, 56), rm.StatusOK, rm.StatusInvalidObject, false},
		{"of nothing", 0x999, streamFree, index(given), rm.StatusOK, rm.StatusInvalidObject, false},
	} {
		status = x.driver
		if s, asked := control(x.object, x.cmd, x.params); s != x.status || asked != x.asked {
			t.Errorf("%s: %s, driver asked: %v; want %s, %v", x.name, rm.StatusName(s), asked, rm.StatusName(x.status), x.asked)
		}
	}
}

// TestCacheFlush: an invalidation of the GPU's caches writes back what neighbours have in them.
func TestCacheFlush(t *testing.T) {
	var flags uint32
	_, _, control := newProfiler(t, func(call *rm.Call) {
		if call.NR() == rm.EscControl {
			flags = rm.U32(call.Blocks[0].Data, rm.CacheFlushFlags)
		}
	})
	const full = 1 << 4
	for passed, want := range map[uint32]uint32{full: full, full | rm.CacheFlushWriteBack: full | rm.CacheFlushWriteBack,
		full | rm.CacheFlushInvalidate: full | rm.CacheFlushInvalidate | rm.CacheFlushWriteBack} {
		p := make([]byte, 4024)
		rm.PutU32(p, rm.CacheFlushFlags, passed)
		if s, _ := control(fakeDevice, cacheFlush, p); s != rm.StatusOK || flags != want {
			t.Errorf("flags %#x: %s, the driver saw %#x, want %#x", passed, rm.StatusName(s), flags, want)
		}
	}
}
