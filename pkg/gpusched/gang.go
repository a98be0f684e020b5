// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"hash/fnv"
	"path/filepath"
	"slices"
	"time"

	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// gang is the same number for all containers that share the same GPUs; 0: less than two.
func gang(gpus []guardcfg.GPU) uint64 {
	var uuids []string
	for _, g := range gpus {
		if !g.Native {
			uuids = append(uuids, filepath.Base(g.UUID))
		}
	}
	if len(uuids) < 2 {
		return 0
	}
	slices.Sort(uuids)
	h := fnv.New64a()
	for _, uuid := range uuids {
		_, _ = h.Write([]byte(uuid + "\n"))
	}
	return max(h.Sum64()>>1, 1)
}

// agree has slots that are for all of the container's GPUs kept, if its rows are the same, and tells the arbiters.
func (s *Scheduler) agree(now time.Duration) {
	if len(s.gpus) < 2 {
		return
	}
	var parts []*sched.Local
	for _, x := range s.gpus {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.receiveRow()
		parts = append(parts, x.local)
	}
	agreed := sched.Agree(parts, now)
	for _, x := range s.gpus {
		if x.page != nil {
			x.page.TellGang(s.gang, agreed)
		}
	}
}
