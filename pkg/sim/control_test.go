// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"slices"
	"testing"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

func TestFBInfo(t *testing.T) {
	d := newDriver(t)
	u := newGPUUser(t, d.Session([]int{0}), 1)
	u.memory(1 << 30)
	indices := []uint32{7, 8, 9, 0xa, 0x12, 0x16, 0x20}
	p := make([]byte, 1028)
	rm.PutU32(p, 0, uint32(len(indices)))
	for i, x := range indices {
		rm.PutU32(p, 4+8*i, x)
	}
	if st := u.control(u.subd, 0x20801303, p); st != 0 {
		t.Fatalf("%#x", st)
	}
	for i, x := range indices {
		want := uint32(15109 << 10)
		if x == 0x12 || x == 0x16 {
			want = (15109 - 1024) << 10
		}
		if got := rm.U32(p, 4+8*i+4); got != want {
			t.Errorf("index %#x: %d KiB, want %d", x, got, want)
		}
	}
	rm.PutU32(p, 0, 1000)
	if st := u.control(u.subd, 0x20801303, p); st != rm.StatusInvalidArgument {
		t.Errorf("list longer than the block: %#x", st)
	}
	// The old form, with its list behind a pointer.
	out := make([]byte, rm.ControlSize)
	rm.PutU32(out, rm.ControlClient, u.client)
	rm.PutU32(out, rm.ControlObject, u.subd)
	rm.PutU32(out, rm.ControlCmd, 0x20801301)
	v1, list := make([]byte, 16), make([]byte, 8)
	rm.PutU32(v1, 0, 1)
	rm.PutU32(list, 0, 0x16)
	c := &rm.Call{Cmd: cmd(rm.EscControl, 32), Outer: out, Blocks: []rm.Block{{In: -1, Off: 16, Data: v1}, {In: 0, Off: 8, Data: list}}}
	if e := u.s.Ioctl(u.file, 1, 1, c); e != 0 || rm.U32(out, rm.ControlStatus) != 0 || rm.U32(list, 4) != (15109-1024)<<10 {
		t.Errorf("FB_GET_INFO: %v, status %#x, %d KiB", e, rm.U32(out, rm.ControlStatus), rm.U32(list, 4))
	}
}

func TestGPUQueries(t *testing.T) {
	d := newDriver(t)
	u := newGPUUser(t, d.Session([]int{0, 3}), 1)
	cards := make([]byte, 32*rm.CardInfoSize)
	if e := u.call(rm.EscCardInfo, cards, 0, nil); e != 0 {
		t.Fatal(e)
	}
	var ids []uint32
	for off := 0; off < len(cards) && cards[off] != 0; off += rm.CardInfoSize {
		ids = append(ids, rm.U32(cards, off+rm.CardInfoGPUID))
	}
	if len(ids) != 2 || rm.U32(cards, rm.CardInfoSize+rm.CardInfoMinor) != 3 {
		t.Fatalf("CARD_INFO: ids %x", ids)
	}
	for _, c := range []struct {
		cmd  uint32
		size int
	}{{0x201, 128}, {0x214, 384}} {
		p := make([]byte, c.size)
		if st := u.control(u.client, c.cmd, p); st != 0 {
			t.Fatalf("%#x: %#x", c.cmd, st)
		}
		if rm.U32(p, 0) != ids[0] || rm.U32(p, 4) != ids[1] || rm.U32(p, 8) != rm.GPUIDUnused {
			t.Errorf("%#x: % x", c.cmd, p[:12])
		}
	}
	info := make([]byte, 32)
	rm.PutU32(info, 0, ids[1])
	if st := u.control(u.client, 0x205, info); st != 0 || rm.U32(info, 8) != 1 {
		t.Errorf("ID_INFO_V2: %#x, instance %d", st, rm.U32(info, 8))
	}
	uuid := make([]byte, 268)
	rm.PutU32(uuid, 0, ids[1])
	u.control(u.client, 0x275, uuid)
	if got := string(uuid[8 : 8+40]); got != testConfig().GPUs[1].UUID {
		t.Errorf("UUID %q", got)
	}
	query := make([]byte, 272)
	copy(query, uuid[8:8+41])
	if st := u.control(u.client, 0x274, query); st != 0 || rm.U32(query, rm.UUIDQueryGPUID) != ids[1] {
		t.Errorf("GPU by UUID: %#x", st)
	}
	attach := slices.Repeat([]byte{0xff}, 132)
	rm.PutU32(attach, 0, ids[0])
	rm.PutU32(attach, 4, 0x7777)
	if st := u.control(u.client, 0x215, attach); st == 0 || rm.U32(attach, 128) != 0x7777 {
		t.Errorf("attach of an unknown id: %#x, failed id %#x", st, rm.U32(attach, 128))
	}
	name := make([]byte, 132)
	if st := u.control(u.subd, 0x20800110, name); st != 0 || string(name[4:12]) != "Tesla T4" {
		t.Errorf("name: %#x %q", st, name[4:20])
	}
	if st := u.control(u.client, 0x2080ffff, nil); st != rm.StatusNotSupported {
		t.Errorf("unknown control: %#x", st)
	}
	if st := u.control(u.dev, 0x20801303, make([]byte, 1028)); st != rm.StatusNotSupported {
		t.Errorf("control of another class: %#x", st)
	}
}

func TestProcesses(t *testing.T) {
	d := newDriver(t)
	a := newGPUUser(t, d.Session([]int{0}), 300)
	newGPUUser(t, d.Session([]int{0}), 200)
	newUser(t, d.Session([]int{0}), 100) // has no device
	a.memory(2 << 20)
	pids := func(class uint32) []uint32 {
		p := make([]byte, 3812)
		rm.PutU32(p, rm.PidsID, class)
		if st := a.control(a.subd, 0x2080018d, p); st != 0 {
			t.Fatalf("%#x", st)
		}
		var list []uint32
		for i := range rm.U32(p, rm.PidsCount) {
			list = append(list, rm.U32(p, rm.PidsTable+4*int(i)))
		}
		return list
	}
	if got := pids(classSubdevice); !slices.Equal(got, []uint32{200, 300}) {
		t.Errorf("users %v", got)
	}
	if got := pids(0xc0); len(got) != 0 {
		t.Errorf("contexts %v", got)
	}
	tsg := a.must(a.alloc(a.dev, 0, classGroup, make([]byte, 20)))
	ch := a.must(a.alloc(tsg, 0, 0xc86f, make([]byte, 368)))
	a.must(a.alloc(ch, 0, 0xcbc0, make([]byte, 16)))
	if got := pids(0xc0); !slices.Equal(got, []uint32{300}) {
		t.Errorf("contexts %v", got)
	}
	p := make([]byte, 14408)
	rm.PutU32(p, 0, 2)
	rm.PutU32(p, 8, 300)
	rm.PutU32(p, 8+72, 200)
	if st := a.control(a.subd, 0x2080018e, p); st != 0 || rm.U64(p, 8+16) != 2<<20 || rm.U64(p, 8+72+16) != 0 {
		t.Errorf("PID_INFO: %#x, %d and %d", st, rm.U64(p, 8+16), rm.U64(p, 8+72+16))
	}
}

func TestChannels(t *testing.T) {
	d := newDriver(t)
	u := newGPUUser(t, d.Session([]int{0}), 1)
	p := make([]byte, 20)
	rm.PutU32(p, rm.TSGEngineType, 1)
	tsg := u.must(u.alloc(u.dev, 0, classGroup, p))
	wantUsed(t, d, DefaultContextCost)
	rm.PutU32(p, rm.TSGEngineType, 11)
	u.must(u.alloc(u.dev, 0, classGroup, p))
	wantUsed(t, d, DefaultContextCost) // copy engines cost nothing
	ch := u.must(u.alloc(tsg, 0, 0xc86f, make([]byte, 368)))
	if _, st := u.alloc(u.client, 0, 0xc86f, make([]byte, 368)); st != rm.StatusInvalidObjectParent {
		t.Errorf("channel below the client: %#x", st)
	}
	slice := make([]byte, 8)
	u.control(tsg, 0xa06c0104, slice)
	if rm.U64(slice, 0) != DefaultTimesliceUs {
		t.Errorf("default timeslice %d", rm.U64(slice, 0))
	}
	rm.PutU64(slice, 0, 5000)
	if st := u.control(tsg, 0xa06c0103, slice); st != 0 {
		t.Errorf("SET_TIMESLICE: %#x", st)
	}
	if st := u.control(ch, 0xa06c0103, slice); st != rm.StatusNotSupported {
		t.Errorf("SET_TIMESLICE of a channel: %#x", st)
	}
	// Any client may stop any channel, as measured on the real driver.
	v := newGPUUser(t, d.Session([]int{0}), 2)
	dis := make([]byte, 536)
	dis[0] = 1
	rm.PutU32(dis, 4, 1)
	rm.PutU32(dis, 24, u.client)
	rm.PutU32(dis, 280, ch)
	if st := v.control(v.subd, 0x2080110b, dis); st != 0 {
		t.Errorf("FIFO_DISABLE_CHANNELS: %#x", st)
	}
	g := d.Snapshot().GPUs[0]
	if len(g.TSGs) != 2 || g.TSGs[0].TimesliceUs != 5000 || g.TSGs[0].Disabled != 1 || g.TSGs[0].Channels != 1 {
		t.Errorf("TSGs %+v", g.TSGs)
	}
	rm.PutU32(dis, 280, 0x99)
	if st := v.control(v.subd, 0x2080110b, dis); st != statusInvalidChannel {
		t.Errorf("dead handle in the list: %#x", st)
	}
	u.control(tsg, 0xa06c0101, []byte{1, 0, 0})
	if got := d.Snapshot().GPUs[0].TSGs[0].Disabled; got != 0 {
		t.Error("GPFIFO_SCHEDULE did not undo the pause")
	}
	u.free(u.client)
	wantUsed(t, d, 0)
	if got := d.Snapshot().GPUs[0].Hidden; got != 0 {
		t.Errorf("hidden %v", got)
	}
}

func TestContextNeedsMemory(t *testing.T) {
	d := newDriver(t)
	u := newGPUUser(t, d.Session([]int{0}), 1)
	if _, _, st := u.memory(uint64(15108 * quota.MiB)); st != 0 {
		t.Fatalf("%#x", st)
	}
	p := make([]byte, 20)
	rm.PutU32(p, rm.TSGEngineType, 1)
	if _, st := u.alloc(u.dev, 0, classGroup, p); st != rm.StatusNoMemory {
		t.Errorf("context on a full card: %#x", st)
	}
}

// TestPreemptionMode: a context comes with an object of the graphics engine, and its kernels are preempted once that is asked for.
func TestPreemptionMode(t *testing.T) {
	d := newDriver(t)
	u, other := newGPUUser(t, d.Session([]int{0}), 1), newGPUUser(t, d.Session([]int{0}), 2)
	p := make([]byte, 20)
	rm.PutU32(p, rm.TSGEngineType, 1)
	group := u.must(u.alloc(u.dev, 0, classGroup, p))
	channel := u.must(u.alloc(group, 0, 0xc86f, make([]byte, 368)))
	mode := func(u *user, handle, mode uint32) uint32 {
		p := make([]byte, rm.PreemptSize)
		rm.PutU32(p, rm.PreemptFlags, 1)
		rm.PutU32(p, rm.PreemptChannel, handle)
		rm.PutU32(p, rm.PreemptCILP, mode)
		return u.control(u.subd, 0x20801210, p)
	}
	if st := mode(u, group, rm.PreemptModeCILP); st != rm.StatusNotSupported {
		t.Errorf("without a context: %#x", st)
	}
	u.must(u.alloc(channel, 0, 0xcbc0, make([]byte, 16)))
	for _, c := range []struct {
		u      *user
		handle uint32
		mode   uint32
		status uint32
	}{{u, group, rm.PreemptModeCILP, 0}, {u, channel, rm.PreemptModeWFI, 0}, {u, u.dev, rm.PreemptModeCILP, rm.StatusNotSupported},
		{other, group, rm.PreemptModeCILP, rm.StatusNotSupported}} {
		if st := mode(c.u, c.handle, c.mode); st != c.status {
			t.Errorf("%#x: %#x, want %#x", c.handle, st, c.status)
		}
	}
	if _, st := u.alloc(channel, 0, 0xcb97, make([]byte, 16)); st != rm.StatusOK {
		t.Errorf("a 3D object beside kernels that run to their end: %#x", st)
	}
	if st := mode(u, group, rm.PreemptModeCILP); st != rm.StatusInvalidRequest {
		t.Errorf("of a context that draws: %#x", st)
	}
	if st := mode(u, group, rm.PreemptModeCTA); st != rm.StatusOK {
		t.Errorf("of a context that draws, by blocks: %#x", st)
	}
	group = u.must(u.alloc(u.dev, 0, classGroup, p))
	channel = u.must(u.alloc(group, 0, 0xc86f, make([]byte, 368)))
	u.must(u.alloc(channel, 0, 0xcbc0, make([]byte, 16)))
	if st := mode(u, group, rm.PreemptModeCILP); st != rm.StatusOK {
		t.Errorf("%#x", st)
	}
	if _, st := u.alloc(channel, 0, 0x902d, make([]byte, 16)); st != rm.StatusInvalidObject {
		t.Errorf("a 2D object in a context that preempts: %#x", st)
	}
}
