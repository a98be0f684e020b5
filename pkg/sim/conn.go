// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"syscall"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/sched"
)

// Conn is a Session on the server of cmd/cgpu-sim. Its methods are those of Session and safe for concurrent use; a slow
// call holds up no other. When the connection is lost every method fails, Ioctl with EIO.
type Conn struct {
	c net.Conn

	write sync.Mutex

	mu      sync.Mutex
	next    uint64
	pending map[uint64]chan answer
	err     error // why the connection is over
}

type answer struct {
	errno syscall.Errno
	body  []byte
}

// Dial connects to the server's socket (<run dir>/sim.sock) as an executor that has the GPU nodes with these minors.
func Dial(path string, minors []int) (*Conn, error) {
	nc, err := net.Dial("unix", path)
	if err != nil {
		return nil, fmt.Errorf("sim: connect to the simulated driver: %w; start it with cgpu-sim", err)
	}
	c := &Conn{c: nc, pending: map[uint64]chan answer{}}
	go c.dispatchAnswers(bufio.NewReader(nc))
	b := appendU32(appendU32(nil, wireVersion), uint32(len(minors)))
	for _, m := range minors {
		b = appendU32(b, uint32(int32(m)))
	}
	if _, err := c.do(opHello, b); err != nil {
		nc.Close()
		return nil, fmt.Errorf("sim: %s: %w; are both sides of one version?", path, err)
	}
	return c, nil
}

// Resume goes on with a connection that another program of this process had, on which nothing is under way; last is its last request.
func Resume(f *os.File, last uint64) (*Conn, error) {
	nc, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("sim: the connection that was handed over: %w", err)
	}
	c := &Conn{c: nc, pending: map[uint64]chan answer{}, next: last}
	go c.dispatchAnswers(bufio.NewReader(nc))
	return c, nil
}

// Revive is Resume of a connection of a process that was killed, at whatever moment: requests may be under way, which it awaits, and of
// answers that one may have read a piece. Files of the session but known are closed, as the kernel closes what nobody has open.
func Revive(f *os.File, known []uint32) (*Conn, error) {
	nc, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("sim: the connection of a process that was killed: %w", err)
	}
	c := &Conn{c: nc, pending: map[uint64]chan answer{}, next: rand.Uint64()>>1 | 1<<62} // which no request of that one had
	r := bufio.NewReader(nc)
	frame := appendU32(append(appendU64(nil, c.next), opBarrier), uint32(len(known)))
	for _, id := range known {
		frame = appendU32(frame, id)
	}
	if err = writeFrame(nc, frame); err == nil {
		err = skipPast(r, appendU32(appendU64(appendU32(nil, 12), c.next), 0))
	}
	if err != nil {
		nc.Close()
		return nil, fmt.Errorf("sim: the connection of a process that was killed: %w", err)
	}
	go c.dispatchAnswers(r)
	return c, nil
}

// skipPast reads until what it has read ends in some bytes.
func skipPast(r *bufio.Reader, end []byte) error {
	var last []byte
	for !bytes.Equal(last, end) {
		b, err := r.ReadByte()
		if err != nil {
			return err
		}
		if last = append(last, b); len(last) > len(end) {
			last = last[1:]
		}
	}
	return nil
}

// State is what Resume needs. Nothing may be under way.
func (c *Conn) State() (conn syscall.Conn, last uint64, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	conn, ok = c.c.(syscall.Conn)
	return conn, c.next, ok && c.err == nil && len(c.pending) == 0
}

// dispatchAnswers hands answers to whoever waits for them.
func (c *Conn) dispatchAnswers(r *bufio.Reader) {
	for {
		b, err := readFrame(r)
		if err != nil {
			c.fail(fmt.Errorf("sim: connection to the simulated driver lost: %w", err))
			return
		}
		d := &decoder{b: b}
		id, errno := d.u64(), d.u32()
		c.mu.Lock()
		ch := c.pending[id]
		delete(c.pending, id)
		c.mu.Unlock()
		if ch != nil {
			ch <- answer{syscall.Errno(errno), d.b}
		}
	}
}

func (c *Conn) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = err
	}
	for id, ch := range c.pending {
		close(ch)
		delete(c.pending, id)
	}
}

// do sends a request and waits. The error is the transport's, or the errno of the answer.
func (c *Conn) do(op uint8, body []byte) ([]byte, error) {
	a, err := c.roundTrip(op, body)
	if err == nil && a.errno != 0 {
		err = a.errno
	}
	return a.body, err
}

func (c *Conn) roundTrip(op uint8, body []byte) (answer, error) {
	ch := make(chan answer, 1)
	c.mu.Lock()
	if c.err != nil {
		defer c.mu.Unlock()
		return answer{}, c.err
	}
	c.next++
	id := c.next
	c.pending[id] = ch
	c.mu.Unlock()

	c.write.Lock()
	err := writeFrame(c.c, append(append(appendU64(make([]byte, 0, 9+len(body)), id), op), body...))
	c.write.Unlock()
	if err != nil {
		c.mu.Lock()
		delete(c.pending, id)
		c.mu.Unlock()
		return answer{}, fmt.Errorf("sim: connection to the simulated driver: %w", err)
	}
	a, ok := <-ch
	if !ok {
		c.mu.Lock()
		defer c.mu.Unlock()
		return answer{}, c.err
	}
	return a, nil
}

// OpenFile opens a node; see Session.OpenFile.
func (c *Conn) OpenFile(node NodeKind, minor int) (FileID, error) {
	b, err := c.do(opOpen, appendU32([]byte{byte(node)}, uint32(int32(minor))))
	if err != nil {
		return 0, fmt.Errorf("sim: open node kind %d minor %d: %w", node, minor, err)
	}
	return FileID(rm.U32(b, 0)), nil
}

// CloseFile is the last close of a file; see Session.CloseFile.
func (c *Conn) CloseFile(id FileID) error {
	if _, err := c.do(opClose, appendU32(nil, uint32(id))); err != nil {
		return fmt.Errorf("sim: close file %d: %w", id, err)
	}
	return nil
}

// CloseExport is the last close of an exported descriptor; see Session.CloseExport.
func (c *Conn) CloseExport(key int32) error {
	_, err := c.do(opCloseExport, appendU32(nil, uint32(key)))
	return err
}

// Ioctl executes one call; see Session.Ioctl.
func (c *Conn) Ioctl(id FileID, pid, tid int32, call *rm.Call) syscall.Errno {
	b := appendU32(appendU32(appendU32(nil, uint32(id)), uint32(pid)), uint32(tid))
	a, err := c.roundTrip(opIoctl, appendCall(b, call))
	if err != nil {
		return syscall.EIO
	}
	d := &decoder{b: a.body}
	if a.errno != syscall.EPROTO {
		d.result(call)
	}
	if d.bad {
		return syscall.EIO
	}
	return a.errno
}

// Snapshot describes the driver's state.
func (c *Conn) Snapshot() (Snapshot, error) {
	var s Snapshot
	b, err := c.do(opSnapshot, nil)
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil {
		return s, fmt.Errorf("sim: snapshot: %w", err)
	}
	return s, nil
}

// Switches tells the context switches of a GPU; see Session.Switches.
func (c *Conn) Switches(minor int, since uint64) (records []sched.Switch, next uint64, lost bool, err error) {
	b, err := c.do(opSwitches, appendU64(appendU32(nil, uint32(int32(minor))), since))
	if err == nil {
		d := &decoder{b: b}
		if records, next, lost = d.switches(); !d.bad {
			return records, next, lost, nil
		}
		err = errFrame
	}
	return nil, 0, false, fmt.Errorf("sim: switches of GPU node %d: %w", minor, err)
}

// Pending reports whether any of the processes has work; see Session.Pending.
func (c *Conn) Pending(minor int, pids []int) (bool, error) {
	req := appendU32(appendU32(nil, uint32(int32(minor))), uint32(len(pids)))
	for _, pid := range pids {
		req = appendU32(req, uint32(int32(pid)))
	}
	b, err := c.do(opPending, req)
	if err == nil && len(b) != 1 {
		err = errFrame
	}
	if err != nil {
		return false, fmt.Errorf("sim: pending work on GPU node %d: %w", minor, err)
	}
	return b[0] != 0, nil
}

// Trouble makes trouble with a GPU.
func (c *Conn) Trouble(t Trouble) error {
	b, err := json.Marshal(t)
	if err == nil {
		_, err = c.do(opTrouble, b)
	}
	if err != nil {
		return fmt.Errorf("sim: GPU %d: %w", t.GPU, err)
	}
	return nil
}

// SetDelay changes the delays of later calls of everyone.
func (c *Conn) SetDelay(delay Delay) error {
	b, err := json.Marshal(delay)
	if err == nil {
		_, err = c.do(opDelay, b)
	}
	if err != nil {
		return fmt.Errorf("sim: set delays: %w", err)
	}
	return nil
}

// Close ends the session; the server closes what it opened.
func (c *Conn) Close() error {
	return c.c.Close()
}
