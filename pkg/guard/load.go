package guard

import (
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// A context that is alone on the GPU stays switched in when its work is done, and no record tells. For such times the driver's
// own samples say how much of the time the GPU computed, and for whom: one each 200 ms, the last 14 seconds of them
// (NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2). Asking takes 1.5 ms (H200), so it is done seldom.
const (
	controlGPUMon   = 0x20802096
	gpuMonSamples   = 72
	gpuMonGR        = 1 // among the engines of a sample
	gpuMonBufSize   = 4
	gpuMonToUtil    = 8     // from an engine's pid back to its utilisation
	gpuMonUtilWhole = 10000 // hundredths of a percent
	gpuMonPeriod    = 200 * time.Millisecond
)

// load sums how long the GPU computed for the container between two times of its clock. False: the driver does not say.
func (x *card) load(from, to time.Duration) (time.Duration, bool) {
	g := x.c.g
	own, err := g.ownClient()
	form := g.abi.GPUMon()
	if err != nil || form.Entry <= 0 || len(form.Pids) <= gpuMonGR {
		return 0, false
	}
	p := make([]byte, rm.GPUMonSamples+gpuMonSamples*form.Entry)
	rm.PutU32(p, gpuMonBufSize, uint32(gpuMonSamples*form.Entry))
	if s, e := own.Control(own.Subdevice(x.gpu), controlGPUMon, p); e != 0 || s != rm.StatusOK {
		g.logOnce("gpumon", "the driver does not tell the GPU's load", "status", rm.StatusName(s), "errno", e)
		return 0, false
	}
	owners := g.account.owners()
	sum := time.Duration(0)
	for off := rm.GPUMonSamples; off+form.Entry <= len(p); off += form.Entry {
		at := time.Duration(rm.U64(p, off))
		pid := off + form.Pids[gpuMonGR]
		if at-gpuMonPeriod < from || at > to || !owners[int(rm.U32(p, pid))] {
			continue
		}
		sum += gpuMonPeriod * time.Duration(rm.U32(p, pid-gpuMonToUtil)) / gpuMonUtilWhole
	}
	return min(sum, to-from), true
}

// resident corrects for a context that has been alone on the GPU without a break: it takes the time in which the GPU was idle
// out of what the records say. It reports whether the GPU computed for it lately.
func (x *card) resident(now time.Duration) (working bool) {
	since, ok := x.tracker.Running()
	if !ok {
		return false
	}
	from := max(since, x.corrected)
	if now-from < 2*gpuMonPeriod {
		return true
	}
	// The newest sample may be younger than a period: leave the rest for the next time.
	to := now - gpuMonPeriod
	busy, ok := x.load(from, to)
	if !ok {
		return true
	}
	// The edges fall between samples: what is less than one sample short of the whole is the whole.
	if idle := to - from - busy; idle > gpuMonPeriod {
		x.tracker.Idle(idle - gpuMonPeriod/2)
	}
	x.corrected = to
	x.lately = sched.Permille(busy * time.Duration(sched.Whole) / (to - from))
	return busy > 0
}
