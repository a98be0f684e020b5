// SPDX-License-Identifier: Apache-2.0

package gc

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/guard/driver"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/view"
)

// A guard that is killed leaves its container's channels as they are, possibly paused. Its rescuer lets them run again. What
// is here is for the case that both were killed.

// ResumeLeftovers lets run what a guard that is gone has left paused, by the file in which it noted that. It returns how
// many channels those are.
func ResumeLeftovers(file string) (int, error) {
	if !filepath.IsAbs(file) {
		return 0, nil
	}
	n, err := gpusched.ResumeLeftovers(file, driver.Open, slog.New(slog.DiscardHandler))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	return n, err
}

// collectLeftovers does that for all guards of the node that are gone, and removes their files. It returns what it did.
func collectLeftovers(records []ledger.Record, sockets string) ([]Leftover, error) {
	done := []Leftover{}
	files, err := filepath.Glob(filepath.Join(sockets, "*"+gpusched.LeftoversSuffix))
	if err != nil {
		return done, err
	}
	owner := map[string]ledger.Record{}
	for _, r := range records {
		owner[gpusched.LeftoversFile(r.Socket)] = r
	}
	var bad []error
	for _, file := range files {
		if listens(strings.TrimSuffix(file, gpusched.LeftoversSuffix) + ".ctl") {
			continue
		}
		r, known := owner[file]
		of := Leftover{ID: r.ID}
		if known {
			of.Name = snapshot.Named(r).Name
		}
		of.Channels, err = ResumeLeftovers(file)
		switch {
		case err == nil && of.Channels > 0:
			done = append(done, of)
		case err != nil && known:
			bad = append(bad, fmt.Errorf("resume what the guard of container %s%s had paused: %w", view.ShortID(r.ID),
				view.Label(ledger.Record{Name: of.Name}), err))
		case err != nil:
			// Its channels went with its processes.
			if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
				bad = append(bad, err)
			}
			done = append(done, Leftover{})
		}
	}
	return done, errors.Join(bad...)
}

// listens reports that somebody has a socket open; doubt counts as yes.
func listens(socket string) bool {
	conn, err := net.DialTimeout("unix", socket, api.Timeout)
	if err == nil {
		conn.Close()
	}
	return !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, fs.ErrNotExist)
}

// removeCgroups removes those of runs whose guard, which does this at their end, was killed; its log tells that it was of this run dir.
// One with processes stays.
func removeCgroups(runDir string, of map[string]string, records []ledger.Record) (n int) {
	for dir, nonce := range of {
		if !ledger.IsNonce(nonce) {
			continue
		}
		logs, _ := filepath.Glob(filepath.Join(runDir, "log", "*-"+nonce+".log"))
		living := slices.ContainsFunc(records, func(r ledger.Record) bool { return r.Nonce == nonce })
		if len(logs) > 0 && !living && syscall.Rmdir(dir) == nil {
			n++
		}
	}
	return n
}
