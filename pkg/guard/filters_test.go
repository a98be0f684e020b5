// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"io"
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

// TestAcceptFails: a connection that cannot be taken at first is taken later on; otherwise each exec would hang from then on.
func TestAcceptFails(t *testing.T) {
	ours, theirs := net.Pipe()
	failed, served := 0, make(chan struct{})
	next := []error{unix.EMFILE, unix.ENFILE, nil}
	acceptAll(&door{}, func() (net.Conn, error) {
		if len(next) == 0 {
			return nil, net.ErrClosed
		}
		err := next[0]
		next = next[1:]
		return theirs, err
	}, func(error) { failed++ }, func(net.Conn) { close(served) })
	<-served
	if _, err := ours.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("who is served is not let go: %v", err)
	}
	if failed != 2 {
		t.Errorf("%d failures are told, want 2", failed)
	}
}
