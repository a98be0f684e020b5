package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

func smiCommand() *cli.Command {
	return &cli.Command{
		Name:  "smi",
		Usage: "show the GPUs, who shares them, and what is used",
		Description: "USED is what cgpu charges: allocations and contexts of containers with a vGPU. What programs outside\n" +
			"of such containers use is not in it; nvidia-smi shows that.\n\n" +
			"Examples:\n   cgpu smi\n   cgpu smi -o wide\n   cgpu smi -o json | jq '.gpus[].vgpus[] | {id, used, limit}'",
		Before: noArguments,
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "o", Aliases: []string{"output"}, Usage: "`FORMAT`: table, wide or json", Value: "table"},
		},
		Action: func(c *cli.Context) error {
			var print func(io.Writer, view) error
			switch format := c.String("o"); format {
			case "table":
				print = printTable
			case "wide":
				print = printWide
			case "json":
				print = printJSON
			default:
				return usageError{fmt.Errorf("smi: -o %q: want table, wide or json", format)}
			}
			v, err := look(device.RunDir())
			if err != nil {
				return err
			}
			if v.Stale != "" {
				fmt.Fprintf(c.App.ErrWriter, "cgpu: warning: %s; the next container refreshes it, or cgpu refresh\n", v.Stale)
			}
			return print(c.App.Writer, v)
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
	VGPUs    []vgpuView  `json:"vgpus"`    // in the order of their creation
}

// vgpuView is one container's share of one GPU.
type vgpuView struct {
	ID        string         `json:"id"`
	Name      string         `json:"name,omitempty"`
	Created   time.Time      `json:"created"`
	State     string         `json:"state"`
	Native    bool           `json:"native,omitempty"` // the whole GPU, without a limit
	Limit     quota.Bytes    `json:"limit"`
	Used      quota.Bytes    `json:"used"`
	Peak      quota.Bytes    `json:"peak"`
	Denied    uint64         `json:"denied"` // allocations refused because of the limit
	Weight    int            `json:"weight,omitempty"`
	Percent   int            `json:"percent,omitempty"`
	Priority  quota.Priority `json:"priority"`
	GuardPID  int            `json:"guardPid,omitempty"`
	InitPID   int            `json:"initPid,omitempty"`
	Processes []processView  `json:"processes"`
	// Calls are of the whole container; they are repeated for each of its GPUs.
	Calls guard.CallCounters `json:"calls"`
}

type processView struct {
	PID   int         `json:"pid"`   // on the host
	NSPID int         `json:"nspid"` // in the container
	Name  string      `json:"name"`
	Used  quota.Bytes `json:"used"`
}

// States of a container.
const (
	stateStarting  = "starting"   // reserved; its first process does not run yet
	stateRunning   = "running"    // the guard answers
	stateNoAnswer  = "no answer"  // the guard is there and did not answer in time
	stateGuardDead = "guard dead" // GPU calls fail; the reservation stays until the container is gone
	stateGone      = "gone"       // nothing runs any more; cgpu gc gives the share back
)

// look gathers the view of a run directory.
func look(runDir string) (view, error) {
	t, err := device.Load(runDir)
	var stale string
	if t != nil && errors.Is(err, device.ErrStale) {
		stale = err.Error()
	} else if errors.Is(err, device.ErrMissing) {
		return view{}, fmt.Errorf("%w; cgpu refresh makes it", err)
	} else if err != nil {
		return view{}, err
	}
	records, err := ledger.Open(runDir).List()
	if err != nil {
		return view{}, err
	}
	v := arrange(t, records, askAll(records))
	v.Stale = stale
	return v, nil
}

// answer is what a guard said, or why it said nothing.
type answer struct {
	status guard.Status
	err    error
	gone   bool // with err: neither guard nor container runs
}

// askTimeout bounds the wait for a guard: it answers in microseconds, unless something is wrong with it.
const askTimeout = 300 * time.Millisecond

// askAll asks the guards of all records at once.
func askAll(records []ledger.Record) []answer {
	answers := make([]answer, len(records))
	slots := make(chan struct{}, 64) // open sockets at a time
	var wg sync.WaitGroup
	for i, r := range records {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			answers[i].status, answers[i].err = ask(r)
			answers[i].gone = answers[i].err != nil && ended(r)
		})
	}
	wg.Wait()
	return answers
}

func ask(r ledger.Record) (s guard.Status, err error) {
	deadline := time.Now().Add(askTimeout)
	conn, err := net.DialTimeout("unix", r.Control, askTimeout)
	if err != nil {
		return s, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(deadline); err != nil {
		return s, err
	}
	if err := json.NewEncoder(conn).Encode(guard.Request{Op: "status"}); err != nil {
		return s, err
	}
	// Many processes make a long line; a line without an end is none of a guard's.
	line, err := bufio.NewReader(io.LimitReader(conn, 16<<20)).ReadBytes('\n')
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(line, &s); err != nil {
		return s, err
	}
	if s.ID != r.ID || s.Nonce != r.Nonce {
		return s, errors.New("another container's guard answered")
	}
	return s, nil
}

// ended reports that the guard (before there is one, the launcher) and the container's first process are gone.
func ended(r ledger.Record) bool {
	gone := func(pid int, start uint64) bool {
		now, err := ledger.ProcStart(pid)
		return errors.Is(err, fs.ErrNotExist) || err == nil && start != 0 && now != start
	}
	keeper, start := r.GuardPID, r.GuardStart
	if keeper == 0 {
		keeper, start = r.LauncherPID, r.LauncherStart
	}
	return gone(keeper, start) && (r.InitPID == 0 || gone(r.InitPID, r.InitStart))
}

// state says in a word how a container fares.
func state(r ledger.Record, a answer) string {
	var timeout net.Error
	switch {
	case a.gone:
		return stateGone
	case a.err == nil && a.status.InitPID == 0, a.err != nil && r.GuardPID == 0:
		return stateStarting
	case a.err == nil:
		return stateRunning
	case errors.As(a.err, &timeout) && timeout.Timeout(), errors.Is(a.err, syscall.EACCES):
		return stateNoAnswer
	}
	return stateGuardDead
}

// arrange puts records and answers (of the same order) under the GPUs they are about.
func arrange(t *device.Table, records []ledger.Record, answers []answer) view {
	v := view{Driver: t.Driver, DriverVersion: t.DriverVersion, GPUs: []gpuView{}}
	for _, g := range t.GPUs {
		gv := gpuView{Index: g.Index, UUID: g.UUID, BusID: g.BusID, Name: g.Name, Total: g.Memory, VGPUs: []vgpuView{}}
		for i, r := range records {
			for _, share := range r.VGPUs {
				if share.UUID == g.UUID {
					x := vgpu(r, answers[i], g.UUID)
					x.Limit, x.Weight, x.Percent, x.Priority = share.Limit, share.Weight, share.Percent, share.Priority
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
		}
		v.GPUs = append(v.GPUs, gv)
	}
	return v
}

// vgpu is what a guard says of its container on one GPU.
func vgpu(r ledger.Record, a answer, uuid string) vgpuView {
	x := vgpuView{ID: r.ID, Name: r.Name, Created: r.Created, State: state(r, a), GuardPID: r.GuardPID, InitPID: r.InitPID, Processes: []processView{}}
	if a.err != nil {
		return x
	}
	x.GuardPID, x.InitPID, x.Calls = a.status.GuardPID, a.status.InitPID, a.status.Calls
	for i, g := range a.status.VGPUs {
		if g.UUID != uuid {
			continue
		}
		x.Used, x.Peak, x.Denied = g.Used, g.Peak, g.Denied
		for _, p := range a.status.Processes {
			// A process that opened the driver and holds nothing on this GPU is not shown, like in nvidia-smi.
			if i < len(p.Used) && p.Used[i] > 0 {
				x.Processes = append(x.Processes, processView{PID: p.PID, NSPID: p.NSPID, Name: p.Name, Used: p.Used[i]})
			}
		}
	}
	return x
}
