// SPDX-License-Identifier: Apache-2.0

package arbiter

import (
	"fmt"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// A context that is alone on the GPU stays switched in when its work is done, and no record tells. For such times the driver's
// own samples say how much of the time the GPU computed, and for whom: one each 200 ms, the last 14 seconds of them
// (NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2). Asking takes 1.5 ms (H200), so it is done seldom.
const (
	controlGPUMon   = 0x20802096
	gpuMonSamples   = 72
	gpuMonGR        = 1 // among the engines of a sample
	gpuMonBufSize   = 4
	gpuMonToUtil    = 8     // from an engine's pid back to its utilisation
	gpuMonUtilWhole = 10000 // hundredths of a percent
)

// Load sums how long a GPU, the gpu-th of a client, computed for a process between two times of its clock.
func Load(own *rmclient.Client, abi *rm.ABI, gpu, pid int, from, to time.Duration) (time.Duration, error) {
	form := abi.GPUMon()
	if form.Entry <= 0 || len(form.Pids) <= gpuMonGR {
		return 0, fmt.Errorf("the GPU's load: its form is not known of this driver")
	}
	p := make([]byte, rm.GPUMonSamples+gpuMonSamples*form.Entry)
	rm.PutU32(p, gpuMonBufSize, uint32(gpuMonSamples*form.Entry))
	if s, e := own.Control(own.Subdevice(gpu), controlGPUMon, p); e != 0 || s != rm.StatusOK {
		return 0, fmt.Errorf("the driver does not tell the GPU's load: %s, errno %d", rm.StatusName(s), e)
	}
	sum, known := time.Duration(0), time.Duration(0)
	for off := rm.GPUMonSamples; off+form.Entry <= len(p); off += form.Entry {
		at := time.Duration(rm.U64(p, off))
		of := off + form.Pids[gpuMonGR]
		if at-sched.SamplePeriod < from || at > to {
			continue
		}
		known += sched.SamplePeriod
		if int(rm.U32(p, of)) == pid {
			sum += sched.SamplePeriod * time.Duration(rm.U32(p, of-gpuMonToUtil)) / gpuMonUtilWhole
		}
	}
	if known == 0 {
		return 0, nil
	}
	// The edges, up to a sample at each, are as the rest.
	return min(time.Duration(float64(sum)*float64(to-from)/float64(known)), to-from), nil
}
