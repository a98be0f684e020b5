// SPDX-License-Identifier: Apache-2.0

package device

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/opencgpu/cgpu/pkg/atomicfile"
)

// RunDirMode lets everybody reach a known name below the run directory and only root list it.
const RunDirMode = 0o711

// Save writes the table into a run directory: whole or not at all, and readable by everybody. The caller holds LockFile.
func (t *Table) Save(runDir string) error {
	if err := t.Validate(); err != nil {
		return err
	}
	text, err := json.MarshalIndent(t, "", " ")
	if err != nil {
		return fmt.Errorf("device: %w", err)
	}
	if err := MakeRunDir(runDir); err != nil {
		return err
	}
	if err := atomicfile.Write(TableFile(runDir), append(text, '\n'), 0o644); err != nil {
		return fmt.Errorf("device: %w", err)
	}
	return nil
}

// MakeRunDir makes the run directory where it is missing. One that exists keeps its mode: an administrator may have
// chosen it.
func MakeRunDir(runDir string) error {
	if info, err := os.Stat(runDir); err == nil && info.IsDir() {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(runDir), 0o755); err != nil {
		return fmt.Errorf("device: %w", err)
	}
	switch err := os.Mkdir(runDir, RunDirMode); {
	case os.IsExist(err): // another process was faster
		return nil
	case err != nil:
		return fmt.Errorf("device: %w", err)
	}
	if err := os.Chmod(runDir, RunDirMode); err != nil { // whatever the umask
		return fmt.Errorf("device: %w", err)
	}
	return nil
}
