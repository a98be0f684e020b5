// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
)

// Sockets are the guard's two listening sockets.
type Sockets struct {
	Seccomp *net.UnixListener
	Control *net.UnixListener
}

// Listen makes the sockets. Only root may connect.
func Listen(cfg Config) (Sockets, error) {
	var s Sockets
	old := unix.Umask(0o177)
	defer unix.Umask(old)
	for _, x := range []struct {
		path string
		to   **net.UnixListener
	}{{cfg.Socket, &s.Seccomp}, {cfg.Control, &s.Control}} {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: x.path, Net: "unix"})
		if err != nil {
			return s, fmt.Errorf("listen on %s: %w", x.path, err)
		}
		*x.to = l
	}
	return s, nil
}

// Run serves the container until its last process is gone, then releases its reservation. launcherGone must be closed
// when the process that creates the container has ended: without a filter by then there will be no container.
func (g *Guard) Run(s Sockets) error {
	defer g.driver.Close()
	g.sockets = s
	release := g.keepTally()
	switch {
	case g.fallen != nil:
		g.rise()
	case g.taken != nil:
		g.beginBooks(nil)
		g.goOn(g.taken)
		g.ledgerFD.Store(int32(g.taken.Process.Ledger))
		if err := g.taken.Process.MakeOrdinary(); err != nil { // before there is a child
			g.log.Error("the guard has a nice value that is for the time of a hand-over", "err", err)
		}
		g.startKeeper()
		g.taken = nil
	default:
		g.startKeeping()
		g.watchLauncher()
	}
	go g.serveControl(s.Control)
	go g.acceptFilters(s.Seccomp)
	over := make(chan struct{})
	if g.gpuTime.Schedules() {
		g.gpuTime.Begin()
		go g.watchLedger(over)
	}
	go g.watchOutsiders()
	if g.cfg.DomainServer {
		go g.watchDomain(over)
	}
	if g.isMember() {
		go g.watchLoans(over)
	}
	<-g.done
	_ = s.Seccomp.Close()
	g.awaitMemory()
	close(over)
	err := g.releaseReservation() // first: somebody may wait for the room
	g.gpuTime.AwaitLast()
	g.countGPUTime()
	g.gpuTime.End()
	_ = s.Control.Close()
	release()
	g.keep.stop().Wait() // it has all that this guard has open
	g.noteDomainEnd()
	g.noteEnd()
	return err
}

// releaseReservation removes what the container had in the run directory.
func (g *Guard) releaseReservation() error {
	if g.page != nil { // in preload mode (simulated driver) it is not ours
		if err := page.Remove(g.cfg.RunDir, g.cfg.Nonce); err != nil {
			g.log.Warn("cannot remove the vGPU page", "err", err)
		}
	}
	if err := ledger.Open(g.cfg.RunDir).Release(g.cfg.Nonce); err != nil {
		return fmt.Errorf("release the reservation of %s: %w; `cgpu gc` will do it", g.cfg.ID, err)
	}
	return nil
}

// awaitMemory waits until the driver has everything back. A file that the container's processes sent to others outlives
// them, and the memory with it; the reservation must too.
func (g *Guard) awaitMemory() {
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		g.sweep()
		held := false
		for i := range g.cfg.GPUs {
			u := g.account.usage(i)
			held = held || u.used > 0 || u.spilled > 0 || u.flexible > 0
		}
		if len(g.account.looseWindows()) == 0 && (!held || g.files.count() == 0) { // without a file there is nothing that could hold memory
			return
		}
		if wait >= 640*time.Millisecond { // processes take a moment to end
			// Who it was sent to has no use of it that the ledger knows of, and must not keep the room from others.
			if g.endOutsiders() == 0 {
				g.logOnce("await", "memory of the container is still held by a process of the host; its reservation stays")
			}
		}
		time.Sleep(wait)
	}
}

// watchLauncher ends the guard when runc has gone and no filter came.
func (g *Guard) watchLauncher() {
	end := func() {
		g.mu.Lock()
		none := g.initPID == 0
		g.mu.Unlock()
		if none {
			g.log.Info("the container was not created")
			g.endContainer()
		}
	}
	fd, err := unix.PidfdOpen(g.cfg.LauncherPID, 0)
	if err != nil {
		time.AfterFunc(time.Second, end)
		return
	}
	if err := g.watch.watch(fd, unix.EPOLLIN, func() {
		_ = unix.Close(fd)
		// The connection may be in the socket's queue already.
		time.AfterFunc(100*time.Millisecond, end)
	}); err != nil {
		_ = unix.Close(fd)
		time.AfterFunc(time.Minute, end)
	}
}

// serving: the container is not over.
func (g *Guard) serving() bool {
	select {
	case <-g.done:
		return false
	default:
		return true
	}
}

// pause waits, until the container is over at most.
func (g *Guard) pause(d time.Duration) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-g.done:
	case <-timer.C:
	}
}

// kick wakes who waits on a channel with room for one.
func kick(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

func (g *Guard) endContainer() {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.done:
	default:
		close(g.done)
	}
}
