// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestPreemptGroup: a program takes its channel group off the GPU; however long it asks to wait, the driver's locks are held for a bounded
// time. A group that draws would be waited for.
func TestPreemptGroup(t *testing.T) {
	const group = 0x5c000020
	for _, x := range []struct {
		name   string
		params []byte
		draws  bool
		status uint32
	}{
		{"as libcuda asks", []byte{1, 0, 0, 0, 0, 0, 0, 0}, false, rm.StatusOK},
		{"without a wait", make([]byte, 8), false, rm.StatusOK},
		{"for ever", []byte{1, 1, 0, 0, 0xff, 0xff, 0xff, 0xff}, false, rm.StatusOK},
		{"a group that draws", []byte{1, 0, 0, 0, 0, 0, 0, 0}, true, rm.StatusNotSupported},
	} {
		t.Run(x.name, func(t *testing.T) {
			d := &fakeDriver{}
			g := withClient(newFakeGuard(t, d))
			g.account.addObject(fakeClient, object{handle: group, parent: fakeDevice, kind: rm.ClassTSG, class: classChannelGroup, gpu: noGPU},
				noGPU, 0, 0)
			of := g.account.clients[fakeClient].objects[group].group
			of.context, of.draws, of.scheduled = x.draws, x.draws, x.draws
			var seen []byte
			d.reset(func(call *rm.Call) { seen = slices.Clone(call.Blocks[0].Data) })
			p := slices.Clone(x.params)
			o := fakeControlCall(group, 0xa06c0105, p)
			c := newFakeCall(t, g, fakeControl)
			if rep := c.escape(rm.EscControl, o, p); rep != replyDone || rm.U32(o, rm.ControlStatus) != x.status {
				t.Fatalf("%+v, status %s", rep, rm.StatusName(rm.U32(o, rm.ControlStatus)))
			}
			if want := []byte{1, 1, 0, 0, 0x88, 0x13, 0, 0}; x.status == rm.StatusOK && !slices.Equal(seen, want) {
				t.Errorf("the driver is asked for %v, want %v", seen, want)
			}
			if x.status != rm.StatusOK && seen != nil {
				t.Error("the driver is asked")
			}
			if !slices.Equal(p, x.params) {
				t.Errorf("the program's parameters are %v", p)
			}
		})
	}
}
