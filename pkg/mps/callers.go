// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/page"
)

const (
	// most is how many connections there are at once. A client makes one for its process and one for each context, and they last for
	// milliseconds.
	most = 512
	// mostOfOne is how many of them one container has: who has more is hung up on.
	mostOfOne = 128
	// banTime is for how long a container's programs are turned away when one of them has kept all others waiting.
	banTime = 10 * time.Second
)

// callers are who has connected, by their containers' seats, none of which keeps the others out.
type callers struct {
	mu      sync.Mutex
	all     []*caller // in the order in which they came, but for those of seat 0, who only look
	sources [page.Seats + 1]*source
	clients map[int]*source // by the processes that have been introduced, of which some may have ended
}

// source is who comes by a seat's socket. The seat's next container has another one.
type source struct {
	seat        int
	listener    *net.UnixListener
	connections int
	turn        sync.Mutex
	banned      time.Time // until when
}

// caller is a connection.
type caller struct {
	*net.UnixConn
	peer   *unix.Ucred
	cgroup string // for messages: who is asked can move to another one below the container's
	of     *source
	in     *callers
	silent bool
}

// container finds the cgroup of a container or a run, before those that it may make below.
var container = regexp.MustCompile(`(?m)^[^:\n]*:[^:\n]*:(.*?/[^/\n]*(?:cgpu-run-[0-9a-f]{16}|[0-9a-f]{64})[^/\n]*)(?:/|$)`)

// cgroupOf is the cgroup of a process' container; of a process that has gone it is not known.
func cgroupOf(pid int32) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	return containerIn(string(text))
}

func containerIn(cgroups string) string {
	if m := container.FindStringSubmatch(cgroups); m != nil {
		return m[1]
	}
	return strings.TrimSpace(cgroups)
}

// String names a caller in messages: the process, and its container by the last folder of the cgroup.
func (c *caller) String() string {
	return fmt.Sprintf("process %d (cgroup %.100q)", c.peer.Pid, c.cgroup[strings.LastIndexByte(c.cgroup, '/')+1:])
}

// renew gives a seat a socket, and ends the one before and whoever has come by it.
func (x *callers) renew(seat int, l *net.UnixListener) *source {
	x.mu.Lock()
	defer x.mu.Unlock()
	if old := x.sources[seat]; old != nil {
		_ = old.listener.Close()
		for _, c := range x.all {
			if c.of == old {
				_ = c.Close()
			}
		}
	}
	x.sources[seat] = &source{seat: seat, listener: l}
	return x.sources[seat]
}

// close ends all sockets.
func (x *callers) close() {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, s := range x.sources {
		if s != nil {
			_ = s.listener.Close()
		}
	}
}

// enter takes a connection of a container in, unless that has too many. Where there are as many as may be the oldest goes that has said
// nothing.
func (x *callers) enter(s *source, conn *net.UnixConn) (*caller, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case x.sources[s.seat] != s:
		return nil, errFormer
	case s.connections >= mostOfOne:
		return nil, fmt.Errorf("its container has %d connections", mostOfOne)
	case s.seat == 0: // those of members keep nobody from looking
		s.connections++
		return &caller{UnixConn: conn, of: s, in: x}, nil
	}
	if len(x.all) >= most {
		i := slices.IndexFunc(x.all, func(c *caller) bool { return c.silent })
		if i < 0 {
			return nil, errors.New("there are as many connections as may be")
		}
		_ = x.all[i].Close()
		x.all = slices.Delete(x.all, i, i+1)
	}
	s.connections++
	c := &caller{UnixConn: conn, of: s, in: x, silent: true}
	x.all = append(x.all, c)
	return c, nil
}

// leave ends a connection.
func (c *caller) leave() {
	_ = c.Close()
	x := c.in
	x.mu.Lock()
	defer x.mu.Unlock()
	x.all = slices.DeleteFunc(x.all, func(o *caller) bool { return o == c })
	c.of.connections--
}

// hasSpoken keeps a connection: it has said all that a client says before its turn.
func (c *caller) hasSpoken() {
	c.in.mu.Lock()
	defer c.in.mu.Unlock()
	c.silent = false
}

// mostClients is more than NVIDIA's server takes, and leaves room for processes that have ended.
const mostClients = 1024

// introduced notes a client by its process.
func (c *caller) introduced() {
	x, pid := c.in, int(c.peer.Pid)
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.clients == nil {
		x.clients = map[int]*source{}
	}
	if len(x.clients) >= mostClients {
		maps.DeleteFunc(x.clients, func(pid int, _ *source) bool { return unix.Kill(pid, 0) == unix.ESRCH })
	}
	if _, known := x.clients[pid]; known || len(x.clients) < mostClients {
		x.clients[pid] = c.of // whose number it was before is gone
	}
}

// clientsOf are the processes of a seat's container.
func (x *callers) clientsOf(seat int) (pids []int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for pid, s := range x.clients {
		if s == x.sources[seat] {
			pids = append(pids, pid)
		}
	}
	return pids
}

// ban turns a container away for a while.
func (c *caller) ban() {
	c.in.mu.Lock()
	defer c.in.mu.Unlock()
	c.of.banned = time.Now().Add(banTime)
}

var errFormer = errors.New("its seat is another container's by now")

// refusal is why a caller does not get on, when it has its turn.
func (c *caller) refusal() error {
	c.in.mu.Lock()
	defer c.in.mu.Unlock()
	switch {
	case c.in.sources[c.of.seat] != c.of:
		return errFormer
	case time.Now().Before(c.of.banned):
		return errors.New("a program of its container has been silent just now, which keeps all others waiting")
	}
	return nil
}
