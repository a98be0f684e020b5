// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/opencgpu/cgpu/pkg/atomicfile"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/ledger"
)

// Division says which front end has which GPU. Lists of GPUs have indices, since one DaemonSet is for many nodes; but the driver
// numbers its GPUs anew when one falls off the bus, and then an index is another GPU. So an index is looked up once, and what was found is
// kept: a GPU stays with its front end for as long as the lists are the same, and longer while a container holds it.
type Division struct {
	file, runDir string
	lists        map[string]Selection // of front ends by name
	owners       atomic.Pointer[map[string]string]
}

// division is what is kept.
type division struct {
	// Lists are those by which Owners were found; none where some are to be found anew at the next start.
	Lists  map[string][]string `json:"lists,omitempty"`
	Owners map[string]string   `json:"owners"` // front ends, by the UUIDs of GPUs
}

// Owners that are no front end.
const (
	ownerNone = "-"
	ownerAll  = "*" // in the lists of two front ends, and offered by neither
)

// NewDivision divides by the lists of front ends. What it finds is kept in the file, whose folder has to outlive what front ends
// allocate: a pod keeps its claim when the node is booted.
func NewDivision(file, runDir string, lists map[string]Selection) *Division {
	return &Division{file: file, runDir: runDir, lists: lists}
}

// Of returns what FrontEnd has as Mine and Others. A GPU that was not looked up is nobody's.
func (d *Division) Of(front string) (mine, others func(device.GPU) bool) {
	owner := func(g device.GPU) string {
		if owners := d.owners.Load(); owners != nil {
			return (*owners)[g.UUID]
		}
		return ""
	}
	return func(g device.GPU) bool { o := owner(g); return o == front || o == ownerAll },
		func(g device.GPU) bool { return owner(g) == ownerAll }
}

// Resolve looks up the GPUs of a table.
func (d *Division) Resolve(gpus []device.GPU) error {
	was, err := d.readFile()
	if err != nil {
		return err
	}
	records, err := ledger.Open(d.runDir).List()
	if err != nil {
		return fmt.Errorf("agent: which GPUs are held: %w", err)
	}
	now := divide(gpus, was, d.lists, holders(records))
	if !maps.Equal(now.Owners, was.Owners) || !maps.EqualFunc(now.Lists, was.Lists, slices.Equal) {
		if err := d.write(now); err != nil {
			return err
		}
	}
	d.owners.Store(&now.Owners)
	return nil
}

// holders are the front ends by which containers have GPUs now.
func holders(records []ledger.Record) map[string]string {
	held := map[string]string{}
	for _, r := range records {
		for _, a := range r.Allocated {
			held[a.UUID] = FrontDRA
			if a.Plugin {
				held[a.UUID] = FrontPlugin
			}
		}
	}
	return held
}

// divide finds the owners of GPUs: those of before, and of what is new, or by new lists, those whom the lists name. One that is held
// stays with its owner.
func divide(gpus []device.GPU, was division, lists map[string]Selection, held map[string]string) division {
	now := division{Lists: map[string][]string{}, Owners: map[string]string{}}
	for name, list := range lists {
		now.Lists[name] = list.words()
	}
	same := maps.EqualFunc(now.Lists, was.Lists, slices.Equal)
	if same {
		now.Owners = maps.Clone(was.Owners) // also of a GPU that is away and may come back
	}
	for _, g := range gpus {
		if _, ok := now.Owners[g.UUID]; ok {
			continue
		}
		owner := ownerNone
		for name, list := range lists {
			switch {
			case !list.Has(g):
			case owner != ownerNone:
				owner = ownerAll
			default:
				owner = name
			}
		}
		if holder := held[g.UUID]; holder != "" && holder != owner && owner != ownerNone && owner != ownerAll {
			owner = holder
			now.Lists = nil // the lists say otherwise, which counts when it is free
		}
		now.Owners[g.UUID] = owner
	}
	return now
}

func (d *Division) readFile() (was division, err error) {
	text, err := os.ReadFile(d.file)
	if errors.Is(err, fs.ErrNotExist) {
		return division{}, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &was)
	}
	if err != nil {
		return division{}, fmt.Errorf("agent: which front end has which GPU, %s: %w: remove it when no pod of the node has a GPU", d.file, err)
	}
	return was, nil
}

// write replaces the file. pkg/atomicfile does not sync, and this one is read after a power cut.
func (d *Division) write(now division) error {
	fail := func(err error) error {
		return fmt.Errorf("agent: which front end has which GPU, %s: %w", d.file, err)
	}
	text, err := json.Marshal(now)
	if err != nil {
		return fail(err)
	}
	if err := os.MkdirAll(filepath.Dir(d.file), 0o750); err != nil {
		return fail(err)
	}
	if err := atomicfile.WriteSynced(d.file, append(text, '\n'), 0o600); err != nil {
		return fail(err)
	}
	return nil
}

// words are the list as it was written, in one order.
func (s Selection) words() []string {
	words := slices.Clone(s.uuids)
	for _, n := range s.indices {
		words = append(words, fmt.Sprint(n))
	}
	slices.SortFunc(words, strings.Compare)
	return words
}
