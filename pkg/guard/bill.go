// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"runtime"
	"sync"
	"time"

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

// owed is how long the container's calls have to wait, and what for.
func (b *bill) owed(now time.Time) (wait time.Duration, why string) {
	for _, x := range []struct {
		bucket *bucket
		why    string
	}{
		{&b.calls, "they come faster than calls_per_second"},
		{&b.free, "its guard has spent more CPU time on calls that did not succeed than it may"},
		{&b.quota, "its guard has spent as much CPU time as the container may"},
	} {
		if d := x.bucket.owed(now); d > wait {
			wait, why = d, x.why
		}
	}
	if wait > 0 {
		wait += leastWait
	}
	return wait, why
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

// chargeTime calls f, puts the CPU time that it takes on the container's bill, and returns it.
func (g *Guard) chargeTime(f func()) time.Duration {
	return g.chargeUnpaidTime(func() time.Duration { f(); return 0 })
}

// chargeUnpaidTime is chargeTime, where f says how much of that CPU time the driver took for what it carried out with success.
func (g *Guard) chargeUnpaidTime(f func() time.Duration) time.Duration {
	g.work.RLock()
	defer g.work.RUnlock()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begin := threadTime()
	paid := f()
	took := threadTime() - begin
	g.bill.charge(time.Now(), use{cpu: took, paid: paid})
	g.books.commit(nil)
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

func processTime() time.Duration { return cpuClock(unix.CLOCK_PROCESS_CPUTIME_ID) }
