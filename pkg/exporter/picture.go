// SPDX-License-Identifier: Apache-2.0

package exporter

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/tally"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

// picture is what was seen in one look.
type picture struct {
	version string
	err     error
	view    snapshot.View
	counted tally.Node
	guards  guards

	asked       bool // NVML was
	hardware    map[string]device.Hardware
	hardwareErr error
}

// guards are those that answer.
type guards struct {
	n        int
	resident uint64 // bytes
}

// emit takes one value, with all its labels in the order of their names.
type emit func(s *series, value float64, labels []*dto.LabelPair)

// pairs are the labels of a scope.
func pairs(of scope, values ...string) []*dto.LabelPair {
	return withMore(nil, scopeLabels[of], values)
}

// withMore adds labels to those that series of one scope have in common.
func withMore(common []*dto.LabelPair, names, values []string) []*dto.LabelPair {
	list := append(make([]*dto.LabelPair, 0, len(common)+len(names)), common...)
	for i := range names {
		list = append(list, &dto.LabelPair{Name: &names[i], Value: &values[i]})
	}
	slices.SortFunc(list, func(a, b *dto.LabelPair) int { return strings.Compare(a.GetName(), b.GetName()) })
	return list
}

// info emits a series with labels of its own.
func (e emit) info(s *series, value float64, common []*dto.LabelPair, own ...string) {
	e(s, value, withMore(common, s.labels, own))
}

// tell tells all that is known.
func (p picture) tell(e emit) {
	e.info(buildInfo, 1, nil, text(p.version))
	e(up, truth(p.err == nil), nil)
	if p.err != nil {
		return
	}
	p.tellNode(e)
	named := identify(p.view)
	told := map[string]bool{}
	for _, g := range p.view.GPUs {
		labels := []string{g.UUID, strconv.Itoa(g.Index)}
		p.tellGPU(e, g, pairs(ofGPU, labels...))
		for _, v := range g.VGPUs {
			p.tellVGPU(e, g, v, pairs(ofVGPU, append(labels[:2:2], named[v.Nonce]...)...))
			if !told[v.Nonce] {
				told[v.Nonce] = true
				p.tellContainer(e, v, pairs(ofContainer, named[v.Nonce]...))
			}
		}
	}
}

func (p picture) tellNode(e emit) {
	_, unknown := rm.ForDriver(p.view.DriverVersion, false)
	e.info(nodeInfo, 1, nil, text(p.view.Driver), text(p.view.DriverVersion))
	e(driverKnown, truth(unknown == nil), nil)
	e(tableStale, truth(p.view.Stale != ""), nil)
	e(containers, float64(len(containersOf(p.view))), nil)
	e(guardsUp, float64(p.guards.n), nil)
	e(guardMemory, float64(p.guards.resident), nil)
	sum := p.counted.Sum
	e(guardCPU, seconds(sum.CPU), nil)
	e(nodeCalls, float64(sum.Calls), nil)
	e(nodeKilled, float64(sum.KilledProcesses), nil)
	e(nodeFreed, float64(sum.FreedClients), nil)
	if p.asked {
		e(nvmlUp, truth(p.hardwareErr == nil), nil)
	}
}

func (p picture) tellGPU(e emit, g snapshot.GPU, labels []*dto.LabelPair) {
	free := max(0, g.MaxInst-len(g.VGPUs))
	if slices.ContainsFunc(g.VGPUs, func(v snapshot.VGPU) bool { return v.Native }) {
		free = 0
	}
	e.info(gpuInfo, 1, labels, text(g.Name), g.BusID, g.Policy)
	e(gpuMemory, float64(g.Total), labels)
	e(gpuReserved, float64(g.Reserved), labels)
	e(gpuUsed, float64(g.Used), labels)
	e(gpuSlots, float64(g.MaxInst), labels)
	e(gpuFree, float64(free), labels)
	e(gpuPromised, float64(g.Promised)/float64(sched.Whole), labels)
	if p.view.Watched || g.Fault != "" {
		e(gpuHealthy, truth(g.Fault == ""), labels)
	}
	c := p.counted.Sum.GPUs[g.UUID]
	if c.Exact {
		e(gpuTime, seconds(c.Time), labels)
		e(gpuWaiting, seconds(c.Waiting), labels)
		e(gpuThrottled, seconds(c.Throttled), labels)
		e(gpuEntitled, seconds(c.Entitled), labels)
	}
	e(gpuDenied, float64(c.Denied), labels)
	h := p.hardware[g.UUID]
	if h.Temperature != nil {
		e(gpuTemperature, *h.Temperature, labels)
	}
	if h.Power != nil {
		e(gpuPower, *h.Power, labels)
	}
	if h.Corrected != nil {
		e.info(gpuECC, float64(*h.Corrected), labels, "corrected")
	}
	if h.Uncorrected != nil {
		e.info(gpuECC, float64(*h.Uncorrected), labels, "uncorrected")
	}
	if h.Xids != nil {
		e(gpuXid, float64(*h.Xids), labels)
	}
}

func (p picture) tellVGPU(e emit, g snapshot.GPU, v snapshot.VGPU, labels []*dto.LabelPair) {
	weight, percent := "", ""
	if !v.Native {
		weight = strconv.Itoa(v.Weight)
		e(vgpuLimit, float64(v.Limit), labels)
	}
	if v.Percent != 0 {
		percent = strconv.Itoa(v.Percent)
	}
	paused := v.Paused || v.State == snapshot.StatePaused
	e.info(vgpuInfo, 1, labels, text(v.ID), v.Enforcement, strconv.FormatBool(v.Native), weight, percent, v.Priority.String(),
		strconv.FormatBool(paused), text(v.Domain))
	guarded := v.Enforcement == device.EnforceGuard
	if v.Answered {
		e(vgpuUsed, float64(v.Used), labels)
		if guarded && v.Spill > 0 {
			e(vgpuSpilled, float64(v.Spilled), labels)
		}
	}
	// What was counted is known of a guard that is gone, too.
	if c, ok := p.counted.Containers[v.Nonce].GPUs[g.UUID]; ok {
		if c.Exact {
			e(vgpuTime, seconds(c.Time), labels)
			e(vgpuWaiting, seconds(c.Waiting), labels)
			e(vgpuThrottled, seconds(c.Throttled), labels)
			e(vgpuEntitled, seconds(c.Entitled), labels)
		}
		e(vgpuDenied, float64(c.Denied), labels)
	}
}

func (p picture) tellContainer(e emit, v snapshot.VGPU, labels []*dto.LabelPair) {
	if v.Enforcement == device.EnforceGuard {
		e(containerUp, truth(v.Answered), labels)
	}
	if c, ok := p.counted.Containers[v.Nonce]; ok {
		e(containerCalls, float64(c.Calls), labels)
		e(containerKills, float64(c.KilledProcesses+c.FreedClients), labels)
	}
}

// containersOf are the containers of all GPUs, each once, in the order in which they were made.
func containersOf(view snapshot.View) (list []snapshot.VGPU) {
	seen := map[string]bool{}
	for _, g := range view.GPUs {
		for _, v := range g.VGPUs {
			if !seen[v.Nonce] {
				seen[v.Nonce] = true
				list = append(list, v)
			}
		}
	}
	slices.SortStableFunc(list, func(a, b snapshot.VGPU) int { return a.Created.Compare(b.Created) })
	return list
}

// identify makes each container's labels id, namespace, pod and container, by its nonce. An id is nobody else's: two series with the same
// labels would cost the whole scrape, and tenants choose names, of which two low-level runtimes may know the same.
func identify(view snapshot.View) map[string][]string {
	labels, taken := map[string][]string{}, map[string]bool{}
	for _, v := range containersOf(view) {
		id := shortID(v.ID)
		if taken[id] {
			sum := sha256.Sum256([]byte(v.Nonce))
			id += "/" + hex.EncodeToString(sum[:6]) // no ID has a slash
		}
		taken[id] = true
		labels[v.Nonce] = append([]string{id}, namesOf(v.Name, id)...)
	}
	return labels
}

// namesOf are namespace, pod and container: of a pod's container by the name that the CRI's annotations made (namespace/pod/container),
// else the container alone.
func namesOf(name, id string) []string {
	if parts := strings.Split(name, "/"); len(parts) == 3 {
		return []string{text(parts[0]), text(parts[1]), text(parts[2])}
	}
	if name == "" {
		name = id
	}
	return []string{"", "", text(name)}
}

// shortID is an ID as engines show it: twelve digits of 64.
func shortID(id string) string {
	if len(id) == 64 && strings.Trim(id, "0123456789abcdef") == "" {
		return id[:12]
	}
	return strings.ReplaceAll(text(id), "/", "?")
}

// maxLabel bounds a label's value in bytes; Kubernetes' longest name has as many.
const maxLabel = 253

// text makes a label's value of what a tenant may have chosen: short, valid UTF-8, and nothing that a terminal acts on.
func text(s string) string {
	if len(s) > maxLabel {
		s = s[:maxLabel]
	}
	return terminal.Printable(s) // which makes nothing longer
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func seconds(ns uint64) float64 { return time.Duration(ns).Seconds() }

// residents adds up the memory of the guards that answer.
func residents(root string, view snapshot.View) (g guards) {
	for _, v := range containersOf(view) {
		if v.Enforcement != device.EnforceGuard || !v.Answered {
			continue
		}
		g.n++
		b, err := os.ReadFile(filepath.Join(root, "proc", strconv.Itoa(v.GuardPID), "statm"))
		if err != nil {
			continue
		}
		if fields := strings.Fields(string(b)); len(fields) > 1 {
			pages, _ := strconv.ParseUint(fields[1], 10, 40)
			g.resident += pages * uint64(os.Getpagesize())
		}
	}
	return g
}
