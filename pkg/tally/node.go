// SPDX-License-Identifier: Apache-2.0

package tally

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/atomicfile"
)

// Values are counters at a moment, of a container or of all that the node has had since its boot.
type Values struct {
	Calls           uint64               `json:"calls"`
	FreedClients    uint64               `json:"freedClients"`
	KilledProcesses uint64               `json:"killedProcesses"`
	CPU             uint64               `json:"cpuNs"`
	GPUs            map[string]GPUValues `json:"gpus"` // by UUID
}

// GPUValues are those of one GPU.
type GPUValues struct {
	Exact     bool   `json:"exact"` // somebody's times are known
	Time      uint64 `json:"timeNs"`
	Waiting   uint64 `json:"waitingNs"`
	Throttled uint64 `json:"throttledNs"`
	Entitled  uint64 `json:"entitledNs"`
	Denied    uint64 `json:"denied"`
}

// add adds another's counters.
func (v *Values) add(o Values) {
	v.Calls += o.Calls
	v.FreedClients += o.FreedClients
	v.KilledProcesses += o.KilledProcesses
	v.CPU += o.CPU
	if v.GPUs == nil {
		v.GPUs = map[string]GPUValues{}
	}
	for uuid, g := range o.GPUs {
		sum := v.GPUs[uuid]
		sum.Exact = sum.Exact || g.Exact
		sum.Denied += g.Denied
		sum.Time += g.Time
		sum.Waiting += g.Waiting
		sum.Throttled += g.Throttled
		sum.Entitled += g.Entitled
		v.GPUs[uuid] = sum
	}
}

// total is the file of all containers whose guards are gone.
type total struct {
	Version int    `json:"version"`
	Changes uint64 `json:"changes"`
	Sum     Values `json:"sum"`
	// Folded are in Sum, and their files may still be there.
	Folded []string `json:"folded"`
}

// The names have a dot, which no nonce has.
const (
	totalName = "total.json"
	lockName  = "total.lock"
)

func readTotal(runDir string) (total, error) {
	t := total{Version: version}
	b, err := os.ReadFile(file(runDir, totalName))
	if errors.Is(err, fs.ErrNotExist) {
		return t, nil
	}
	if err != nil {
		return t, fmt.Errorf("tally: %w", err)
	}
	// Damaged or another version's: counters that begin anew are what their readers expect of a restart.
	if json.Unmarshal(b, &t) != nil || t.Version != version {
		return total{Version: version}, nil
	}
	return t, nil
}

// Node are the counters of a node.
type Node struct {
	Sum        Values            // of all containers since the boot, those that have ended too
	Containers map[string]Values // of those whose files are there, by nonce
}

// Read reads the node's counters. It takes no lock: if Fold was at work meanwhile it reads once more.
func Read(runDir string) (Node, error) {
	const tries = 100
	for range tries {
		before, err := readTotal(runDir)
		if err != nil {
			return Node{}, err
		}
		n := Node{Containers: map[string]Values{}}
		n.Sum.add(before.Sum)
		nonces, err := list(runDir)
		if err != nil {
			return Node{}, err
		}
		for _, nonce := range nonces {
			if slices.Contains(before.Folded, nonce) {
				continue
			}
			v, err := readValues(file(runDir, nonce))
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errForeign) {
				continue
			}
			if err != nil { // without it a counter would go back
				return Node{}, fmt.Errorf("tally: %w", err)
			}
			n.Containers[nonce] = v
			n.Sum.add(v)
		}
		if after, err := readTotal(runDir); err != nil || after.Changes == before.Changes {
			return n, err
		}
	}
	return Node{}, errors.New("tally: containers end faster than their counters can be read")
}

func readValues(path string) (Values, error) {
	f, err := os.Open(path)
	if err != nil {
		return Values{}, err
	}
	defer f.Close()
	return values(f)
}

// list are the nonces that have files.
func list(runDir string) (nonces []string, err error) {
	entries, err := os.ReadDir(filepath.Join(runDir, folder))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("tally: %w", err)
	}
	for _, e := range entries {
		if !strings.Contains(e.Name(), ".") {
			nonces = append(nonces, e.Name())
		}
	}
	return nonces, nil
}

// Fold adds the counters of containers whose guards are gone to the node's, and removes their files. If somebody is at it, he does it.
func Fold(runDir string) error {
	nonces, err := list(runDir)
	if err != nil || len(nonces) == 0 {
		return err
	}
	lock, err := os.OpenFile(file(runDir, lockName), os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("tally: %w", err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); errors.Is(err, syscall.EWOULDBLOCK) {
		return nil
	} else if err != nil {
		return fmt.Errorf("tally: lock %s: %w", lock.Name(), err)
	}
	t, err := readTotal(runDir)
	if err != nil {
		return err
	}
	// A kill after the last write may have left files that are counted.
	if err := removeAll(runDir, t.Folded); err != nil {
		return err
	}
	folded := t.Folded
	t.Folded = nil
	var failed []error
	for _, nonce := range nonces {
		if slices.Contains(folded, nonce) {
			continue
		}
		v, gone, err := readEnded(file(runDir, nonce))
		if err != nil {
			failed = append(failed, fmt.Errorf("tally: %w", err)) // the others' are folded all the same
		}
		if gone {
			t.Sum.add(v)
			t.Folded = append(t.Folded, nonce)
		}
	}
	if len(t.Folded) > 0 {
		if err := t.write(runDir); err != nil {
			return err
		}
		failed = append(failed, removeAll(runDir, t.Folded))
	}
	return errors.Join(failed...)
}

// readEnded reads the file of a guard that is gone, which nobody locks again. One that has nothing of ours is removed at once and not
// remembered: a guard may have made it a moment ago, and makes it anew under the same name (claim).
func readEnded(path string) (v Values, gone bool, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return v, false, nil
	}
	if err != nil {
		return v, false, err
	}
	defer f.Close()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); errors.Is(err, syscall.EWOULDBLOCK) {
		return v, false, nil
	} else if err != nil {
		return v, false, fmt.Errorf("lock %s: %w", path, err)
	}
	v, err = values(f)
	if errors.Is(err, errForeign) {
		return v, false, os.Remove(path)
	}
	return v, err == nil, err
}

// write replaces the file, under the lock.
func (t total) write(runDir string) error {
	t.Changes++
	b, err := json.Marshal(t)
	if err != nil {
		return fmt.Errorf("tally: %w", err)
	}
	if err := atomicfile.Write(file(runDir, totalName), b, 0o600); err != nil {
		return fmt.Errorf("tally: %w", err)
	}
	return nil
}

func removeAll(runDir string, nonces []string) error {
	for _, nonce := range nonces {
		if err := os.Remove(file(runDir, nonce)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("tally: %w", err)
		}
	}
	return nil
}
