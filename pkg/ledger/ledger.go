// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencgpu/cgpu/pkg/sched"
)

// Files under the run directory.
const (
	fileName    = "ledger.json"
	lockName    = "ledger.lock"
	socketsName = "g"      // <nonce>.sock and <nonce>.ctl of the guards
	pagesName   = "page"   // <nonce>: the folder of a vGPU page (package page)
	bundlesName = "bundle" // <nonce>: of config.json as the low-level runtime has it (package page)
	logsName    = "log"    // <beginning of the ID>-<nonce>.log of the guards (package launch)
)

// ErrNotFound says that no such record exists.
var ErrNotFound = errors.New("no such container in the ledger")

// Ledger is a handle on the ledger of one run directory. It holds no file open and may be shared by goroutines.
type Ledger struct {
	dir string
	// lockTimeout bounds the wait for the lock: a create that hangs for ever is worse than one that says why.
	lockTimeout time.Duration
	// dyingTime bounds the wait for a container to be gone that held the same allocation.
	dyingTime time.Duration
	// status looks at a process; tests replace it.
	status func(pid int, start uint64) liveness
}

// Open returns the ledger of a run directory. It does no I/O; the directory is made by the first Reserve.
func Open(runDir string) *Ledger {
	return &Ledger{dir: runDir, lockTimeout: 10 * time.Second, dyingTime: dyingTime, status: processStatus}
}

func (l *Ledger) path(name string) string { return filepath.Join(l.dir, name) }

// File is where the ledger of a run directory is kept, for those who only look whether a container is in it.
func File(runDir string) string { return filepath.Join(runDir, fileName) }

// Reserve admits req and stores its record, or refuses with a *Refusal. The stored record is returned, with the slices
// that placement chose.
//
// A record of the same container (one ID under one root) is replaced (restart), unless that still runs. When there is no room, records of
// containers that are provably dead are dropped and admission is tried once more, all under one lock. For one that holds
// the same allocation and is about to be gone, Reserve waits, without the lock.
func (l *Ledger) Reserve(req Request) (Record, error) {
	if err := req.Record.bound(); err != nil {
		return Record{}, err
	}
	if err := req.validate(); err != nil {
		return Record{}, err
	}
	if err := l.makeDir(); err != nil {
		return Record{}, err
	}
	req.weigh()
	return l.reserveOnceFree(req, func() (Record, error) { return l.reserve(req) })
}

// weigh gives slices without a weight the default one; the caller's stay as they are.
func (req *Request) weigh() {
	req.Record.VGPUs = slices.Clone(req.Record.VGPUs)
	req.Record.weigh()
	if req.Place != nil {
		place := *req.Place
		place.Slice.Weigh()
		req.Place = &place
	}
}

func (r *Record) weigh() {
	for i := range r.VGPUs {
		r.VGPUs[i].Weigh()
	}
}

// reserve is one try of Reserve.
func (l *Ledger) reserve(req Request) (Record, error) {
	var reserved Record
	err := l.change(func(f *file) error {
		err := l.replace(f, req.Record)
		if err != nil {
			return err
		}
		var vgpus []VGPU
		err = l.roomy(f, func() (err error) {
			if err := l.refuseNested(f.Records, req.Record); err != nil {
				return err
			}
			vgpus, err = admit(f, req)
			return err
		})
		if err != nil {
			return err
		}
		reserved = req.Record
		reserved.VGPUs = vgpus
		reserved.sit(f.Records)
		reserved.Allocated = slices.Clone(reserved.Allocated)
		for i := range reserved.Allocated {
			if a := &reserved.Allocated[i]; a.UUID == "" { // the ledger has chosen
				a.UUID, a.Given.UUID = vgpus[0].UUID, vgpus[0].UUID
			}
		}
		if reserved.Created.IsZero() {
			reserved.Created = time.Now().UTC()
		}
		f.Records = append(f.Records, reserved)
		return nil
	})
	if err != nil {
		return Record{}, err
	}
	return reserved, nil
}

// replace drops what there is of the container that next is of: replaced, its amounts do not count.
func (l *Ledger) replace(f *file, next Record) error {
	var keep []Record
	for _, r := range f.Records {
		if !r.same(next) {
			keep = append(keep, r)
			continue
		}
		if err := l.replaceable(r, next); err != nil {
			return err
		}
		f.gone = append(f.gone, r)
	}
	f.Records = keep
	return nil
}

// same says whether two records are of one container for a low-level runtime. Two containerd namespaces, or two engines, can each have one
// called "web"; where a root is not known, it may be any.
func (r Record) same(o Record) bool {
	return r.ID == o.ID && (r.Root == o.Root || r.Root == "" || o.Root == "")
}

// replaceable refuses to replace a record whose container runs or is being created by another process: the low-level
// runtime will refuse the second container of that name, and by then the first would have lost its reservation.
func (l *Ledger) replaceable(old, next Record) error {
	if old.InitPID != 0 && l.status(old.InitPID, old.InitStart) != dead {
		return fmt.Errorf("ledger: container %q is in use by process %d (bundle %s): stop it first, or take another name",
			old.ID, old.InitPID, old.Bundle)
	}
	same := old.LauncherPID == next.LauncherPID && old.LauncherStart == next.LauncherStart
	if old.LauncherPID != 0 && !same && l.status(old.LauncherPID, old.LauncherStart) != dead {
		return fmt.Errorf("ledger: container %q is being created by process %d (bundle %s): wait for it, or take another name",
			old.ID, old.LauncherPID, old.Bundle)
	}
	return nil
}

// refuseNested refuses a container whose cgroup is that of another, or above or below it (docker run --cgroup-parent=/docker/ID):
// which processes are whose is also told by their cgroup. One that is about to be gone is in nobody's way.
func (l *Ledger) refuseNested(records []Record, next Record) error {
	for _, r := range records {
		if (below(next.Cgroup, r.Cgroup) || below(r.Cgroup, next.Cgroup)) && !l.dying(r) {
			return &Refusal{Remedy: "give it one of its own (docker run --cgroup-parent)",
				Reason: fmt.Sprintf("cgroupsPath %.200q: container %s has %.200q, and a vGPU's cgroup is neither above nor below another's",
					next.Cgroup, r.label(), r.Cgroup)}
		}
	}
	return nil
}

// below says whether a cgroup is another one or below it. None is below nothing.
func below(cgroup, other string) bool {
	return other != "" && (cgroup == other || strings.HasPrefix(cgroup, other+"/"))
}

// Update changes one record under the lock; what identifies it stays as it is. An error of f leaves the ledger as it was. f must not
// touch limits and shares: admission is Reserve's and Change's.
func (l *Ledger) Update(nonce string, f func(*Record) error) error {
	return l.change(func(state *file) error {
		i, err := indexOf(state.Records, nonce)
		if err != nil {
			return err
		}
		r := &state.Records[i]
		id, root := r.ID, r.Root
		if err := f(r); err != nil {
			return err
		}
		r.ID, r.Root, r.Nonce = id, root, nonce
		return r.bound()
	})
}

// Release drops a record. It may be called any number of times by anybody (poststop hook, guard, cgpu gc): a record
// that is not there, maybe because the container was restarted, is none to drop.
func (l *Ledger) Release(nonce string) error {
	return l.change(func(f *file) error {
		i, err := indexOf(f.Records, nonce)
		if err != nil {
			return errUnchanged
		}
		f.Records = slices.Delete(f.Records, i, i+1)
		return nil
	})
}

// List returns all records, oldest reservation first. It takes no lock: a rename replaces the file as a whole.
func (l *Ledger) List() ([]Record, error) {
	f, err := l.load()
	return f.Records, err
}

// Cards returns the settings of GPUs, by UUID, that were made with SetCard; any other GPU has the node's defaults. It
// takes no lock.
func (l *Ledger) Cards() (map[string]sched.Card, error) {
	f, err := l.load()
	return f.Cards, err
}

// State returns what List and Cards do, of one moment.
func (l *Ledger) State() ([]Record, map[string]sched.Card, error) {
	f, err := l.load()
	return f.Records, f.Cards, err
}

// Get returns the record with a nonce.
func (l *Ledger) Get(nonce string) (Record, error) {
	records, err := l.List()
	if err != nil {
		return Record{}, err
	}
	i, err := indexOf(records, nonce)
	if err != nil {
		return Record{}, err
	}
	return records[i], nil
}

// indexOf finds a record by its nonce, which no other has.
func indexOf(records []Record, nonce string) (int, error) {
	i := slices.IndexFunc(records, func(r Record) bool { return r.Nonce == nonce })
	if i < 0 {
		return i, fmt.Errorf("ledger: nonce %q: %w", nonce, ErrNotFound)
	}
	return i, nil
}

// Find returns the record that somebody means: by its ID or nonce, a beginning of the ID, or its whole name, where only one has that. IDs
// go first: tenants choose names, and must not get a command that was meant for another.
func (l *Ledger) Find(container string) (Record, error) {
	records, err := l.List()
	if err != nil {
		return Record{}, err
	}
	for _, other := range []func(Record) bool{
		func(r Record) bool { return container == "" || !r.IsCalled(container) },
		func(r Record) bool { return container == "" || !strings.HasPrefix(r.ID, container) },
		func(r Record) bool { return container == "" || r.Name != container },
	} {
		fits := slices.DeleteFunc(slices.Clone(records), other)
		if len(fits) > 1 {
			return Record{}, Ambiguous(container, fits)
		}
		if len(fits) == 1 {
			return fits[0], nil
		}
	}
	return Record{}, fmt.Errorf("ledger: container %q: %w", container, ErrNotFound)
}

// IsCalled says whether somebody typed all of what a container is called: its ID, or its nonce, since several can have that ID.
func (r Record) IsCalled(typed string) bool { return r.ID == typed || r.Nonce == typed }

// Ambiguous is the error for what several containers fit. It says how to name one of them alone.
func Ambiguous(typed string, fits []Record) error {
	which := fits[0].beside(fits[1]) + " or " + fits[1].beside(fits[0])
	if n := len(fits) - 2; n > 0 {
		which += fmt.Sprintf(" or one of %d more", n)
	}
	return fmt.Errorf("container %q: may be %s: give one of these", typed, which)
}

// beside is how to name a container and not another one.
func (r Record) beside(o Record) string {
	switch {
	case r.ID == o.ID && r.Root != "":
		return fmt.Sprintf("%s (root %q)", r.Nonce, r.Root)
	case r.ID == o.ID:
		return fmt.Sprintf("%s (bundle %q)", r.Nonce, r.Bundle)
	case r.Name != "":
		return r.ID + " (" + DisplayName(r.Name) + ")"
	}
	return r.ID
}
