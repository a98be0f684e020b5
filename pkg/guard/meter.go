// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// use is CPU time for a number of calls. paid is how long what calls that succeeded pay for took, unpaid how long the others did: by the
// clock on the wall, so who slept has used less CPU time than that.
type use struct {
	calls        int
	cpu          time.Duration
	paid, unpaid time.Duration
}

// notPaid is the CPU time that the paid calls cannot have used, or the others may have, whichever is more: a call that sleeps in the driver
// pays for no other.
func (u use) notPaid() time.Duration { return max(u.cpu-u.paid, min(u.cpu, u.unpaid)) }

// meter measures what a worker's thread spends.
type meter struct {
	at  time.Time     // when the thread's clock was read last
	cpu time.Duration // what it said
	use
}

// start begins to measure the calling thread, which the goroutine must keep.
func (m *meter) start(now time.Time) { *m = meter{at: now, cpu: threadTime()} }

// countCall notes a call that took so long, in the driver and beside it.
func (m *meter) countCall(succeeded bool, driver, own time.Duration) {
	m.calls++
	if succeeded {
		m.paid += driver + min(own, callCost) + receiveCost
	} else {
		m.unpaid += driver + own + receiveCost
	}
}

// spent tells what was spent since the last reading, if it is time.
func (m *meter) spent(now time.Time, anyway bool) (use, bool) {
	if !anyway && m.calls < readCalls && now.Sub(m.at) < readAfter {
		return use{}, false
	}
	u, cpu := m.use, threadTime()
	u.cpu = cpu - m.cpu
	*m = meter{at: now, cpu: cpu}
	return u, true
}

// payBill puts on the bill what the worker has spent, and sleeps while the container owes.
func (w *worker) payBill(now time.Time) {
	u, ok := w.meter.spent(now, false)
	if !ok {
		return
	}
	b := w.guard.bill
	b.charge(now, u)
	b.refreshQuota(now, w.guard.cpuQuota)
	wait, why := b.owed(now)
	if wait == 0 {
		return
	}
	w.guard.stats.throttled.Add(1)
	w.guard.logOnce("throttled"+why, "the container's calls wait: "+why)
	for ; wait > 0 && !w.listener.halted.Load(); wait -= sleepPiece {
		time.Sleep(min(wait, sleepPiece))
	}
}

// sleepPiece is how soon one who sleeps sees that the filter is gone.
const sleepPiece = 100 * time.Millisecond

// threadTime is the CPU time of the calling thread, processTime that of the guard's process.
func threadTime() time.Duration { return cpuClock(unix.CLOCK_THREAD_CPUTIME_ID) }

func cpuClock(id uintptr) time.Duration {
	var ts unix.Timespec
	_, _, _ = unix.RawSyscall(unix.SYS_CLOCK_GETTIME, id, uintptr(unsafe.Pointer(&ts)), 0)
	return time.Duration(ts.Nano())
}
