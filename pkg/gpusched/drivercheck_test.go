// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// TestTryDriver: what a driver refuses is told, the rest is tried all the same, and pauses name no channel that there is.
func TestTryDriver(t *testing.T) {
	fault := func(cmd uint32, status uint32) func(*fakeGPU) {
		return func(d *fakeGPU) {
			d.fault = func(call *rm.Call) (uint32, syscall.Errno, bool) {
				return status, 0, call.NR() == rm.EscControl && rm.U32(call.Outer, rm.ControlCmd) == cmd
			}
		}
	}
	allocFault := func(class uint32) func(*fakeGPU) {
		return func(d *fakeGPU) {
			d.fault = func(call *rm.Call) (uint32, syscall.Errno, bool) {
				return 0, syscall.EPERM, call.NR() == rm.EscAlloc && rm.U32(call.Outer, rm.AllocClass) == class
			}
		}
	}
	all := []string{TryClient, TryGroup, TryTimeslice, TryPause}
	for _, tt := range []struct {
		name    string
		fault   func(*fakeGPU)
		records bool
		tried   []string
		refused string // name and reason
	}{
		{name: "good", tried: all},
		{name: "no such channel", fault: fault(controlDisableChannels, statusInvalidChannel), tried: all},
		{name: "no client", fault: allocFault(rmclient.ClassClient), tried: []string{TryClient}, refused: "client: make an RM client"},
		{name: "no group", fault: allocFault(classGroup), tried: []string{TryClient, TryGroup, TryPause}, refused: "group: allocate"},
		{name: "no timeslice", fault: fault(controlSetTimeslice, rm.StatusNotSupported), tried: all,
			refused: "timeslice: set a timeslice: NV_ERR_NOT_SUPPORTED"},
		{name: "not read", fault: fault(controlGetTimeslice, rm.StatusNotSupported), tried: all, refused: "timeslice: read a timeslice"},
		{name: "not kept", fault: func(d *fakeGPU) {
			d.at = func(cmd uint32) {
				if cmd == controlGetTimeslice {
					d.mu.Lock()
					clear(d.slices)
					d.mu.Unlock()
				}
			}
		}, tried: all, refused: "timeslice: timeslice of 7ms was set, 0s is read back"},
		{name: "no pause", fault: fault(controlDisableChannels, rm.StatusInsufficientPermissions), tried: all,
			refused: "pause: pause a channel: NV_ERR_INSUFFICIENT_PERMISSIONS"},
		{name: "no records", records: true, fault: fault(0x20801238 /* NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID_V2 */, rm.StatusNotSupported),
			tried: append([]string{TryClient, TrySwitches}, all[1:]...), refused: "switches: bind context-switch records"},
	} {
		cfg := fakeConfig(t.TempDir(), 1)
		cfg.Driver = device.DriverNVIDIA
		cfg.Settings.NoSwitchRecords = !tt.records
		d := newFakeGPU()
		if tt.fault != nil {
			tt.fault(d)
		}
		dropped := 0
		trials, err := TryDriver(cfg, d, func() error { dropped++; return nil })
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		var tried, refused []string
		for _, x := range trials {
			tried = append(tried, x.What)
			if x.Refused != "" {
				refused = append(refused, x.What+": "+x.Refused)
			}
		}
		if strings.Join(tried, " ") != strings.Join(tt.tried, " ") || !strings.HasPrefix(strings.Join(refused, ", "), tt.refused) ||
			(tt.refused == "") != (len(refused) == 0) {
			t.Errorf("%s: tried %v, want %v; refused %q, want %q", tt.name, tried, tt.tried, refused, tt.refused)
		}
		if want := len(tt.tried) > 1; (dropped == 1) != want {
			t.Errorf("%s: privileges dropped %d times", tt.name, dropped)
		}
		for _, l := range d.take() {
			if !l.off || len(l.channels) != 1 || l.channels[0].handle < rmclient.FirstHandle {
				t.Errorf("%s: %+v", tt.name, l)
			}
		}
	}
	cfg := fakeConfig(t.TempDir(), 1)
	cfg.Driver = device.DriverNVIDIA
	cfg.Settings.NoSwitchRecords = true
	if _, err := TryDriver(cfg, newFakeGPU(), func() error { return errors.New("kept") }); err == nil {
		t.Error("calls were made with privileges that a guard has not")
	}
	cfg.DriverVersion = "600.1"
	if _, err := TryDriver(cfg, newFakeGPU(), nil); err == nil {
		t.Error("an unknown driver")
	}
}
