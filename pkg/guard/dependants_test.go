// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"syscall"
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
	"github.com/opencgpu/cgpu/pkg/rmclient"
)

// TestEndsWithOther: what the driver has ended with an object, beside what is below it, is in the account no more, so nothing that is made
// under its handle then passes for it. What lives on stays known, whatever is freed, and nothing is asked where memory is freed.
func TestEndsWithOther(t *testing.T) {
	const space, other, group, share, channel, compute, second, peers = 0x5c000010, 0x5c000011, 0x5c000012, 0x5c000013, 0x5c000014, 0x5c000015,
		0x5c000016, 0x5c000017
	all := []uint32{other, group, share, channel, compute, second, peers, fakeDevice}
	for name, x := range map[string]struct {
		freed uint32
		ended []uint32          // by the driver
		is    map[uint32]uint32 // what is there instead: a class
		gone  []uint32          // from the account
		asks  int
	}{
		"an address space": {freed: space, ended: []uint32{channel}, gone: []uint32{channel, compute}, asks: 5},
		"an address space, a device in its place": {freed: space, ended: []uint32{channel}, is: map[uint32]uint32{channel: rmclient.ClassDevice},
			gone: []uint32{channel, compute}, asks: 5},
		"an address space with a group": {freed: space, ended: []uint32{group, share, channel, second},
			gone: []uint32{group, share, channel, compute, second}, asks: 5},
		"one that nothing uses":           {freed: space, asks: 5},
		"a context share":                 {freed: share, ended: []uint32{channel}, gone: []uint32{share, channel, compute}, asks: 4},
		"a subdevice":                     {freed: 0x5c000018, ended: []uint32{peers}, gone: []uint32{peers}, asks: 5},
		"USERD":                           {freed: fakeMemory, ended: []uint32{channel}, gone: []uint32{channel, compute}, asks: 1},
		"memory":                          {freed: other},
		"an object of the driver's own":   {freed: 0x5c0000ff, ended: []uint32{channel}, gone: []uint32{channel, compute}, asks: 5},
		"a channel, the driver is silent": {freed: 0x5c0000fe, asks: 5},
	} {
		t.Run(name, func(t *testing.T) {
			asks := 0
			d := &fakeDriver{unseen: true}
			g := withClient(newFakeGuard(t, d))
			add := func(handle, parent, class uint32, kind rm.ClassKind) *object {
				g.account.addObject(fakeClient, object{handle: handle, parent: parent, class: class, kind: kind, gpu: noGPU}, noGPU, 0, 0)
				return g.account.clients[fakeClient].objects[handle]
			}
			add(space, fakeDevice, 0x90f1, rm.ClassVASpace)
			add(0x5c000018, fakeDevice, rmclient.ClassSubdevice, rm.ClassSubdevice)
			add(other, fakeDevice, classVidmem, rm.ClassVidmem)
			add(group, fakeDevice, classChannelGroup, rm.ClassTSG)
			add(share, group, classContextShare, rm.ClassPlain)
			add(channel, group, 0xc86f, rm.ClassChannel).userd.memory = fakeMemory
			add(compute, channel, 0xcbc0, rm.ClassCompute)
			add(second, group, 0xc86f, rm.ClassChannel)
			add(peers, fakeClient, 0x503b, rm.ClassP2P)
			records := map[uint32]object{}
			for _, h := range all {
				records[h], _ = g.account.lookup(fakeClient, h)
			}
			d.answer = func(_ Target, call *rm.Call) syscall.Errno {
				if call.NR() != rm.EscControl || rm.U32(call.Outer, rm.ControlCmd) != controlHandleInfo {
					return 0
				}
				asks++
				h := rm.U32(call.Blocks[0].Data, 0)
				class, status := records[h].class, uint32(rm.StatusOK)
				for _, e := range x.ended {
					if e == h {
						class, status = x.is[h], rm.StatusOK
						if class == 0 {
							status = rm.StatusObjectNotFound
						}
					}
				}
				if x.freed == 0x5c0000fe {
					status = rm.StatusInsufficientPermissions
				}
				rm.PutU32(call.Blocks[0].Data, handleInfoResult, class)
				rm.PutU32(call.Outer, rm.ControlStatus, status)
				return 0
			}
			c := newFakeCall(t, g, fakeControl)
			o := make([]byte, rm.FreeSize)
			rm.PutU32(o, rm.FreeRoot, fakeClient)
			rm.PutU32(o, rm.FreeObject, x.freed)
			if c.escape(rm.EscFree, o); rm.U32(o, rm.FreeStatus) != rm.StatusOK || asks != x.asks {
				t.Errorf("%s, %d questions, want %d", rm.StatusName(rm.U32(o, rm.FreeStatus)), asks, x.asks)
			}
			gone := map[uint32]bool{x.freed: true}
			for _, h := range x.gone {
				gone[h] = true
			}
			for _, h := range all {
				if _, known := g.account.lookup(fakeClient, h); known == gone[h] {
					t.Errorf("%#x: known %v", h, known)
				}
			}
		})
	}
}
