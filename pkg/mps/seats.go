// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/page"
)

// A seat is one container's after the other. Who had it may have its folder or its socket still, mounted or as a descriptor, and may have
// sent that on. So each container has a socket of its own, which root makes and hands to the gate by seat 0.

// What root says to the gate, and then the seat's number. The gate says that it has received it when it is done, or else why not.
const (
	newSeat = "CGPUSEAT" // with the socket
	endSeat = "CGPUENDS" // the work of the container that has the seat is to end
)

// Hand has the gate to which conn leads serve a seat by a socket that is bound, and by no other.
func Hand(conn *net.UnixConn, seat, socket int) error {
	_ = conn.SetDeadline(time.Now().Add(patience))
	return order(conn, newSeat, seat, socket)
}

// End has the gate to which conn leads have the server end the work of a seat's programs, while conn has time.
func End(conn *net.UnixConn, seat int) error { return order(conn, endSeat, seat) }

func order(conn *net.UnixConn, word string, seat int, fds ...int) error {
	_, err := receive(conn, hello, 0)
	if err != nil {
		return err
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	if err := errors.Join(write(conn, word, rights), write(conn, string([]byte{byte(seat)}), nil)); err != nil {
		return err
	}
	said, _, err := packet(conn, maxWhy, 0)
	if err == nil && said != received {
		err = fmt.Errorf("%.*q", maxWhy, said)
	}
	return err
}

// maxWhy is how much the gate says of why it has not done something.
const maxWhy = 200

// obey does what root says. Others look whether there is a gate, and say nothing.
func (g *Gate) obey(c *caller) error {
	word, fds, err := packet(c.UnixConn, len(newSeat), 1)
	if errors.Is(err, io.EOF) {
		return nil
	}
	defer func() { closeAll(fds) }()
	var seat [1]byte
	if err == nil {
		_, err = c.Read(seat[:])
	}
	switch {
	case err != nil:
		return err
	case c.peer.Uid != 0 || seat[0] < 1 || seat[0] > page.Seats:
		return fmt.Errorf("user %d: says %q of seat %d: want root, and a seat from 1 to %d", c.peer.Uid, word, seat[0], page.Seats)
	case word == newSeat && len(fds) == 1:
		socket := os.NewFile(uintptr(fds[0]), "socket")
		fds = nil
		err = g.reseat(int(seat[0]), socket)
	case word == endSeat && len(fds) == 0:
		err = g.Alone(func() error {
			why := g.End(g.callers.clientsOf(int(seat[0])))
			if why != nil {
				g.Doubt(why)
			}
			return why
		})
	default:
		return fmt.Errorf("sent %q with %d descriptors: want %q with one, or %q", word, len(fds), newSeat, endSeat)
	}
	if err != nil {
		return errors.Join(err, write(c.UnixConn, fmt.Sprintf("%.*s", maxWhy, err), nil))
	}
	return write(c.UnixConn, received, nil)
}

// reseat gives a seat its new socket.
func (g *Gate) reseat(seat int, socket *os.File) error {
	l, err := listen(socket)
	if err != nil {
		return err
	}
	g.Sit(seat, l)
	return nil
}
