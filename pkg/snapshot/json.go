// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/schema"
)

// JSON is the view as commands print it.
func (v View) JSON() schema.Node {
	n := schema.Node{Schema: schema.Version, Driver: v.Driver, DriverVersion: v.DriverVersion, Stale: v.Stale, Watched: v.Watched,
		GPUs: []schema.GPU{}}
	for _, g := range v.GPUs {
		x := schema.GPU{Index: g.Index, UUID: g.UUID, BusID: g.BusID, Name: g.Name, Total: g.Total, Reserved: g.Reserved, Used: g.Used,
			Outside: g.Outside, Policy: g.Policy, MaxInst: g.MaxInst, PrioRatio: schema.Percent(g.PrioRatio),
			Promised: schema.PercentOf(g.Promised), Fault: g.Fault, VGPUs: []schema.VGPU{}}
		if g.Utilization != nil {
			x.Utilization = new(schema.PercentOf(*g.Utilization))
		}
		for _, v := range g.VGPUs {
			x.VGPUs = append(x.VGPUs, v.json())
		}
		n.GPUs = append(n.GPUs, x)
	}
	return n
}

func (x VGPU) json() schema.VGPU {
	v := schema.VGPU{ID: x.ID, Nonce: x.Nonce, Root: x.Root, SharedID: x.SharedID, Name: x.Name, Created: x.Created, State: x.State,
		Native: x.Native, Enforcement: x.Enforcement, DriverLimits: x.DriverLimits, Domain: x.Domain,
		DomainServer: x.DomainServer, Threads: x.Threads, Limit: x.Limit, Used: x.Used, Managed: x.Managed,
		Spill: x.Spill, Spilled: x.Spilled,
		Peak: x.Peak, Denied: x.Denied, Weight: x.Weight, Percent: x.Percent, Paused: x.Paused, GuardPID: x.GuardPID, InitPID: x.InitPID,
		Processes: []schema.Process{}, Compute: computeJSON(x.Compute), Calls: callsJSON(x.Calls)}
	if !x.Native {
		v.Priority = x.Priority.String()
	}
	for _, p := range x.Processes {
		v.Processes = append(v.Processes, schema.Process(p))
	}
	return v
}

// GuardJSON is what a guard said as commands print it.
func GuardJSON(s api.Status) *schema.Guard {
	g := &schema.Guard{GuardPID: s.GuardPID, InitPID: s.InitPID, Listeners: s.Listeners, VGPUs: []schema.GuardVGPU{},
		Processes: []schema.GuardedProcess{}, Calls: callsJSON(s.Calls)}
	for _, v := range s.VGPUs {
		g.VGPUs = append(g.VGPUs, schema.GuardVGPU{Index: v.Index, UUID: v.UUID, Native: v.Native, Limit: v.Limit, Used: v.Used,
			Managed: v.Managed, Spill: v.Spill, Spilled: v.Spilled, Peak: v.Peak, Denied: v.Denied, Compute: computeJSON(v.Compute)})
	}
	for _, p := range s.Processes {
		g.Processes = append(g.Processes, schema.GuardedProcess{PID: p.PID, NSPID: p.NSPID, Name: p.Name, Clients: p.Clients, Used: p.Used})
	}
	return g
}

func computeJSON(c *api.ComputeStatus) *schema.Compute {
	if c == nil {
		return nil
	}
	return &schema.Compute{Policy: c.Policy.String(), Weight: c.Weight, Percent: c.Percent, Priority: c.Priority.String(),
		Cap: schema.PercentOf(c.Cap), Paused: c.Paused, TSGs: c.TSGs, Busy: c.Busy, Slice: schema.SecondsOf(c.Slice), Ruled: c.Ruled,
		Exact: c.Exact, Utilization: schema.PercentOf(c.Utilization), Entitled: schema.PercentOf(c.Entitled),
		GPUTime: schema.SecondsOf(c.GPUTime), Waiting: schema.SecondsOf(c.Waiting), Throttled: schema.SecondsOf(c.Throttled),
		Switches: c.Switches, Preemptions: c.Preemptions, Pauses: c.Pauses, Granted: schema.SecondsOf(c.Granted)}
}

func callsJSON(c api.CallCounters) schema.Calls {
	return schema.Calls{Trapped: c.Trapped, Denied: c.Denied, Interrupted: c.Interrupted, Replayed: c.Replayed, Undone: c.Undone,
		Throttled: c.Throttled, Killed: c.Killed, ProcessesKilled: c.ProcessesKilled, Spills: c.Spills}
}
