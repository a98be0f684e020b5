// SPDX-License-Identifier: Apache-2.0

//go:build openfinding

package guard

import (
	"os"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestUnseenChannelsNotifier is open: a root alloc that became a channel below a known group, which is forgiven once in an hour, and at any
// time where somebody outside makes the client. The group's GPFIFO_SCHEDULE lets it run. The guard does not know what it writes errors to,
// so that memory is freed, and given to a neighbour, while the driver has its address. (The write here is a control's; on a GPU it is one
// of any error of the group's channels.) Run it with -tags openfinding.
func TestUnseenChannelsNotifier(t *testing.T) {
	r := newRig(t)
	c := r.start()
	a := c.do("open")[0]
	memory, other := c.do("alloc", a, 8*mib)[0], c.do("alloc", a, mib)[0]
	group := c.do("notifier", a, other, 1)[0]
	var client *client
	for _, x := range r.guard.account.clients {
		client = x
	}
	f, ok := r.guard.fileOf(client)
	if !ok {
		t.Fatal("no file")
	}
	defer f.Done()
	class, _ := r.guard.abi.Class(0xc86f)
	p := make([]byte, class.ParamsSize)
	rm.PutU32(p, rm.ChannelNotifiers[0], uint32(memory))
	rm.PutU32(p, rm.ChannelEngineType, 1)
	const unseen = 0x5cffff01
	call := r.guard.allocCall(allocation{client.handle, uint32(group), unseen, 0xc86f, p})
	if e := r.guard.driver.Exec(f, &call); e != 0 || rm.U32(call.Outer, 40) != rm.StatusOK { // what became of the root alloc
		t.Fatal(e, rm.StatusName(rm.U32(call.Outer, 40)))
	}
	schedule, _ := r.guard.abi.Control(0xa06c0101)
	on := make([]byte, schedule.Size)
	on[0] = 1
	if s, e := r.guard.rmControl(f, client.handle, uint32(group), 0xa06c0101, on); e != 0 || s != rm.StatusOK { // as the program may
		t.Fatal(e, rm.StatusName(s))
	}
	c.do("free", a, memory)
	token, _ := r.guard.abi.Control(0xc36f0108)
	if s, e := r.guard.rmControl(f, client.handle, unseen, 0xc36f0108, make([]byte, token.Size)); e != 0 || s != rm.StatusOK {
		t.Fatal(e, rm.StatusName(s))
	}
	if n := r.sim.Snapshot().Stray; n != 0 {
		t.Errorf("%d writes to free memory", n)
	}
}

// TestClientOfAnotherHides is open: memory of a client that somebody outside has made is in the guard's account of the process that asked
// for it, and in the driver's of the one that made it, which the guard does not ask for. So it is room for as much that was never charged:
// the next such call can become an allocation of it, and then the room is freed. Whose a client is the driver could be asked by what it
// counts for the process before and after a small allocation below it.
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
	more.Store(int64(length)) // for this process: what the next call for a client has become
	if u, _ := g.holdsUncharged(own); u != (uncharged{driver: length}) {
		t.Errorf("%+v: it is hidden", u)
	}
}
