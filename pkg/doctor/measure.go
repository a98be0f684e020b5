// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// Figure is a number that was measured.
type Figure struct {
	GPU   int     `json:"gpu"` // index
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit"` // % or ms
	// Least and Most bound what is wanted; without one there is no such bound.
	Least float64 `json:"least,omitempty"`
	Most  float64 `json:"most,omitempty"`

	text string // for people, with a verb for the value
}

func (f Figure) good() bool { return f.Value >= f.Least && (f.Most == 0 || f.Value <= f.Most) }

func (f Figure) String() string {
	want := fmt.Sprintf("at least %g", f.Least)
	switch {
	case f.Least > 0 && f.Most > 0:
		want = fmt.Sprintf("%g to %g", f.Least, f.Most)
	case f.Most > 0:
		want = fmt.Sprintf("at most %g", f.Most)
	}
	return fmt.Sprintf("%s %.3g %s (want %s)", f.text, f.Value, f.Unit, want)
}

// GPUUser is a container with a slice of a GPU.
type GPUUser struct {
	Name    string // for people
	Record  ledger.Record
	Compute *api.ComputeStatus // nil: nobody tells, or it has the whole GPU
	Used    quota.Bytes        // of the GPU's memory
}

// works says whether it may compute while somebody measures: who has a context may any moment, and who does not tell.
func (u GPUUser) works() bool {
	return u.Compute == nil || u.Compute.TSGs > 0 || u.Compute.Utilization > 0
}

// since names who has computed since others were asked the same, or may have and is gone.
func since(before, after []GPUUser) (names []string) {
	for _, u := range after {
		i := indexUser(before, u)
		switch {
		case u.Compute == nil:
		case i < 0 || before[i].Compute == nil:
			if u.Compute.GPUTime == 0 {
				continue
			}
		case u.Compute.GPUTime == before[i].Compute.GPUTime:
			continue
		}
		names = append(names, u.Name)
	}
	for _, u := range before {
		if indexUser(after, u) < 0 {
			names = append(names, u.Name)
		}
	}
	return names
}

func indexUser(list []GPUUser, u GPUUser) int {
	return slices.IndexFunc(list, func(o GPUUser) bool { return o.Record.Nonce == u.Record.Nonce })
}

// What is measured, as the checks are named.
const (
	partWeights = "measure-weights"
	partWaiting = "measure-waiting"
	partPause   = "measure-pause"
	partSwitch  = "measure-switch"
)

// measured is what came out on a GPU: figures of a part, or why there are none.
type measured struct {
	gpu     device.GPU
	figures map[string][]Figure
	why     map[string]string // empty key: of all parts
	left    string            // what could not be taken away again
}

// Measurements are run after the checks when asked for: they start containers that load the GPUs.
func Measurements() []Check {
	part := func(name, means, remedy string) Check {
		return Check{Name: name, Means: means + " Only with --measure.", Remedy: remedy, Run: func(h *Host) Result { return h.measure(name) }}
	}
	return []Check{
		part(partWeights,
			"Of two containers that always have work, one with weight 3 gets three times as much of each GPU's time as one with weight 1.",
			"use percentages (cgpu set CONTAINER --percent) where pauses work, and see docs/limits.md"),
		part(partWaiting, "A program that waits for each of its kernels (1 ms) gets its part beside one of the same weight that never waits.",
			"look at `guards` and `scheduling` above: without an arbiter, or records of switches, such programs get less"),
		part(partPause,
			"After `cgpu pause` nothing of a container runs any more, and after `cgpu resume` it does again. Hard caps are made of pauses.",
			"do not rely on percentages, cgpu pause and priorities here; memory limits hold without"),
		part(partSwitch, "What a switch between two containers costs, and what part of the GPU's time that is.",
			"lower max_loss in cgpu.toml, or put fewer containers that wait for short kernels beside others"),
	}
}

// measure measures once, for all parts.
func (h *Host) measure(part string) Result {
	r, stop := h.cannotMeasure()
	if stop {
		if part != partWeights {
			return Result{}
		}
		return r
	}
	if h.measured == nil {
		h.measured = h.measureAll()
	}
	return judgeMeasured(h.measured, part)
}

// judgeMeasured says what a part gave on all GPUs. The status is the worst of one.
func judgeMeasured(list []measured, part string) Result {
	var found []string
	res := Result{Status: Skip}
	for _, m := range list {
		text, status := m.judge(part)
		found = append(found, fmt.Sprintf("GPU %d: %s", m.gpu.Index, text))
		if rank := []Status{Skip, OK, Warn, Fail}; slices.Index(rank, status) > slices.Index(rank, res.Status) {
			res.Status = status
		}
		res.Figures = append(res.Figures, m.figures[part]...)
	}
	res.Found = line("%s", strings.Join(found, "; "))
	if res.Status == Fail {
		res.Remedy = "cgpu gc"
	}
	return res
}

func (m measured) judge(part string) (string, Status) {
	if part == partWeights && m.left != "" {
		return m.left, Fail
	}
	figures := m.figures[part]
	if len(figures) == 0 {
		if why := m.why[part]; why != "" {
			return "unknown: " + why, Skip
		}
		return "unknown: " + m.why[""], Skip
	}
	if part == partWeights && figures[0].Value > 45 && figures[0].Value < 55 {
		instead := "memory limits only"
		if m.good(partPause) {
			instead = "caps by pauses (percentages), and memory limits"
		}
		return fmt.Sprintf("%v: 1 : 3 comes out as 1 : 1, so SET_TIMESLICE has no effect here; what works: %s", figures[0], instead), Warn
	}
	var texts []string
	for _, f := range figures {
		texts = append(texts, f.String())
	}
	if m.good(part) {
		return strings.Join(texts, ", "), OK
	}
	return strings.Join(texts, ", "), Warn
}

// good says that a part was measured and is as it should be.
func (m measured) good(part string) bool {
	figures := m.figures[part]
	return len(figures) > 0 && !slices.ContainsFunc(figures, func(f Figure) bool { return !f.good() })
}

// cannotMeasure says why nothing is measured on this node.
func (h *Host) cannotMeasure() (Result, bool) {
	switch {
	case h.UID != 0:
		return fail("needs root").but("sudo cgpu doctor --measure"), true
	case h.settings().Unguarded() != "":
		return skip("%s: GPU time is not shared out", h.settings().Unguarded()), true
	case !regular(h.loadProgram()[0]):
		return fail("%s is not there, which computes in the containers", h.loadProgram()[0]).
			but("make install, or make build, puts it there"), true
	case h.loose(h.loadProgram()[0]):
		return fail("others than root may write or replace %s, which would run here", h.loadProgram()[0]).
			but("chown root and chmod go-w it and its folders"), true
	}
	if k := h.kubernetes(); k.allocates() && !h.Force {
		return skip("Kubernetes allocates GPUs of this node, and does not know of what would run: a pod that starts meanwhile may find no " +
			"room; " +
			"drain the node, and use --force"), true
	}
	if _, err := h.node(); err != nil {
		return skip("there is no table of GPUs to rely on, cgpu refresh makes one: %v", err), true
	}
	return Result{}, false
}
