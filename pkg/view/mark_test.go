// SPDX-License-Identifier: Apache-2.0

package view

import (
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/snapshot"
)

// TestMark: whoever limits a container beside its guard, or in its place, is told once below the table.
func TestMark(t *testing.T) {
	var all []snapshot.VGPU
	for _, tt := range []struct {
		x    snapshot.VGPU
		mark string
		note string
	}{
		{snapshot.VGPU{Enforcement: device.EnforceGuard}, "", ""},
		{snapshot.VGPU{Enforcement: device.EnforceGuard, DriverLimits: true}, "+", "+ memory is limited by the guard and NVIDIA's driver"},
		{snapshot.VGPU{Enforcement: device.EnforcePreload}, "*", "* enforced by the preload library only;"},
		{snapshot.VGPU{Enforcement: device.EnforcePreload, DriverLimits: true}, "*+", "*+ enforced by the preload library and NVIDIA's driver;"},
		{snapshot.VGPU{Enforcement: device.EnforceDriver, DriverLimits: true}, "^", "^ memory is limited by NVIDIA's driver only,"},
		{snapshot.VGPU{Enforcement: device.EnforceDriver, DriverLimits: true, Native: true}, "", ""},
	} {
		all = append(all, tt.x, tt.x)
		e := extrasOf(snapshot.View{GPUs: []snapshot.GPU{{VGPUs: []snapshot.VGPU{tt.x}}}}, false)
		if got := Mark(tt.x); got != tt.mark || !strings.HasPrefix(e.notes(), tt.note) || strings.Trim(got, Marks) != "" {
			t.Errorf("%+v: mark %q, note %q", tt.x, got, e.notes())
		}
	}
	if lines := strings.Count(extrasOf(snapshot.View{GPUs: []snapshot.GPU{{VGPUs: all}}}, false).notes(), "\n"); lines != len(notes) {
		t.Errorf("%d lines of notes, want %d", lines, len(notes))
	}
	alone := snapshot.VGPU{Enforcement: device.EnforceDriver, State: snapshot.StateRunning}
	if _, _, _, state, known := usageCells(alone); known || state != "running^" {
		t.Errorf("what nobody counts is shown: %v %s", known, state)
	}
}
