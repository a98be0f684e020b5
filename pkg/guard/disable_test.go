// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestDisable: a domain's MPS server is told that its own channel group is off, or on, and nobody else that any is. The driver never hears
// of it: it would take channels of any client of the node.
func TestDisable(t *testing.T) {
	const group, channel = 0x5c000020, 0x5c000021
	type pair [2]uint32 // client and group
	own := pair{fakeClient, group}
	for _, x := range []struct {
		name   string
		server bool
		list   []pair
		count  int // 0: as many as there are
		set    map[int]byte
		status uint32
	}{
		{"off", true, []pair{own}, 0, map[int]byte{rm.DisableFlag: 1}, rm.StatusOK},
		{"on", true, []pair{own}, 0, nil, rm.StatusOK},
		{"several", true, []pair{own, own, own}, 0, nil, rm.StatusOK},
		{"by a container", false, []pair{own}, 0, nil, rm.StatusNotSupported},
		{"none", true, nil, 0, nil, rm.StatusNotSupported},
		{"more than there are", true, []pair{own}, rm.DisableMost + 1, nil, rm.StatusNotSupported},
		{"another one's client", true, []pair{own, {fakeClient + 1, group}}, 0, nil, rm.StatusNotSupported},
		{"what is no group", true, []pair{{fakeClient, channel}}, 0, nil, rm.StatusNotSupported},
		{"what is not there", true, []pair{{fakeClient, channel + 1}}, 0, nil, rm.StatusNotSupported},
		{"queued work dropped", true, []pair{own}, 0, map[int]byte{rm.DisableFlag: 1, rm.DisableRewind: 1}, rm.StatusNotSupported},
		{"first another one's client", true, []pair{{fakeClient + 1, group}, own}, 0, nil, rm.StatusInvalidClient},
	} {
		t.Run(x.name, func(t *testing.T) {
			d := &fakeDriver{}
			g := withClient(newFakeGuard(t, d))
			g.cfg.DomainServer = x.server
			g.account.addObject(fakeClient, object{handle: group, parent: fakeDevice, kind: rm.ClassTSG, class: classChannelGroup, gpu: noGPU},
				noGPU, 0, 0)
			g.account.addObject(fakeClient, object{handle: channel, parent: group, kind: rm.ClassChannel, gpu: noGPU}, noGPU, 0, 0)
			asked := false
			d.reset(func(*rm.Call) { asked = true })
			p := make([]byte, rm.DisableSize)
			rm.PutU32(p, rm.DisableCount, uint32(len(x.list)))
			if x.count != 0 {
				rm.PutU32(p, rm.DisableCount, uint32(x.count))
			}
			for i, c := range x.list {
				rm.PutU32(p, rm.DisableClients+4*i, c[0])
				rm.PutU32(p, rm.DisableChannels+4*i, c[1])
			}
			for at, value := range x.set {
				p[at] = value
			}
			o := fakeControlCall(fakeDevice, 0x2080110b, p)
			c := newFakeCall(t, g, fakeControl)
			if rep := c.escape(rm.EscControl, o, p); rep != replyDone || rm.U32(o, rm.ControlStatus) != x.status || asked {
				t.Fatalf("%+v, status %s, the driver is asked: %v", rep, rm.StatusName(rm.U32(o, rm.ControlStatus)), asked)
			}
		})
	}
}
