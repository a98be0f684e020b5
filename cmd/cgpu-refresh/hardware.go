//go:build cgo

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/opencgpu/cgpu/pkg/device"
)

// nvmlHardware answers from NVML until in ends. As long as it runs the driver is in use.
func nvmlHardware(driverRoot string, in io.Reader, out io.Writer) error {
	lib, _, shutdown, err := openNVML(driverRoot)
	if err != nil {
		return err
	}
	defer shutdown()
	xids := &xidCounter{}
	if err := xids.begin(lib); err == nil {
		go xids.follow()
	}
	return answerNVML(lib, xids, in, out)
}

func answerNVML(lib nvml.Interface, xids *xidCounter, in io.Reader, out io.Writer) error {
	return answerLines(in, out, func(line string) (map[string]device.Hardware, error) {
		if line == device.HealthLine {
			return health(lib, xids)
		}
		return hardware(lib, xids), nil
	})
}

// health asks for what pkg/health goes by. A GPU that is lost has no handle any more, or one that says so.
func health(lib nvml.Interface, xids *xidCounter) (map[string]device.Hardware, error) {
	all, err := xids.take()
	if err != nil {
		return nil, err
	}
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
		h := all[lowerUUID(uuid)]
		_, ret = d.GetTemperature(nvml.TEMPERATURE_GPU) // names and numbers NVML keeps: this asks the GPU
		h.Lost = ret == nvml.ERROR_GPU_IS_LOST
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

// hardware asks for each GPU. One that is lost has nothing to say, but for its Xids.
func hardware(lib nvml.Interface, xids *xidCounter) map[string]device.Hardware {
	count, _ := lib.DeviceGetCount()
	all := xids.counts()
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
	return all
}

// xidCounter counts critical Xids of the GPUs that tell of them.
type xidCounter struct {
	set nvml.EventSet

	mu  sync.Mutex
	n   map[string]uint64   // by UUID; a GPU that tells of none is not in it
	new map[string][]uint64 // that were not taken
}

// maxNew bounds the Xids of a GPU that wait to be taken. Who does not ask for them takes none.
const maxNew = 64

// begin asks for the events of all GPUs.
func (x *xidCounter) begin(lib nvml.Interface) error {
	set, ret := lib.EventSetCreate()
	if ret != nvml.SUCCESS {
		return ret
	}
	x.set, x.n, x.new = set, map[string]uint64{}, map[string][]uint64{}
	count, _ := lib.DeviceGetCount()
	for i := range count {
		d, ret := lib.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS {
			continue
		}
		if uuid, ret := d.GetUUID(); ret == nvml.SUCCESS && d.RegisterEvents(nvml.EventTypeXidCriticalError, set) == nvml.SUCCESS {
			x.n[lowerUUID(uuid)] = 0
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
			if uuid, ret := e.Device.GetUUID(); ret == nvml.SUCCESS {
				x.count(lowerUUID(uuid), e.EventData)
			}
		case nvml.ERROR_TIMEOUT:
		default: // such as a GPU that is lost; what is not counted must not look like nothing
			x.mu.Lock()
			x.n = nil
			x.mu.Unlock()
			return
		}
	}
}

func (x *xidCounter) count(uuid string, xid uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.n[uuid]++
	if list := x.new[uuid]; len(list) < maxNew && !slices.Contains(list, xid) {
		x.new[uuid] = append(list, xid)
	}
}

// take returns the Xids since it was called last, by UUID. When nobody counts any more it is an error, once they are taken: whoever watches
// starts another process then.
func (x *xidCounter) take() (map[string]device.Hardware, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.n == nil && len(x.new) == 0 {
		return nil, errors.New("NVML tells of no Xids any more")
	}
	all := map[string]device.Hardware{}
	for uuid, list := range x.new {
		all[uuid] = device.Hardware{NewXids: list}
	}
	clear(x.new)
	return all, nil
}

func (x *xidCounter) counts() map[string]device.Hardware {
	x.mu.Lock()
	defer x.mu.Unlock()
	all := map[string]device.Hardware{}
	for uuid, n := range x.n {
		all[uuid] = device.Hardware{Xids: new(n)}
	}
	return all
}
