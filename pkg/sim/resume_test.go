// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"io"
	"net"
	"testing"
	"time"
)

// TestResume: who goes on with a connection has the files that were opened on it, and its requests are answered.
func TestResume(t *testing.T) {
	d, path := startServer(t)
	c := dial(t, path, 0)
	id, err := c.OpenFile(Control, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, last, ok := c.State()
	if !ok || last == 0 {
		t.Fatalf("nothing is under way, and the state is %d, %v", last, ok)
	}
	// A copy, as the other program would have: here the first still reads, so it is kept from that.
	f, err := c.c.(*net.UnixConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	_ = c.c.Close()
	next, err := Resume(f, last)
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	if s := d.Snapshot(); s.Files != 1 {
		t.Errorf("%d files", s.Files)
	}
	if err := next.CloseFile(id); err != nil {
		t.Error(err)
	}
	if _, _, ok := c.State(); ok {
		t.Error("a lost connection can be handed over")
	}
}

// TestRevive: of a process that was killed nobody knows what was under way, nor how much of an answer it had read.
func TestRevive(t *testing.T) {
	d, path := startServer(t)
	c := dial(t, path, 0)
	id, err := c.OpenFile(Control, 0)
	if err == nil {
		_, err = c.OpenFile(UVM, 0) // of which it told nobody
	}
	if err != nil {
		t.Fatal(err)
	}
	f, err := c.c.(*net.UnixConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	nc, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	c.write.Lock() // its reader is in the way
	_ = c.c.(*net.UnixConn).SetReadDeadline(time.Unix(1, 0))
	for c.failed() == nil {
		time.Sleep(time.Millisecond)
	}
	for i := range uint64(3) {
		if err := writeFrame(nc, append(appendU64(nil, 100+i), opSnapshot)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := io.ReadFull(nc, make([]byte, 7)); err != nil {
		t.Fatal(err)
	}
	next, err := Revive(f, []uint32{uint32(id)})
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	if n := d.Snapshot().Files; n != 1 {
		t.Errorf("%d files, one is known", n)
	}
	if err := next.CloseFile(id); err != nil || d.Snapshot().Files != 0 {
		t.Error(err, d.Snapshot().Files)
	}
}

// TestOlderBarrier: a guard that is older names no files. It waits for the one answer that it knows, and all stay open.
func TestOlderBarrier(t *testing.T) {
	d, path := startServer(t)
	c := dial(t, path, 0)
	if _, err := c.OpenFile(Control, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := c.do(opBarrier, nil); err != nil || d.Snapshot().Files != 1 {
		t.Error(err, d.Snapshot().Files)
	}
}

func (c *Conn) failed() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}
