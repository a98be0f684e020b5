// SPDX-License-Identifier: Apache-2.0

package domain

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
)

// A member's part of the multiprocessors is in the ledger, which the domain's gate (package mps) cannot read. It reads a file of root's in
// the domain's folder, which members do not see.

// MakeParts makes the file of a folder that is being made, with nobody in it.
func MakeParts(folder string) error {
	path := filepath.Join(folder, page.Parts)
	return errors.Join(os.WriteFile(path, make([]byte, page.Seats+1), 0o644), os.Chmod(path, 0o644))
}

// WriteParts has a domain's file on a GPU say what the ledger says. The last that anybody writes is what the ledger has by then:
// whoever writes looks again, and who changes the ledger writes afterwards. Where that one is killed in between, the guard of the domain's
// server writes within a second.
func WriteParts(runDir, uuid, name string) error {
	f, err := os.OpenFile(filepath.Join(page.Pipes(runDir, uuid, name), page.Parts), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // nobody serves; the first member to start writes
	}
	if err != nil {
		return err
	}
	defer f.Close()
	return settle(f, func() ([]byte, error) {
		records, err := ledger.Open(runDir).List()
		return parts(records, name, uuid), err
	})
}

// settle writes what the ledger has until that is there when it is looked at.
func settle(f *os.File, inLedger func() ([]byte, error)) error {
	for {
		want, err := inLedger()
		if err != nil {
			return err
		}
		has := make([]byte, len(want))
		if _, err := f.ReadAt(has, 0); err != nil {
			return fmt.Errorf("%s: %w", f.Name(), err)
		}
		if bytes.Equal(has, want) {
			return nil
		}
		if _, err := f.WriteAt(want, 0); err != nil { // in place, at once: there is room for it, whatever fills the folder
			return err
		}
	}
}

// parts are those of a domain's members on a GPU, by their seats.
func parts(records []ledger.Record, name, uuid string) []byte {
	list := make([]byte, page.Seats+1)
	for _, r := range records {
		if !r.IsMember() || r.Domain != name || len(r.VGPUs) != 1 || r.VGPUs[0].UUID != uuid || r.Seat < 1 || r.Seat > page.Seats {
			continue
		}
		if list[r.Seat] = byte(r.Threads); r.Threads == 0 {
			list[r.Seat] = page.AllParts
		}
	}
	return list
}
