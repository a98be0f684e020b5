// SPDX-License-Identifier: Apache-2.0

package view

import (
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/health"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/node"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

// GPUHealth is a GPU as cgpu health prints it.
type GPUHealth struct {
	Index      int            `json:"index"`
	UUID       string         `json:"uuid"`
	Name       string         `json:"name"`
	Healthy    bool           `json:"healthy"`
	Faults     []health.Fault `json:"faults"`
	Containers []string       `json:"containers"` // IDs of those that have it
}

// Health is what cgpu health -o json prints.
type Health struct {
	Watched bool        `json:"watched"` // by cgpu health watch
	GPUs    []GPUHealth `json:"gpus"`
}

func HealthOf(runDir string) (v Health, err error) {
	t, err := node.Load(runDir)
	if err != nil {
		return v, err
	}
	state, err := health.Read(runDir)
	if err != nil {
		return v, err
	}
	records, err := ledger.Open(runDir).List()
	if err != nil {
		return v, err
	}
	v.Watched = health.Watched(runDir)
	for _, g := range t.GPUs {
		h := GPUHealth{Index: g.Index, UUID: g.UUID, Name: g.Name, Healthy: len(state.GPUs[g.UUID]) == 0, Faults: []health.Fault{},
			Containers: []string{}}
		h.Faults = append(h.Faults, state.GPUs[g.UUID]...)
		for _, r := range health.Holders(records, g.UUID) {
			h.Containers = append(h.Containers, r.ID)
		}
		v.GPUs = append(v.GPUs, h)
	}
	return v, nil
}

func PrintHealth(w io.Writer, v Health, now time.Time) error {
	t := newTable(w)
	t.row("GPU", "NAME", "UUID", "CONTAINERS", "HEALTH", "FOR", "WHY")
	for _, g := range v.GPUs {
		first := []any{g.Index, short(g.Name), ShortUUID(g.UUID), len(g.Containers)}
		if g.Healthy {
			t.row(append(first, healthWord(""), "-", "-")...)
		}
		for _, f := range g.Faults {
			t.row(append(slices.Clone(first), healthWord(f.Text), now.Sub(f.Since).Round(time.Second), terminal.Printable(f.Text))...)
		}
	}
	if err := t.Flush(); err != nil || v.Watched {
		return err
	}
	_, err := fmt.Fprintln(w, "\nNobody watches these GPUs: systemctl enable --now cgpu-health, or cgpu health watch.")
	return err
}
