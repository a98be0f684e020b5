// SPDX-License-Identifier: Apache-2.0

package gc

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/opencgpu/cgpu/pkg/ledger"
)

// TestCgroups: those of this node's runs that are gone are removed, but for one that is in use.
func TestCgroups(t *testing.T) {
	const gone, lives, busy, others = "0000000000000001", "0000000000000002", "0000000000000003", "0000000000000004"
	dir, runDir := t.TempDir(), t.TempDir()
	if err := os.Mkdir(filepath.Join(runDir, "log"), 0o700); err != nil {
		t.Fatal(err)
	}
	of := map[string]string{}
	for _, nonce := range []string{gone, lives, busy, others} {
		of[filepath.Join(dir, nonce)] = nonce
		if err := os.MkdirAll(filepath.Join(dir, nonce), 0o700); err != nil {
			t.Fatal(err)
		}
		if nonce == others {
			continue
		}
		if err := os.WriteFile(filepath.Join(runDir, "log", "run-"+nonce+".log"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, busy, "child"), 0o700); err != nil {
		t.Fatal(err)
	}
	if n := removeCgroups(runDir, of, []ledger.Record{{Nonce: lives}}); n != 1 {
		t.Errorf("%d are removed, want 1", n)
	}
	if _, err := os.Stat(filepath.Join(dir, gone)); !os.IsNotExist(err) {
		t.Errorf("the one that is gone: %v", err)
	}
}
