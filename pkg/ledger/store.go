// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/opencgpu/cgpu/pkg/atomicfile"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// version is the format of ledger.json; another one is refused, because guessing at it could lose reservations.
const version = 1

// file is ledger.json.
type file struct {
	Version int      `json:"version"`
	Records []Record `json:"records"`
	// Cards are the settings of GPUs by UUID; a GPU that is not in it has the node's defaults. The key came later than
	// the format: a file without it is as good.
	Cards map[string]sched.Card `json:"cards,omitempty"`
	// gone are records that a change drops because something else wants their place.
	gone []Record
}

// card is how a GPU is shared.
func (f *file) card(uuid string, def sched.Card) sched.Card {
	if c, ok := f.Cards[uuid]; ok {
		return c
	}
	return def
}

// errTooLarge is of a ledger beyond maxFile, which is far from what the containers of a node need.
var errTooLarge = errors.New("it is larger than 16 MiB")

// errUnchanged lets a change end without writing.
var errUnchanged = errors.New("unchanged")

// change reads the ledger under the lock and stores what f makes of it, unless f returns an error. Then it removes the pages of what is
// gone: in preload mode no guard sweeps, and low-level runtimes call no hook for a create that fails early, so each would leave a tmpfs.
func (l *Ledger) change(f func(*file) error) error {
	gone, err := l.changeLocked(f)
	for _, r := range gone {
		if IsNonce(r.Nonce) {
			_ = page.Remove(l.dir, r.Nonce) // what stays is Sweep's
		}
	}
	return err
}

func (l *Ledger) changeLocked(f func(*file) error) (gone []Record, err error) {
	lock, err := l.lock()
	if errors.Is(err, fs.ErrNotExist) {
		// No run directory: nothing is reserved, so there is nothing to release or to update either.
		if ferr := f(&file{}); errors.Is(ferr, errUnchanged) {
			return nil, nil
		} else if ferr != nil {
			return nil, ferr
		}
		return nil, err
	}
	if err != nil {
		return nil, err
	}
	defer lock.release()
	state, err := l.load()
	if err != nil {
		return nil, err
	}
	if err := f(&state); errors.Is(err, errUnchanged) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	if err := l.store(state); err != nil {
		return nil, err
	}
	return state.gone, nil
}

// load returns what the ledger holds; no file means no records. Anything unreadable is an error, never an empty ledger:
// that would give the memory of running containers away a second time.
func (l *Ledger) load() (file, error) {
	data, err := os.ReadFile(l.path(fileName))
	if errors.Is(err, fs.ErrNotExist) {
		return file{}, nil
	}
	if err != nil {
		return file{}, fmt.Errorf("ledger: %w", err)
	}
	var f file
	damaged := func(err error) (file, error) {
		return file{}, fmt.Errorf("ledger: %s is damaged: %w: stop the GPU containers of this machine, then remove the file",
			l.path(fileName), err)
	}
	if len(data) > maxFile {
		return damaged(errTooLarge)
	}
	if err := json.Unmarshal(data, &f); err != nil {
		return damaged(err)
	}
	if f.Version != version {
		return file{},
			fmt.Errorf("ledger: %s has format %d, this program knows %d: use the cgpu version that wrote it, or stop the GPU containers of this "+
				"machine, then remove the file",
				l.path(fileName), f.Version, version)
	}
	for uuid, c := range f.Cards {
		if err := c.Validate(); err != nil {
			return damaged(fmt.Errorf("card %q: %w", uuid, err))
		}
	}
	for i := range f.Records {
		f.Records[i].weigh() // an older cgpu wrote none
	}
	return f, nil
}

// store replaces ledger.json, under the lock.
func (l *Ledger) store(f file) error {
	f.Version = version
	if f.Records == nil {
		f.Records = []Record{}
	}
	data, err := json.Marshal(f)
	if err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	if len(data) >= maxFile {
		return fmt.Errorf("ledger: a record more, and %w: cgpu gc drops those of containers that are gone", errTooLarge)
	}
	if err := atomicfile.Write(l.path(fileName), append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	return nil
}

// makeDir makes the run directory. Others may pass through it but not list it: the runtime of a user namespace must reach its
// guard's socket, whose name holds a nonce, and nobody else should learn names.
func (l *Ledger) makeDir() error {
	if err := os.MkdirAll(l.dir, 0o711); err != nil {
		return fmt.Errorf("ledger: run directory: %w", err)
	}
	return nil
}
