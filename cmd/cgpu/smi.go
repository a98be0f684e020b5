package main

import (
	"errors"
	"fmt"
	"io"
	"os/signal"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sched"
)

func smiCommand() *cli.Command {
	return &cli.Command{
		Name:  "smi",
		Usage: "show the GPUs, who shares them, and what is used",
		Description: "USED is what cgpu charges: allocations and contexts of containers with a vGPU. What programs outside\n" +
			"of such containers use is not in it; nvidia-smi shows that. SPILL, where a container has any, is host memory\n" +
			"used in place of the GPU's, of what it may use; it is not in USED. UTIL is the part of the GPU's time in the last\n" +
			"second, where the driver tells it.\n\n" +
			"On a terminal -o table draws lines around its columns, where they fit; -o plain, and a pipe, have columns only.\n\n" +
			filterHelp + "\n\n" +
			"Examples:\n   cgpu smi\n   cgpu smi --watch 2\n   cgpu smi -o wide\n   cgpu smi --gpu 0 --filter state=paused\n   cgpu smi --container web --watch\n   cgpu smi --json | jq '.gpus[].vgpus[] | {id, used, limit}'",
		ArgsUsage: " ",
		Flags: append(filterFlags(),
			&cli.StringFlag{Name: "o", Aliases: []string{"output"}, Usage: "`FORMAT`: table, plain, wide or json", Value: "table"},
			&cli.BoolFlag{Name: "json", Usage: "the same as -o json"},
			&cli.GenericFlag{Name: "watch", Usage: "show it again every `[SECONDS]`, every second when none are given, until Ctrl-C", Value: new(seconds), DefaultText: "once"},
		),
		Action: func(c *cli.Context) error {
			every, err := interval(c)
			if err != nil {
				return usageError{fmt.Errorf("smi: %w", err)}
			}
			format := c.String("o")
			if c.Bool("json") {
				if c.IsSet("o") && format != "json" {
					return usageError{fmt.Errorf("smi: -o %q beside --json: want one of them", format)}
				}
				format = "json"
			}
			sel, err := selectionOf(c)
			if err != nil {
				return usageError{fmt.Errorf("smi: %w", err)}
			}
			var print func(io.Writer, view) error
			switch format {
			case "table":
				print = tableFor(c.App.Writer)
			case "plain":
				print = printTable
			case "wide":
				print = printWide
			case "json":
				print = printJSON
			default:
				return usageError{fmt.Errorf("smi: -o %q: want table, plain, wide or json", format)}
			}
			show := func(w, warnings io.Writer) error {
				v, err := look(device.RunDir())
				if err != nil {
					return err
				}
				if v.Stale != "" {
					fmt.Fprintf(warnings, "cgpu: warning: %s; the next container refreshes it, or cgpu refresh\n", v.Stale)
				}
				if v, err = sel.apply(v); err != nil {
					return fmt.Errorf("smi: %w", err)
				}
				return print(w, v)
			}
			if every == 0 {
				return show(c.App.Writer, c.App.ErrWriter)
			}
			ctx, stop := signal.NotifyContext(c.Context, syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return watch(ctx, c.App.Writer, c.App.ErrWriter, every, show)
		},
	}
}

// view is the node as smi shows it. Its JSON form is an interface: fields may be added, none renamed. Amounts are bytes.
type view struct {
	Driver        string    `json:"driver"` // "nvidia" or "sim"
	DriverVersion string    `json:"driverVersion"`
	Stale         string    `json:"stale,omitempty"` // why node.json describes the past
	GPUs          []gpuView `json:"gpus"`
}

type gpuView struct {
	Index    int         `json:"index"`
	UUID     string      `json:"uuid"`
	BusID    string      `json:"busId"`
	Name     string      `json:"name"`
	Total    quota.Bytes `json:"total"`
	Reserved quota.Bytes `json:"reserved"` // sum of the limits
	Used     quota.Bytes `json:"used"`     // sum of what vGPUs use
	Policy   string      `json:"policy"`   // in effect
	MaxInst  int         `json:"maxInst"`
	// PrioRatio is the most that high-priority containers get while others want the GPU, in percent.
	PrioRatio int            `json:"prioRatio"`
	Promised  sched.Permille `json:"promised"` // sum of the hard caps
	// Utilization is the sum of what vGPUs used of the last second; absent where no guard can tell.
	Utilization *sched.Permille `json:"utilization,omitempty"`
	VGPUs       []vgpuView      `json:"vgpus"` // in the order of their creation
}

// vgpuView is one container's share of one GPU.
type vgpuView struct {
	ID      string    `json:"id"`
	Name    string    `json:"name,omitempty"`
	Created time.Time `json:"created"`
	State   string    `json:"state"`
	Native  bool      `json:"native,omitempty"` // the whole GPU, without a limit
	// Enforcement is who keeps the container to its limits: device.EnforceGuard or device.EnforcePreload.
	Enforcement string         `json:"enforcement"`
	Limit       quota.Bytes    `json:"limit"`
	Used        quota.Bytes    `json:"used"`
	Managed     quota.Bytes    `json:"managed"` // the part of Used that is managed memory
	Spill       quota.Bytes    `json:"spill"`   // host memory allowed beyond Limit
	Spilled     quota.Bytes    `json:"spilled"` // used of it; not in Used
	Peak        quota.Bytes    `json:"peak"`
	Denied      uint64         `json:"denied"` // allocations refused because of the limit
	Weight      int            `json:"weight,omitempty"`
	Percent     int            `json:"percent,omitempty"`
	Priority    quota.Priority `json:"priority"`
	Paused      bool           `json:"paused,omitempty"` // by cgpu pause
	GuardPID    int            `json:"guardPid,omitempty"`
	InitPID     int            `json:"initPid,omitempty"`
	Processes   []processView  `json:"processes"`
	// Compute is what the guard says of the GPU's time; absent where it says nothing.
	Compute *guard.ComputeStatus `json:"compute,omitempty"`
	// Calls are of the whole container; they are repeated for each of its GPUs.
	Calls guard.CallCounters `json:"calls"`
}

type processView struct {
	PID   int         `json:"pid"`   // on the host
	NSPID int         `json:"nspid"` // in the container
	Name  string      `json:"name"`
	Used  quota.Bytes `json:"used"`
}

// look gathers the view of a run directory.
func look(runDir string) (view, error) {
	t, err := device.Load(runDir)
	var stale string
	if t != nil && errors.Is(err, device.ErrStale) {
		stale = err.Error()
	} else if errors.Is(err, device.ErrMissing) {
		if t, err = loadNode(runDir); err != nil {
			return view{}, err
		}
	} else if err != nil {
		return view{}, err
	}
	records, cards, err := ledger.Open(runDir).State()
	if err != nil {
		return view{}, err
	}
	for i := range records {
		records[i] = named(records[i])
	}
	v := arrange(t, records, cards, askAll(t, records))
	v.Stale = stale
	return v, nil
}

// arrange puts records and answers (of the same order) under the GPUs they are about.
func arrange(t *device.Table, records []ledger.Record, cards map[string]sched.Card, answers []answer) view {
	v := view{Driver: t.Driver, DriverVersion: t.DriverVersion, GPUs: []gpuView{}}
	for _, g := range t.GPUs {
		gv := gpuView{Index: g.Index, UUID: g.UUID, BusID: g.BusID, Name: g.Name, Total: g.Memory, VGPUs: []vgpuView{}}
		s := sharingOf(g.UUID, t.Config.Card(), records, cards)
		gv.Policy, gv.MaxInst, gv.PrioRatio, gv.Promised = s.effect.String(), s.card.MaxInst, s.card.PrioRatio, s.promised
		for i, r := range records {
			for _, share := range r.VGPUs {
				if share.UUID == g.UUID {
					x := vgpu(r, answers[i], g.UUID)
					x.Limit, x.Spill, x.Weight, x.Percent, x.Priority = share.Limit, share.Spill, share.Weight, share.Percent, share.Priority
					gv.VGPUs = append(gv.VGPUs, x)
				}
			}
			for _, uuid := range r.Native {
				if uuid == g.UUID {
					x := vgpu(r, answers[i], g.UUID)
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

// vgpu is what a guard says of its container on one GPU.
func vgpu(r ledger.Record, a answer, uuid string) vgpuView {
	enforcement := device.EnforceGuard
	if r.Preload {
		enforcement = device.EnforcePreload
	}
	x := vgpuView{Enforcement: enforcement, ID: r.ID, Name: r.Name, Created: r.Created, State: state(r, a), Paused: r.Paused, GuardPID: r.GuardPID, InitPID: r.InitPID, Processes: []processView{}}
	if a.err != nil {
		return x
	}
	x.GuardPID, x.InitPID, x.Calls = a.status.GuardPID, a.status.InitPID, a.status.Calls
	for i, g := range a.status.VGPUs {
		if g.UUID != uuid {
			continue
		}
		x.Used, x.Managed, x.Spilled, x.Peak, x.Denied, x.Compute = g.Used, g.Managed, g.Spilled, g.Peak, g.Denied, g.Compute
		for _, p := range a.status.Processes {
			// A process that opened the driver and holds nothing on this GPU is not shown, like in nvidia-smi.
			if i < len(p.Used) && p.Used[i] > 0 {
				x.Processes = append(x.Processes, processView{PID: p.PID, NSPID: p.NSPID, Name: p.Name, Used: p.Used[i]})
			}
		}
	}
	return x
}
