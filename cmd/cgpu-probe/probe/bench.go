// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"encoding/json"
	"os"
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// timing is the distribution of one call in µs.
type timing struct {
	MedianUs float64 `json:"medianUs"`
	P99Us    float64 `json:"p99Us"`
	MeanUs   float64 `json:"meanUs"`
}

func timingOf(d []time.Duration) timing {
	slices.Sort(d)
	var sum time.Duration
	for _, v := range d {
		sum += v
	}
	us := func(v time.Duration) float64 { return float64(v.Nanoseconds()) / 1000 }
	return timing{MedianUs: us(d[len(d)/2]), P99Us: us(d[len(d)*99/100]), MeanUs: us(sum / time.Duration(len(d)))}
}

func cmdBench(args []string) error {
	n, err := countArg(arg(args, 0))
	if err != nil {
		return err
	}
	open := time.Now()
	c, err := openGPU(patient)
	if err != nil {
		return err
	}
	opened := time.Since(open)
	defer c.close()
	other, err := busyStrangers()
	if err != nil {
		return err
	}
	var passed, info, alloc, free []time.Duration
	for range n {
		begin := time.Now()
		_ = other()
		t0 := time.Now()
		passed = append(passed, t0.Sub(begin))
		if _, err := c.fb(rm.FBIndexTotalRAMSize, rm.FBIndexHeapFree); err != nil {
			return err
		}
		t1 := time.Now()
		h, _, err := c.memory(2 * quota.MiB)
		if err != nil {
			return err
		}
		t2 := time.Now()
		if err := c.free(h); err != nil {
			return err
		}
		info, alloc, free = append(info, t1.Sub(t0)), append(alloc, t2.Sub(t1)), append(free, time.Since(t2))
	}
	return json.NewEncoder(os.Stdout).Encode(struct {
		Calls  int     `json:"calls"`
		OpenUs float64 `json:"openUs"`
		Passed timing  `json:"passed"`
		FBInfo timing  `json:"fbInfo"`
		Alloc  timing  `json:"alloc2MiB"`
		Free   timing  `json:"free2MiB"`
	}{n, float64(opened.Nanoseconds()) / 1000, timingOf(passed), timingOf(info), timingOf(alloc), timingOf(free)})
}
