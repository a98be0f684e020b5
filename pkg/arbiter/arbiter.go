// Package arbiter decides about the time of one GPU, for all the containers on it: it reads the driver's records of context switches,
// and what guards say on the GPU's page (pkg/peerpage), decides by pkg/sched, and writes a row for each guard there, with the account of
// its GPU time. It makes no goroutine, holds no lock, and keeps nothing that a successor could not find on the page or in records.
package arbiter

import (
	"log/slog"
	"time"

	"github.com/opencgpu/cgpu/pkg/sched"
)

// Options are what an Arbiter works with.
type Options struct {
	RunDir string
	UUID   string // of the GPU
	Timing sched.Timing
	Source Source // nil: the driver does not tell of context switches; every context counts as one with work
	// Load is how long the GPU computed for a process between two times of its own clock; nil, or an error: nobody knows. See the function
	// Load.
	Load func(pid int, from, to time.Duration) (time.Duration, error)
	Log  *slog.Logger
}

// Arbiter decides about one GPU. Its methods but Generation and Await are of one goroutine.
type Arbiter struct {
	Options
}

// New makes one that has decided nothing, and maps the GPU's page. It may be one that stands by: only Step writes there.
func New(o Options) (*Arbiter, error) { return &Arbiter{Options: o}, nil }

// Step reads what is new, decides, and writes rows; now is of CLOCK_MONOTONIC. It is called only by who holds the GPU's lock: at once when
// it has got it, when Source.Await or Await returned, and when the time that Step returned has passed, whatever comes first; 0: no time.
// After Source.Await no sooner than sched.Tick/2 after the last Step: there may be several batches at once.
//
// The first Step of a successor reads what its Source has kept since Enable and goes on where the accounts on the page end.
func (a *Arbiter) Step(now time.Duration) (again time.Duration) { return 0 }

// Living counts the guards on the page that live.
func (a *Arbiter) Living() int { return 0 }

// Generation changes when a guard came, went, or says something new.
func (a *Arbiter) Generation() uint32 { return 0 }

// Await waits until Generation is not seen any more.
func (a *Arbiter) Await(seen uint32) {}

// Close unmaps the page.
func (a *Arbiter) Close() {}
