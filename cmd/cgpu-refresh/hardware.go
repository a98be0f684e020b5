//go:build cgo

package main

import (
	"bufio"
	"encoding/json"
	"io"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/opencgpu/cgpu/pkg/device"
)

// serveHardware writes, for each line that comes in, a line of JSON: what NVML says of each GPU, by UUID. It is for `cgpu exporter`, which is
// static, and ends with in. As long as it runs the driver is in use.
func serveHardware(in io.Reader, out io.Writer) error {
	lib, shutdown, err := openNVML()
	if err != nil {
		return err
	}
	defer shutdown()
	xids := &xidCounter{}
	if err := xids.begin(lib); err == nil {
		go xids.follow()
	}
	return answerHardware(lib, xids, in, out)
}

func answerHardware(lib nvml.Interface, xids *xidCounter, in io.Reader, out io.Writer) error {
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		b, err := json.Marshal(hardware(lib, xids))
		if err != nil {
			return err
		}
		if _, err := out.Write(append(b, '\n')); err != nil {
			return err
		}
	}
	return lines.Err()
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

	mu sync.Mutex
	n  map[string]uint64 // by UUID; a GPU that tells of none is not in it
}

// begin asks for the events of all GPUs.
func (x *xidCounter) begin(lib nvml.Interface) error {
	set, ret := lib.EventSetCreate()
	if ret != nvml.SUCCESS {
		return ret
	}
	x.set, x.n = set, map[string]uint64{}
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
				x.mu.Lock()
				x.n[lowerUUID(uuid)]++
				x.mu.Unlock()
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

func (x *xidCounter) counts() map[string]device.Hardware {
	x.mu.Lock()
	defer x.mu.Unlock()
	all := map[string]device.Hardware{}
	for uuid, n := range x.n {
		all[uuid] = device.Hardware{Xids: new(n)}
	}
	return all
}
