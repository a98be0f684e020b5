package guard

import (
	"slices"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestResetChannel: a program ends its own channel after a hardware exception, and no other engine than that channel's.
func TestResetChannel(t *testing.T) {
	const group, channel, compute, copyGroup, copyChannel, lone = 0x200, 0x201, 0x202, 0x210, 0x211, 0x220
	d := answering(0, nil)
	g := withClient(newFakeGuard(t, d))
	g.cfg.Settings.MaxTSGs, g.cfg.Settings.MaxChannels = 8, 8
	f := newFakeCall(t, g, fakeControl)
	for _, x := range []struct{ parent, handle, class, groupEngine, channelEngine uint32 }{
		{fakeDevice, group, classChannelGroup, 1, 0}, {group, channel, 0xc86f, 0, 0}, {channel, compute, 0xcbc0, 0, 0},
		{fakeDevice, copyGroup, classChannelGroup, 9, 0}, {copyGroup, copyChannel, 0xc86f, 0, 0},
		{fakeDevice, lone, 0xc86f, 0, 10},
	} {
		p := make([]byte, 368)
		if x.class == classChannelGroup {
			rm.PutU32(p, rm.TSGEngineType, x.groupEngine)
		} else {
			rm.PutU32(p, rm.ChannelEngineType, x.channelEngine)
		}
		o := fakeAlloc(x.parent, x.handle, x.class, p)
		if f.escape(rm.EscAlloc, o, p); rm.U32(o, 40) != rm.StatusOK {
			t.Fatalf("%#x: %s", x.handle, rm.StatusName(rm.U32(o, 40)))
		}
	}
	reset := func(handle uint32, size int, words ...uint32) (uint32, int) {
		p := make([]byte, size)
		for i, w := range words {
			rm.PutU32(p, 4*i, w)
		}
		o := fakeControlCall(handle, 0x906f0102, p)
		before := len(d.calls)
		f.escape(rm.EscControl, o, p)
		return rm.U32(o, rm.ControlStatus), len(d.calls) - before
	}
	for _, x := range []struct {
		name         string
		handle       uint32
		size         int
		words        []uint32
		status       uint32
		reachesCalls int
	}{
		{"as libcuda does", channel, 16, []uint32{1}, rm.StatusOK, 1},
		{"once more", channel, 16, []uint32{1, 0, 2}, rm.StatusOK, 1},
		{"the engine that neighbours compute on", copyChannel, 16, []uint32{1}, rm.StatusInvalidArgument, 0},
		{"no engine", copyChannel, 16, []uint32{0}, rm.StatusInvalidArgument, 0},
		{"another GPU of an SLI group", copyChannel, 16, []uint32{9, 1}, rm.StatusInvalidArgument, 0},
		{"a reason that only the driver gives", copyChannel, 16, []uint32{9, 0, 4}, rm.StatusInvalidArgument, 0},
		{"a copy channel", copyChannel, 16, []uint32{9}, rm.StatusOK, 1},
		{"a channel without a group", lone, 16, []uint32{10}, rm.StatusOK, 1},
		{"a group", group, 16, []uint32{1}, rm.StatusInvalidObject, 0},
		{"what is no channel", fakeDevice, 16, []uint32{1}, rm.StatusInvalidObject, 0},
		{"nothing", 0x999, 16, []uint32{1}, rm.StatusInvalidObject, 0},
		{"the structure of branches before 550", channel, 12, []uint32{1}, rm.StatusInvalidParamStruct, 0},
	} {
		if status, calls := reset(x.handle, x.size, x.words...); status != x.status || calls != x.reachesCalls {
			t.Errorf("%s: %s, %d driver calls; want %s, %d", x.name, rm.StatusName(status), calls, rm.StatusName(x.status), x.reachesCalls)
		}
	}
}

// TestRegOps: registers of the container's own context may be written, and no others.
func TestRegOps(t *testing.T) {
	const group, channel = 0x200, 0x201
	d := answering(0, nil)
	g := withClient(newFakeGuard(t, d))
	g.cfg.Settings.MaxTSGs, g.cfg.Settings.MaxChannels = 8, 8
	f := newFakeCall(t, g, fakeControl)
	for _, x := range [][3]uint32{{fakeDevice, group, classChannelGroup}, {group, channel, 0xc86f}} {
		p := make([]byte, 368)
		rm.PutU32(p, rm.TSGEngineType, 1)
		f.escape(rm.EscAlloc, fakeAlloc(x[0], x[1], x[2], p), p)
	}
	for _, x := range []struct {
		name            string
		client, channel uint32
		types           []byte
		status          uint32
		calls           int
	}{
		{"no channel: the whole GPU", fakeClient, 0, []byte{rm.RegOpTypeGRCtx}, rm.StatusNotSupported, 0},
		{"no client", 0, channel, []byte{rm.RegOpTypeGRCtx}, rm.StatusNotSupported, 0},
		{"another container's client", 0xc1d00099, channel, []byte{rm.RegOpTypeGRCtx}, rm.StatusInvalidClient, 0},
		{"a register of the GPU", fakeClient, channel, []byte{0}, rm.StatusNotSupported, 0},
		{"one of the memory's", fakeClient, channel, []byte{0x20}, rm.StatusNotSupported, 0},
		{"one of the GPU among others", fakeClient, channel, []byte{rm.RegOpTypeGRCtx, 0}, rm.StatusNotSupported, 0},
		{"none", fakeClient, channel, nil, rm.StatusNotSupported, 0},
		{"too many", fakeClient, channel, []byte{1, 1, 1, 1, 1}, rm.StatusInvalidArgument, 0},
		{"as libcuda does", fakeClient, channel, []byte{rm.RegOpTypeGRCtx}, rm.StatusOK, 1},
	} {
		ops := make([]byte, rm.RegOpSize*len(x.types))
		for i, kind := range x.types {
			ops[i*rm.RegOpSize+rm.RegOpType] = kind
		}
		p := make([]byte, 48)
		putWords(p, rm.RegOpsClient, x.client, x.channel)
		rm.PutU32(p, 20, uint32(len(x.types)))
		if len(ops) > 0 {
			putPointer(p, 24, ops)
		}
		o := fakeControlCall(fakeDevice, 0x20800122, p)
		before := len(d.calls)
		f.escape(rm.EscControl, o, p, ops)
		if status, calls := rm.U32(o, rm.ControlStatus), len(d.calls)-before; status != x.status || calls != x.calls {
			t.Errorf("%s: %s, %d driver calls; want %s, %d", x.name, rm.StatusName(status), calls, rm.StatusName(x.status), x.calls)
		}
	}
}

// TestDebugMemory: a debugger reads and writes more than fits into the guard at once, and memory only.
func TestDebugMemory(t *testing.T) {
	const vaspace, size = 0x300, chunk*2 + 100
	card := make([]byte, size+10)
	for i := range card {
		card[i] = byte(i * 7)
	}
	d := answering(0, func(call *rm.Call) {
		p, b := call.Blocks[0].Data, call.Blocks[1].Data
		off := rm.U64(p, rm.DebugMemoryOffset)
		if int(rm.U32(p, rm.DebugMemoryLength)) != len(b) || len(b) > chunk {
			t.Errorf("%d bytes in a block of %d", rm.U32(p, rm.DebugMemoryLength), len(b))
		}
		if rm.U32(call.Outer, rm.ControlCmd) == 0x83de0316 {
			copy(card[off:], b)
		} else {
			copy(b, card[off:])
		}
	})
	g := withClient(newFakeGuard(t, d))
	g.account.addObject(fakeClient, object{handle: vaspace, parent: fakeDevice, class: 0x50a0, kind: rm.ClassPlain, gpu: noGPU}, noGPU, 0, 0)
	f := newFakeCall(t, g, fakeControl)
	do := func(cmd, handle, length uint32, buffer []byte) (reply, uint32) {
		p := make([]byte, 24)
		putWords(p, rm.DebugMemoryHandle, handle, length)
		rm.PutU64(p, rm.DebugMemoryOffset, 10)
		putPointer(p, rm.DebugMemoryBuffer, buffer)
		o := fakeControlCall(fakeDevice, cmd, p)
		rep := f.escape(rm.EscControl, o, p, buffer)
		if rm.U32(p, rm.DebugMemoryLength) != length || rm.U64(p, rm.DebugMemoryOffset) != 10 {
			t.Error("the program's parameters are changed")
		}
		return rep, rm.U32(o, rm.ControlStatus)
	}
	buffer := make([]byte, size)
	if rep, status := do(0x83de0315, fakeMemory, size, buffer); rep != replyDone || status != rm.StatusOK || !slices.Equal(buffer, card[10:]) {
		t.Errorf("read: %+v, %s", rep, rm.StatusName(status))
	}
	for i := range buffer {
		buffer[i] = byte(i * 3)
	}
	if rep, status := do(0x83de0316, fakeMemory, size, buffer); rep != replyDone || status != rm.StatusOK || !slices.Equal(buffer, card[10:]) || len(d.calls) != 6 {
		t.Errorf("write: %+v, %s, %d driver calls", rep, rm.StatusName(status), len(d.calls))
	}
	for _, x := range []struct {
		name           string
		handle, length uint32
		status         uint32
	}{
		{"an address space", vaspace, size, rm.StatusInvalidObject},
		{"nothing", fakeMemory, 0, rm.StatusInvalidArgument},
		{"too much", fakeMemory, 256<<20 + 1, rm.StatusInvalidArgument},
	} {
		if _, status := do(0x83de0315, x.handle, x.length, buffer); status != x.status || len(d.calls) != 6 {
			t.Errorf("%s: %s, %d driver calls", x.name, rm.StatusName(status), len(d.calls))
		}
	}
}

// TestSlowCalls: calls that hold the driver's locks for long are paid for in time.
func TestSlowCalls(t *testing.T) {
	b, now := slowCalls(), time.Now()
	if wait := b.spend(now, 0); wait != 0 {
		t.Errorf("the first waits %v", wait)
	}
	b.spend(now, 3.5)
	if wait := b.spend(now, 0); wait != 5*time.Second {
		t.Errorf("half a second too much waits %v", wait)
	}
	if wait := b.spend(now.Add(5*time.Second), 0); wait != 0 {
		t.Errorf("after that it waits %v", wait)
	}
	for _, id := range []uint32{0x906f0102, 0x20800122, 0x83de030c, 0x83de0310, 0x83de0315, 0x83de0316} {
		abi, _ := rm.ForDriver(testVersion, false)
		if c, ok := abi.Control(id); !ok || !c.Slow {
			t.Errorf("%#x is not among them", id)
		}
	}
}
