// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"net"
	"testing"
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
