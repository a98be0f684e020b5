//go:build openfinding

// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestUnseenChannelsNotifier is open: a root alloc that became a channel below a known group, which is forgiven once in an hour, and at any
// time where somebody outside makes the client. The group's GPFIFO_SCHEDULE lets it run. The guard does not know what it writes errors to,
// so that memory is freed, and given to a neighbour, while the driver has its address. (The write here is a control's; on a GPU it is one of
// any error of the group's channels.) Run it with -tags openfinding.
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
