// SPDX-License-Identifier: Apache-2.0

// Package snapshot is a node's GPUs at this moment: who shares them, what each container may use and uses. It reads the run
// directory's table and ledger and asks the guards; it changes nothing. `cgpu smi` prints it, and cgpu-agent serves it.
package snapshot

import (
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/health"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// View is a node as cgpu smi shows it. Its form in JSON is package schema's.
type View struct {
	Driver        string // "nvidia" or "sim"
	DriverVersion string
	Stale         string // why node.json describes the past
	Watched       bool   // somebody watches the health of the GPUs (cgpu health watch), and what he finds can be read
	GPUs          []GPU
}

type GPU struct {
	Index    int // as NVML counts
	UUID     string
	BusID    string
	Name     string
	Total    quota.Bytes
	Reserved quota.Bytes // sum of the limits
	Used     quota.Bytes // sum of what vGPUs use
	// Outside is what the driver has given out beside that, at least: to programs outside cgpu, and a little to cgpu itself. Absent where
	// that is not known, and of a GPU that no container has.
	Outside *quota.Bytes
	Policy  string // in effect
	MaxInst int    // containers that may share it
	// PrioRatio is the most that high-priority containers get while others want the GPU, in percent.
	PrioRatio int
	Promised  sched.Permille // sum of the hard caps
	// Utilization is the sum of what vGPUs used of the last second; absent where no guard can tell.
	Utilization *sched.Permille
	Fault       string // why it is unhealthy
	VGPUs       []VGPU // in the order of their creation
}

// VGPU is one container's share of one GPU.
type VGPU struct {
	ID    string
	Nonce string // of the reservation: no other container has it
	Root  string // of the low-level runtime's state, in which no other container has the ID
	// SharedID: another container of the node has the ID, too, under another root.
	SharedID bool

	Name    string
	Created time.Time
	State   string // as cgpu smi --filter has them, with spaces
	Native  bool   // the whole GPU, without a limit
	// Answered: the guard did, or the page could be read. If not, what is used is not known, and zero here.
	Answered bool
	// Enforcement is who keeps the container to its limits: "guard", "preload", or "driver".
	Enforcement string
	// DriverLimits: NVIDIA's driver limits the memory of its cgroup; beside Enforcement, unless that is "driver".
	DriverLimits bool
	// LimitedCgroup is what the driver limits, for MeasureLimited.
	LimitedCgroup string
	// Domain is the trust domain; empty: none. DomainServer: it is its MPS server, else a member, with Threads percent of the
	// multiprocessors; 0: all.
	Domain       string
	DomainServer bool
	Threads      int
	quota.Slice
	Used      quota.Bytes
	Managed   quota.Bytes // the part of Used that is managed memory
	Spilled   quota.Bytes // used of it; not in Used
	Peak      quota.Bytes
	Denied    uint64 // allocations refused because of the limit
	Paused    bool   // by cgpu pause
	GuardPID  int
	InitPID   int
	Processes []Process
	// Compute is what the guard says of the GPU's time; absent where it says nothing.
	Compute *api.ComputeStatus
	// Calls are of the whole container; they are repeated for each of its GPUs.
	Calls api.CallCounters
}

// Handle is what names the container alone: the ID, or the nonce where others have that ID.
func (x VGPU) Handle() string {
	if x.SharedID {
		return x.Nonce
	}
	return x.ID
}

// ShownState is the state in a word, of which cgpu pause makes one more.
func (x VGPU) ShownState() string {
	if x.Paused && !x.Native && x.State == StateRunning {
		return StatePaused
	}
	return x.State
}

type Process struct {
	PID   int // on the host
	NSPID int // in the container
	Name  string
	Used  quota.Bytes
}

// Look gathers the view of a run directory. load is called where the table is missing, and may make one; nil: that is an error. names are
// those of the looks before; nil: there are none.
func Look(runDir string, load func(runDir string) (*device.Table, error), names *Names) (View, error) {
	t, err := device.Load(runDir)
	var stale string
	if t != nil && errors.Is(err, device.ErrStale) {
		stale = err.Error()
	} else if errors.Is(err, device.ErrMissing) && load != nil {
		if t, err = load(runDir); err != nil {
			return View{}, err
		}
	} else if err != nil {
		return View{}, err
	}
	faults, unread := health.Read(runDir) // why, cgpu health tells
	t = faults.Show(t)
	records, cards, err := ledger.Open(runDir).State()
	if err != nil {
		return View{}, err
	}
	if names == nil {
		names = new(Names)
	}
	names.give(records, time.Now())
	v := Arrange(t, records, cards, AskAll(t, records))
	v.Stale, v.Watched = stale, unread == nil && health.Watched(runDir)
	return v, nil
}

// Arrange puts records and answers (of the same order) under the GPUs they are about.
func Arrange(t *device.Table, records []ledger.Record, cards map[string]sched.Card, answers []Answer) View {
	v := View{Driver: t.Driver, DriverVersion: t.DriverVersion, GPUs: []GPU{}}
	with := map[string]int{} // how many containers have an ID
	for _, r := range records {
		with[r.ID]++
	}
	for _, g := range t.GPUs {
		gv := GPU{Index: g.Index, UUID: g.UUID, BusID: g.BusID, Name: g.Name, Total: g.Memory, Fault: g.Fault, VGPUs: []VGPU{}}
		s := SharingOf(g.UUID, t.Config.Card(), records, cards)
		gv.Policy, gv.MaxInst, gv.PrioRatio, gv.Promised = s.Effect.String(), s.Card.MaxInst, s.Card.PrioRatio, s.Promised
		for i, r := range records {
			for _, share := range r.VGPUs {
				if share.UUID == g.UUID {
					x := vgpu(r, answers[i], g.UUID)
					x.SharedID = with[r.ID] > 1
					x.Slice = share.Slice
					gv.VGPUs = append(gv.VGPUs, x)
				}
			}
			for _, uuid := range r.Native {
				if uuid == g.UUID {
					x := vgpu(r, answers[i], g.UUID)
					x.SharedID = with[r.ID] > 1
					x.Native = true
					gv.VGPUs = append(gv.VGPUs, x)
				}
			}
		}
		for _, x := range gv.VGPUs {
			gv.Reserved += x.Limit
			gv.Used += x.Used
			if x.Compute != nil && x.Compute.Exact {
				sum := x.Compute.Utilization
				if gv.Utilization != nil {
					sum += *gv.Utilization
				}
				gv.Utilization = &sum
			}
		}
		v.GPUs = append(v.GPUs, gv)
	}
	return v
}

// MeasureLimited sets what is used of containers that the driver alone limits. used asks the driver, by UUID=CGROUP.
func (v *View) MeasureLimited(used func(asked []string) (map[string]quota.Bytes, error)) {
	type place struct {
		*GPU
		*VGPU
	}
	places := map[string]place{}
	for i := range v.GPUs {
		g := &v.GPUs[i]
		for j := range g.VGPUs {
			if x := &g.VGPUs[j]; x.Enforcement == device.EnforceDriver && !x.Native && !x.Answered && x.LimitedCgroup != "" {
				places[g.UUID+"="+x.LimitedCgroup] = place{g, x}
			}
		}
	}
	if len(places) == 0 {
		return
	}
	all, _ := used(slices.Sorted(maps.Keys(places))) // with an error it is nothing
	for name, p := range places {
		if n, ok := all[name]; ok {
			p.VGPU.Used, p.Answered = min(n, p.Total), true
			p.GPU.Used += p.VGPU.Used
		}
	}
}

// MeasureOutside sets what is used outside cgpu. used asks the driver what it has given out, of GPUs with some indices.
func (v *View) MeasureOutside(used func(gpus []int) (map[string]quota.Bytes, error)) {
	var gpus []int
	for _, g := range v.GPUs {
		if len(g.VGPUs) > 0 && g.Fault == "" {
			gpus = append(gpus, g.Index)
		}
	}
	if len(gpus) == 0 {
		return
	}
	all, err := used(gpus)
	if err != nil {
		return
	}
	for i := range v.GPUs {
		g := &v.GPUs[i]
		unknown := func(x VGPU) bool { return !x.Answered }
		if n, ok := all[g.UUID]; ok && !slices.ContainsFunc(g.VGPUs, unknown) {
			g.Outside = new(n - min(n, g.Used)) // managed memory is a part of Used wherever it is
		}
	}
}

// vgpu is what a guard says of its container on one GPU.
func vgpu(r ledger.Record, a Answer, uuid string) VGPU {
	enforcement := device.EnforceGuard
	switch {
	case r.DriverOnly:
		enforcement = device.EnforceDriver
	case r.Preload:
		enforcement = device.EnforcePreload
	}
	x := VGPU{Enforcement: enforcement, DriverLimits: r.DriverLimits, LimitedCgroup: r.LimitedCgroup, Domain: r.Domain,
		DomainServer: r.DomainServer, Threads: r.Threads, ID: r.ID, Nonce: r.Nonce, Root: r.Root,
		Name: r.Name, Created: r.Created,
		State: StateOf(r, a), Paused: r.Paused, GuardPID: r.GuardPID, InitPID: r.InitPID, Processes: []Process{}}
	if a.Err != nil {
		return x
	}
	x.Answered = true
	x.GuardPID, x.InitPID, x.Calls = a.Status.GuardPID, a.Status.InitPID, a.Status.Calls
	for i, g := range a.Status.VGPUs {
		if g.UUID != uuid {
			continue
		}
		x.Used, x.Managed, x.Spilled, x.Peak, x.Denied, x.Compute = g.Used, g.Managed, g.Spilled, g.Peak, g.Denied, g.Compute
		for _, p := range a.Status.Processes {
			// A process that opened the driver and holds nothing on this GPU is not shown, like in nvidia-smi.
			if i < len(p.Used) && p.Used[i] > 0 {
				x.Processes = append(x.Processes, Process{PID: p.PID, NSPID: p.NSPID, Name: p.Name, Used: p.Used[i]})
			}
		}
	}
	return x
}
