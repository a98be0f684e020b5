// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"

	"github.com/opencgpu/cgpu/pkg/rm"
)

// TestChannelIDs: a container has its part of a GPU's channel ids whatever others do, and beyond it what they leave.
func TestChannelIDs(t *testing.T) {
	const group = 0x5c000015
	share := commonChannels / testSettings().MaxInst
	dir := t.TempDir()
	join := func(t *testing.T, g *Guard) {
		g.cfg.RunDir = dir
		g.gpuTime = newScheduler(g)
		g.account.onChannels = g.gpuTime.TellChannels
		g.gpuTime.Begin()
		t.Cleanup(g.gpuTime.End)
		g.gpuTime.Made(0)
		eventually(t, "the others are known", func() bool { _, ok := g.gpuTime.OtherChannels(0); return ok })
	}
	other := newFakeGuard(t, answering(0, nil))
	join(t, other)
	told := func() int {
		n, _ := other.gpuTime.OtherChannels(0)
		return n
	}
	for _, c := range []struct {
		name   string
		others int
		want   int
	}{
		{"alone", 0, commonChannels},
		{"beside some", 1000, share},
		{"beside a few", 100, commonChannels - 100},
		{"beside all that there are", 2048, share},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := withClient(newFakeGuard(t, answering(0, nil)))
			g.cfg.Settings.MaxChannels = 4096
			join(t, g)
			g.account.addObject(fakeClient, object{handle: group, parent: fakeDevice, kind: rm.ClassTSG, gpu: noGPU, engine: engineGR}, noGPU, 0, 0)
			other.gpuTime.TellChannels(0, c.others)
			f := newFakeCall(t, g, fakeControl)
			n := 0
			for ; n < 2100; n++ {
				p := make([]byte, 368)
				o := fakeAlloc(group, uint32(0x5d000000+n), 0xc86f, p)
				if f.escape(rm.EscAlloc, o, p); rm.U32(o, 40) != rm.StatusOK {
					break
				}
			}
			if told := told(); n != c.want || told != n {
				t.Errorf("%d channels, want %d; the other sees %d", n, c.want, told)
			}
			p := make([]byte, 368) // another engine has ids of its own
			rm.PutU32(p, rm.ChannelEngineType, rm.ChannelEngineTypeCopy0)
			o := fakeAlloc(fakeDevice, 0x5e000000, 0xc86f, p)
			if f.escape(rm.EscAlloc, o, p); rm.U32(o, 40) != rm.StatusOK {
				t.Errorf("on another engine: %s", rm.StatusName(rm.U32(o, 40)))
			}
			f.escape(rm.EscFree, fakeFree(fakeDevice))
			if told := told(); told != 0 || len(g.account.runlists) != 0 {
				t.Errorf("%d channels told after the end, %v", told, g.account.runlists)
			}
		})
	}
}
