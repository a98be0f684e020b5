// SPDX-License-Identifier: Apache-2.0

// Package process is the process around the one that decides about a GPU's time (package arbiter): there is one at any moment, and a
// second that stands by, with all that takes time done, and goes on when the first is killed. See docs/adr/0012-arbiter.md.
//
// Two locks say who is what. A new process has the standby's, makes ready, and waits for the leader's, which the kernel hands over
// when its holder is gone. Then it lets go of the standby's, and waits in flock(2) until that is free, whenever it is, to start another.
//
// A leader ends when no guard of the GPU has been left for a while, and so does the standby, which finds as the new leader that nobody is
// there. A guard that comes just then has one: it takes its place on the peer page before it looks for the standby's lock, and a new leader
// gives that back before it looks at the page. So one of the two sees the other.
package process

import (
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
)

// Name is how cgpu-guard is called to be such a process.
const Name = "cgpu-arbiter"

// Decider decides about a GPU.
type Decider interface {
	// Step looks at what happened and decides, while no other process does. It returns when to be called again; 0: when woken.
	Step(now time.Duration) (again time.Duration)
	// Living is how many guards of the GPU live.
	Living() int
	// Wakes are functions that each wait for a reason for a step. False: they can wait no more.
	Wakes() []func() bool
}

// Options are what a process works with.
type Options struct {
	RunDir string
	UUID   string // of the GPU
	Config []byte // what Start was told, for the next standby
	Now    func() time.Duration
	Log    *slog.Logger
	Times
}

// Times are for how long what is waited for.
type Times struct {
	Linger time.Duration // from the last guard's end to the arbiter's
	Look   time.Duration // between two looks for living guards, who may be killed and tell nobody
	Steady time.Duration // who lived for so long did not die of what it does
	// PauseFrom and PauseMost bound the pause before the next standby where several in a row did not live for long.
	PauseFrom, PauseMost time.Duration
}

// DefaultTimes are those of a node.
func DefaultTimes() Times {
	return Times{Linger: 5 * time.Second, Look: 10 * time.Second, Steady: 10 * time.Second,
		PauseFrom: 100 * time.Millisecond, PauseMost: 3 * time.Second}
}

// forgiven is how many short lives there are no pause for: somebody kills them by hand.
const forgiven = 4

// pause is how long to wait for the next one after some that did not live long.
func (t Times) pause(hasty int) time.Duration {
	if hasty < forgiven {
		return 0
	}
	return min(t.PauseFrom<<min(hasty-forgiven, 20), t.PauseMost)
}

// Run stands by, then decides, until no guard is left. open makes ready what a decision needs and gives up the right to do so again.
func Run(o Options, open func() (Decider, error)) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v: %s", p, debug.Stack())
		}
	}()
	standby := os.NewFile(lockFD, standbyLock)
	if _, err := standby.Stat(); err != nil {
		return fmt.Errorf("no lock: %w; it is started by cgpu-guard only", err)
	}
	unix.CloseOnExec(lockFD)
	leader, err := openLock(o.RunDir, o.UUID, leaderLock)
	if err != nil {
		return err
	}
	// A descriptor that nobody closes: the lock is given back when the process is gone, with all that it does.
	if _, err := unix.FcntlInt(leader.Fd(), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return fmt.Errorf("keep the lock: %w", err)
	}
	d, err := open()
	if err != nil {
		return err
	}
	o.Log.Info("stands by", "pid", os.Getpid())
	if err := take(leader); err != nil {
		return fmt.Errorf("wait for the lock: %w", err)
	}
	if err := standby.Close(); err != nil {
		return fmt.Errorf("give back the standby's lock: %w", err)
	}
	if d.Living() == 0 { // after the lock, see above
		return o.end(leader)
	}
	hasty := o.enter(leader)
	o.Log.Info("decides", "pid", os.Getpid(), "hasty", hasty)
	keeper := keeper{Options: o}
	go keeper.keep(hasty)
	o.lead(d, keeper.there)
	return o.end(leader)
}

// end leaves no name behind of one who was not killed.
func (o Options) end(lock *os.File) error {
	o.Log.Info("ends: no container is left", "pid", os.Getpid())
	return Leader{}.write(lock)
}

// enter writes down who leads.
func (o Options) enter(lock *os.File) (hasty int) {
	before, now := readLeader(lock), o.Now()
	if before.PID != 0 && before.Since <= now && now-before.Since < o.Steady {
		hasty = before.Hasty + 1
	}
	start, err := ledger.ProcStart(os.Getpid())
	if err == nil {
		err = Leader{PID: os.Getpid(), Start: start, Since: now, Hasty: hasty}.write(lock)
	}
	if err != nil { // a full disk is no reason to have nobody who decides
		o.Log.Warn("cannot write down who decides", "err", err)
	}
	return hasty
}

// lead decides until no guard is left, and somebody stands by, who finds out whether one has come.
func (o Options) lead(d Decider, stoodBy func() bool) {
	kick := make(chan struct{}, 1)
	for _, wait := range d.Wakes() {
		go func() {
			for wait() {
				select {
				case kick <- struct{}{}:
				default:
				}
			}
		}()
	}
	alive, look := o.Now(), time.Duration(0)
	for timer := time.NewTimer(0); ; {
		select {
		case <-kick:
		case <-timer.C:
		}
		again, now := d.Step(o.Now()), o.Now()
		if now >= look {
			if d.Living() > 0 {
				alive, look = now, now+o.Look
			} else if look = now + o.Linger/4; now-alive >= o.Linger && stoodBy() {
				return
			}
		}
		if again <= 0 || again > look-now {
			again = look - now
		}
		timer.Reset(again)
	}
}

// keeper starts a standby whenever there is none.
type keeper struct {
	Options
	starts atomic.Bool // the standby's lock is ours
}

func (k *keeper) keep(hasty int) {
	for {
		time.Sleep(k.pause(hasty))
		begin := k.Now()
		if err := k.start(); err != nil {
			k.Log.Error("no standby", "err", err)
		} else {
			k.Log.Warn("the standby has ended", "after", k.Now()-begin)
		}
		if hasty++; k.Now()-begin >= k.Steady {
			hasty = 0
		}
	}
}

// start waits until there is no standby, and then for the end of the one that it starts.
func (k *keeper) start() error {
	lock, err := openLock(k.RunDir, k.UUID, standbyLock)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := take(lock); err != nil {
		return fmt.Errorf("wait for the standby's lock: %w", err)
	}
	k.starts.Store(true)
	ended, err := start(lock, k.Config)
	_ = lock.Close()
	k.starts.Store(false)
	if err != nil {
		return err
	}
	<-ended
	return nil
}

// there reports a standby. Where the lock's file is gone, as with the run directory, nobody that comes can find it.
func (k *keeper) there() bool {
	lock, err := os.OpenFile(lockPath(k.RunDir, k.UUID, standbyLock), os.O_RDWR, 0)
	if err != nil {
		return true
	}
	defer lock.Close()
	free, err := takeIfFree(lock)
	return err != nil || !free && !k.starts.Load()
}
