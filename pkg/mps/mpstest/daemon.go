// SPDX-License-Identifier: Apache-2.0

// Package mpstest stands for the driver's control daemon of MPS and for libcuda, as far as they speak with each other
// (docs/internals/mps.md, "The pipe"): for tests of pkg/mps, and for a domain on the simulated driver.
package mpstest

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Who connects says what he is by one of these.
const (
	AsServer  = 1
	AsClient  = 2
	AsCommand = 4
)

// patience is for whatever should come at once, on a busy machine.
const patience = time.Minute

// Daemon serves one connection at a time, as the driver's does.
type Daemon struct {
	// Server gets the server's end of a client's socket, and closes it, and which part of the multiprocessors it has, in percent.
	Server func(c *net.UnixConn, percent string)
	Quit   func() // is called when it is told to
	Stuck  bool   // the server does not answer, and so the daemon does not that asks it
	Fault  bool   // the server says that it takes nobody

	mu      sync.Mutex
	heard   []string
	percent string // empty: 100
	clients map[int32]*net.UnixConn
}

// Heard is who connected: "client", "command", or what was wrong with him.
func (d *Daemon) Heard() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]string(nil), d.heard...)
}

// Serve serves until the listener is closed.
func (d *Daemon) Serve(l *net.UnixListener) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return
		}
		_ = c.SetDeadline(time.Now().Add(patience))
		if err := d.serve(c); err != nil {
			d.note(err.Error())
		}
		_ = c.Close()
	}
}

func (d *Daemon) note(what string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.heard = append(d.heard, what)
}

func (d *Daemon) serve(c *net.UnixConn) error {
	if _, err := c.Write([]byte("OUTBHELL\x00")); err != nil {
		return err
	}
	who, err := credentialsOf(c)
	if err != nil {
		return err
	}
	role, err := word(c)
	if err != nil {
		return err
	}
	switch role {
	case AsClient:
		d.note("client")
		return d.hand(c, who)
	case AsCommand:
		d.note("command")
		return d.command(c)
	}
	return fmt.Errorf("role %d", role)
}

// credentialsOf is who the caller says it is; the kernel has looked.
func credentialsOf(c *net.UnixConn) (*unix.Ucred, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PASSCRED, 1) })
	if err = errors.Join(err, failed); err != nil {
		return nil, err
	}
	packet, oob := make([]byte, 64), make([]byte, 256)
	n, size, _, _, err := c.ReadMsgUnix(packet, oob)
	if errors.Is(err, io.EOF) {
		return nil, errors.New("no credentials")
	}
	if err != nil {
		return nil, err
	}
	if string(packet[:n]) != "OUTBCRED\x00" {
		return nil, fmt.Errorf("credentials: %q", packet[:n])
	}
	messages, err := unix.ParseSocketControlMessage(oob[:size])
	if err != nil || len(messages) != 1 {
		return nil, fmt.Errorf("credentials: %d control messages, %v", len(messages), err)
	}
	return unix.ParseUnixCredentials(&messages[0])
}

func word(c *net.UnixConn) (uint32, error) {
	packet := make([]byte, 64)
	n, err := c.Read(packet)
	if err != nil {
		return 0, err
	}
	if n != 4 {
		return 0, fmt.Errorf("want a word, not %q", packet[:n])
	}
	return binary.LittleEndian.Uint32(packet), nil
}

// hand gives the client one end of a socket, and the server the other.
func (d *Daemon) hand(c *net.UnixConn, who *unix.Ucred) error {
	if int(who.Uid) != os.Geteuid() {
		return fmt.Errorf("user %d: the server ends", who.Uid) // as the driver's does, for a server of that user
	}
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(ends[0])
	server, err := Conn(ends[1])
	if err != nil {
		return err
	}
	percent := cmp.Or(d.percent, "100")
	go func() {
		who, err := credentialsOf(server) // the client's, which has a socket that the gate does not see
		if err != nil {
			_ = server.Close()
			return
		}
		d.enter(who.Pid, server)
		d.Server(server, percent)
		d.enter(who.Pid, nil)
	}()
	if _, _, err := c.WriteMsgUnix([]byte("OUTBCUFD\x00"), unix.UnixRights(ends[0]), nil); err != nil {
		return err
	}
	status, err := word(c)
	if err == nil && status != 0 {
		err = fmt.Errorf("status %d", status)
	}
	return err
}

// enter notes a client of a process, or that it has none any more.
func (d *Daemon) enter(pid int32, c *net.UnixConn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.clients == nil {
		d.clients = map[int32]*net.UnixConn{}
	}
	if d.clients[pid] = c; c == nil {
		delete(d.clients, pid)
	}
}

// ps lists the clients, as the driver's daemon does.
func (d *Daemon) ps() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	text := "PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        \n"
	for pid := range d.clients {
		text += fmt.Sprintf("%-9d %-9d %-14s %-25s %-14s %s\n", pid, 2, serverPID, "GPU-2ae9f675-2ebc-e2ca", "?", "/bin/client")
	}
	return text
}

// terminate hangs up on a client.
func (d *Daemon) terminate(pid string) {
	d.note("terminate " + pid)
	d.mu.Lock()
	defer d.mu.Unlock()
	for p, c := range d.clients {
		if fmt.Sprint(p) == pid {
			_ = c.CloseRead()
			_ = c.CloseWrite()
		}
	}
}

func (d *Daemon) command(c *net.UnixConn) error {
	packet := make([]byte, 4096)
	if n, err := c.Read(packet); err != nil || n != 8 {
		return fmt.Errorf("length: %d bytes, %v", n, err)
	}
	n, err := c.Read(packet)
	if err != nil {
		return err
	}
	text := string(packet[:max(n-2, 0)]) // a newline and a zero at its end
	if _, err := c.Read(packet); err != nil {
		return err
	}
	if _, err := c.Write([]byte(d.do(text) + "\x00")); err != nil {
		return err
	}
	_, err = c.Write([]byte{1, 0, 0, 0})
	return err
}

// serverPID is the server's, of which there is always one.
const serverPID = "4242"

// do is what a command does, and says.
func (d *Daemon) do(line string) string {
	word := strings.Fields(line)
	switch {
	case len(word) == 1 && word[0] == "quit":
		d.Quit()
	case len(word) == 1 && word[0] == "get_server_list":
		return serverPID + "\n"
	case len(word) == 2 && word[0] == "get_server_status" && word[1] == serverPID:
		if d.Stuck {
			time.Sleep(time.Hour)
		}
		if d.Fault {
			return "FAULT\n"
		}
		return "ACTIVE\n"
	case len(word) == 1 && word[0] == "ps":
		return d.ps()
	case len(word) == 3 && word[0] == "terminate_client" && word[1] == serverPID:
		d.terminate(word[2])
		return "0\n"
	case len(word) == 2 && word[0] == "set_default_active_thread_percentage":
		return word[1] + ".0\n"
	case len(word) == 3 && word[0] == "set_active_thread_percentage" && word[1] == serverPID:
		d.percent = word[2]
		return word[2] + ".0\n"
	}
	return ""
}

// Conn is a descriptor's socket, which it closes.
func Conn(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "socket")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// Dial connects to a control socket as libcuda does, or as whatever says role, and is left with what follows.
func Dial(socket string, role uint32) (*net.UnixConn, error) {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	packet := make([]byte, 64)
	n, err := c.Read(packet)
	if err == nil && string(packet[:n]) != "OUTBHELL\x00" {
		err = fmt.Errorf("hello: %q", packet[:n])
	}
	if err == nil {
		err = introduce(c)
	}
	if err == nil {
		_, err = c.Write(binary.LittleEndian.AppendUint32(nil, role))
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// Client is what libcuda does for a context: the socket that it then speaks with the server by.
func Client(socket string) (*net.UnixConn, error) {
	c, err := Dial(socket, AsClient)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	fd, err := handed(c)
	if err != nil {
		return nil, err
	}
	server, err := Conn(fd)
	if err != nil {
		return nil, err
	}
	err = introduce(server)
	if err == nil {
		_, err = c.Write([]byte{0, 0, 0, 0})
	}
	if err != nil {
		return nil, errors.Join(err, server.Close())
	}
	return server, nil
}

// introduce says who this process is.
func introduce(c *net.UnixConn) error {
	self := unix.UnixCredentials(&unix.Ucred{Pid: int32(os.Getpid()), Uid: uint32(os.Geteuid()), Gid: uint32(os.Getegid())})
	_, _, err := c.WriteMsgUnix([]byte("OUTBCRED\x00"), self, nil)
	return err
}

func handed(c *net.UnixConn) (int, error) {
	packet, oob := make([]byte, 64), make([]byte, 256)
	n, size, _, _, err := c.ReadMsgUnix(packet, oob)
	if err != nil {
		return -1, err
	}
	if string(packet[:n]) != "OUTBCUFD\x00" {
		return -1, fmt.Errorf("want a socket, not %q", packet[:n])
	}
	messages, err := unix.ParseSocketControlMessage(oob[:size])
	if err != nil {
		return -1, err
	}
	for i := range messages {
		if fds, err := unix.ParseUnixRights(&messages[i]); err == nil && len(fds) == 1 {
			return fds[0], nil
		}
	}
	return -1, errors.New("no socket came along")
}
