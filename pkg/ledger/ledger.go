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
	tempName    = "ledger.json.tmp"
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
// A record with the same ID is replaced (restart), unless its container still runs. When there is no room, records of
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
	return l.reserveOnceFree(req, func() (Record, error) { return l.reserve(req) })
}

// reserve is one try of Reserve.
func (l *Ledger) reserve(req Request) (Record, error) {
	var reserved Record
	err := l.change(func(f *file) error {
		if i := indexOf(f.Records, req.Record.ID, ""); i >= 0 {
			if err := l.replaceable(f.Records[i], req.Record); err != nil {
				return err
			}
			// Replaced, its amounts do not count.
			f.gone = append(f.gone, f.Records[i])
			f.Records = slices.Delete(f.Records, i, i+1)
		}
		var vgpus []VGPU
		err := l.roomy(f, func() (err error) {
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
		reserved.VGPUs = slices.Clone(vgpus)
		for i := range reserved.VGPUs {
			reserved.VGPUs[i].Weight = max(reserved.VGPUs[i].Weight, 1)
		}
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

// replaceable refuses to replace a record whose container runs or is being created by another process: the low-level
// runtime will refuse the second container of that name, and by then the first would have lost its reservation. (Two
// containerd namespaces can each have a container called "web".)
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
				Reason: fmt.Sprintf("cgroupsPath %.200q: container %s has %.200q, and a vGPU's cgroup is neither above nor below another's", next.Cgroup, r.label(), r.Cgroup)}
		}
	}
	return nil
}

// below says whether a cgroup is another one or below it. None is below nothing.
func below(cgroup, other string) bool {
	return other != "" && (cgroup == other || strings.HasPrefix(cgroup, other+"/"))
}

// Update changes one record under the lock. An empty nonce matches any; the record's ID and nonce stay what they are.
// An error of f leaves the ledger as it was. f must not touch limits and shares: admission is Reserve's and Change's.
func (l *Ledger) Update(id, nonce string, f func(*Record) error) error {
	return l.change(func(state *file) error {
		i := indexOf(state.Records, id, nonce)
		if i < 0 {
			return fmt.Errorf("ledger: container %q, nonce %q: %w", id, nonce, ErrNotFound)
		}
		r := &state.Records[i]
		id, nonce := r.ID, r.Nonce
		if err := f(r); err != nil {
			return err
		}
		r.ID, r.Nonce = id, nonce
		return r.bound()
	})
}

// Release drops a record. It may be called any number of times by anybody (poststop hook, guard, cgpu gc): a record
// that is not there, or is there with another nonce because the container was restarted, is left alone. An empty nonce
// matches any.
func (l *Ledger) Release(id, nonce string) error {
	return l.change(func(f *file) error {
		i := indexOf(f.Records, id, nonce)
		if i < 0 {
			return errUnchanged
		}
		f.Records = slices.Delete(f.Records, i, i+1)
		return nil
	})
}

// List returns all records, oldest reservation first. It takes no lock: a rename replaces the file as a whole.
func (l *Ledger) List() ([]Record, error) {
	f, err := l.read()
	return f.Records, err
}

// Cards returns the settings of GPUs, by UUID, that were made with SetCard; any other GPU has the node's defaults. It
// takes no lock.
func (l *Ledger) Cards() (map[string]sched.Card, error) {
	f, err := l.read()
	return f.Cards, err
}

// State returns what List and Cards do, of one moment.
func (l *Ledger) State() ([]Record, map[string]sched.Card, error) {
	f, err := l.read()
	return f.Records, f.Cards, err
}

// Get returns the record of a container by its whole ID.
func (l *Ledger) Get(id string) (Record, error) {
	records, err := l.List()
	if err != nil {
		return Record{}, err
	}
	if i := indexOf(records, id, ""); i >= 0 {
		return records[i], nil
	}
	return Record{}, fmt.Errorf("ledger: container %q: %w", id, ErrNotFound)
}

// Find returns the record of a container by its ID, a unique beginning of it, or its whole name. IDs go first: tenants
// choose names, and must not get a command that was meant for another.
func (l *Ledger) Find(container string) (Record, error) {
	records, err := l.List()
	if err != nil {
		return Record{}, err
	}
	i, err := find(records, container)
	if err != nil {
		return Record{}, err
	}
	return records[i], nil
}

func find(records []Record, container string) (int, error) {
	if i := indexOf(records, container, ""); i >= 0 {
		return i, nil
	}
	var begin, named []int
	for i, r := range records {
		if container != "" && strings.HasPrefix(r.ID, container) {
			begin = append(begin, i)
		}
		if container != "" && r.Name == container {
			named = append(named, i)
		}
	}
	switch {
	case len(begin) == 1:
		return begin[0], nil
	case len(begin) > 1:
		return 0, fmt.Errorf("ledger: container %q: is the beginning of %d IDs, such as %s and %s: give more of it",
			container, len(begin), records[begin[0]].ID, records[begin[1]].ID)
	case len(named) == 1:
		return named[0], nil
	case len(named) > 1:
		return 0, fmt.Errorf("ledger: container %q: is the name of %d, with the IDs %s and %s: give the beginning of an ID",
			container, len(named), records[named[0]].ID, records[named[1]].ID)
	}
	return 0, fmt.Errorf("ledger: container %q: %w", container, ErrNotFound)
}

// indexOf finds a record; an empty nonce matches any. There is at most one per ID.
func indexOf(records []Record, id, nonce string) int {
	return slices.IndexFunc(records, func(r Record) bool { return r.ID == id && (nonce == "" || r.Nonce == nonce) })
}
