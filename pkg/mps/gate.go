// SPDX-License-Identifier: Apache-2.0

// Package mps stands between the members of a trust domain and the control daemon of NVIDIA's MPS, whose one socket takes clients, servers
// and commands alike (docs/internals/mps.md, "The pipe").
package mps

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// What is said on the daemon's socket, one packet each. Who connects says what he is; a client is handed one end of a socket whose other
// end the server gets, and speaks with the server from then on: to the daemon a client never says anything that is not one of these
// constants.
const (
	hello       = "OUTBHELL\x00" // the daemon, to all
	credentials = "OUTBCRED\x00" // the answer, with SCM_CREDENTIALS
	isClient    = "\x02\x00\x00\x00"
	handed      = "OUTBCUFD\x00" // the daemon, with SCM_RIGHTS
	received    = "\x00\x00\x00\x00"
)

// SocketName is the daemon's socket for clients, and so the gate's.
const SocketName = "control"

// network is SOCK_SEQPACKET, for package net.
const network = "unixpacket"

// startTime is for the daemon, which may have a server to start.
const startTime = 30 * time.Second

// AnyUser is the user of a Gate before a daemon that serves all.
const AnyUser = -1

// Gate lets clients through to a control daemon, and nobody else.
type Gate struct {
	Daemon string // the daemon's own socket, out of the members' reach
	// User is who the server, and so each client, must be; AnyUser for a daemon that is for all. Else it would end its server for a client
	// of another user.
	User int
	// Patience is for what a member has to say: while it has its socket and does not say so, others that start wait.
	Patience time.Duration
	Refused  func(error) // is told whom it turned away; by several goroutines
	// Prepare is called before a client is let through, with its container's seat.
	Prepare func(seat int) error
	// Doubt is called when the daemon does not take a client, or a client has its socket and does not say that it has spoken with the
	// server, which waits for it, and for it alone.
	Doubt func(error)
	// End ends the work of clients, by their processes, in a turn of its own.
	End func(pids []int) error

	turn    sync.Mutex // of one client at a time, from Prepare until it has spoken with the server
	callers callers
}

// Alone calls f in a turn of its own, when no client is on its way.
func (g *Gate) Alone(f func() error) error {
	g.turn.Lock()
	defer g.turn.Unlock()
	return f()
}

// Sit serves who connects by a seat's socket from now on, and nobody by the one before.
func (g *Gate) Sit(seat int, l *net.UnixListener) {
	go g.serve(g.callers.renew(seat, l))
}

// serve serves the container that has the seat, until its socket is closed.
func (g *Gate) serve(s *source) {
	for {
		member, err := s.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // no descriptors or memory are left, for a moment
			time.Sleep(10 * time.Millisecond)
			continue
		}
		c, err := g.receive(member, s)
		if err != nil {
			_ = member.Close()
			g.Refused(err)
			continue
		}
		go func() {
			defer c.leave()
			if err := g.relay(c); err != nil {
				g.Refused(fmt.Errorf("%v: %w", c, err))
			}
		}()
	}
}

// receive finds out who has connected.
func (g *Gate) receive(member *net.UnixConn, of *source) (*caller, error) {
	peer, err := peerOf(member)
	if err != nil {
		return nil, err
	}
	c, err := g.callers.enter(of, member)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", peer.Pid, err)
	}
	c.peer, c.cgroup = peer, cgroupOf(peer.Pid)
	return c, nil
}

// relay serves a connection. The daemon hears of it when the member has said all that it may.
func (g *Gate) relay(c *caller) error {
	_ = c.SetDeadline(time.Now().Add(g.Patience))
	if err := send(c.UnixConn, hello); err != nil {
		return nil // it has gone
	}
	if c.of.seat == 0 {
		return g.obey(c)
	}
	for i, want := range []string{credentials, isClient} {
		switch _, err := receive(c.UnixConn, want, 0); {
		case i == 0 && errors.Is(err, io.EOF):
			return nil // libcuda looks whether there is a daemon
		case err != nil:
			return err
		}
	}
	// Not before: who is hung up on without a hello takes it that there is no MPS, and computes by itself.
	if g.User != AnyUser && int(c.peer.Uid) != g.User {
		return fmt.Errorf("user %d: want user %d, whose the domain's server is; run the program as that user", c.peer.Uid, g.User)
	}
	c.hasSpoken()
	c.of.turn.Lock() // one of each container waits with those of others
	defer c.of.turn.Unlock()
	g.turn.Lock()
	defer g.turn.Unlock()
	if err := c.refusal(); err != nil {
		return err
	}
	if err := g.Prepare(c.of.seat); err != nil {
		return fmt.Errorf("its part of the multiprocessors: %w", err)
	}
	return g.introduce(c)
}

// introduce has the daemon and its server know of a client.
func (g *Gate) introduce(c *caller) error {
	daemon, end, err := g.register()
	if err != nil {
		err = fmt.Errorf("the control daemon: %w", err)
		g.Doubt(err)
		return err
	}
	defer daemon.Close()
	defer unix.Close(end)
	_ = c.SetDeadline(time.Now().Add(g.Patience))
	err = send(c.UnixConn, handed, end)
	if err == nil {
		_, err = receive(c.UnixConn, received, 0)
	}
	if err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			c.ban()
		}
		err = fmt.Errorf("has not spoken with the server: %w", err)
		_ = daemon.Close() // it waits for that, too
		g.Doubt(fmt.Errorf("%v %w", c, err))
		return err
	}
	c.introduced()
	return send(daemon, received)
}

// register tells the daemon of a client, and returns the connection and the client's end of the socket to the server.
func (g *Gate) register() (*net.UnixConn, int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	defer cancel()
	daemon, err := g.dial(ctx)
	if err != nil {
		return nil, -1, err
	}
	end, err := tell(daemon)
	if err != nil {
		_ = daemon.Close()
		return nil, -1, err
	}
	return daemon, end, nil
}

// tell tells the daemon of a client, in the gate's name.
func tell(daemon *net.UnixConn) (int, error) {
	if err := errors.Join(send(daemon, credentials), write(daemon, isClient, nil)); err != nil {
		return -1, err
	}
	fds, err := receive(daemon, handed, 1)
	if err != nil {
		return -1, err
	}
	return fds[0], nil
}

// dial connects to the daemon, whose backlog is short, and waits for its hello.
func (g *Gate) dial(ctx context.Context) (*net.UnixConn, error) {
	for {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, g.Daemon)
		if err == nil {
			daemon := conn.(*net.UnixConn)
			deadline, _ := ctx.Deadline()
			_ = daemon.SetDeadline(deadline)
			if _, err = receive(daemon, hello, 0); err == nil {
				return daemon, nil
			}
			_ = daemon.Close()
		}
		if !errors.Is(err, syscall.EAGAIN) && !errors.Is(err, io.EOF) {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func peerOf(c *net.UnixConn) (*unix.Ucred, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var peer *unix.Ucred
	var failed error
	err = raw.Control(func(fd uintptr) { peer, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return peer, errors.Join(err, failed)
}

// send sends a packet with this process' credentials, which both libcuda and the daemon look for, and with descriptors.
func send(c *net.UnixConn, packet string, fds ...int) error {
	oob := unix.UnixCredentials(&unix.Ucred{Pid: int32(os.Getpid()), Uid: uint32(os.Geteuid()), Gid: uint32(os.Getegid())})
	if len(fds) > 0 {
		oob = append(oob, unix.UnixRights(fds...)...)
	}
	return write(c, packet, oob)
}

func write(c *net.UnixConn, packet string, oob []byte) error {
	_, _, err := c.WriteMsgUnix([]byte(packet), oob, nil)
	return err
}

// receive receives the packet that must come now, with as many descriptors. It leaves no other descriptor open.
func receive(c *net.UnixConn, want string, rights int) ([]int, error) {
	said, fds, err := packet(c, len(want), rights)
	switch {
	case err != nil:
	case said != want:
		err = fmt.Errorf("sent %q: want %q; the gate is for CUDA programs, and not for commands", said, want)
	case len(fds) != rights:
		err = fmt.Errorf("sent descriptors with %q: want %d", want, rights)
	default:
		return fds, nil
	}
	closeAll(fds)
	return nil, err
}

// packet receives the next packet, of which one more byte than size says that it is longer, with up to as many descriptors.
func packet(c *net.UnixConn, size, rights int) (said string, fds []int, err error) {
	text := make([]byte, size+1)
	var oob []byte // without room for descriptors the kernel makes none
	if rights > 0 {
		oob = make([]byte, unix.CmsgSpace(4*rights))
	}
	n, size, flags, _, err := c.ReadMsgUnix(text, oob)
	if err != nil {
		return "", nil, err
	}
	fds, err = descriptors(oob[:size])
	if err == nil && flags&unix.MSG_CTRUNC != 0 {
		err = fmt.Errorf("sent descriptors with %q: want %d", text[:n], rights)
	}
	if err != nil {
		closeAll(fds)
		fds = nil
	}
	return string(text[:n]), fds, err
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

func descriptors(oob []byte) ([]int, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var all []int
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return all, err
		}
		all = append(all, fds...)
	}
	return all, nil
}
