// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"net"
	"sync"
	"syscall"
	"time"
)

// maxInFlight bounds the requests of one connection that run at a time.
const maxInFlight = 256

// Serve answers connections of Dial on l until ctx ends, and then closes l and every connection. What a connection
// opened is closed with it: a guard that was killed gives everything back.
func (d *Driver) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	context.AfterFunc(ctx, func() { l.Close() })
	wg.Go(func() { d.keepUp(ctx) })
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ECONNABORTED) {
				continue
			}
			return err
		}
		wg.Go(func() {
			stop := context.AfterFunc(ctx, func() { c.Close() })
			defer stop()
			d.serveConn(c)
		})
	}
}

// keepUp computes the engines' time in small pieces, so that no call finds hours of it to do.
func (d *Driver) keepUp(ctx context.Context) {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			d.mu.Lock()
			d.tick()
			d.mu.Unlock()
		}
	}
}

// serveConn serves one connection. A peer that breaks the protocol is dropped.
func (d *Driver) serveConn(c net.Conn) {
	defer c.Close()
	r := bufio.NewReader(c)
	s, err := d.hello(c, r)
	if err != nil {
		return
	}
	var (
		wg    sync.WaitGroup
		write sync.Mutex
		slots = make(chan struct{}, maxInFlight)
	)
	defer wg.Wait()
	defer s.Close() // before the wait: it ends delays
	for {
		b, err := readFrame(r)
		if err != nil {
			return
		}
		req := &decoder{b: b}
		id, op := req.u64(), req.u8()
		if op == opBarrier { // nothing else is under way then
			for range maxInFlight {
				slots <- struct{}{}
			}
			for range maxInFlight {
				<-slots
			}
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			errno, result := d.serve(s, op, req)
			write.Lock()
			defer write.Unlock()
			if writeFrame(c, append(appendU32(appendU64(nil, id), uint32(errno)), result...)) != nil {
				c.Close() // ends the loop above
			}
		})
	}
}

func (d *Driver) hello(c net.Conn, r *bufio.Reader) (*Session, error) {
	b, err := readFrame(r)
	if err != nil {
		return nil, err
	}
	req := &decoder{b: b}
	id, op, version, n := req.u64(), req.u8(), req.u32(), req.u32()
	if op != opHello || version != wireVersion || n > maxGPUs {
		_ = writeFrame(c, appendU32(appendU64(nil, id), uint32(syscall.EPROTO)))
		return nil, errFrame
	}
	var minors []int
	for range n {
		minors = append(minors, int(int32(req.u32())))
	}
	if req.bad {
		return nil, errFrame
	}
	s := d.Session(minors)
	if err := writeFrame(c, appendU32(appendU64(nil, id), 0)); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// serve does one request.
func (d *Driver) serve(s *Session, op uint8, req *decoder) (syscall.Errno, []byte) {
	switch op {
	case opOpen:
		node, minor := NodeKind(req.u8()), int(int32(req.u32()))
		if req.bad {
			return syscall.EPROTO, nil
		}
		f, err := s.OpenFile(node, minor)
		return errnoOf(err), appendU32(nil, uint32(f))
	case opClose:
		f := FileID(req.u32())
		if req.bad {
			return syscall.EPROTO, nil
		}
		return errnoOf(s.CloseFile(f)), nil
	case opIoctl:
		f, pid, tid := FileID(req.u32()), int32(req.u32()), int32(req.u32())
		call := req.call()
		if req.bad {
			return syscall.EPROTO, nil
		}
		errno := s.Ioctl(f, pid, tid, call)
		return errno, appendResult(nil, call)
	case opCloseExport:
		key := int32(req.u32())
		if req.bad {
			return syscall.EPROTO, nil
		}
		return errnoOf(s.CloseExport(key)), nil
	case opSnapshot:
		b, err := json.Marshal(d.Snapshot())
		return errnoOf(err), b
	case opSwitches:
		minor, since := int(int32(req.u32())), req.u64()
		if req.bad {
			return syscall.EPROTO, nil
		}
		records, next, lost, err := s.Switches(minor, since)
		return errnoOf(err), appendSwitches(nil, records, next, lost)
	case opPending:
		minor, n := int(int32(req.u32())), req.u32()
		var pids []int
		for ; n > 0 && !req.bad; n-- {
			pids = append(pids, int(int32(req.u32())))
		}
		if req.bad {
			return syscall.EPROTO, nil
		}
		pending, err := s.Pending(minor, pids)
		return errnoOf(err), []byte{flag(pending)}
	case opDelay:
		var delay Delay
		if json.Unmarshal(req.b, &delay) != nil {
			return syscall.EPROTO, nil
		}
		d.SetDelay(delay)
		return 0, nil
	case opBarrier:
		if len(req.b) == 0 { // an older guard names none, and would wait for ever for another answer than this
			return 0, nil
		}
		var known []FileID
		for n := req.u32(); n > 0 && !req.bad; n-- {
			known = append(known, FileID(req.u32()))
		}
		if req.bad {
			return syscall.EPROTO, nil
		}
		s.CloseOthers(known)
		return 0, nil
	case opTrouble:
		var t Trouble
		if json.Unmarshal(req.b, &t) != nil {
			return syscall.EPROTO, nil
		}
		return errnoOf(d.Trouble(t)), nil
	}
	return syscall.EPROTO, nil
}

// errnoOf is the errno inside err.
func errnoOf(err error) syscall.Errno {
	if err == nil {
		return 0
	}
	var e syscall.Errno
	if errors.As(err, &e) {
		return e
	}
	return syscall.EIO
}
