// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/sim/runlist"
)

// Controls that only the simulated driver has, of a channel group on the graphics engine. They stand for what a process
// does with its channels: put kernels into them, and see how far they came.
const (
	// CtrlSubmit queues kernels.
	CtrlSubmit   = 0xa06c01f0
	SubmitSize   = 24
	SubmitLength = 0  // u64, ns that a kernel takes alone
	SubmitCount  = 8  // u32, kernels; 0: one after the other without end, until the next CtrlSubmit
	SubmitFlags  = 12 // u32
	SubmitGap    = 16 // u64, ns from the end of a kernel until the process submits the next; 0: they are in the queue

	SubmitStop = 1 << 0 // flag: first drop what is queued; with a length of 0 that is all

	// CtrlWork reads the group's account.
	CtrlWork        = 0xa06c01f1
	WorkSize        = 40
	WorkDone        = 0  // u64, kernels
	WorkGPUTime     = 8  // u64, ns
	WorkWaiting     = 16 // u64, ns in which there was work that did not run
	WorkSwitches    = 24 // u64, how often the group came on the engine
	WorkPreemptions = 32 // u64, how often it was taken off with work left
)

// ControlForm is what a guard must know of those, which are none of the driver's ABI.
func ControlForm(cmd uint32) (rm.Control, bool) {
	switch cmd {
	case CtrlSubmit:
		return rm.Control{Name: "SIM_SUBMIT", Size: SubmitSize, FDOff: -1, Kind: rm.ControlFlat}, true
	case CtrlWork:
		return rm.Control{Name: "SIM_WORK", Size: WorkSize, FDOff: -1, Kind: rm.ControlFlat}, true
	}
	return rm.Control{}, false
}

// Bounds of CtrlSubmit, so that the model has few events in a second of real time and a short list of them.
const (
	minWork   = time.Microsecond // a kernel, and a gap that is not 0
	maxWork   = time.Hour
	maxQueued = 1024 // calls whose work is not done, per group
)

// maxSwitches is the most records of one answer.
const maxSwitches = 8192

// Of GPUMON samples, as an H200 gives them (580.159.04).
const (
	samplePeriod = 200 * time.Millisecond
	noPID        = ^uint32(0) // NV2080_GPUMON_PID_INVALID
)

// engine is the graphics engine of a card.
type engine struct {
	*runlist.Runlist
	groups  map[*runlist.TSG]bool
	samples [rm.GPUMonMax]sample // a ring
	sampled uint64               // samples ever taken; number n was at (n+1)·samplePeriod
	busy    time.Duration        // at the last of them
}

// sample is what GPUMON tells of the period before at.
type sample struct {
	at   time.Duration
	util uint32 // in hundredths of a percent
	pid  uint32 // running at that moment
}

func newEngine() *engine {
	return &engine{Runlist: runlist.New(runlist.Config{}), groups: map[*runlist.TSG]bool{}}
}

// add puts a channel group on the runlist. It does not run before one of its channels may: see repause.
func (e *engine) add(pid int32, handle uint32) *runlist.TSG {
	t := e.Add(int(pid), handle)
	t.Pause()
	e.groups[t] = true
	return t
}

func (e *engine) remove(t *runlist.TSG) {
	t.Remove()
	delete(e.groups, t)
}

// advance computes the time until now, with a sample at the end of each period.
func (e *engine) advance(now time.Duration) {
	due := uint64(max(now, 0) / samplePeriod)
	if due > e.sampled+rm.GPUMonMax { // nobody will see the ones between
		e.sampled = due - rm.GPUMonMax
		e.Advance(time.Duration(e.sampled) * samplePeriod)
		e.busy = e.Totals().Load()
	}
	for e.sampled < due {
		at := time.Duration(e.sampled+1) * samplePeriod
		e.Advance(at)
		s := sample{at: at, pid: noPID, util: uint32((e.Totals().Load() - e.busy) * 10000 / samplePeriod)}
		if t := e.Running(); t != nil {
			s.pid = uint32(t.PID())
		}
		e.busy = e.Totals().Load()
		e.samples[e.sampled%rm.GPUMonMax] = s
		e.sampled++
	}
	e.Advance(now)
}

// tick brings the engines to the present. It is called before anything that they have a part in.
func (d *Driver) tick() {
	now := d.clock()
	for _, g := range d.gpus {
		g.engine.advance(now)
	}
}

// repause lets a group run while at least one of its channels was scheduled and is not disabled, as on the real driver: a
// channel that was just made runs nothing, and in a paused group it ends the pause once it is scheduled.
func repause(group *object) {
	t := group.group.tsg
	if t == nil {
		return
	}
	for o := range group.group.below {
		if o.channel != nil && o.channel.enabled && !o.channel.disabled {
			t.Resume()
			return
		}
	}
	t.Pause()
}

// below yields what is below all handles of a group.
func (g *group) below(yield func(*object) bool) {
	for handle := range g.handles {
		for _, o := range handle.children {
			if !yield(o) {
				return
			}
		}
	}
}

func (c *controlCall) simSubmit() uint32 {
	t := c.object.group.tsg
	if t == nil {
		return rm.StatusNotSupported
	}
	length, gap := rm.U64(c.p, SubmitLength), rm.U64(c.p, SubmitGap)
	stop := rm.U32(c.p, SubmitFlags) == SubmitStop
	switch {
	case rm.U32(c.p, SubmitFlags)&^SubmitStop != 0,
		length > uint64(maxWork) || gap > uint64(maxWork),
		length < uint64(minWork) && !(length == 0 && stop),
		gap != 0 && gap < uint64(minWork):
		return rm.StatusInvalidArgument
	case !stop && t.Queued() >= maxQueued:
		return rm.StatusInsufficientResources
	}
	if stop {
		t.Stop()
	}
	if length > 0 {
		t.Submit(runlist.Work{Length: time.Duration(length), Count: int(rm.U32(c.p, SubmitCount)), Gap: time.Duration(gap)})
	}
	return rm.StatusOK
}

func (c *controlCall) simWork() uint32 {
	t := c.object.group.tsg
	if t == nil {
		return rm.StatusNotSupported
	}
	a := t.Account()
	rm.PutU64(c.p, WorkDone, a.Kernels)
	rm.PutU64(c.p, WorkGPUTime, uint64(a.GPUTime))
	rm.PutU64(c.p, WorkWaiting, uint64(a.Waiting))
	rm.PutU64(c.p, WorkSwitches, a.Switches)
	rm.PutU64(c.p, WorkPreemptions, a.Preemptions)
	return rm.StatusOK
}

// NV2080_CTRL_PERF_GPUMON_PERFMON_UTIL_SAMPLE (ctrl2080perf.h): the timestamp is at 0, an engine's utilisation 8 bytes
// before its process.
const (
	sampleTime    = 0
	sampleEngines = 8
	gpuMonGR      = 1 // second of GPUMonForm.Pids
)

// gpuMon is PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2: a ring whose newest entry is the one before tracker. Of all engines
// only GR is ever busy.
func (c *controlCall) gpuMon() uint32 {
	e, form := c.object.gpu.engine, c.d.abi.GPUMon()
	count := min(e.sampled, rm.GPUMonMax, uint64((len(c.p)-rm.GPUMonSamples)/form.Entry))
	rm.PutU32(c.p, rm.GPUMonCount, uint32(count))
	rm.PutU32(c.p, rm.GPUMonTracker, uint32(e.sampled%rm.GPUMonMax)*uint32(form.Entry)) // a byte offset (H200, 580.159.04)
	clear(c.p[rm.GPUMonSamples:])
	for i := range int(count) {
		entry, s := c.p[rm.GPUMonSamples+i*form.Entry:][:form.Entry], e.samples[i]
		rm.PutU64(entry, sampleTime, uint64(s.at))
		for _, at := range form.Pids {
			rm.PutU32(entry, at, noPID)
		}
		rm.PutU32(entry, form.Pids[gpuMonGR]-sampleEngines, s.util)
		rm.PutU32(entry, form.Pids[gpuMonGR], s.pid)
	}
	return rm.StatusOK
}

// Switches tells the context switches of a GPU's graphics engine, as a privileged reader of FECS records learns them:
// those from number since on (0 is the first), at most some thousands at a time, and the number to ask for next. lost:
// older ones that were asked for are not kept any more. Processes are numbered in the initial pid namespace; a context is
// the handle of its channel group. Times are of the driver's clock.
func (s *Session) Switches(minor int, since uint64) (records []sched.Switch, next uint64, lost bool, err error) {
	d := s.d
	d.mu.Lock()
	defer d.mu.Unlock()
	g, err := s.engineOf(minor)
	if err != nil {
		return nil, 0, false, fmt.Errorf("sim: switches of GPU node %d: %w", minor, err)
	}
	records, next, lost = g.Runlist.Switches(since, maxSwitches)
	return records, next, lost, nil
}

// Pending reports whether any of these processes (of the initial pid namespace) has work queued or running on a GPU's
// graphics engine.
func (s *Session) Pending(minor int, pids []int) (bool, error) {
	d := s.d
	d.mu.Lock()
	defer d.mu.Unlock()
	g, err := s.engineOf(minor)
	if err != nil {
		return false, fmt.Errorf("sim: pending work on GPU node %d: %w", minor, err)
	}
	for t := range g.groups {
		if t.Pending() && slices.Contains(pids, t.PID()) {
			return true, nil
		}
	}
	return false, nil
}

// engineOf is a card's engine at the present. Any session may ask for any card: the state is the driver's, not a file's.
func (s *Session) engineOf(minor int) (*engine, error) {
	if s.ctx.Err() != nil {
		return nil, errClosed
	}
	g := s.d.byMinor(minor)
	if g == nil {
		return nil, syscall.ENXIO
	}
	s.d.tick()
	return g.engine, nil
}
