// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/guard/handover"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
	"github.com/opencgpu/cgpu/pkg/tally"
)

// Guard is the state of one container.
type Guard struct {
	books      *books // nil: nobody goes on, should this process be killed
	own        ownProcess
	keep       *keep
	fallen     *Fallen // the guard in whose place this one goes on, which was killed; nil: there was none
	cfg        Config
	log        *slog.Logger
	driver     Driver
	abi        *rm.ABI
	account    *account
	tasks      *taskTable
	files      *fileTable
	nodes      nodeTable
	gpus       []gpuIdentity
	bill       *bill
	guests     guests
	slowBucket bucket       // of seconds, for calls that hold the driver's locks for long
	waiters    atomic.Int32 // calls that wait for it
	stats      stats
	// tally outlives the guard once Run has begun (keepTally).
	tally     *tally.Page
	tallyFile *tally.File // nil: it is in no file

	pendingRoots    atomic.Int64
	rootsLet        atomic.Int64 // root allocs that were ever let through
	rootGate        sync.RWMutex // held for reading where none may be let through, and taken before a file's mu
	exportedObjects atomic.Int64 // objects in files
	rootPatience    time.Duration
	settledRoots    settledRoots
	memoryCalls     memoryCalls
	astrayAt        atomic.Int64 // when a root alloc last did not make its client, in nanoseconds of Unix time; 0: never
	allEndedAt      atomic.Int64 // when everything of the container's was ended for that
	sweepMu         sync.Mutex
	teardownMu      sync.Mutex // one address space at a time is torn down: neighbours' calls wait for the same locks of the driver's
	sweepPending    atomic.Bool
	sweepTurnMu     sync.Mutex
	sweepNotBefore  time.Time    // when the next sweep that was asked for may be; of who holds sweepTurnMu
	savedBytes      atomic.Int64 // bytes of results kept for interrupted callers
	undos           atomic.Int64 // of these results, those that are taken back if nobody comes, even when their thread is forgotten
	gpuNodes        []int        // the container's GPU nodes, open for as long as the guard runs
	leaseHeld       []int        // files that no tenant shall have a lease on

	rmClientMu sync.Mutex
	rmClient   *rmclient.Client // nil until somebody needs it
	bar1       []quota.Bytes    // how large each GPU's is; 0: not known. Set with rmClient
	// oldClients are those of guards that were killed, the last one's first. The driver maps memory for the process only that has made the
	// client (rm_create_mmap_context), so this guard has one of its own; the windows that they made stay theirs. The account's lock
	// is held to change it.
	oldClients []*rmclient.Client

	windowsMu      sync.Mutex   // held while windows that are over are looked at
	windowsPending atomic.Bool  // they will be, without anybody asking
	windowsRest    atomic.Int64 // that the next such look waits, ns

	preemptMu        sync.Mutex // held by preemptWhilePending
	preemptNotBefore time.Time  // when it may look again

	gpuTime    *gpusched.Scheduler
	ledgerFD   atomic.Int32   // by which it follows the ledger; 0: it does not
	lastRecord *ledger.Record // the container's, as events told it last; of the goroutine that follows the ledger
	managed    managed
	sentFDs    sentFDs
	page       *page.Page // nil: the container has none
	events     *event.Writer
	beganAt    atomic.Int64 // when the container's first process was seen, in nanoseconds of Unix time; 0: not yet

	mu             sync.Mutex
	contextBuffers map[contextBuffer]uint64   // their sizes, as far as they are known
	instances      map[uint32]int             // RM device instance → index in gpus
	logged         map[string]map[string]bool // by message: the keys of logOnce
	initPID        int
	words          *os.File // see holdWords
	silence        int      // see askDomain
	initStart      uint64
	cgroups        cgroups
	devDevice      uint64 // st_dev of the container's /dev; 0 before it is known
	devFirst       uint64 // the same when the first process had just begun: that of a `cgpu run` can end before others make clients
	listeners      int
	sweepWait      time.Duration // of the sweep that is scheduled; 0: none is
	sweepTimer     *time.Timer
	auditing       bool // the guard compares with the driver's account, until auditUntil, with auditWait between
	auditUntil     time.Time
	auditWait      time.Duration
	auditSuspects  suspicion

	uvmMaps atomic.Int64 // mappings in its UVM address spaces
	uvmHost hostPool     // what UVM has on the host for the container

	watch   *watcher
	monitor *monitor
	// work is held by whoever changes something without being called by the container, see chargeUnpaidTime; filters are those that are
	// served, or that are gone while a worker still has a call of theirs.
	work      sync.RWMutex
	filters   map[*listener]bool // with mu held
	doors     doors
	sockets   Sockets         // of Run
	taken     *handover.State // of the program in whose place this one goes on; nil: there was none
	upgrading atomic.Bool
	done      chan struct{} // closed when the container is over
}

type stats struct {
	denied, replayed, undone, interrupted, throttled, spills atomic.Uint64
	calls, killed, processesKilled                           *atomic.Uint64 // in Guard.tally
}

// New prepares a guard. It opens the container's GPU nodes, because RM makes a device object only for a process that holds
// the GPU's node open (nv_is_gpu_accessible, kernel-open/nvidia/nv.c) — and therefore no others.
func New(cfg Config, driver Driver, log *slog.Logger) (*Guard, error) {
	g, err := newGuard(cfg, driver, log)
	if err != nil {
		return nil, err
	}
	g.leaseHeld = holdOpen(cfg.Hold, log)
	if err := g.openPage(); err != nil {
		return nil, err
	}
	begin := time.Now()
	if err := g.openNodes(true); err != nil {
		return nil, err
	}
	log.Info("the container's GPU nodes are open", "took", time.Since(begin))
	return g, nil
}

// openPage has use and limits written into the container's vGPU page.
func (g *Guard) openPage() (err error) {
	if g.cfg.Page == "" {
		return nil
	}
	if g.page, err = page.Open(g.cfg.Page); err == nil {
		g.account.publishTo(g.page)
	}
	return err
}

// newGuard makes one that has nothing, and nobody sees.
func newGuard(cfg Config, driver Driver, log *slog.Logger) (*Guard, error) {
	abi, err := rm.ForDriver(cfg.DriverVersion, cfg.Settings.AllowUnknownDriver)
	if err != nil {
		return nil, err
	}
	g := &Guard{cfg: cfg, log: log, driver: driver, abi: abi, account: newAccount(cfg.GPUs),
		instances: map[uint32]int{}, contextBuffers: map[contextBuffer]uint64{}, logged: map[string]map[string]bool{},
		done: make(chan struct{}), monitor: newMonitor(), filters: map[*listener]bool{},
		files:      &fileTable{self: os.Getpid()},
		events:     event.NewWriter(cfg.RunDir, cfg.ID, cfg.Nonce),
		slowBucket: slowCalls(), rootPatience: rootPatience,
		bill:    newBill(cfg.Settings.CallsPerSecond, cfg.Settings.CallsBurst),
		sentFDs: sentFDs{members: make(chan struct{}, 1), look: make(chan struct{}, 1)},
		managed: managed{ran: make(chan struct{}, 1)},
	}
	for _, x := range cfg.GPUs {
		id, err := identify(x.BusID, x.Minor)
		if err != nil {
			return nil, fmt.Errorf("GPU %d: %w", x.Index, err)
		}
		g.gpus = append(g.gpus, id)
	}
	g.driver.NameFiles(g.nameFile)
	g.countIn(new(tally.Page))
	g.account.onDenied = g.noteDenied
	g.account.onLoose = g.endWindowsLater
	g.gpuTime = newScheduler(g)
	g.account.onChannels = g.gpuTime.TellChannels
	if g.watch, err = newWatcher(func(f func()) { g.chargeTime(f) }); err != nil {
		return nil, err
	}
	g.tasks = newTaskTable(g.watchProcess)
	return g, nil
}

// followFile finds or makes the record of an open file.
func (g *Guard) followFile(fd int, n node) (*file, error) {
	f, err := g.files.follow(fd, n, g.driver.OpenFile)
	if errors.Is(err, errTooManyFiles) { // some may be closed by now
		g.sweep()
		f, err = g.files.follow(fd, n, g.driver.OpenFile)
	}
	return f, err
}

// nameFile is by what the driver was told of the file behind a descriptor of the guard's.
func (g *Guard) nameFile(fd int) (uint32, error) {
	n, _, err := g.nodes.classify(fd)
	if err != nil {
		return 0, err
	}
	f, err := g.followFile(fd, n)
	if err != nil {
		g.log.Error("cannot follow a file", "err", err)
		return 0, err
	}
	return uint32(f.sim), nil
}

// maxLogged bounds how many keys of one message are remembered. What comes beyond is counted by the log (cmd/cgpu-guard), which writes
// a message so many times and no more.
const maxLogged = 64

// logOnce writes a line the first time that something happens. A container that makes a thousand different things happen must
// neither fill the log nor keep other lines out.
func (g *Guard) logOnce(key, msg string, args ...any) {
	g.mu.Lock()
	keys := g.logged[msg]
	if keys == nil {
		keys = map[string]bool{}
		g.logged[msg] = keys
	}
	seen := keys[key]
	if len(keys) < maxLogged {
		keys[key] = true
	}
	g.mu.Unlock()
	if !seen {
		g.log.Warn(msg, args...)
	}
}
