// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"

	"github.com/opencgpu/cgpu/pkg/device"
)

// TestHardware: each line is answered by what NVML says, and what it does not say is left out.
func TestHardware(t *testing.T) {
	devices := []*mock.Device{}
	events := make(chan nvml.EventData, 8)
	for _, uuid := range []string{"GPU-AA", "GPU-bb"} {
		devices = append(devices, &mock.Device{
			GetUUIDFunc:        func() (string, nvml.Return) { return uuid, nvml.SUCCESS },
			GetTemperatureFunc: func(nvml.TemperatureSensors) (uint32, nvml.Return) { return 41, nvml.SUCCESS },
			GetPowerUsageFunc:  func() (uint32, nvml.Return) { return 70500, nvml.SUCCESS },
			GetTotalEccErrorsFunc: func(kind nvml.MemoryErrorType, _ nvml.EccCounterType) (uint64, nvml.Return) {
				return 3 + uint64(kind), nvml.SUCCESS
			},
			RegisterEventsFunc: func(uint64, nvml.EventSet) nvml.Return { return nvml.SUCCESS },
		})
	}
	none := func() (uint32, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED }
	devices[1].GetPowerUsageFunc = none
	devices[1].GetTotalEccErrorsFunc = func(nvml.MemoryErrorType, nvml.EccCounterType) (uint64, nvml.Return) {
		return 0, nvml.ERROR_NOT_SUPPORTED
	}
	devices[1].RegisterEventsFunc = func(uint64, nvml.EventSet) nvml.Return { return nvml.ERROR_NOT_SUPPORTED }
	set := &mock.EventSet{WaitFunc: func(uint32) (nvml.EventData, nvml.Return) {
		if e, ok := <-events; ok {
			return e, nvml.SUCCESS
		}
		return nvml.EventData{}, nvml.ERROR_GPU_IS_LOST
	}}
	lib := &mock.Interface{
		DeviceGetCountFunc: func() (int, nvml.Return) { return 3, nvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(i int) (nvml.Device, nvml.Return) { // the third is lost
			if i == 2 {
				return nil, nvml.ERROR_GPU_IS_LOST
			}
			return devices[i], nvml.SUCCESS
		},
		EventSetCreateFunc: func() (nvml.EventSet, nvml.Return) { return set, nvml.SUCCESS },
	}
	var out bytes.Buffer
	xids := &xidCounter{out: &lines{to: &out}}
	if err := xids.begin(lib); err != nil {
		t.Fatal(err)
	}
	told := func() string {
		xids.out.mu.Lock()
		defer xids.out.mu.Unlock()
		defer out.Reset()
		return out.String()
	}
	ended := make(chan bool)
	go func() { xids.follow(); close(ended) }()
	devices[0].GetUUIDFunc = func() (string, nvml.Return) { return "", nvml.ERROR_GPU_IS_LOST } // from now on
	events <- nvml.EventData{Device: devices[0], EventData: 79}
	events <- nvml.EventData{Device: devices[0], EventData: 31}
	const want = `{"GPU-aa":{"newXids":[79]}}` + "\n" + `{"GPU-aa":{"newXids":[31]}}` + "\n"
	all := ""
	for len(all) < len(want) { // nobody has asked
		all += told()
		runtime.Gosched()
	}
	if all != want {
		t.Errorf("told %q, want %q", all, want)
	}
	devices[0].GetUUIDFunc = func() (string, nvml.Return) { return "GPU-AA", nvml.SUCCESS }
	ask := func() map[string]device.Hardware {
		if err := answerNVML(lib, xids, func() {}, strings.NewReader("\n")); err != nil {
			t.Fatal(err)
		}
		var all map[string]device.Hardware
		if text := told(); json.Unmarshal([]byte(text), &all) != nil || strings.Count(text, "\n") != 1 {
			t.Fatal(text)
		}
		return all
	}
	got := ask()
	a, b := got["GPU-aa"], got["GPU-bb"]
	if len(got) != 2 || *a.Temperature != 41 || *a.Power != 70.5 || *a.Corrected != 3 || *a.Uncorrected != 4 || *a.Xids != 2 ||
		*b.Temperature != 41 || b.Power != nil || b.Corrected != nil || b.Uncorrected != nil || b.Xids != nil {
		t.Errorf("%+v %+v", a, b)
	}
	close(events)
	<-ended
	if err := answerNVML(lib, xids, func() {}, strings.NewReader("\n")); err == nil {
		t.Error("nobody counts any more, and there is an answer")
	}
	xids = &xidCounter{out: xids.out} // of a driver that tells of none
	if got := ask()["GPU-aa"]; got.Xids != nil || got.Temperature == nil {
		t.Errorf("nobody ever counted: %+v", got)
	}
}

// TestMemoryAnswers: what is used of the GPUs that are named; others are not woken.
func TestMemoryAnswers(t *testing.T) {
	var woken []int
	lib := &mock.Interface{
		DeviceGetCountFunc: func() (int, nvml.Return) { return 4, nvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(i int) (nvml.Device, nvml.Return) {
			woken = append(woken, i)
			return &mock.Device{
				GetUUIDFunc: func() (string, nvml.Return) { return fmt.Sprintf("GPU-A%d", i), nvml.SUCCESS },
				GetMemoryInfo_v2Func: func() (nvml.Memory_v2, nvml.Return) {
					if i == 3 { // a driver before 510
						return nvml.Memory_v2{}, nvml.ERROR_FUNCTION_NOT_FOUND
					}
					return nvml.Memory_v2{Used: uint64(100 + i), Reserved: 7}, nvml.SUCCESS
				},
			}, nvml.SUCCESS
		},
	}
	var out bytes.Buffer
	begin := func() { t.Error("Xids are counted, which wakes all") }
	xids := &xidCounter{out: &lines{to: &out}}
	if err := answerNVML(lib, xids, begin, strings.NewReader(device.MemoryLine+" 0 2 3\n")); err != nil {
		t.Fatal(err)
	}
	if want := `{"GPU-a0":{"used":100},"GPU-a2":{"used":102}}` + "\n"; out.String() != want || !slices.Equal(woken, []int{0, 2, 3}) {
		t.Errorf("%s want %s, woken %v", out.String(), want, woken)
	}
}

// TestHealthAnswers: what pkg/health goes by. A GPU that is lost says so, or is absent; once nobody counts Xids any more there is
// no answer.
func TestHealthAnswers(t *testing.T) {
	uuids := []string{"GPU-AA", "GPU-bb", "GPU-cc"}
	var devices []*mock.Device
	for i, uuid := range uuids {
		temperature, action := nvml.SUCCESS, uint32(0)
		if i == 1 {
			temperature, action = nvml.ERROR_GPU_IS_LOST, uint32(nvml.GPU_RECOVERY_ACTION_NODE_REBOOT)
		}
		devices = append(devices, &mock.Device{
			GetUUIDFunc:         func() (string, nvml.Return) { return uuid, nvml.SUCCESS },
			GetTemperatureFunc:  func(nvml.TemperatureSensors) (uint32, nvml.Return) { return 41, temperature },
			GetRemappedRowsFunc: func() (int, int, bool, bool, nvml.Return) { return 0, 1, true, i == 0, nvml.SUCCESS },
			GetFieldValuesFunc: func(v []nvml.FieldValue) nvml.Return {
				binary.NativeEndian.PutUint32(v[0].Value[:], action)
				return nvml.SUCCESS
			},
			RegisterEventsFunc: func(uint64, nvml.EventSet) nvml.Return { return nvml.SUCCESS },
		})
	}
	lib := &mock.Interface{
		DeviceGetCountFunc: func() (int, nvml.Return) { return len(devices), nvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(i int) (nvml.Device, nvml.Return) {
			if i == 2 {
				return nil, nvml.ERROR_GPU_IS_LOST
			}
			return devices[i], nvml.SUCCESS
		},
		EventSetCreateFunc: func() (nvml.EventSet, nvml.Return) {
			return &mock.EventSet{WaitFunc: func(uint32) (nvml.EventData, nvml.Return) { return nvml.EventData{}, nvml.ERROR_GPU_IS_LOST }},
				nvml.SUCCESS
		},
	}
	var out bytes.Buffer
	xids := &xidCounter{out: &lines{to: &out}}
	if err := xids.begin(lib); err != nil {
		t.Fatal(err)
	}
	ask := func() (all map[string]device.Hardware, err error) {
		out.Reset()
		if err := answerNVML(lib, xids, func() {}, strings.NewReader(device.HealthLine+"\n")); err != nil {
			return nil, err
		}
		return all, json.Unmarshal(out.Bytes(), &all)
	}
	got, err := ask()
	want := map[string]device.Hardware{"GPU-aa": {RemapFailed: true}, "GPU-bb": {Lost: true, Recovery: "boot the node"}}
	if !reflect.DeepEqual(got, want) || err != nil {
		t.Errorf("%v: %+v, want %+v", err, got, want)
	}
	xids.follow()
	if _, err = ask(); err == nil {
		t.Error("nobody counts, and there is an answer")
	}
}
