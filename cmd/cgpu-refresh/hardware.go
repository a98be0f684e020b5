// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/nvmlclient"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// nvmlHardware answers from NVML until in ends. As long as it runs the driver is in use.
func nvmlHardware(driverRoot string, in io.Reader, out io.Writer) error {
	lib, _, shutdown, err := openNVML(driverRoot)
	if err != nil {
		return err
	}
	defer shutdown()
	xids := &xidCounter{out: &lines{to: out}}
	begin := sync.OnceFunc(func() { // it wakes every GPU
		if err := xids.begin(lib); err == nil {
			go xids.follow()
		}
	})
	return answerNVML(lib, xids, begin, in)
}

// answerNVML calls begin before the first answer that has Xids.
func answerNVML(lib nvml.Interface, xids *xidCounter, begin func(), in io.Reader) error {
	return answerLines(in, xids.out, func(line string) (map[string]device.Hardware, error) {
		if strings.HasPrefix(line, device.MemoryLine) {
			return memory(lib, line)
		}
		if asked, ok := strings.CutPrefix(line, device.LimitsLine+" "); ok {
			return limited(lib, lib.Extensions().LookupSymbol, nvmlclient.CgroupRoot, asked)
		}
		begin()
		if line == device.HealthLine {
			return health(lib, xids)
		}
		return hardware(lib, xids)
	})
}

// memory is what the driver has given out, without what it keeps for itself. Drivers before 510 do not tell these apart.
func memory(lib nvml.Interface, line string) (map[string]device.Hardware, error) {
	all := map[string]device.Hardware{}
	count, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	for i := range count {
		if !memoryOf(line, i) {
			continue
		}
		d, ret := lib.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS {
			continue
		}
		uuid, ret := d.GetUUID()
		if ret != nvml.SUCCESS {
			continue
		}
		if m, ret := d.GetMemoryInfo_v2(); ret == nvml.SUCCESS {
			all[lowerUUID(uuid)] = device.Hardware{Used: new(quota.Bytes(m.Used))}
		}
	}
	return all, nil
}

// health asks for what pkg/health goes by. A GPU that is lost has no handle any more, or one that says so. When nobody counts Xids any more
// it is an error: whoever watches starts another process then.
func health(lib nvml.Interface, xids *xidCounter) (map[string]device.Hardware, error) {
	if n, ended := xids.counts(); ended || n == nil {
		return nil, errNoXids
	}
	all := map[string]device.Hardware{}
	count, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	for i := range count {
		d, ret := lib.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS {
			continue
		}
		uuid, ret := d.GetUUID()
		if ret != nvml.SUCCESS {
			continue
		}
		_, ret = d.GetTemperature(nvml.TEMPERATURE_GPU) // names and numbers NVML keeps: this asks the GPU
		h := device.Hardware{Lost: ret == nvml.ERROR_GPU_IS_LOST}
		if _, _, _, failed, ret := d.GetRemappedRows(); ret == nvml.SUCCESS {
			h.RemapFailed = failed
		}
		h.Recovery = recovery(d)
		all[lowerUUID(uuid)] = h
	}
	return all, nil
}

// recovery is what the driver wants to be done, as 570 and newer tell.
func recovery(d nvml.Device) string {
	field := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	if d.GetFieldValues(field) != nvml.SUCCESS || field[0].NvmlReturn != uint32(nvml.SUCCESS) {
		return ""
	}
	switch action := nvml.DeviceGpuRecoveryAction(binary.NativeEndian.Uint32(field[0].Value[:])); action {
	case nvml.GPU_RECOVERY_ACTION_NONE:
		return ""
	case nvml.GPU_RECOVERY_ACTION_GPU_RESET, nvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET, nvml.GPU_RECOVERY_ACTION_BUS_RESET:
		return "reset the GPU"
	case nvml.GPU_RECOVERY_ACTION_NODE_REBOOT, nvml.GPU_RECOVERY_ACTION_SYSTEM_REBOOT:
		return "boot the node"
	default:
		return fmt.Sprintf("recovery action %d", action)
	}
}

// hardware asks for each GPU. One that is lost has nothing to say, but for its Xids. When they are not counted any more it is an error:
// another process will count.
func hardware(lib nvml.Interface, xids *xidCounter) (map[string]device.Hardware, error) {
	all, ended := xids.counts()
	if ended {
		return nil, errNoXids
	}
	if all == nil {
		all = map[string]device.Hardware{}
	}
	count, _ := lib.DeviceGetCount()
	for i := range count {
		d, ret := lib.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS {
			continue
		}
		uuid, ret := d.GetUUID()
		if ret != nvml.SUCCESS {
			continue
		}
		h := all[lowerUUID(uuid)]
		if c, ret := d.GetTemperature(nvml.TEMPERATURE_GPU); ret == nvml.SUCCESS {
			h.Temperature = new(float64(c))
		}
		if mW, ret := d.GetPowerUsage(); ret == nvml.SUCCESS {
			h.Power = new(float64(mW) / 1000)
		}
		if n, ret := d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.VOLATILE_ECC); ret == nvml.SUCCESS {
			h.Corrected = new(n)
		}
		if n, ret := d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC); ret == nvml.SUCCESS {
			h.Uncorrected = new(n)
		}
		all[lowerUUID(uuid)] = h
	}
	return all, nil
}

// xidCounter counts critical Xids of the GPUs that tell of them, and tells of each at once: the next question may hang.
type xidCounter struct {
	out   *lines
	set   nvml.EventSet
	uuids map[nvml.Device]string // a GPU that is lost may not tell its UUID any more

	mu    sync.Mutex
	n     map[string]uint64 // by UUID; a GPU that tells of none is not in it, and nil is none of all
	ended bool              // NVML has no more to say
}

var errNoXids = errors.New("NVML tells of no Xids any more")

// begin asks for the events of all GPUs.
func (x *xidCounter) begin(lib nvml.Interface) error {
	set, ret := lib.EventSetCreate()
	if ret != nvml.SUCCESS {
		return ret
	}
	x.set, x.n, x.uuids = set, map[string]uint64{}, map[nvml.Device]string{}
	count, _ := lib.DeviceGetCount()
	for i := range count {
		d, ret := lib.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS {
			continue
		}
		if uuid, ret := d.GetUUID(); ret == nvml.SUCCESS && d.RegisterEvents(nvml.EventTypeXidCriticalError, set) == nvml.SUCCESS {
			x.uuids[d], x.n[lowerUUID(uuid)] = lowerUUID(uuid), 0
		}
	}
	return nil
}

// follow counts until NVML has no more to say.
func (x *xidCounter) follow() {
	const wait = 60_000 // ms
	for {
		e, ret := x.set.Wait(wait)
		switch ret {
		case nvml.SUCCESS:
			uuid, known := x.uuids[e.Device]
			if !known {
				uuid, _ = e.Device.GetUUID()
			}
			x.count(lowerUUID(uuid), e.EventData)
		case nvml.ERROR_TIMEOUT:
		default: // such as a GPU that is lost; what is not counted must not look like nothing
			x.mu.Lock()
			x.ended = true
			x.mu.Unlock()
			return
		}
	}
}

func (x *xidCounter) count(uuid string, xid uint64) {
	x.mu.Lock()
	x.n[uuid]++
	x.mu.Unlock()
	_ = x.out.write(map[string]device.Hardware{uuid: {NewXids: []uint64{xid}}}) // who asks has ended, and so does this process
}

// counts are those of the GPUs; nil: nobody counts.
func (x *xidCounter) counts() (all map[string]device.Hardware, ended bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.n != nil {
		all = map[string]device.Hardware{}
	}
	for uuid, n := range x.n {
		all[uuid] = device.Hardware{Xids: new(n)}
	}
	return all, x.ended
}
