// SPDX-License-Identifier: Apache-2.0

package web

import (
	"time"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/history"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

// state is what the page is told of a look. It is between this program and its page, and no interface. Parts of the GPU's time are per
// mille, amounts bytes; -1 is what nobody can tell. Nonces and processes are not in it.
type state struct {
	Host    string    `json:"host"`
	Version string    `json:"version"`
	At      time.Time `json:"at"`
	Error   string    `json:"error,omitempty"`
	Driver  string    `json:"driver"`
	Stale   string    `json:"stale,omitempty"`
	GPUs    []gpu     `json:"gpus"`
}

type gpu struct {
	Line     int            `json:"line"` // of the history
	Index    int            `json:"index"`
	Name     string         `json:"name"`
	UUID     string         `json:"uuid"`
	Policy   string         `json:"policy"`
	Total    uint64         `json:"total"`
	Reserved uint64         `json:"reserved"`
	Used     uint64         `json:"used"`
	Slots    int            `json:"slots"`
	Got      sched.Permille `json:"got"`
	VGPUs    []vgpu         `json:"vgpus"`
}

type vgpu struct {
	Line      int            `json:"line"`
	ID        string         `json:"id"`
	Name      string         `json:"name"`
	State     string         `json:"state"`
	Native    bool           `json:"native"`
	Unguarded bool           `json:"unguarded"` // no guard keeps it to its limits
	Limit     uint64         `json:"limit"`
	Used      int64          `json:"used"`
	Peak      uint64         `json:"peak"`
	Spill     uint64         `json:"spill"`
	Spilled   uint64         `json:"spilled"`
	Denied    uint64         `json:"denied"`
	Weight    int            `json:"weight"`
	Percent   int            `json:"percent"`
	Priority  string         `json:"priority"`
	Got       sched.Permille `json:"got"`
	Entitled  sched.Permille `json:"entitled"`
}

// text is what others chose, such as names: short, and without what acts or turns the text around it.
func text(s string) string {
	const most = 256
	return terminal.Printable(terminal.Cut(s, most))
}

// describe fills in a view.
func (p *Page) describe(s *state, v snapshot.View) {
	s.Driver = "NVIDIA driver " + text(v.DriverVersion)
	if v.Driver == device.DriverSim {
		s.Driver = "simulated driver " + text(v.DriverVersion)
	}
	s.Stale, s.GPUs = text(v.Stale), []gpu{}
	for _, g := range v.GPUs {
		line := p.past.Of(g.UUID, "")
		out := gpu{Line: line.Number, Index: g.Index, Name: text(g.Name), UUID: g.UUID, Policy: g.Policy, Total: uint64(g.Total),
			Reserved: uint64(g.Reserved), Used: uint64(g.Used), Slots: g.MaxInst, Got: line.Now.Got, VGPUs: []vgpu{}}
		for _, x := range g.VGPUs {
			out.VGPUs = append(out.VGPUs, p.container(x, p.past.Of(g.UUID, x.Nonce)))
		}
		s.GPUs = append(s.GPUs, out)
	}
}

func (p *Page) container(x snapshot.VGPU, line history.Line) vgpu {
	out := vgpu{Line: line.Number, ID: text(x.ID), Name: text(x.Name), State: x.ShownState(), Native: x.Native, Limit: uint64(x.Limit),
		Used:  history.Unknown,
		Peak:  uint64(x.Peak),
		Spill: uint64(x.Spill), Spilled: uint64(x.Spilled), Denied: x.Denied, Weight: x.Weight, Percent: x.Percent, Priority: x.Priority.String(),
		Got: line.Now.Got, Entitled: line.Now.Entitled}
	out.Unguarded = !x.Native && x.Enforcement != device.EnforceGuard
	if x.Answered {
		out.Used = int64(x.Used)
	}
	return out
}

// hour is the history of everything that is there, by its lines' numbers. Memory is in MiB.
type hour struct {
	Step   float64       `json:"step"` // seconds
	Points int           `json:"points"`
	Lines  map[int]lines `json:"lines"`
}

type lines struct {
	Got      []sched.Permille `json:"got"`
	Entitled []sched.Permille `json:"entitled"`
	Used     []int64          `json:"used"`
}

func (p *Page) hourOf(v snapshot.View) hour {
	h := hour{Step: step.Seconds(), Points: points, Lines: map[int]lines{}}
	add := func(l history.Line) {
		n := len(l.Points)
		out := lines{make([]sched.Permille, n), make([]sched.Permille, n), make([]int64, n)}
		for i, x := range l.Points {
			out.Got[i], out.Entitled[i], out.Used[i] = x.Got, x.Entitled, x.Used
			if x.Used > 0 {
				out.Used[i] = (x.Used + 1<<20 - 1) >> 20
			}
		}
		h.Lines[l.Number] = out
	}
	for _, g := range v.GPUs {
		add(p.past.Of(g.UUID, ""))
		for _, x := range g.VGPUs {
			add(p.past.Of(g.UUID, x.Nonce))
		}
	}
	return h
}
