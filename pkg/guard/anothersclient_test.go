// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestClientOfAnotherHides is the bound in docs/security-model.md of what an accomplice outside of the container gives: memory of a client
// that he has made is in the guard's account of the process that asked for it, and in the driver's of the accomplice, which the guard does
// not ask for. So it hides as much that was never charged, and no byte more. Whoever has it hide nothing mends that paragraph, too.
func TestClientOfAnotherHides(t *testing.T) {
	const length = 64 * quota.MiB
	d, g := newFakeRM(t)
	var more atomic.Int64
	d.holding(g, &more)
	g.sentFDs.pids = func() []int { return []int{os.Getpid()} }
	c := newFakeCall(t, g, fakeControl)
	keep, err := unix.FcntlInt(uintptr(c.fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		t.Fatal(err)
	}
	theirs := d.made(keep) // by a process without a guard
	if rep := c.escape(rm.EscAlloc, rootOuter()); !rep.resume {
		t.Fatalf("%+v", rep)
	}
	f, p := c.root, c.root.pending
	g.rootAnswered(f, true)
	if g.resolveRoot(f, p, theirs, true); !g.account.ownsClient(theirs) {
		t.Fatal("the other's client does not pass for its own: this test says nothing")
	}
	g.account.addObject(theirs, object{handle: fakeDevice, parent: theirs, kind: rm.ClassDevice, gpu: 0}, noGPU, 0, 0)
	m := memoryObject(fakeMemory, fakeDevice)
	m.length = length
	g.account.addObject(theirs, m, 0, 0, length) // by the guard; the driver counts it for the process outside
	own, err := g.guardClient()
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		stolen quota.Bytes // by this process: what the next call for a client has become
		want   uncharged
	}{{length, uncharged{}}, {length + 1, uncharged{driver: length + 1, guard: length}}} {
		more.Store(int64(x.stolen))
		if u, _ := g.holdsUncharged(own); u != x.want {
			t.Errorf("%d bytes are hidden behind %d: %+v, want %+v", x.stolen, length, u, x.want)
		}
	}
}
