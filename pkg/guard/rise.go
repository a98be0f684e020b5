// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/gpusched"
	"github.com/opencgpu/cgpu/pkg/guard/journal"
	"github.com/opencgpu/cgpu/pkg/guard/keeper"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/proc"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// How a guard goes on in the place of one that was killed (docs/adr/0015-keeper.md). What that one knew is in its books, and what was under
// way in its flights: such a call is answered if the books have what came of it. If not, what the driver may have made of it is taken back,
// and the call is served from its beginning; its caller waits in the kernel. Where nobody can tell, the process that made it is ended.

// Fallen is a guard that was killed.
type Fallen struct {
	*Revived
	Memory *keeper.Memory
	last   uint64 // commit
}

// ReadFallen reads what a guard has left, and closes what it had open and nobody needs. With an error it is nil, or has what is known.
func ReadFallen(fd int) (*Fallen, error) {
	m, err := keeper.OpenMemory(fd)
	if err != nil {
		return nil, fmt.Errorf("what the guard has left: %w", err)
	}
	f := &Fallen{Memory: m}
	books := os.NewFile(uintptr(m.Files()[m.Active().Load()&1]), "journal")
	entries, last, err := journal.Read(books)
	books.Close() // before Left comes by its number
	if err != nil {
		return nil, err
	}
	f.last = last
	if f.Revived, err = ReadBooks(entries); err != nil {
		return f, err
	}
	kept := append(f.Descriptors(), fd)
	for _, x := range f.flights() {
		if x.outcome(f.last) == unknown && !slices.Contains(kept, int(x.fd)) && x.fd > 2 {
			kept = append(kept, int(x.fd))
		}
	}
	if err := keeper.Left(kept); err != nil {
		return f, err
	}
	if !m.Restarted(gpusched.Monotonic()) {
		return f, errors.New("guards of this container end again and again")
	}
	return f, f.checkDescriptors()
}

// SimFiles are what the books name of the simulated driver's files. Others it has to close, as keeper.Left does with descriptors: that
// guard was about to write them down, as a file of an RM client of its own.
func (f *Fallen) SimFiles() (list []uint32) {
	for _, x := range f.Files {
		list = append(list, x.Sim)
	}
	for _, x := range f.Process.OldRM {
		list = append(list, x.File)
	}
	if f.Process.RM != nil {
		list = append(list, f.Process.RM.File)
	}
	return list
}

// flights are those that hold a notification.
func (f *Fallen) flights() (list []*flight) {
	for i := range keeper.MaxFlights {
		if x, _ := flightAt(f.Memory.Flight(i)); x.notif.ID != 0 {
			list = append(list, x)
		}
	}
	return list
}

// checkDescriptors sees that the books' descriptors are what the books say: a number that was used again would be a disaster.
func (f *Fallen) checkDescriptors() error {
	var wrong error
	check := func(fd int, what string) {
		target, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
		if err != nil || !strings.Contains(target, what) {
			wrong = fmt.Errorf("%w: descriptor %d is %q, %v: want %s", errBooks, fd, target, err, what)
		}
	}
	for _, fd := range f.Process.Listeners {
		check(fd, "seccomp")
	}
	for _, x := range f.Files {
		if x.Weak != nil {
			check(x.Weak.Epoll, "eventpoll")
		} else {
			check(x.Strong, "/")
		}
	}
	for _, x := range f.Account.Windows {
		if x.File != nil {
			check(x.File.Epoll, "eventpoll")
		}
	}
	for _, c := range f.Account.Clients {
		for _, e := range c.Events {
			check(e.Epoll, "eventpoll")
		}
	}
	for _, x := range f.Processes {
		check(x.PidFD, "pidfd")
	}
	return wrong
}

// Rise makes the guard that goes on.
func Rise(f *Fallen, driver Driver, log *slog.Logger) (*Guard, Sockets, error) {
	g, err := Revive(f.Revived, driver, log)
	if err != nil {
		return nil, Sockets{}, err
	}
	if err := g.mayGoOn(f); err != nil {
		return nil, Sockets{}, err
	}
	sockets, err := g.takeWhatIsOutside(f.State)
	if err != nil {
		return nil, sockets, err
	}
	g.fallen = f
	return g, sockets, g.moveRecord()
}

// mayGoOn refuses where something may be in a file of the container's, which outlives processes, and nobody can tell what.
func (g *Guard) mayGoOn(f *Fallen) error {
	for _, x := range f.flights() {
		c, ok := x.call()
		if !ok || x.outcome(f.last) != unknown || rm.UVMShaped(c.Cmd) || c.NR() != rm.EscControl {
			continue
		}
		switch ctl, _ := g.abi.Control(rm.U32(c.Outer, rm.ControlCmd)); ctl.Kind {
		case rm.ControlExportFD, rm.ControlExportFDs, rm.ControlCreateExportFD:
			return errors.New("memory was being exported to a file, and nobody can tell whether it is there")
		}
	}
	return nil
}

// rise begins where the other guard has stopped. Its memory is let go of when this one's is complete.
func (g *Guard) rise() {
	f := g.fallen
	g.fallen = nil // or all that it has would be kept for as long as this guard
	g.freeUnknownHandles(f)
	g.endOldClients()
	g.closeRights(f.Memory.Rights())
	var again, ends []*flight
	for _, x := range f.flights() {
		switch g.land(f, x) {
		case unknown:
			ends = append(ends, x)
		case undone:
			again = append(again, x)
		}
	}
	for _, x := range ends { // before it has an answer: it could end by itself, and nobody would be told why
		g.endUndecided(x)
	}
	for _, tgid := range f.Rooting {
		g.endOwner(tgid, "it was making an RM client when the guard was killed")
	}
	for !g.work.TryLock() { // windows of what has ended may be looked at by now, and what changes meanwhile nobody would write down
		time.Sleep(time.Millisecond) // to wait for the lock would keep others from it, whom its holder may wait for
	}
	g.beginBooks(f.Memory)
	g.work.Unlock()
	for gpu := range g.cfg.GPUs {
		if len(g.account.groupsOn(gpu)) > 0 {
			g.gpuTime.Made(gpu)
		}
	}
	g.goOnWithRest(f.State)
	g.startAudit(unsure)                     // the driver has the last word
	for _, fd := range f.Process.Listeners { // from here on others change what is read above
		g.resumeFilter(fd)
	}
	for _, x := range again {
		g.serveAgain(x)
	}
	g.startKeeper() // who goes on after this guard must find these calls, which nobody hands out again
	stall := gpusched.Monotonic() - f.Memory.Died()
	g.log.Warn("the guard was killed; this one goes on", "stall", stall, "calls", len(again), "ended", len(ends)+len(f.Rooting))
	g.events.Note(event.Event{Kind: event.Warning, PID: os.Getpid(),
		Text: fmt.Sprintf("the guard was killed; another one has gone on in its place after %v", stall.Round(time.Millisecond/10))})
	f.Memory.Close()
}

// tgidOf is the process of a thread; 0: it is gone.
func tgidOf(tid int) int {
	tgid, _, _, err := readStatus(tid)
	if err != nil {
		return 0
	}
	return tgid
}

// moveRecord tells the ledger who the guard is.
func (g *Guard) moveRecord() error {
	start, err := ledger.ProcStart(os.Getpid())
	if err == nil {
		err = ledger.Open(g.cfg.RunDir).Update(g.cfg.Nonce, func(r *ledger.Record) error {
			r.GuardPID, r.GuardStart = os.Getpid(), start
			return nil
		})
	}
	if err != nil {
		return fmt.Errorf("tell the ledger who the guard is: %w", err)
	}
	return nil
}

// closeRights closes objects that were open for the moment of a call.
func (g *Guard) closeRights(list []keeper.Right) {
	for _, r := range list {
		c := g.account.client(r.Client)
		if c == nil {
			continue
		}
		t, ok := g.fileOf(c)
		if ok {
			c.open.mu.Lock()
			_, _ = g.callShare(t, c, openRight{r.Object, r.Access}, shareActionRevoke) // the object may be gone
			c.open.mu.Unlock()
			t.Done()
			continue
		}
		g.endOwner(c.tgid, "an object of it was open when the guard was killed, and cannot be closed")
	}
}

// endOwner ends a process and what it has, where nobody can tell what that is.
func (g *Guard) endOwner(tgid int, why string) {
	g.log.Error("killing a process", "pid", tgid, "why", why)
	g.events.Note(event.Event{Kind: event.Killed, PID: tgid, Text: why})
	g.killClients(func(c *client) bool { return c.tgid == tgid }) // their files may be a child's, too
	if tgid > 0 && !proc.Exiting(tgid) {
		g.stats.processesKilled.Add(1)
		g.killProcess(tgid)
	}
}

// endUndecided ends all that a call may have changed, and the process that has made it.
func (g *Guard) endUndecided(x *flight) {
	defer unix.Close(int(x.fd)) // ReadFallen has kept it
	if f := g.files.find(int(x.fd), nodeUVM); f != nil && rm.UVMShaped(x.cmd) {
		g.endUVM(f)
	} else if c, ok := x.call(); ok && len(c.Outer) >= 4 && !rm.UVMShaped(x.cmd) { // every escape that names a client has it first
		named := rm.U32(c.Outer, 0)
		g.killClients(func(c *client) bool { return c.handle == named })
	}
	g.endOwner(tgidOf(int(x.notif.PID)), "a call of it was under way when the guard was killed, and nobody can tell what came of it")
	l := &listener{guard: g, fd: int(x.listener)}
	l.answer(x.notif.ID, fail(unix.ENODEV))
}

// land settles a call that was under way, and gives its answer if it has one.
func (g *Guard) land(f *Fallen, x *flight) outcome {
	l := &listener{guard: g, fd: int(x.listener)}
	if !slices.Contains(f.Process.Listeners, l.fd) {
		return answered
	}
	waits, came := l.valid(x.notif.ID), x.outcome(f.last)
	if came == unknown {
		if came = g.settle(x); came == unknown {
			return unknown
		}
		_ = unix.Close(int(x.fd))
	}
	switch {
	case !waits:
		return answered // by a signal; nobody asks any more
	case came == answered:
		g.deliver(l, x)
	}
	return came
}

// deliver gives the answer that the other guard was about to give.
func (g *Guard) deliver(l *listener, x *flight) {
	rep := reply{resume: x.resume != 0, errno: syscall.Errno(x.errno)}
	var parts []memoryPart
	for _, p := range x.parts[:min(x.partN, maxParts)] {
		b, ok := x.bytes(p)
		if !ok {
			rep = fail(unix.EFAULT)
			break
		}
		parts = append(parts, memoryPart{p.addr, b})
	}
	if rep.errno == 0 && !writeMemory(int(x.notif.PID), parts) {
		rep = fail(unix.EFAULT)
	}
	l.answer(x.notif.ID, rep)
}

// bytes are a part of the worker's memory.
func (x *flight) bytes(p flightPart) ([]byte, bool) {
	body := x.body()
	if int(p.at) > len(body) || int(p.len) > len(body)-int(p.at) || p.len == 0 {
		return nil, false
	}
	return body[p.at:][:p.len:p.len], true
}

// call is the call as the other guard made it, with what the driver has written into it.
func (x *flight) call() (*rm.Call, bool) {
	outer, ok := x.bytes(x.at)
	if !ok || x.whole == 0 || x.blockN > maxParts {
		return nil, false
	}
	c := &rm.Call{Cmd: x.cmd, Outer: slices.Clone(outer)}
	for _, b := range x.blocks[:x.blockN] {
		data, ok := x.bytes(b.flightPart)
		if !ok && b.len > 0 {
			return nil, false
		}
		c.Blocks = append(c.Blocks, rm.Block{In: int(b.in), Off: int(b.off), Addr: b.addr, Data: slices.Clone(data)})
	}
	return c, true
}

// serveAgain serves a call that another guard had taken up.
func (g *Guard) serveAgain(x *flight) {
	g.mu.Lock()
	var l *listener
	for at := range g.filters {
		if at.fd == int(x.listener) {
			l = at
		}
	}
	g.mu.Unlock()
	if l == nil {
		return
	}
	w, err := l.idleWorker()
	if err != nil {
		g.log.Error("no memory for a worker", "err", err)
		l.answer(x.notif.ID, fail(unix.ENOMEM))
		return
	}
	if w.flight != nil {
		w.flight.received(l.fd)
	}
	*w.notif = x.notif
	l.total.Add(1)
	go func() {
		defer l.total.Add(-1)
		defer l.parkWorker(w)
		w.start = time.Now()
		w.serve(w.notif)
	}()
}
