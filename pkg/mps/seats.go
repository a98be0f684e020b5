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

const newSeat = "CGPUSEAT" // root, to the gate, with the socket; then the seat's number, and the gate says that it has received it

// Hand has the gate to which conn leads serve a seat by a socket that is bound, and by no other.
func Hand(conn *net.UnixConn, seat, socket int) error {
	_ = conn.SetDeadline(time.Now().Add(patience))
	_, err := receive(conn, hello, 0)
	if err == nil {
		err = errors.Join(write(conn, newSeat, unix.UnixRights(socket)), write(conn, string([]byte{byte(seat)}), nil))
	}
	if err == nil {
		_, err = receive(conn, received, 0)
	}
	return err
}

// reseat takes a seat's new socket from root. Others look whether there is a gate, and say nothing.
func (g *Gate) reseat(c *caller) error {
	fds, err := receive(c.UnixConn, newSeat, 1)
	if errors.Is(err, io.EOF) {
		return nil
	}
	if err != nil {
		return err
	}
	socket := os.NewFile(uintptr(fds[0]), "socket")
	defer socket.Close()
	var seat [1]byte
	if _, err := c.Read(seat[:]); err != nil {
		return err
	}
	if c.peer.Uid != 0 || seat[0] < 1 || seat[0] > page.Seats {
		return fmt.Errorf("user %d: gives seat %d a socket: want root, and a seat from 1 to %d", c.peer.Uid, seat[0], page.Seats)
	}
	l, err := listen(socket)
	if err != nil {
		return err
	}
	g.Sit(int(seat[0]), l)
	return write(c.UnixConn, received, nil)
}
