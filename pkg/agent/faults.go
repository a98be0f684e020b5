// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"log/slog"
	"strings"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/health"
)

// faults follows what cgpu health watch finds wrong with the node's GPUs.
type faults struct {
	runDir string
	log    *slog.Logger

	file  stamp // of what was read last
	state health.State
	wrong string // why it could not be read
	told  string // what mark said last
}

// differs says whether the file is another than when it was read.
func (f *faults) differs() bool {
	now, _ := stampOf(health.File(f.runDir))
	return !now.same(f.file)
}

// mark marks a table; changed says that its GPUs are not marked as those of the last one. While the file cannot be read, what was
// known counts.
func (f *faults) mark(t *device.Table) (marked *device.Table, changed bool) {
	f.file, _ = stampOf(health.File(f.runDir)) // before it is read
	state, err := health.Read(f.runDir)
	wrong := ""
	if err != nil {
		wrong = err.Error()
	} else {
		f.state = state
	}
	if wrong != "" && wrong != f.wrong {
		f.log.Warn("the health of the GPUs is not known", "err", err)
	}
	f.wrong = wrong
	marked = f.state.Mark(t)
	told := ""
	if marked != nil {
		told = strings.Join(health.Unhealthy(marked), "; ")
	}
	if changed = told != f.told; changed {
		f.log.Warn("unhealthy GPUs", "now", told)
	}
	f.told = told
	return marked, changed
}
