// SPDX-License-Identifier: Apache-2.0

package domain

import (
	"errors"
	"io/fs"
	"path/filepath"
	"syscall"
	"time"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/mps"
	"github.com/opencgpu/cgpu/pkg/page"
)

// EndName is the command of cgpu's that ends a member's work.
const EndName = "domain-end"

// End has the domain's server end the work of a member's programs in order, before they are killed: who is killed in the middle of a kernel
// takes the contexts of all others along.
func End(runDir string, r ledger.Record, within time.Duration) error {
	if !r.IsMember() || len(r.VGPUs) != 1 {
		return nil
	}
	gate, err := dial(page.Seat(filepath.Join(page.Pipes(runDir, r.VGPUs[0].UUID, r.Domain), page.Members), 0))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return nil // nobody serves, so nobody has a context
	}
	if err != nil {
		return err
	}
	defer gate.Close()
	_ = gate.SetDeadline(time.Now().Add(within))
	return mps.End(gate, r.Seat)
}
