// SPDX-License-Identifier: Apache-2.0

package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/opencgpu/cgpu/pkg/atomicfile"
	"github.com/opencgpu/cgpu/pkg/domain"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

// Kept is what an administrator has set of a domain on a GPU. Its server's record goes with the server, which members can end; so it is
// here, until the machine is restarted.
type Kept struct {
	ledger.Settings
	Paused bool `json:"paused,omitempty"`
}

func (d Domain) keptFile() string {
	return filepath.Join(d.RunDir, "domains", d.UUID+"."+d.Name+".json")
}

// Keep keeps what was changed of a record, if it is a domain's server's.
func Keep(runDir string, r ledger.Record, change ledger.ChangeRequest) error {
	if !r.DomainServer || len(r.VGPUs) != 1 {
		return nil
	}
	d := Domain{runDir, r.VGPUs[0].UUID, r.Domain}
	if err := d.keep(change); err != nil {
		return fmt.Errorf("domain %s: what was set holds until its server ends, and no longer: %w", d.Name, err)
	}
	return nil
}

func (d Domain) keep(change ledger.ChangeRequest) error {
	dir := filepath.Dir(d.keptFile())
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	unlock, err := domain.Lock(dir)
	if err != nil {
		return err
	}
	defer unlock()
	kept, err := d.kept()
	if err != nil {
		return err
	}
	last(&kept.Limit, change.Limit)
	last(&kept.Weight, change.Weight)
	last(&kept.Percent, change.Percent)
	if change.Paused != nil {
		kept.Paused = *change.Paused
	}
	text, err := json.Marshal(kept)
	if err != nil {
		return err
	}
	return atomicfile.Write(d.keptFile(), text, 0o600)
}

func last[T any](to **T, set *T) {
	if set != nil {
		*to = set
	}
}

// kept reads it; nothing is set where there is no file.
func (d Domain) kept() (k Kept, err error) {
	text, err := os.ReadFile(d.keptFile())
	if errors.Is(err, fs.ErrNotExist) {
		return k, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &k)
	}
	if err != nil {
		return k, fmt.Errorf("what was set of domain %s: %w; remove %s and set it again", d.Name, err, d.keptFile())
	}
	return k, nil
}
