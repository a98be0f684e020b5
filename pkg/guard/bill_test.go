// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestBucket: a burst is free, then it comes at the rate, and waiting does not add up to more.
func TestBucket(t *testing.T) {
	start := time.Unix(1000, 0)
	b := bucket{perSecond: 10, burst: 3}
	for i := range 3 {
		if b.spend(start, 1); b.owed(start) != 0 {
			t.Errorf("call %d of the burst waits %v", i, b.owed(start))
		}
	}
	if b.spend(start, 1); b.owed(start) != 100*time.Millisecond {
		t.Errorf("the next waits %v", b.owed(start))
	}
	if d := b.tryPay(start, 1); d != 100*time.Millisecond || b.owed(start) != d {
		t.Errorf("in debt: %v, then %v", d, b.owed(start))
	}
	if d := b.owed(start.Add(time.Second)); d != 0 {
		t.Errorf("a second later: %v", d)
	}
	b.owed(start.Add(time.Hour))
	if b.tokens > 3 {
		t.Errorf("%v tokens after an hour", b.tokens)
	}
	b.owed(start) // two threads that read the clock at the same time
	if b.tokens < 3 {
		t.Errorf("%v tokens after time went back", b.tokens)
	}
	none := &bucket{}
	if none.spend(start, 1e9); none.owed(start) != 0 || none.tryPay(start, 1e9) != 0 {
		t.Error("no rate, and yet a bound")
	}
	none.burst = 2
	if none.setRate(start, 1); none.owed(start) != 0 || none.tokens != 2 {
		t.Errorf("a new rate begins with %v", none.tokens)
	}
	none.spend(start, 3)
	if none.setRate(start.Add(500*time.Millisecond), 0.5); none.owed(start.Add(500*time.Millisecond)) != time.Second {
		t.Errorf("another rate: owed %v", none.owed(start.Add(500*time.Millisecond)))
	}
}

// caller makes calls one after the other, in virtual time, and waits when its container owes.
type caller struct {
	b   *bill
	m   meter
	now time.Time
	cpu time.Duration // that the guard has spent
}

func (c *caller) call(succeeded bool, driver, own time.Duration) {
	c.sleepIn(succeeded, 0, driver, own)
}

// sleepIn is a call that sleeps in the driver beside what it computes there.
func (c *caller) sleepIn(succeeded bool, asleep, driver, own time.Duration) {
	c.m.countCall(succeeded, asleep+driver, own)
	c.m.cpu += driver + own
	c.cpu += driver + own
	c.now = c.now.Add(asleep + driver + own)
	if c.m.calls < readCalls && c.now.Sub(c.m.at) < readAfter {
		return
	}
	u := c.m.use
	u.cpu = c.m.cpu
	c.m = meter{at: c.now}
	c.b.charge(c.now, u)
	wait, _ := c.b.owed(c.now)
	c.now = c.now.Add(wait)
}

// TestBill: what share of a core a container makes its guard use in a minute, after the burst.
func TestBill(t *testing.T) {
	const us = time.Microsecond
	cases := []struct {
		name        string
		call        func(c *caller)
		quota       float64
		least, most float64
	}{
		{"waved through", func(c *caller) { c.call(false, 0, 3*us) }, 0, 0.046, 0.051},
		{"refused by the guard after a long look", func(c *caller) { c.call(false, 0, 40*time.Millisecond) }, 0, 0.043, 0.051},
		{"refused by the driver", func(c *caller) { c.call(false, 10*us, 6*us) }, 0, 0.046, 0.051},
		{"succeed", func(c *caller) { c.call(true, 20*us, 10*us) }, 0, 0.99, 1},
		{"succeed, faster than calls_per_second", func(c *caller) { c.call(true, us, 4*us) }, 0, 0.24, 0.26},
		{"succeed, and make the guard look for long", func(c *caller) { c.call(true, 20*us, 5*time.Millisecond) }, 0, 0.046, 0.052},
		{"slow in the driver", func(c *caller) { c.call(true, 300*time.Millisecond, 10*us) }, 0, 0.99, 1},
		{"one that succeeds for 64 refused", func(c *caller) {
			c.call(true, 5*us, 10*us)
			for range 64 {
				c.call(false, 0, 10*us)
			}
		}, 0, 0.046, 0.056},
		{"one that sleeps in the driver and succeeds for 63 refused", func(c *caller) {
			for range 63 {
				c.call(false, 0, 30*us)
			}
			c.sleepIn(true, 2*time.Millisecond, 10*us, 10*us)
		}, 0, 0.046, 0.056},
		{"succeed, and sleep in the driver", func(c *caller) { c.sleepIn(true, 100*us, 10*us, 10*us) }, 0, 0.16, 0.17},
		{"succeed, a quota of a tenth of a CPU", func(c *caller) { c.call(true, 20*us, 10*us) }, 0.1, 0.09, 0.102},
		{"waved through, a quota of a hundredth", func(c *caller) { c.call(false, 0, 3*us) }, 0.01, 0.009, 0.0102},
	}
	for _, x := range cases {
		t.Run(x.name, func(t *testing.T) {
			start := time.Unix(1000, 0)
			c := &caller{b: newBill(50000, 100000), now: start, m: meter{at: start}}
			c.b.refreshQuota(start, func() float64 { return x.quota })
			for c.now.Sub(start) < 2*time.Minute { // the burst is over
				x.call(c)
			}
			begin := c.now
			for c.cpu = 0; c.now.Sub(begin) < time.Minute; {
				x.call(c)
			}
			if share := c.cpu.Seconds() / c.now.Sub(begin).Seconds(); share < x.least || share > x.most {
				t.Errorf("%.4f of a core, want %v to %v", share, x.least, x.most)
			}
		})
	}
}

// TestRuntimeOnBill: with what Go's runtime needs for it a container gets no more of the guard than without; for what is paid for it owes
// nothing, and little for what the guard does meanwhile.
func TestRuntimeOnBill(t *testing.T) {
	const us = time.Microsecond
	for _, x := range []struct {
		name        string
		paid        bool
		runtime     float64 // CPU time beside what is on the bill, for each second of that
		other       float64 // for each second that passes
		least, most float64 // of a core, without other
	}{
		{"refused", false, 1.25, 0, 0.046, 0.051},
		{"succeed", true, 1, 0, 1.9, 2},
		{"refused, while the guard is at other work", false, 0, 0.5, 0.016, 0.021},
	} {
		t.Run(x.name, func(t *testing.T) {
			start := time.Unix(1000, 0)
			c := &caller{b: newBill(50000, 100000), now: start, m: meter{at: start}}
			used := func() time.Duration { return time.Duration(float64(c.cpu) * (1 + x.runtime)) }
			c.b.process = func() time.Duration { return used() + time.Duration(float64(c.now.Sub(start))*x.other) }
			call := func() { c.call(x.paid, 20*us, 10*us) }
			for c.now.Sub(start) < 2*time.Minute { // the burst is over
				call()
			}
			begin, before := c.now, used()
			for c.now.Sub(begin) < time.Minute {
				call()
			}
			if share := (used() - before).Seconds() / c.now.Sub(begin).Seconds(); share < x.least || share > x.most {
				t.Errorf("%.4f of a core, want %v to %v", share, x.least, x.most)
			}
		})
	}
}

// TestProgramStart: a program's start waits for nothing, even if none of its calls succeeds.
func TestProgramStart(t *testing.T) {
	start := time.Unix(1000, 0)
	c := &caller{b: newBill(50000, 100000), now: start, m: meter{at: start}}
	cpu := time.Duration(0)
	for range 20000 {
		c.call(false, 10*time.Microsecond, 15*time.Microsecond)
		cpu += 25 * time.Microsecond
	}
	if c.now.Sub(start) != cpu {
		t.Errorf("%v for %v of work", c.now.Sub(start), cpu)
	}
}

// TestQuotaOf: the CPU quota of a cgroup, in either version, and of those above it.
func TestQuotaOf(t *testing.T) {
	for _, x := range []struct {
		files map[string]string
		want  float64
	}{
		{nil, 0},
		{map[string]string{"cpu.max": "max 100000\n"}, 0},
		{map[string]string{"cpu.max": "25000 100000\n"}, 0.25},
		{map[string]string{"cpu.max": "-5 100000\n"}, 0},
		{map[string]string{"cpu.max": "100 0\n"}, 0},
		{map[string]string{"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, 0},
		{map[string]string{"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"}, 1.5},
		{map[string]string{"cpu.cfs_quota_us": "150000\n"}, 0},
	} {
		pod := t.TempDir()
		dir := filepath.Join(pod, "container")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		for name, text := range x.files {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got := quotaOf(dir); got != x.want {
			t.Errorf("%v: %v, want %v", x.files, got, x.want)
		}
		if got := (cgroups{quota: dir}).cpuQuota(); got != x.want {
			t.Errorf("%v below none: %v, want %v", x.files, got, x.want)
		}
		_ = os.WriteFile(filepath.Join(pod, "cpu.max"), []byte("20000 100000"), 0o600)
		if got := (cgroups{quota: dir}).cpuQuota(); got != 0.2 {
			t.Errorf("%v in a pod of 0.2: %v", x.files, got)
		}
	}
}

// TestEndsOnBill: what it takes to tear address spaces down is on the bill; UVM's part is paid for where it succeeds.
func TestEndsOnBill(t *testing.T) {
	const slow = 20 * time.Millisecond
	for _, status := range []uint32{rm.StatusOK, rm.StatusInvalidState} {
		d := &fakeDriver{}
		d.answer = func(_ Target, call *rm.Call) syscall.Errno {
			if call.Cmd == rm.UVMUnregisterVASpace {
				for begin := threadTime(); threadTime()-begin < slow; {
				}
				rm.PutU32(call.Outer, rm.UVMUnregisterStatus, status)
			}
			return 0
		}
		g := withClient(newFakeGuard(t, d))
		g.bill = newBill(0, 0)
		g.bill.quota.setRate(time.Now(), 1e-6)
		mappedUVM(t, g)
		g.sweep()
		if g.files.count() != 0 {
			t.Fatal("not torn down")
		}
		all, free := g.bill.quota.burst-g.bill.quota.tokens, g.bill.free.burst-g.bill.free.tokens
		if paid := all - free; all < slow.Seconds() || status == rm.StatusOK && paid < slow.Seconds() || status != rm.StatusOK && paid > 0.001 {
			t.Errorf("status %d: %v s on the bill, %v s of it paid for", status, all, paid)
		}
	}
}

// TestMeter: what the guard does by itself is on the bill.
func TestMeter(t *testing.T) {
	g := newFakeGuard(t, &fakeDriver{})
	g.bill = newBill(0, 0)
	took := g.chargeTime(func() {
		for begin := threadTime(); threadTime()-begin < 20*time.Millisecond; {
		}
	})
	if took < 20*time.Millisecond {
		t.Errorf("took %v", took)
	}
	if spent := g.bill.free.burst - g.bill.free.tokens; max(spent-took.Seconds(), took.Seconds()-spent) > 1e-6 {
		t.Errorf("%v s on the bill, not %v", spent, took)
	}
}
