package guard

import (
	"bufio"
	"encoding/json"
	"net"
	"os"
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// Request is a line of JSON on the control socket. The guard answers with one line of JSON and closes.
type Request struct {
	Op string `json:"op"` // "status"
}

// Status is the answer to op "status".
type Status struct {
	ID        string          `json:"id"`
	Nonce     string          `json:"nonce"`
	GuardPID  int             `json:"guardPid"`
	InitPID   int             `json:"initPid"`   // the container's first process, in the host's numbers; 0 before it is known
	Listeners int             `json:"listeners"` // live seccomp filters: the container's own and one for each exec
	VGPUs     []VGPUStatus    `json:"vgpus"`
	Processes []ProcessStatus `json:"processes"`
	Calls     CallCounters    `json:"calls"`
}

// VGPUStatus is the memory of one vGPU. Native ones have no limit.
type VGPUStatus struct {
	Index  int         `json:"index"`
	UUID   string      `json:"uuid"`
	Native bool        `json:"native,omitempty"`
	Limit  quota.Bytes `json:"limit"`
	Used   quota.Bytes `json:"used"`
	Peak   quota.Bytes `json:"peak"`
	// Managed is the part of Used that is managed memory; Spill is the host memory allowed beyond Limit, Spilled what is used of it.
	Managed quota.Bytes `json:"managed,omitempty"`
	Spill   quota.Bytes `json:"spill,omitempty"`
	Spilled quota.Bytes `json:"spilled,omitempty"`
	Denied  uint64      `json:"denied"` // allocations refused because of the limit
	// Compute is nil for native GPUs.
	Compute *ComputeStatus `json:"compute,omitempty"`
}

// ComputeStatus is the GPU time of one vGPU.
type ComputeStatus = gpusched.Status

// ProcessStatus is a process that has used the GPU.
type ProcessStatus struct {
	PID     int           `json:"pid"`   // in the host's pid namespace
	NSPID   int           `json:"nspid"` // in the container's
	Name    string        `json:"name"`
	Clients int           `json:"clients"`
	Used    []quota.Bytes `json:"used"` // per vGPU, in the order of Status.VGPUs; without context overhead shared memory counts once per process
}

// CallCounters count trapped calls since the start.
type CallCounters struct {
	Trapped     uint64 `json:"trapped"`
	Denied      uint64 `json:"denied"`
	Interrupted uint64 `json:"interrupted"` // carried out while a signal took the caller away
	Replayed    uint64 `json:"replayed"`    // of those, answered when the call came again
	Undone      uint64 `json:"undone"`      // of those, taken back because it did not
	Throttled   uint64 `json:"throttled"`   // delayed by the rate limit
	Killed      uint64 `json:"killed"`      // clients freed because of uncharged memory
	// ProcessesKilled counts processes killed for managed memory beyond the limit, Spills allocations that went to host memory.
	ProcessesKilled uint64 `json:"processesKilled"`
	Spills          uint64 `json:"spills"`
}

// Status copies the guard's present state.
func (g *Guard) Status() Status {
	g.mu.Lock()
	s := Status{ID: g.cfg.ID, Nonce: g.cfg.Nonce, GuardPID: os.Getpid(), InitPID: g.initPID, Listeners: g.listeners}
	g.mu.Unlock()
	for i, x := range g.cfg.GPUs {
		u := g.account.usage(i)
		v := VGPUStatus{Index: x.Index, UUID: x.UUID, Native: x.Native, Limit: u.limit, Used: u.used, Peak: u.peak, Denied: u.denied,
			Managed: u.managed, Spill: u.spill, Spilled: u.spilled}
		v.Compute = g.gpuTime.Status(i)
		s.VGPUs = append(s.VGPUs, v)
	}
	g.countLooked()
	uses := g.account.byProcess()
	for _, p := range g.tasks.processes() {
		ps := ProcessStatus{PID: p.tgid, NSPID: p.nspid, Name: p.name, Used: make([]quota.Bytes, len(g.cfg.GPUs))}
		if u, ok := uses[p.tgid]; ok {
			ps.Clients, ps.Used = u.clients, u.used
		}
		s.Processes = append(s.Processes, ps)
	}
	slices.SortFunc(s.Processes, func(a, b ProcessStatus) int { return a.PID - b.PID })
	s.Calls = CallCounters{Trapped: g.stats.calls.Load(), Denied: g.stats.denied.Load(), Interrupted: g.stats.interrupted.Load(),
		Replayed: g.stats.replayed.Load(), Undone: g.stats.undone.Load(), Throttled: g.stats.throttled.Load(), Killed: g.stats.killed.Load(), ProcessesKilled: g.stats.processesKilled.Load(), Spills: g.stats.spills.Load()}
	return s
}

// serveControl answers cgpu on the control socket, one request a connection.
func (g *Guard) serveControl(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
			line, err := bufio.NewReaderSize(conn, 4096).ReadSlice('\n')
			var req Request
			if err != nil || json.Unmarshal(line, &req) != nil {
				return
			}
			if req.Op == "status" {
				g.sweep() // what was closed unnoticed must not be shown
				_ = json.NewEncoder(conn).Encode(g.Status())
			}
		}()
	}
}
