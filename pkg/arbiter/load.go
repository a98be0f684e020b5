// SPDX-License-Identifier: Apache-2.0

package arbiter

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// How long the GPU computed, no context-switch record tells: a context stays switched in when its work is done. The driver's own samples
// do: one each 200 ms, the last 14 seconds of them (NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2). Asking takes 1.5 ms (H200),
// so it is done seldom. The process that a sample names is nobody's when it has ended since.
const (
	controlGPUMon   = 0x20802096
	gpuMonSamples   = 72
	gpuMonGR        = 1 // among the engines of a sample
	gpuMonBufSize   = 4
	gpuMonToUtil    = 8     // from an engine's pid back to its utilisation
	gpuMonUtilWhole = 10000 // hundredths of a percent
)

// Samples are of the load of a GPU, the gpu-th of a client, the oldest first.
func Samples(own *rmclient.Client, abi *rm.ABI, gpu int) ([]sched.Sample, error) {
	form := abi.GPUMon()
	if form.Entry <= 0 || len(form.Pids) <= gpuMonGR {
		return nil, fmt.Errorf("the GPU's load: its form is not known of this driver")
	}
	p := make([]byte, rm.GPUMonSamples+gpuMonSamples*form.Entry)
	rm.PutU32(p, gpuMonBufSize, uint32(gpuMonSamples*form.Entry))
	if s, e := own.Control(own.Subdevice(gpu), controlGPUMon, p); e != 0 || s != rm.StatusOK {
		return nil, fmt.Errorf("the driver does not tell the GPU's load: %s, errno %d", rm.StatusName(s), e)
	}
	var list []sched.Sample
	for off := rm.GPUMonSamples; off+form.Entry <= len(p); off += form.Entry {
		if at := time.Duration(rm.U64(p, off)); at > 0 {
			list = append(list, sched.Sample{At: at, Load: float64(rm.U32(p, off+form.Pids[gpuMonGR]-gpuMonToUtil)) / gpuMonUtilWhole})
		}
	}
	slices.SortFunc(list, func(x, y sched.Sample) int { return cmp.Compare(x.At, y.At) })
	return list, nil
}

// meanLoad is the GPU's load between two times of its clock; without a sample there, 0.
func meanLoad(samples []sched.Sample, from, to time.Duration) float64 {
	sum, n := 0.0, 0
	for _, s := range samples {
		if s.At-sched.SamplePeriod >= from && s.At <= to {
			sum, n = sum+s.Load, n+1
		}
	}
	return sum / float64(max(1, n))
}
