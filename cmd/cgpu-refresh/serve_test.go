// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/sim"
)

// TestSimHardware: what is made to happen to simulated GPUs is told, an Xid once.
func TestSimHardware(t *testing.T) {
	const uuid = "GPU-00000000-0000-0000-0000-000000000001"
	d, err := sim.New(sim.Config{DriverVersion: "580.159.04",
		GPUs: []sim.GPU{{UUID: uuid, BusID: "0000:01:00.0", Name: "Tesla T4", Memory: quota.GiB}}})
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(t.TempDir(), "sim.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error)
	go func() { served <- d.Serve(ctx, l) }()
	in, asks := io.Pipe()
	answers, out := io.Pipe()
	ended := make(chan error)
	go func() { ended <- simHardware(socket, in, out) }()
	told := bufio.NewScanner(answers)
	line := func() device.Hardware {
		t.Helper()
		var all map[string]device.Hardware
		if !told.Scan() || json.Unmarshal(told.Bytes(), &all) != nil {
			t.Fatalf("%v: %s", told.Err(), told.Bytes())
		}
		return all[uuid]
	}
	look := func(lost bool, xids ...uint64) {
		t.Helper()
		if _, err := io.WriteString(asks, device.HealthLine+"\n"); err != nil {
			t.Fatal(err)
		}
		if len(xids) > 0 {
			if h := line(); !slices.Equal(h.NewXids, xids) || h.Xids != nil {
				t.Errorf("%+v: want Xids %v by themselves", h, xids)
			}
		}
		if h := line(); h.Lost != lost || len(h.NewXids) > 0 {
			t.Errorf("%+v, want lost %v", h, lost)
		}
	}
	trouble := func(x sim.Trouble) {
		t.Helper()
		if err := d.Trouble(x); err != nil {
			t.Fatal(err)
		}
	}
	look(false)
	trouble(sim.Trouble{Xids: []uint64{79, 48}, Lost: new(true)})
	look(true, 79, 48)
	look(true)
	trouble(sim.Trouble{Xids: []uint64{79}, Lost: new(false)})
	look(false, 79)
	for asked, want := range map[string]bool{device.MemoryLine + " 0": true, device.MemoryLine + " 1": false, device.HealthLine: false} {
		if _, err := io.WriteString(asks, asked+"\n"); err != nil {
			t.Fatal(err)
		}
		if h := line(); (h.Used != nil) != want {
			t.Errorf("%q: %+v", asked, h)
		}
	}
	asks.Close()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
