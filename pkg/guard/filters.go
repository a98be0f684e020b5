// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
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
)

// maxProcessState bounds what an OCI runtime sends with the listener; annotations of the container travel in it.
const maxProcessState = 1 << 20

// filterPatience is how long a filter may be on its way. Slurm starts no task of a step before the last one is prepared
// (slurm/cgpu_spank.c). The socket is root's.
const filterPatience = 5 * time.Minute

// acceptFilters takes the filters of the container and of each exec.
func (g *Guard) acceptFilters(l *net.UnixListener) {
	acceptAll(&g.doors.seccomp, l.AcceptUnix, g.acceptFails, func(conn *net.UnixConn) {
		_ = conn.SetDeadline(time.Now().Add(filterPatience))
		if err := g.receiveFilter(conn); err != nil {
			g.log.Error("a connection brought no filter", "err", err)
		}
	})
}

func (g *Guard) acceptFails(err error) { g.logOnce("accept", "a connection waits", "err", err) }

// acceptPause is how long a connection waits at least that could not be taken.
const acceptPause = 50 * time.Millisecond

// acceptAll serves all connections, until the listener is closed. That one cannot be taken, because there are too many open files say,
// passes: who connects waits meanwhile.
func acceptAll[C net.Conn](d *door, accept func() (C, error), fails func(error), serve func(C)) {
	for {
		conn, err := accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case errors.Is(err, os.ErrDeadlineExceeded):
			d.awaitOpen()
		case err != nil:
			fails(err)
			time.Sleep(acceptPause)
		default:
			d.enter()
			go func() {
				defer d.leave()
				defer conn.Close()
				serve(conn)
			}()
		}
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
		thread := cmp.Or(state.Pid, g.initPID) // of a `cgpu run` the one that is about to become the first process
		g.devFirst = deviceOfDev(thread)
		g.holdWords(thread)
	}
	g.listeners++
	g.mu.Unlock()
	if first {
		kick(g.sentFDs.members)
		if err := g.recordInit(); err != nil {
			g.log.Warn("cannot record the container's first process", "err", err)
		}
	}
	l := g.serveListener(fd)
	return g.watch.watch(fd, 0, func() { g.filterGone(l) })
}

// serveListener begins to serve a filter.
func (g *Guard) serveListener(fd int) *listener {
	l := g.newListener(fd)
	g.mu.Lock()
	g.filters[l] = true
	g.books.note(&g.own)
	g.mu.Unlock()
	g.books.commit(nil) // before the first call: what the books do not name is closed with this guard
	l.spawn()
	return l
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
	l.halted.Store(true)
	if l.total.Load() == 0 { // else the last worker does it
		l.close()
	}
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

func (g *Guard) firstPID() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.initPID
}
