package guard

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/page"
)

// maxProcessState bounds what an OCI runtime sends with the listener; annotations of the container travel in it.
const maxProcessState = 1 << 20

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
	release := g.keepTally()
	go g.serveControl(s.Control)
	go g.acceptFilters(s.Seccomp)
	g.watchLauncher()
	over := make(chan struct{})
	if g.gpuTime.Schedules() {
		g.gpuTime.Begin()
		go g.watchLedger(over)
	}
	go g.watchOutsiders()
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
			held = held || u.used > 0 || u.spilled > 0
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

func (g *Guard) endContainer() {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.done:
	default:
		close(g.done)
	}
}

// acceptFilters takes the filters of the container and of each exec.
func (g *Guard) acceptFilters(l *net.UnixListener) {
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				g.log.Error("accept", "err", err)
			}
			return
		}
		go func() {
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
			if err := g.receiveFilter(conn); err != nil {
				g.log.Error("a connection brought no filter", "err", err)
			}
		}()
	}
}

// receiveFilter receives one filter's descriptor and starts to serve it.
func (g *Guard) receiveFilter(conn *net.UnixConn) error {
	var data, oob []byte
	buf, control := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(16*4))
	var fds []int
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}()
	var state specs.ContainerProcessState
	for {
		n, oobn, _, _, err := conn.ReadMsgUnix(buf, control)
		if err != nil {
			return fmt.Errorf("read the container process state: %w", err)
		}
		oob = control[:oobn]
		if oobn > 0 {
			more, err := parseFDs(oob)
			if err != nil {
				return err
			}
			fds = append(fds, more...)
		}
		if data = append(data, buf[:n]...); len(data) > maxProcessState {
			return errors.New("the container process state is too long")
		}
		if json.Unmarshal(data, &state) == nil {
			break
		}
		if n == 0 {
			return errors.New("the container process state is not JSON")
		}
	}
	var who struct {
		Nonce string `json:"nonce"` // written by pkg/spec
	}
	if err := json.Unmarshal([]byte(state.Metadata), &who); err != nil || who.Nonce != g.cfg.Nonce {
		return fmt.Errorf("the filter is of another container (%.40q)", state.Metadata)
	}
	for i, name := range state.Fds {
		if name != specs.SeccompFdName || i >= len(fds) {
			continue
		}
		if target, err := os.Readlink("/proc/self/fd/" + fmt.Sprint(fds[i])); err != nil || !strings.Contains(target, "seccomp") {
			return fmt.Errorf("the descriptor is no seccomp listener (%s)", target)
		}
		fd := fds[i]
		fds = append(fds[:i], fds[i+1:]...)
		return g.serveFilter(fd, state)
	}
	return errors.New("no seccomp listener came with the container process state")
}

func parseFDs(oob []byte) ([]int, error) {
	messages, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("parse the control message: %w", err)
	}
	var fds []int
	for _, m := range messages {
		f, err := syscall.ParseUnixRights(&m)
		if err != nil {
			return nil, fmt.Errorf("parse the descriptors: %w", err)
		}
		for _, fd := range f {
			syscall.CloseOnExec(fd)
		}
		fds = append(fds, f...)
	}
	return fds, nil
}

// serveFilter starts the workers of a filter and waits, without a thread, for its end.
func (g *Guard) serveFilter(fd int, state specs.ContainerProcessState) error {
	g.mu.Lock()
	first := g.initPID == 0
	if first {
		g.initPID = state.State.Pid
		if g.initPID == 0 {
			g.initPID = state.Pid
		}
		g.cgroups = cgroupsOf(g.initPID)
		g.leaseHeld = append(g.leaseHeld, holdOpen(g.cgroups.leasable(), g.log)...)
		g.initStart, _ = ledger.ProcStart(g.initPID)
		g.devFirst = deviceOfDev(g.initPID)
	}
	g.listeners++
	g.mu.Unlock()
	if first {
		if err := g.recordInit(); err != nil {
			g.log.Warn("cannot record the container's first process", "err", err)
		}
	}
	l := g.newListener(fd)
	return g.watch.watch(fd, 0, func() { g.filterGone(l) })
}

// recordInit tells the ledger which process the container is, for the case that this guard is killed.
func (g *Guard) recordInit() error {
	pid := g.firstPID()
	start, err := ledger.ProcStart(pid)
	if err != nil {
		return err
	}
	var record ledger.Record
	err = ledger.Open(g.cfg.RunDir).Update(g.cfg.Nonce, func(r *ledger.Record) error {
		r.InitPID, r.InitStart = pid, start
		record = *r
		return nil
	})
	if err == nil {
		g.noteStart(record)
	}
	return err
}

// lastBreath is how long the guard stays after its last filter: runc may be about to load one for an exec.
const lastBreath = 2 * time.Millisecond

// filterGone ends the workers of a filter that no task has any more. When it was the last one, the container is over.
func (g *Guard) filterGone(l *listener) {
	l.dead.Store(true)
	go func() {
		for deadline := time.Now().Add(2 * time.Second); l.total.Load() > 0 && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}
		if l.total.Load() == 0 {
			l.close()
		}
	}()
	g.startSweep()
	g.mu.Lock()
	g.listeners--
	last := g.listeners == 0
	g.mu.Unlock()
	if last {
		time.AfterFunc(lastBreath, func() {
			g.mu.Lock()
			over := g.listeners == 0
			g.mu.Unlock()
			if over {
				g.endContainer()
			}
		})
	}
}
