// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestRootOfAnother: a client that somebody outside of the container has made on a file that was sent to him is no excuse.
func TestRootOfAnother(t *testing.T) {
	d, g := newFakeRM(t)
	c := newFakeCall(t, g, fakeControl)
	keep, err := unix.FcntlInt(uintptr(c.fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		t.Fatal(err)
	}
	d.made(keep) // by a process without a guard, or by a swapped root alloc of another container's
	rep := c.escape(rm.EscAlloc, rootOuter())
	if !rep.resume {
		t.Fatalf("%+v", rep)
	}
	f, p := c.root, c.root.pending
	g.rootAnswered(f, true)
	// here another thread makes it an RM_ALLOC of device memory below another client.
	if g.resolveRoot(f, p, 0, true); g.astrayAt.Load() == 0 {
		t.Error("it is taken for the client that this call has made")
	}
}
