// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/sim/runlist"
)

const (
	us = time.Microsecond
	ms = time.Millisecond

	switchCost  = runlist.DefaultSwitchCost
	preemptCost = switchCost + runlist.DefaultPreemptCost // of a switch from who has work left
)

// clock is the time of a driver in a test.
type clock struct{ ns atomic.Int64 }

func (c *clock) now() time.Duration     { return time.Duration(c.ns.Load()) }
func (c *clock) pass(d time.Duration)   { c.ns.Add(int64(d)) }
func (c *clock) set(now time.Duration)  { c.ns.Store(int64(now)) }
func (c *clock) config(g Config) Config { g.Clock = c.now; return g }

func newTimedDriver(t *testing.T) (*Driver, *clock) {
	t.Helper()
	c := &clock{}
	d, err := New(c.config(testConfig()))
	if err != nil {
		t.Fatal(err)
	}
	return d, c
}

// graphics makes a group on the graphics engine with some channels, and schedules it as libcuda does.
func (u *user) graphics(channels int) (group uint32, handles []uint32) {
	u.t.Helper()
	p := make([]byte, 20)
	rm.PutU32(p, rm.TSGEngineType, rm.ChannelEngineTypeGR)
	group = u.must(u.alloc(u.dev, u.handle(), classGroup, p))
	for range channels {
		handles = append(handles, u.channel(group))
	}
	u.schedule(group)
	return group, handles
}

func (u *user) schedule(group uint32) {
	u.t.Helper()
	if st := u.control(group, 0xa06c0101, []byte{1, 0}); st != 0 {
		u.t.Fatalf("GPFIFO_SCHEDULE: %#x", st)
	}
}

func (u *user) channel(group uint32) uint32 {
	u.t.Helper()
	return u.must(u.alloc(group, u.handle(), 0xc86f, make([]byte, 368)))
}

func submitParams(length time.Duration, count, flags uint32, gap time.Duration) []byte {
	p := make([]byte, SubmitSize)
	rm.PutU64(p, SubmitLength, uint64(length))
	rm.PutU32(p, SubmitCount, count)
	rm.PutU32(p, SubmitFlags, flags)
	rm.PutU64(p, SubmitGap, uint64(gap))
	return p
}

func (u *user) submit(group uint32, length time.Duration, count uint32) {
	u.t.Helper()
	if st := u.control(group, CtrlSubmit, submitParams(length, count, 0, 0)); st != 0 {
		u.t.Fatalf("SIM_SUBMIT: %#x", st)
	}
}

// work is the group's GPU time, as the process is told.
func (u *user) work(group uint32) (gpuTime time.Duration, done uint64) {
	u.t.Helper()
	p := make([]byte, WorkSize)
	if st := u.control(group, CtrlWork, p); st != 0 {
		u.t.Fatalf("SIM_WORK: %#x", st)
	}
	return time.Duration(rm.U64(p, WorkGPUTime)), rm.U64(p, WorkDone)
}

func (u *user) setTimeslice(group uint32, d time.Duration) {
	u.t.Helper()
	p := make([]byte, 8)
	rm.PutU64(p, 0, uint64(d.Microseconds()))
	if st := u.control(group, 0xa06c0103, p); st != 0 {
		u.t.Fatalf("SET_TIMESLICE: %#x", st)
	}
}

// disable stops or restarts channels of another user.
func (u *user) disable(stop bool, of *user, channels ...uint32) uint32 {
	u.t.Helper()
	p := make([]byte, 536)
	if stop {
		p[disableFlag] = 1
	}
	rm.PutU32(p, disableCount, uint32(len(channels)))
	for i, h := range channels {
		rm.PutU32(p, disableClients+4*i, of.client)
		rm.PutU32(p, disableChannels+4*i, h)
	}
	return u.control(u.subd, 0x2080110b, p)
}

func TestEngineTimeslices(t *testing.T) {
	d, clock := newTimedDriver(t)
	u, v := newGPUUser(t, d.Session([]int{0}), 100), newGPUUser(t, d.Session([]int{0}), 200)
	a, _ := u.graphics(1)
	b, _ := v.graphics(1)
	u.setTimeslice(a, 10*ms)
	v.setTimeslice(b, 30*ms)
	u.submit(a, ms, 0)
	v.submit(b, 100*ms, 0)
	clock.pass(400 * (10 + 30) * ms)
	clock.pass(400 * 2 * preemptCost)
	ta, na := u.work(a)
	tb, nb := v.work(b)
	if ta != 4*time.Second || tb != 12*time.Second || na != 4000 || nb != 120 {
		t.Errorf("a: %v in %d kernels, b: %v in %d", ta, na, tb, nb)
	}
	g := d.Snapshot().GPUs[0]
	if e := g.Engine; e.Busy != ta+tb || e.Busy+e.Switching+e.Idle != clock.now() {
		t.Errorf("engine %+v after %v", e, clock.now())
	}
	if s := g.TSGs[0]; s.PID != 100 || s.GPUTime != ta || s.Kernels != na || s.Waiting != clock.now()-ta || s.Switches != 400 ||
		s.Preemptions != 400 || s.Paused {
		t.Errorf("snapshot %+v", s)
	}
	if e := d.Snapshot().GPUs[1].Engine; e.Idle != clock.now() {
		t.Errorf("the other GPU: %+v", e)
	}
	// 0 and values out of bounds are taken, and read back.
	for _, n := range []uint64{0, 1 << 63, ^uint64(0)} {
		p := make([]byte, 8)
		rm.PutU64(p, 0, n)
		st := u.control(a, 0xa06c0103, p)
		clear(p)
		if u.control(a, 0xa06c0104, p); st != 0 || rm.U64(p, 0) != n {
			t.Errorf("timeslice %d: %#x, read back %d", n, st, rm.U64(p, 0))
		}
	}
	before, _ := v.work(b)
	clock.pass(20 * time.Second)
	if after, _ := v.work(b); after == before {
		t.Error("a timeslice of 584942 years starves the others")
	}
	// PREEMPT ends a slice.
	was := d.Snapshot().GPUs[0].TSGs
	u.control(a, 0xa06c0105, make([]byte, 8))
	v.control(b, 0xa06c0105, make([]byte, 8))
	if now := d.Snapshot().GPUs[0].TSGs; now[0].Preemptions+now[1].Preemptions != was[0].Preemptions+was[1].Preemptions+1 {
		t.Errorf("after PREEMPT %+v\nbefore %+v", now, was)
	}
}

func TestEnginePauses(t *testing.T) {
	d, clock := newTimedDriver(t)
	u, guard := newGPUUser(t, d.Session([]int{0}), 100), newGPUUser(t, d.Session([]int{0}), 1)
	a, _ := u.graphics(0)
	u.submit(a, 100*ms, 0)
	var ch []uint32
	var last time.Duration
	for _, c := range []struct {
		what string
		do   func()
		runs bool
	}{
		{"no channel", func() {}, false},
		{"two channels that are not scheduled", func() { ch = append(ch, u.channel(a), u.channel(a)) }, false},
		{"disabled and enabled", func() { guard.disable(true, u, ch...); guard.disable(false, u, ch...) }, false},
		{"GPFIFO_SCHEDULE of the first", func() { u.control(ch[0], 0xa06f0103, []byte{1, 0}) }, true},
		{"which is stopped, the other not scheduled", func() { guard.disable(true, u, ch[0]) }, false},
		{"both scheduled", func() { u.schedule(a) }, true},
		{"one channel stopped", func() { guard.disable(true, u, ch[0]) }, true},
		{"both stopped", func() { guard.disable(true, u, ch[1]) }, false},
		{"stopped again", func() { guard.disable(true, u, ch...) }, false},
		{"one restarted", func() { guard.disable(false, u, ch[0]) }, true},
		{"both stopped in one call", func() { guard.disable(true, u, ch...) }, false},
		{"a list with a dead handle", func() {
			if st := guard.disable(false, u, append(ch, 0x1234)...); st != statusInvalidChannel {
				t.Errorf("dead handle: %#x", st)
			}
		}, false},
		{"a new channel", func() { ch = append(ch, u.channel(a)) }, false},
		{"which is scheduled", func() { u.control(ch[2], 0xa06f0103, []byte{1, 0}) }, true},
		{"which is stopped", func() { guard.disable(true, u, ch[2]) }, false},
		{"and restarted", func() { guard.disable(false, u, ch[2]) }, true},
		{"and freed", func() { u.free(ch[2]) }, false},
		{"GPFIFO_SCHEDULE of a channel", func() { u.control(ch[1], 0xa06f0103, []byte{1, 0}) }, true},
		{"stopped once more", func() { guard.disable(true, u, ch[:2]...) }, false},
		{"GPFIFO_SCHEDULE off", func() { u.control(a, 0xa06c0101, []byte{0, 0}) }, false},
		{"GPFIFO_SCHEDULE of the group", func() { u.control(a, 0xa06c0101, []byte{1, 0}) }, true},
		{"stopped at last", func() { guard.disable(true, u, ch[:2]...) }, false},
		{"and all channels freed", func() { u.free(ch[0]); u.free(ch[1]) }, false},
	} {
		c.do()
		clock.pass(time.Second)
		now, _ := u.work(a)
		if want := map[bool]time.Duration{true: time.Second}[c.runs]; now-last != want && now-last != want-switchCost {
			t.Errorf("%s: %v in a second", c.what, now-last)
		}
		if p := d.Snapshot().GPUs[0].TSGs[0].Paused; p == c.runs {
			t.Errorf("%s: paused %v", c.what, p)
		}
		last = now
	}
	if _, done := u.work(a); done != uint64(last/(100*ms)) {
		t.Errorf("%d kernels of 100 ms in %v", done, last)
	}
}

func TestEngineMembers(t *testing.T) {
	d, clock := newTimedDriver(t)
	s := d.Session([]int{0})
	u, v := newGPUUser(t, d.Session([]int{0}), 100), newGPUUser(t, s, 200)
	a, _ := u.graphics(1)
	p := make([]byte, 20)
	b := v.must(v.alloc(v.dev, v.handle(), classGroup, p)) // engine type 0
	v.channel(b)
	v.schedule(b)
	rm.PutU32(p, rm.TSGEngineType, 11)
	copies := v.must(v.alloc(v.dev, v.handle(), classGroup, p))
	for _, c := range []uint32{CtrlSubmit, CtrlWork} {
		if st := v.control(copies, c, slices.Concat(submitParams(ms, 1, 0, 0), make([]byte, 16))); st != rm.StatusNotSupported {
			t.Errorf("control %#x of a copy engine: %#x", c, st)
		}
		if st := v.control(v.subd, c, make([]byte, 40)); st != rm.StatusNotSupported {
			t.Errorf("control %#x of a subdevice: %#x", c, st)
		}
	}
	v.setTimeslice(copies, ms)
	u.submit(a, ms, 0)
	v.submit(b, ms, 0)
	clock.pass(time.Second)
	if now, _ := v.work(b); now < 400*ms || now > 500*ms {
		t.Errorf("engine type 0: %v in a second beside another", now)
	}
	half, _ := u.work(a)
	v.free(b)
	clock.pass(time.Second)
	if now, _ := u.work(a); now-half < 990*ms {
		t.Errorf("%v in a second after the other group was freed", now-half)
	}
	b, _ = v.graphics(2)
	v.submit(b, ms, 0)
	clock.pass(time.Second)
	before, _ := u.work(a)
	clock.pass(time.Second)
	if err := v.s.CloseFile(v.file); err != nil { // which worked until now
		t.Fatal(err)
	}
	clock.pass(time.Second)
	v = newGPUUser(t, s, 200)
	b, _ = v.graphics(2)
	v.submit(b, ms, 0)
	clock.pass(time.Second)
	s.Close() // the death of a process
	clock.pass(time.Second)
	if now, _ := u.work(a); now-before < 2*990*ms+2*400*ms || now-before > 3*time.Second {
		t.Errorf("%v in two seconds beside another and two alone", now-before)
	}
	if n := len(d.gpus[0].engine.groups); n != 1 {
		t.Errorf("%d groups on the runlist, want 1", n)
	}
}

func TestSubmit(t *testing.T) {
	d, clock := newTimedDriver(t)
	u := newGPUUser(t, d.Session([]int{0}), 100)
	a, _ := u.graphics(1)
	for _, c := range []struct {
		what        string
		length, gap time.Duration
		count       uint32
		flags       uint32
		status      uint32
		kernels     uint64 // within 100 ms
	}{
		{"three", ms, 0, 3, 0, 0, 3},
		{"three with gaps", ms, 40 * ms, 3, 0, 0, 3},
		{"a loop", ms, 0, 0, 0, 0, 100},
		{"two, and the loop's that had begun", 20 * ms, 0, 2, 0, 0, 3},
		{"a loop with gaps", 10 * ms, 30 * ms, 0, 0, 0, 3},
		{"stop", 0, 0, 0, SubmitStop, 0, 0},
		{"many", ms, 0, 1 << 31, 0, 0, 100},
		{"others instead", 2 * ms, 0, 10, SubmitStop, 0, 10},
		{"nothing", 0, 0, 1, 0, rm.StatusInvalidArgument, 0},
		{"too short", us - 1, 0, 1, 0, rm.StatusInvalidArgument, 0},
		{"too short, and stop", 1, 0, 1, SubmitStop, rm.StatusInvalidArgument, 0},
		{"too long", time.Hour + 1, 0, 1, 0, rm.StatusInvalidArgument, 0},
		{"negative", -1, 0, 1, 0, rm.StatusInvalidArgument, 0},
		{"gap too short", ms, 1, 1, 0, rm.StatusInvalidArgument, 0},
		{"gap too long", ms, -1, 1, 0, rm.StatusInvalidArgument, 0},
		{"unknown flag", ms, 0, 1, 2, rm.StatusInvalidArgument, 0},
	} {
		_, before := u.work(a)
		if st := u.control(a, CtrlSubmit, submitParams(c.length, c.count, c.flags, c.gap)); st != c.status {
			t.Errorf("%s: %#x, want %#x", c.what, st, c.status)
		}
		clock.pass(100*ms + switchCost)
		if _, now := u.work(a); now-before != c.kernels {
			t.Errorf("%s: %d kernels, want %d", c.what, now-before, c.kernels)
		}
	}
	n := 0
	for ; u.control(a, CtrlSubmit, submitParams(time.Hour, 1, 0, 0)) == 0 && n < 1<<20; n++ {
	}
	if n != maxQueued {
		t.Errorf("%d calls queued, want %d", n, maxQueued)
	}
	if st := u.control(a, CtrlSubmit, submitParams(ms, 1, SubmitStop, 0)); st != 0 {
		t.Errorf("stop of a full queue: %#x", st)
	}
	if st := u.control(a, CtrlSubmit, make([]byte, SubmitSize-1)); st != rm.StatusInvalidArgument {
		t.Errorf("short parameters: %#x", st)
	}
}

// watcher is what Session and Conn tell about the engine.
type watcher interface {
	Switches(minor int, since uint64) ([]sched.Switch, uint64, bool, error)
	Pending(minor int, pids []int) (bool, error)
}

func TestWatch(t *testing.T) {
	for _, kind := range []string{"session", "connection"} {
		t.Run(kind, func(t *testing.T) {
			d, clock := newTimedDriver(t)
			var w watcher = d.Session(nil)
			if kind == "connection" {
				w = dial(t, serve(t, d))
			}
			s := d.Session([]int{0})
			defer s.Close()
			u, v := newGPUUser(t, s, 100), newGPUUser(t, s, 200)
			a, ch := u.graphics(1)
			b, _ := v.graphics(1)
			pending := func(want bool, pids ...int) {
				t.Helper()
				if got, err := w.Pending(0, pids); err != nil || got != want {
					t.Errorf("pending work of %v: %v, %v; want %v", pids, got, err, want)
				}
			}
			pending(false, 100, 200)
			u.submit(a, 10*ms, 1)
			pending(true, 7, 100)
			pending(false, 200)
			pending(false)
			clock.pass(5 * ms)
			pending(true, 100)
			v.submit(b, ms, 1)
			u.disable(true, u, ch...)
			pending(true, 100) // paused, and has work
			clock.pass(5 * ms)
			pending(false, 200)
			if got, err := w.Pending(3, []int{100}); got || err != nil {
				t.Errorf("the other GPU: %v, %v", got, err)
			}
			want := []sched.Switch{{At: switchCost, PID: 100, Context: a, On: true}, {At: 5*ms + 107*time.Microsecond, PID: 100, Context: a},
				{At: 5*ms + preemptCost, PID: 200, Context: b, On: true}}
			if got, next, lost, err := w.Switches(0, 0); err != nil || lost || next != 3 || !slices.Equal(got, want) {
				t.Errorf("switches %v, next %d, lost %v, %v\nwant %v", got, next, lost, err, want)
			}
			if got, next, lost, err := w.Switches(0, 2); err != nil || lost || next != 3 || !slices.Equal(got, want[2:]) {
				t.Errorf("since 2: %v, next %d, lost %v, %v", got, next, lost, err)
			}
			if got, next, lost, err := w.Switches(0, 99); err != nil || !lost || next != 3 || len(got) != 0 {
				t.Errorf("since 99: %v, next %d, lost %v, %v", got, next, lost, err)
			}
			// More than an answer holds, and more than is kept.
			u.disable(false, u, ch...)
			u.submit(a, ms, 0)
			v.submit(b, ms, 0)
			since := uint64(0)
			for _, c := range []struct {
				pass     time.Duration
				lost     bool
				at, most int
			}{{20 * time.Second, false, 30_000, 40_000}, {100 * time.Second, true, 1 << 16, 1 << 16}} {
				clock.pass(c.pass)
				n := 0
				for first := true; ; first = false {
					got, next, lost, err := w.Switches(0, since)
					if err != nil || lost != (c.lost && first) || len(got) > maxSwitches {
						t.Fatalf("%d records since %d, lost %v, %v", len(got), since, lost, err)
					}
					n, since = n+len(got), next
					if len(got) == 0 {
						break
					}
				}
				if n < c.at || n > c.most {
					t.Errorf("%d records in %v", n, c.pass)
				}
			}
			if _, _, _, err := w.Switches(1, 0); err == nil {
				t.Error("switches of a GPU that is not there")
			}
			if _, err := w.Pending(1, nil); err == nil {
				t.Error("pending work of a GPU that is not there")
			}
			switch w := w.(type) {
			case *Session:
				w.Close()
			case *Conn:
				w.Close()
			}
			if _, _, _, err := w.Switches(0, 0); err == nil {
				t.Error("switches of a closed session")
			}
			if _, err := w.Pending(0, nil); err == nil {
				t.Error("pending work of a closed session")
			}
		})
	}
}

func TestGPUMon(t *testing.T) {
	d, clock := newTimedDriver(t)
	form := d.abi.GPUMon()
	u := newGPUUser(t, d.Session([]int{0}), 100)
	a, ch := u.graphics(1)
	read := func() (p []byte, utils, pids []uint32) {
		t.Helper()
		p = make([]byte, rm.GPUMonSamples+rm.GPUMonMax*form.Entry)
		if st := u.control(u.subd, 0x20802096, p); st != 0 {
			t.Fatalf("GPUMON: %#x", st)
		}
		for i := range int(rm.U32(p, rm.GPUMonCount)) {
			e := p[rm.GPUMonSamples+i*form.Entry:]
			utils, pids = append(utils, rm.U32(e, form.Pids[1]-8)), append(pids, rm.U32(e, form.Pids[1]))
		}
		return p, utils, pids
	}
	if _, utils, _ := read(); len(utils) != 0 {
		t.Errorf("%d samples at the start", len(utils))
	}
	clock.pass(samplePeriod)
	u.submit(a, ms, 0)
	clock.pass(samplePeriod + 1)
	u.disable(true, u, ch...)
	clock.pass(samplePeriod)
	p, utils, pids := read()
	if len(utils) != 3 || utils[0] != 0 || utils[1] < 9900 || utils[1] > 10000 || utils[2] != 0 ||
		!slices.Equal(pids, []uint32{noPID, 100, noPID}) {
		t.Errorf("utilisation %d of %d", utils, pids)
	}
	if int(rm.U32(p, rm.GPUMonTracker)) != 3*form.Entry || rm.U64(p, rm.GPUMonSamples+form.Entry) != uint64(2*samplePeriod) ||
		rm.U32(p, rm.GPUMonSamples+form.Pids[0]) != noPID {
		t.Errorf("tracker %d, second at %d ns", rm.U32(p, rm.GPUMonTracker), rm.U64(p, rm.GPUMonSamples+form.Entry))
	}
	u.disable(false, u, ch...)
	clock.pass(100 * samplePeriod)
	p, utils, _ = read()
	if len(utils) != 72 || slices.Min(utils) != 10000 {
		t.Errorf("%d samples, least %d", len(utils), slices.Min(utils))
	}
	newest := (int(rm.U32(p, rm.GPUMonTracker))/form.Entry + 71) % 72
	if got := rm.U64(p, rm.GPUMonSamples+newest*form.Entry); got != uint64(103*samplePeriod) {
		t.Errorf("newest sample at %d µs", got)
	}
	if st := u.control(u.subd, 0x20802096, make([]byte, rm.GPUMonSamples)); st != 0 {
		t.Errorf("no room for samples: %#x", st)
	}
}

// TestClock: a clock that stands or goes back does no harm, and the default one runs.
func TestClock(t *testing.T) {
	d, clock := newTimedDriver(t)
	u := newGPUUser(t, d.Session([]int{0}), 100)
	a, _ := u.graphics(1)
	u.submit(a, ms, 0)
	clock.set(10 * ms)
	before, _ := u.work(a)
	clock.set(-time.Hour)
	if now, _ := u.work(a); now != before || before != 10*ms-switchCost {
		t.Errorf("%v, then %v", before, now)
	}
	real := newDriver(t)
	v := newGPUUser(t, real.Session([]int{0}), 100)
	b, _ := v.graphics(1)
	v.submit(b, us, 1)
	eventually(t, "a kernel", func() bool { _, n := v.work(b); return n == 1 })
	if e := real.Snapshot().GPUs[0].Engine; e.Busy != us || e.Switching != switchCost || e.Idle == 0 {
		t.Errorf("engine %+v", e)
	}
}

func TestWatchErrno(t *testing.T) {
	d := newDriver(t)
	s := d.Session(nil)
	if errno, _ := d.serve(s, opSwitches, &decoder{b: appendU64(appendU32(nil, 9), 0)}); errno != syscall.ENXIO {
		t.Errorf("switches of GPU 9: %v", errno)
	}
	for _, b := range [][]byte{nil, appendU32(nil, 0), appendU32(appendU32(nil, 0), 1)} {
		if errno, _ := d.serve(s, opSwitches, &decoder{b: b}); errno != syscall.EPROTO {
			t.Errorf("switches % x: %v", b, errno)
		}
		if errno, _ := d.serve(s, opPending, &decoder{b: b}); errno != syscall.EPROTO {
			t.Errorf("pending % x: %v", b, errno)
		}
	}
}
