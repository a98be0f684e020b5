package guard

import (
	"runtime"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What a guard does it does for its container, so its CPU time is the container's to pay. Calls that the driver carried out with success
// are paid for by themselves: of them as many are allowed as calls_per_second says. Everything else that a worker's thread spends, on
// calls that are refused, waved through, interrupted or looked at for long, is free up to freeShare of a core. Who has used that up
// waits, and nobody works meanwhile: the worker of each filter sleeps before it takes the next notification up.

const (
	// freeShare of a core may go into what is not paid for. freeBurst of CPU time may at once: a CUDA program's start takes some 2000 calls of
	// 10 µs, most of which succeed.
	freeShare = 0.05
	freeBurst = time.Second
	// callCost is forgiven of a call that succeeded, beside the driver's part, and receiveCost for taking it up. A call takes 5 to 7 µs
	// on a fast machine.
	callCost    = 50 * time.Microsecond
	receiveCost = 5 * time.Microsecond
	// quotaBurst is what a container with a CPU quota of its own may make the guard use at once.
	quotaBurst = time.Second
	// A thread's clock is read after so many calls or so much time: that costs as much as a tenth of a call.
	readCalls = 64
	readAfter = 2 * time.Millisecond
	// leastWait is the shortest that who owes sleeps beyond what he owes: to sleep and wake costs time too.
	leastWait = 100 * time.Millisecond
	// quotaLook is how often the container's quota is read, while it makes calls.
	quotaLook = time.Second
	// runtimeLook is how often the bill is compared with what the guard's process has used. The rest is Go's runtime, which no thread's clock
	// of ours shows: in the worst case that was found (processes that end after one call) 1.25 times what is on the bill. It is believed to
	// be maxRuntime times that at most: with a little on the bill it is the guard's other work.
	runtimeLook = time.Second
	maxRuntime  = 2
	// backgroundShare bounds each kind of look that the guard takes by itself: sweeps, looks at maps and at outsiders, audits, searches for
	// a client's file. After one it rests from that kind for so many times as long. They are on the bill too.
	backgroundShare = 100
	// searchBurst is how much CPU time searches for files may take at once: all of a container's clients may have to be freed.
	searchBurst = time.Second
)

// bill is what a container owes its guard.
type bill struct {
	calls bucket // of calls
	free  bucket // of seconds of CPU time that is not paid for
	quota bucket // of seconds of all CPU time, where the container has a quota

	searches bucket // of seconds

	mu          sync.Mutex
	quotaReadAt time.Time            // at the quota
	process     func() time.Duration // the CPU time of the guard's process
	since       bookings
}

// bookings is what was put on the bill since it was compared with what the guard's process has used.
type bookings struct {
	begin       time.Time
	process     time.Duration // that it had used then
	cpu, unpaid time.Duration
}

func newBill(callsPerSecond, callsBurst int) *bill {
	return &bill{
		calls: bucket{perSecond: float64(callsPerSecond), burst: float64(callsBurst)},
		free:  bucket{perSecond: freeShare, burst: freeBurst.Seconds()},
		quota: bucket{burst: quotaBurst.Seconds()},

		searches: bucket{perSecond: 1.0 / backgroundShare, burst: searchBurst.Seconds()},
		process:  processTime,
	}
}

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

// charge puts a use on the bill.
func (b *bill) charge(now time.Time, u use) {
	runtime := b.runtimeFor(now, u)
	b.calls.spend(now, float64(u.calls))
	b.free.spend(now, (u.notPaid() + runtime).Seconds())
	b.quota.spend(now, (u.cpu + runtime).Seconds())
}

// runtimeFor is what Go's runtime has needed for what is not paid for, now and then, with a use that is put on the bill.
func (b *bill) runtimeFor(now time.Time, u use) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := &b.since
	s.cpu += u.cpu
	s.unpaid += u.notPaid()
	if now.Sub(s.begin) < runtimeLook {
		return 0
	}
	last := *s
	*s = bookings{begin: now, process: b.process()}
	if last.begin.IsZero() || last.cpu == 0 {
		return 0
	}
	rest := min(max(0, s.process-last.process-last.cpu), maxRuntime*last.cpu)
	return time.Duration(rest.Seconds() * last.unpaid.Seconds() / last.cpu.Seconds() * float64(time.Second))
}

// owed is how long the container's calls have to wait.
func (b *bill) owed(now time.Time) time.Duration {
	wait := max(b.calls.owed(now), b.free.owed(now), b.quota.owed(now))
	if wait > 0 {
		wait += leastWait
	}
	return wait
}

// refreshQuota has the container's CPU quota read again, now and then.
func (b *bill) refreshQuota(now time.Time, read func() float64) {
	b.mu.Lock()
	due := now.Sub(b.quotaReadAt) >= quotaLook
	if due {
		b.quotaReadAt = now
	}
	b.mu.Unlock()
	if due {
		b.quota.setRate(now, read())
	}
}

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
	wait := b.owed(now)
	if wait == 0 {
		return
	}
	w.guard.stats.throttled.Add(1)
	w.guard.logOnce("throttled", "the container's calls wait: they come faster than calls_per_second, or its guard has spent more CPU time on calls that did not succeed than it may")
	for ; wait > 0 && !w.listener.dead.Load(); wait -= sleepPiece {
		time.Sleep(min(wait, sleepPiece))
	}
}

// sleepPiece is how soon one who sleeps sees that the filter is gone.
const sleepPiece = 100 * time.Millisecond

// chargeTime calls f, puts the CPU time that it takes on the container's bill, and returns it.
func (g *Guard) chargeTime(f func()) time.Duration {
	return g.chargeUnpaidTime(func() time.Duration { f(); return 0 })
}

// chargeUnpaidTime is chargeTime, where f says how much of that CPU time the driver took for what it carried out with success.
func (g *Guard) chargeUnpaidTime(f func() time.Duration) time.Duration {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begin := threadTime()
	paid := f()
	took := threadTime() - begin
	g.bill.charge(time.Now(), use{cpu: took, paid: paid})
	return took
}

// timeIfDone is the CPU time that a call of the driver takes; 0 if it does not succeed.
func timeIfDone(call func() bool) time.Duration {
	begin := threadTime()
	if !call() {
		return 0
	}
	return threadTime() - begin
}

// cpuQuota reads how many CPUs the container may use.
func (g *Guard) cpuQuota() float64 { return g.containerCgroups().cpuQuota() }

// threadTime is the CPU time of the calling thread, processTime that of the guard's process.
func threadTime() time.Duration  { return cpuClock(unix.CLOCK_THREAD_CPUTIME_ID) }
func processTime() time.Duration { return cpuClock(unix.CLOCK_PROCESS_CPUTIME_ID) }

func cpuClock(id uintptr) time.Duration {
	var ts unix.Timespec
	_, _, _ = unix.RawSyscall(unix.SYS_CLOCK_GETTIME, id, uintptr(unsafe.Pointer(&ts)), 0)
	return time.Duration(ts.Nano())
}

// bucket limits the rate of something. The zero value, and one of a rate of 0, limits nothing.
type bucket struct {
	mu               sync.Mutex
	perSecond, burst float64
	tokens           float64
	last             time.Time
}

// spend takes n tokens, if need be on credit.
func (b *bucket) spend(now time.Time, n float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.perSecond > 0 {
		b.fill(now)
		b.tokens -= n
	}
}

// owed is how long it takes until the debt is paid.
func (b *bucket) owed(now time.Time) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.perSecond <= 0 {
		return 0
	}
	b.fill(now)
	return b.debt()
}

// tryPay takes n tokens if the bucket is not in debt; else it says when it will not be.
func (b *bucket) tryPay(now time.Time, n float64) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.perSecond <= 0 {
		return 0
	}
	b.fill(now)
	if b.tokens >= 0 {
		b.tokens -= n
		return 0
	}
	return b.debt()
}

func (b *bucket) debt() time.Duration {
	if b.tokens >= 0 {
		return 0
	}
	return time.Duration(-b.tokens / b.perSecond * float64(time.Second))
}

// setRate changes how fast the bucket fills. One that had no rate begins full.
func (b *bucket) setRate(now time.Time, perSecond float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.perSecond > 0 {
		b.fill(now)
	} else {
		b.last = time.Time{}
	}
	b.perSecond = perSecond
}

// fill adds what has come since the last time.
func (b *bucket) fill(now time.Time) {
	if b.last.IsZero() {
		b.tokens = b.burst
	} else {
		b.tokens = min(b.burst, b.tokens+max(0, now.Sub(b.last)).Seconds()*b.perSecond)
	}
	b.last = now
}
