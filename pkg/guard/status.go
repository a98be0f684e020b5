// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/json"
	"net"
	"os"
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// Status copies the guard's present state.
func (g *Guard) Status() api.Status {
	g.mu.Lock()
	s := api.Status{ID: g.cfg.ID, Nonce: g.cfg.Nonce, GuardPID: os.Getpid(), InitPID: g.initPID, Listeners: g.listeners}
	g.mu.Unlock()
	for i, x := range g.cfg.GPUs {
		u := g.account.usage(i)
		v := api.VGPUStatus{Index: x.Index, UUID: x.UUID, Native: x.Native, Limit: u.limit, Used: u.used, Peak: u.peak, Denied: u.denied,
			Managed: u.managed, Spill: u.spill, Spilled: u.spilled}
		v.Compute = g.gpuTime.Status(i)
		s.VGPUs = append(s.VGPUs, v)
	}
	g.countGPUTime()
	uses := g.account.byProcess()
	for _, p := range g.tasks.processes() {
		ps := api.ProcessStatus{PID: p.tgid, NSPID: p.nspid, Name: p.name, Used: make([]quota.Bytes, len(g.cfg.GPUs))}
		if u, ok := uses[p.tgid]; ok {
			ps.Clients, ps.Used = u.clients, u.used
		}
		s.Processes = append(s.Processes, ps)
	}
	slices.SortFunc(s.Processes, func(a, b api.ProcessStatus) int { return a.PID - b.PID })
	s.Calls = api.CallCounters{Trapped: g.stats.calls.Load(), Denied: g.stats.denied.Load(), Interrupted: g.stats.interrupted.Load(),
		Replayed: g.stats.replayed.Load(), Undone: g.stats.undone.Load(), Throttled: g.stats.throttled.Load(), Killed: g.stats.killed.Load(),
		ProcessesKilled: g.stats.processesKilled.Load(), Spills: g.stats.spills.Load()}
	return s
}

// serveControl answers cgpu on the control socket, one request a connection.
func (g *Guard) serveControl(l *net.UnixListener) {
	acceptAll(&g.doors.control, l.AcceptUnix, g.acceptFails, func(conn *net.UnixConn) {
		_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
		var req api.Request
		if api.Receive(conn, &req) != nil {
			return
		}
		switch req.Op {
		case api.OpStatus:
			g.sweep() // what was closed unnoticed must not be shown
			_ = json.NewEncoder(conn).Encode(g.Status())
		case api.OpUpgrade:
			g.serveUpgrade(conn, req.Program)
		case api.OpLend:
			if req.Loan != nil {
				g.lend(conn, *req.Loan)
			}
		case api.OpRenew:
			if req.Loans != nil {
				_ = json.NewEncoder(conn).Encode(g.renewed(*req.Loans))
			}
		}
	})
}
