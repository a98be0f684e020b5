// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/guard/api"
	"github.com/opencgpu/cgpu/pkg/guard/handover"
	"github.com/opencgpu/cgpu/pkg/tally"
)

// A guard goes on as another program (docs/adr/0013-upgrade.md). While nothing is under way it writes its state down, has the program try
// that as a child, and executes it. Until then everything can be undone, and is where something does not come to rest in time: calls that
// wait longer than the least that it takes would be worse than a hand-over that comes later.

const (
	// openTime is for the program to be opened and read, to be started as a child, and to say what it can read.
	openTime = 20 * time.Second
	// maxProgram is how much of it is read.
	maxProgram = 64 << 20
	// upgradeTime is for how long it is tried. Each time calls wait for a longer window, from firstWindow to lastWindow at most, until all
	// that were under way have ended, and windowShare times as long they come through in between.
	upgradeTime = 15 * time.Second
	firstWindow = 10 * time.Millisecond
	lastWindow  = 640 * time.Millisecond
	windowShare = 5
	// objectBytes is what an RM object takes of a state, about: what there is to know of its size before one is written.
	objectBytes = 100
)

// errBusy says that something is under way that may have ended the next time.
var errBusy = errors.New("the guard does not come to rest")

func busy(what string) error { return fmt.Errorf("%w: %s", errBusy, what) }

// serveUpgrade answers a request to go on as another program. The answer to one that succeeds is that program's (TakeOver).
func (g *Guard) serveUpgrade(conn *net.UnixConn, program string) {
	_ = conn.SetDeadline(time.Time{})
	answer := api.Upgraded{Error: "another upgrade of this guard is under way"}
	if g.upgrading.CompareAndSwap(false, true) {
		answer = g.upgradeWithin(openTime, conn, program)
	}
	if answer.Error != "" {
		g.log.Warn("the guard goes on as the program that it is", "program", program, "err", answer.Error)
	}
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	_ = json.NewEncoder(conn).Encode(answer)
}

// upgradeWithin does not wait for a program whose file system hangs. As long as that is asked no other upgrade begins: to become another
// program all threads have to end, and the one that asks may not.
func (g *Guard) upgradeWithin(limit time.Duration, conn *net.UnixConn, program string) api.Upgraded {
	tried := make(chan attempt, 1)
	go func() { tried <- try(program) }()
	select {
	case a := <-tried:
		defer g.upgrading.Store(false)
		return g.upgrade(conn, a)
	case <-time.After(limit):
		go func() {
			(<-tried).end()
			g.upgrading.Store(false)
		}()
		return api.Upgraded{Error: fmt.Sprintf("%s is not opened and started within %v; does its file system hang? Want a program on a local one",
			program, limit)}
	}
}

// attempt is a program that was tried as a child. same: it is what the guard is, and was not.
type attempt struct {
	trial *handover.Trial
	same  bool
	err   error
}

func try(program string) (a attempt) {
	file, same, err := openProgram(program)
	if err != nil || same {
		return attempt{same: same, err: err}
	}
	// What execve(2) reads is in memory then. A file system that hangs does so here, in the first place, where no call waits for it.
	if _, err = io.CopyN(io.Discard, file, maxProgram); err == nil || errors.Is(err, io.EOF) {
		err = letInterrupt()
	}
	if err != nil {
		file.Close()
		return attempt{err: err}
	}
	if a.trial, err = handover.Try(file); err != nil {
		a.err = fmt.Errorf("%s: %w", program, err)
	}
	return a
}

func (a attempt) end() {
	if a.trial != nil {
		a.trial.Close()
	}
}

// upgrade returns only if the guard stays what it is.
func (g *Guard) upgrade(conn *net.UnixConn, a attempt) (answer api.Upgraded) {
	defer a.end()
	refuse := func(err error) api.Upgraded {
		answer.Error = err.Error()
		return answer
	}
	if a.err != nil {
		return refuse(a.err)
	}
	if a.same {
		return api.Upgraded{Done: true, Already: true}
	}
	var err error
	untried, tried := true, time.Duration(0)
	deadline := time.Now().Add(upgradeTime)
	for window := firstWindow; ; window = min(2*window, lastWindow) {
		answer.Tries++
		if untried { // once: to rest twice in one window is less likely
			tried, err = g.tryState(conn, a.trial, window)
			answer.Stall, untried = tried, err != nil
		}
		if !untried {
			answer.Stall, err = g.become(conn, a.trial, window, handover.Process{Tried: int64(tried), Tries: answer.Tries})
		}
		if !errors.Is(err, errBusy) || time.Now().After(deadline) {
			return refuse(err)
		}
		time.Sleep(windowShare*window + rand.N(window))
	}
}

// openProgram opens what the guard is to go on as. same: it is that.
func openProgram(path string) (f *os.File, same bool, err error) {
	if f, err = os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0); err != nil {
		return nil, false, err
	}
	info, err := f.Stat()
	if err == nil {
		err = isProgram(path, info)
	}
	own, ownErr := os.Stat("/proc/self/exe")
	if err = errors.Join(err, ownErr); err != nil {
		f.Close()
		return nil, false, err
	}
	return f, os.SameFile(info, own), nil
}

// isProgram refuses what cannot be executed, and what others than root can change: a guard has more rights than they.
func isProgram(path string, info os.FileInfo) error {
	s, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.Mode().IsRegular() || s.Mode&0o111 == 0 {
		return fmt.Errorf("%s is no program: want a file that can be executed", path)
	}
	if s.Uid != 0 || s.Mode&0o002 != 0 || s.Mode&0o020 != 0 && s.Gid != 0 {
		return fmt.Errorf("%s: others than root can write it (owner %d:%d, mode %#o): chown root:root and chmod go-w it", path, s.Uid, s.Gid,
			s.Mode&0o777)
	}
	return nil
}

// tryState has the program try the guard's state. The guard rests while that is written: calls are served while the child is woken and
// makes a guard of it. stall is for how long they have waited.
func (g *Guard) tryState(conn *net.UnixConn, trial *handover.Trial, window time.Duration) (stall time.Duration, err error) {
	stall, err = g.atRest(conn, trial, window, func(s *handover.State) error { return writeState(trial, s) })
	if err != nil {
		return stall, err
	}
	if err := trial.Read(); err != nil {
		return stall, fmt.Errorf("the other program cannot go on with this guard's state: %w", err)
	}
	return stall, nil
}

// become has the guard become the program that has tried its state. It returns only if that fails; then all goes on. What has changed since
// then is of the same kinds; could the program not go on with it, it would give the process back.
func (g *Guard) become(conn *net.UnixConn, trial *handover.Trial, window time.Duration,
	told handover.Process) (stall time.Duration, err error) {
	return g.atRest(conn, trial, window, func(s *handover.State) error {
		p := &s.Process
		p.Tried, p.Tries, p.Trial, p.Keeper, p.Nice = told.Tried, told.Tries, trial.PID(), g.keep.pid(), trial.Nice()
		g.gpuTime.LetGoOfPages()
		if err := writeState(trial, s); err != nil {
			return err
		}
		g.log.Info("the guard goes on as another program", "tries", p.Tries)
		killed := g.keep.stop() // that program has one of its own
		defer g.keep.resume(killed)
		return trial.Exec(s.Descriptors())
	})
}

func writeState(trial *handover.Trial, s *handover.State) error {
	b, err := handover.Encode(s)
	if err == nil {
		err = trial.Write(b)
	}
	if err != nil {
		return fmt.Errorf("the other program cannot go on with this guard's state: %w", err)
	}
	return nil
}

// atRest brings the guard to rest, for a window at most, and calls f with its state. Then all goes on. stall is for how long calls waited.
// The trial's child makes the guard urgent meanwhile.
func (g *Guard) atRest(conn *net.UnixConn, trial *handover.Trial, window time.Duration,
	f func(*handover.State) error) (stall time.Duration, err error) {
	until := time.Now().Add(window)
	g.doors.seccomp.close(g.sockets.Seccomp)
	defer g.doors.seccomp.open(g.sockets.Seccomp)
	g.doors.control.close(g.sockets.Control)
	defer g.doors.control.open(g.sockets.Control)
	if !g.doors.seccomp.awaitEmpty(0, until) || !g.doors.control.awaitEmpty(1, until) {
		return stall, busy("somebody has a connection to it")
	}
	g.awaitCalm(window)
	until = time.Now().Add(window)
	filters := g.parkAll()
	parked := gpusched.Monotonic()
	ordinary := func() {}
	defer func() { ordinary() }() // when calls wait no more
	defer func() {
		for _, l := range filters {
			l.unpark()
		}
		stall = gpusched.Monotonic() - parked
	}()
	if ordinary, err = trial.MakeUrgent(g.account.objectCount() * objectBytes); err != nil {
		return stall, fmt.Errorf("become urgent: %w", err)
	}
	for _, l := range filters {
		if !l.awaitIdle(until) {
			return stall, busy("a call of the container's takes long")
		}
	}
	for !g.work.TryLock() {
		if time.Now().After(until) {
			return stall, busy("it looks at the container, or frees what the container had")
		}
		shortly()
	}
	defer g.work.Unlock()
	wake, ok := g.restGPUTime(until)
	if !ok {
		return stall, busy("it shares out GPU time")
	}
	defer wake()
	state, err := g.stateAtRest(conn, filters)
	if err != nil {
		return stall, err
	}
	state.Process.Parked = int64(parked)
	return stall, f(state)
}

// awaitCalm waits, for a time at most, until no call is under way: the others would wait for it, too, once nobody takes up any.
func (g *Guard) awaitCalm(most time.Duration) {
	for until := time.Now().Add(most); !g.calm() && time.Now().Before(until); {
		shortly()
	}
}

func (g *Guard) calm() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for l := range g.filters {
		if l.waiting.Load() == 0 || l.total.Load() > 1 {
			return false
		}
	}
	return true
}

// parkAll has nobody take up a call.
func (g *Guard) parkAll() (filters []*listener) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for l := range g.filters {
		l.park()
		filters = append(filters, l)
	}
	return filters
}

func (g *Guard) restGPUTime(until time.Time) (wake func(), ok bool) {
	for {
		if wake, ok = g.gpuTime.Rest(); ok || time.Now().After(until) {
			return wake, ok
		}
		shortly()
	}
}

// stateAtRest is the state of a guard that is at rest.
func (g *Guard) stateAtRest(conn *net.UnixConn, filters []*listener) (*handover.State, error) {
	select {
	case <-g.done:
		return nil, errors.New("the container is over")
	default:
	}
	switch {
	case len(filters) == 0 || g.firstPID() == 0:
		return nil, errors.New("the container is being created, or ends")
	case g.pendingRoots.Load() > 0:
		return nil, busy("an RM client is being made")
	}
	state, err := g.snapshot()
	if err != nil {
		return nil, busy(err.Error())
	}
	idle, err := g.findSockets()
	switch {
	case err != nil:
		return nil, err
	case !idle:
		return nil, busy("a call of the simulated driver is under way")
	}
	p, own := &state.Process, &g.own.sockets
	p.Seccomp, p.Control, p.Sim, p.SimNext = own.Seccomp, own.Control, own.Sim, own.SimNext
	p.Ledger = int(g.ledgerFD.Load())
	if p.Reply, err = descriptor(conn); err != nil {
		return nil, err
	}
	for _, l := range filters {
		if l.dead.Load() {
			return nil, busy("a filter's last process ends")
		}
		p.Listeners = append(p.Listeners, l.fd)
	}
	return state, nil
}

// handsOver is a driver that has a connection.
type handsOver interface {
	State() (conn syscall.Conn, last uint64, ok bool)
}

// TakeOver makes the guard that goes on with a state. It changes nothing that another program could not go on with: until Run.
func TakeOver(s *handover.State, driver Driver, log *slog.Logger) (*Guard, Sockets, error) {
	g, err := Restore(s, driver, log)
	if err != nil {
		return nil, Sockets{}, err
	}
	sockets, err := g.takeWhatIsOutside(s)
	if err != nil {
		return nil, sockets, err
	}
	g.taken = s
	for i := range g.cfg.GPUs { // before there is a page that says how many there are
		g.account.tellChannels(i)
	}
	return g, sockets, g.gpuTime.Rejoin(s.GPUTime, s.Rescuer)
}

// takeWhatIsOutside takes up the page, the counters and the sockets.
func (g *Guard) takeWhatIsOutside(s *handover.State) (sockets Sockets, err error) {
	if err := g.openPage(); err != nil {
		return sockets, err
	}
	if s.Process.Tally > 0 {
		f, err := handover.Copy(s.Process.Tally, "counters")
		if err != nil {
			return sockets, err
		}
		if g.tallyFile, err = tally.Resume(f); err != nil {
			return sockets, err
		}
		g.countIn(g.tallyFile.Page)
	}
	return takeSockets(s.Process)
}

func takeSockets(p handover.Process) (s Sockets, err error) {
	for _, x := range []struct {
		fd int
		to **net.UnixListener
	}{{p.Seccomp, &s.Seccomp}, {p.Control, &s.Control}} {
		f, err := handover.Copy(x.fd, "socket")
		if err != nil {
			return s, err
		}
		l, err := net.FileListener(f)
		f.Close()
		if err != nil {
			return s, fmt.Errorf("take over a socket: %w", err)
		}
		var ok bool
		if *x.to, ok = l.(*net.UnixListener); !ok {
			return s, fmt.Errorf("take over a socket: it is one of %s", l.Addr().Network())
		}
	}
	return s, nil
}

// goOn begins where the program before has stopped: with the container's calls, which wait.
func (g *Guard) goOn(s *handover.State) {
	g.goOnWithRest(s)
	for _, fd := range s.Process.Listeners { // last: from here on others change what is read above
		g.resumeFilter(fd)
	}
	go handover.Bury(s.Process.Trial)
	go handover.Bury(s.Process.Keeper)
	g.log.Info("this program goes on with the container", "stall", stallOf(s.Process), "tried", time.Duration(s.Process.Tried),
		"tries", s.Process.Tries)
}

// goOnWithRest begins again what was under way or due beside the container's calls.
func (g *Guard) goOnWithRest(s *handover.State) {
	for _, p := range g.tasks.processes() {
		g.watchProcess(p)
	}
	if until := unixTime(s.Process.AuditUntil); time.Now().Before(until) {
		g.startAudit(unsure)
	}
	g.checkSettledRootsSoon()
	if g.account.clientCount() > 0 || len(g.managed.procs) > 0 {
		g.clientMade()
	}
	if len(g.account.looseWindows()) > 0 {
		g.endWindowsLater()
	}
	g.sweepSoon() // one may have been due
	copied := []int{s.Process.Seccomp, s.Process.Control, s.Process.Sim, s.Process.Tally}
	if s.Rescuer != nil {
		copied = append(copied, s.Rescuer.Pipe)
	}
	for _, fd := range copied {
		if fd > 0 {
			_ = unix.Close(fd)
		}
	}
}

// resumeFilter serves a filter that another program served.
func (g *Guard) resumeFilter(fd int) {
	g.mu.Lock()
	g.listeners++
	g.mu.Unlock()
	l := g.serveListener(fd)
	if err := g.watch.watch(fd, 0, func() { g.filterGone(l) }); err != nil {
		g.log.Error("cannot watch a filter", "err", err)
	}
}

// tellChannels has others told of the container's channels.
func (a *account) tellChannels(gpu int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.reportChannels(gpu)
}

// AnswerUpgrade tells who asked for the hand-over what came of it; failed: why this program goes on after all.
func AnswerUpgrade(s *handover.State, failed string) {
	if s.Process.Reply == 0 {
		return
	}
	f := os.NewFile(uintptr(s.Process.Reply), "reply")
	defer f.Close()
	conn, err := net.FileConn(f)
	if err != nil {
		return
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	_ = json.NewEncoder(conn).Encode(api.Upgraded{Done: failed == "", Error: failed, Tries: s.Process.Tries,
		Stall: stallOf(s.Process)})
}

// stallOf is the longer one of the times that calls have waited.
func stallOf(p handover.Process) time.Duration {
	return max(time.Duration(p.Tried), gpusched.Monotonic()-time.Duration(p.Parked))
}
