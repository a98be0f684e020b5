// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/config"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/health"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

var firstChecks = []Check{
	{Name: "rights", Means: "Doctor runs as root. Without, what needs root is skipped.", Remedy: "sudo cgpu doctor", Run: checkRights},
	{Name: "config", Means: "cgpu.toml can be read and every key in it is known; without a file the defaults hold.",
		Remedy: "correct the line; configs/cgpu.toml documents every key", Run: checkConfig},
	{Name: "table",
		Means: "The table of GPUs and driver files (node.json) is there and describes the node as it is now. The next container makes it anew " +
			"by itself.",
		Remedy: "cgpu refresh", Run: checkTable},
	{Name: "enforcement",
		Means: "A guard enforces the limits. In preload mode only libcgpu.so does, inside the programs themselves; with `limits = \"driver\"` " +
			"only NVIDIA's driver, and memory alone.",
		Remedy: `set enforcement = "guard" and limits = "guard" in cgpu.toml where driver, kernel and runtime allow it`, Run: checkEnforcement},
}

func checkRights(h *Host) Result {
	if h.UID != 0 {
		return warn("not root: what needs root is skipped")
	}
	return ok("root")
}

func checkConfig(h *Host) Result {
	h.config = config.Default()
	c, err := config.Load(h.ConfigFile)
	if err != nil {
		return fail("%v", err)
	}
	h.config = c
	if _, err := os.Stat(h.ConfigFile); errors.Is(err, fs.ErrNotExist) {
		return ok("no %s: the defaults hold", h.ConfigFile)
	}
	return ok("%s", h.ConfigFile)
}

func checkTable(h *Host) Result {
	t, err := h.node()
	switch {
	case errors.Is(err, device.ErrMissing):
		return warn("%s is not made yet: the first container does it", device.TableFile(h.RunDir))
	case errors.Is(err, device.ErrStale):
		return warn("%v", err)
	case h.UID != 0 && errors.Is(err, fs.ErrPermission):
		return skip("needs root: %v", err)
	case err != nil:
		return fail("%v", err)
	}
	var names []string
	for _, g := range t.GPUs {
		names = append(names, g.Name)
	}
	if len(names) == 0 {
		return warn("fresh, but there is no GPU").but("see the driver's checks; then cgpu refresh")
	}
	return ok("fresh, %s: %s", terminal.Plural(len(names), "GPU"), strings.Join(names, ", "))
}

func checkEnforcement(h *Host) Result {
	switch limits := h.settings().Limits(); {
	case limits == device.LimitsDriver:
		return warn(`limits = "driver": memory alone is limited, by NVIDIA's driver; it counts no managed memory, nor what a process leaves open for another when it ends; time is not shared out`)
	case h.preload() && limits == device.LimitsBoth:
		return warn(`enforcement = "preload", and the driver limits memory, too (limits = "both"): that counts no managed memory, and what a process leaves open for another when it ends is not limited`)
	case h.preload():
		return warn(`enforcement = "preload": it can be walked around. A program that is linked statically, makes its system calls itself or drops the library has the whole card`)
	}
	if h.settings().DriverLimits {
		return ok(`by a guard for each container, and memory by NVIDIA's driver, too (limits = "both")`)
	}
	return ok("by a guard for each container")
}

var stateChecks = []Check{
	{Name: "health", Means: "No GPU is unhealthy. Nobody is placed on one that is, and without `cgpu health watch` none is ever found to be.",
		Remedy: "cgpu health tells what is wrong, docs/health.md what to do", Run: checkHealth},
	{Name: "limiter", Means: "libcgpu.so is installed where containers can execute it.",
		Remedy: "make install puts it into PREFIX/lib/cgpu", Run: checkLimiter},
	{Name: "host-memory", Means: "The host has the memory that containers may spill into (`max_spill`, `spill_reserve`).",
		Remedy: "lower max_spill in cgpu.toml, or lower what containers have (cgpu set CONTAINER --spill)", Run: checkHostMemory},
	{Name: "ledger", Means: "The ledger can be read, and no container in it is gone without its share being given back.",
		Remedy: "cgpu gc", Run: checkLedger},
	{Name: "leftovers", Means: "No sockets, pages or notes of pauses are left of containers that are gone.",
		Remedy: "cgpu gc", Run: checkLeftovers},
	{Name: "guards",
		Means: "The guard of each running container answers. GPU calls in a container whose guard is gone fail. Somebody decides about the " +
			"time of each GPU that they use (`cgpu-arbiter`).",
		Remedy: "restart the container; its guard's log below log/ in the run directory tells why", Run: checkGuards},
}

func checkHealth(h *Host) Result {
	t, err := h.node()
	if t == nil {
		return skip("there is no node table: %v", err)
	}
	state, err := health.Read(h.RunDir)
	if err != nil {
		return fail("%v", err).but("remove the file")
	}
	if sick := health.Unhealthy(state.Mark(t)); len(sick) > 0 {
		return fail("%s", strings.Join(sick, ", "))
	}
	if !health.Watched(h.RunDir) {
		return ok("nothing is reported; nobody watches the GPUs (systemctl enable --now cgpu-health)")
	}
	return ok("the GPUs are watched, and nothing is wrong")
}

func checkLimiter(h *Host) Result {
	if h.settings().Limits() == device.LimitsDriver {
		return skip(`limits = "driver": no container loads libcgpu.so`)
	}
	if h.Limiter == "" {
		r := warn("libcgpu.so is not beside cgpu and not in ../lib/cgpu: managed memory that does not fit is found out late instead of refused")
		if h.preload() {
			r = fail("libcgpu.so is not beside cgpu and not in ../lib/cgpu: in preload mode no container with a quota starts")
		}
		return r
	}
	var st unix.Statfs_t
	if err := unix.Statfs(h.Limiter, &st); err == nil && st.Flags&unix.ST_NOEXEC != 0 {
		return fail("%s is on a file system without execution: no program in a container can load it", h.Limiter).
			but("put it on one that is not mounted noexec")
	}
	return ok("%s", h.Limiter)
}

func checkHostMemory(h *Host) Result {
	t, err := h.node()
	if t == nil {
		return skip("there is no node table: %v", err)
	}
	text, _ := h.text("/proc/meminfo")
	records, _ := ledger.Open(h.RunDir).List()
	var given quota.Bytes
	for _, r := range records {
		for _, v := range r.VGPUs {
			given += v.Spill
		}
	}
	return judgeMemory(t.Config, t.HostMemory, memAvailable(text), given)
}

// memAvailable reads /proc/meminfo; 0: it does not tell.
func memAvailable(text string) quota.Bytes {
	for l := range strings.Lines(text) {
		f := strings.Fields(l)
		if len(f) == 3 && f[0] == "MemAvailable:" && f[2] == "kB" {
			var n quota.Bytes
			for _, d := range f[1] {
				if d < '0' || d > '9' || n > 1<<50 {
					return 0
				}
				n = n*10 + quota.Bytes(d-'0')
			}
			return n * quota.KiB
		}
	}
	return 0
}

// judgeMemory compares what may be spilled, and what is promised of it, with the memory of the host.
func judgeMemory(c device.Config, total, available, given quota.Bytes) Result {
	most, reserve := c.MaxSpill.Of(total), c.SpillReserve.Of(total)
	switch {
	case total == 0:
		return warn("the node table does not know the host's memory: no container can spill").but("cgpu refresh")
	case most > total-min(total, reserve):
		return warn("max_spill (%v) and spill_reserve (%v) are more than the host's %v", most.FloorMiB(), reserve.FloorMiB(), total.FloorMiB()).
			but("lower max_spill in cgpu.toml")
	case given > most:
		return warn("containers may spill %v, max_spill is %v", given.FloorMiB(), most.FloorMiB())
	case given > 0 && available > 0 && given > available-min(available, reserve):
		return warn("containers may spill %v, but the host has %v available and keeps %v: spilling will be refused before that", given.FloorMiB(),
			available.FloorMiB(), reserve.FloorMiB())
	}
	return ok("max_spill is %v of %v, %v are promised", most.FloorMiB(), total.FloorMiB(), given.FloorMiB())
}
