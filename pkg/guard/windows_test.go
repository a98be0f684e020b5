package guard

import (
	"testing"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
)

// windowsAgree waits until the guard and the driver count the same of BAR1, and that is want.
func (r *rig) windowsAgree(want quota.Bytes) {
	r.t.Helper()
	var guard, driver quota.Bytes
	for deadline := time.Now().Add(4 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		r.guard.sweep()
		if guard, driver = r.guard.account.usage(0).windows, r.sim.Snapshot().GPUs[0].BAR1; guard == want && driver == want {
			return
		}
	}
	r.t.Fatalf("the guard counts %v of BAR1, the driver %v: want %v", guard, driver, want)
}

// TestWindows: what windows for the processor take of BAR1 is what the guard counts, whatever ends them, and no more than the container's
// share of it: a quarter, as of the card's memory.
func TestWindows(t *testing.T) {
	r := newRig(t)
	c := r.start()
	a := c.do("open")[0]
	m := c.do("alloc", a, 48*mib)[0]
	small := c.do("alloc", a, 256<<10)[0]

	first := c.do("window", a, m, 0, 40*mib)[0]
	r.windowsAgree(40 * quota.MiB)
	c.do("window", a, m, mib, 4096) // a page of the memory
	c.do("window", a, small, 4096, 64<<10)
	r.windowsAgree(42*quota.MiB + 128*quota.KiB)
	c.refused("NV_ERR_INSUFFICIENT_RESOURCES", "window", a, m, 2*mib, 40*mib)
	c.refused("NV_ERR_INVALID_LIMIT", "window", a, m, 47*mib, 4*mib)
	c.refused("NV_ERR_INVALID_LIMIT", "window", a, m, -4096, 8192)
	c.refused("NV_ERR_INVALID_ARGUMENT", "window", a, m, 0, 4096, 1) // a file of nvidiactl
	r.windowsAgree(42*quota.MiB + 128*quota.KiB)

	c.refused("NV_ERR_INVALID_OBJECT_HANDLE", "window", a, c.do("vaspace", a)[0], 0, 4096)

	// Under the address that the program has mapped it at.
	c.do("movewindow", a, m, first, 1<<40)
	c.refused("NV_ERR_OBJECT_NOT_FOUND", "unwindow", a, m, first)
	c.do("unwindow", a, m, 1<<40)
	c.refused("NV_ERR_OBJECT_NOT_FOUND", "unwindow", a, m, 1<<40)
	r.windowsAgree(2*quota.MiB + 128*quota.KiB)

	c.do("free", a, small)
	r.windowsAgree(2 * quota.MiB)
	second := c.do("open")[0]
	d := c.do("dup", second, a, m)[0]
	c.do("window", second, d, 0, 48*mib)
	c.do("close", a)
	r.windowsAgree(48 * quota.MiB)
	r.agree(48 * quota.MiB)
	c.do("freeclient", second)
	r.windowsAgree(0)
	r.agree(0)

	third := c.do("open")[0]
	c.do("window", third, c.do("alloc", third, 48*mib)[0], 0, 48*mib)
	r.agree(48 * quota.MiB)
	c.kill()
	r.empty()
}
