// SPDX-License-Identifier: Apache-2.0

package gpusched

import (
	"hash/fnv"
	"path/filepath"
	"slices"

	"github.com/opencgpu/cgpu/pkg/guard/guardcfg"
)

// gang is the same number for all containers that have the same GPUs; 0: only one.
func gang(gpus []guardcfg.GPU) uint64 {
	if len(gpus) < 2 {
		return 0
	}
	var uuids []string
	for _, g := range gpus {
		uuids = append(uuids, filepath.Base(g.UUID))
	}
	slices.Sort(uuids)
	h := fnv.New64a()
	for _, uuid := range uuids {
		_, _ = h.Write([]byte(uuid + "\n"))
	}
	return max(h.Sum64(), 1)
}
