package guard

import (
	"github.com/opencgpu/cgpu/pkg/rm"
)

// The driver has 2048 channel ids for each runlist of a GPU (an engine's queue), for everybody. Half of them is divided among the containers
// that a GPU may have: so many each can make whatever others do, which is six CUDA contexts with 20 containers (eight channels each on the graphics engine). Beyond
// that it takes what the other half has left. The guards tell each other how many they have.
const commonChannels = 1024

// runlist is an engine of one of the container's GPUs.
type runlist struct {
	gpu    int
	engine uint32
}

// roomForChannel reports that the GPU has a channel id for the container.
func (g *Guard) roomForChannel(r runlist) bool {
	n := g.account.channelsIn(r) + 1
	if n <= commonChannels/max(1, g.cfg.Settings.MaxInst) {
		return true
	}
	others, ok := g.gpuTime.OtherChannels(r.gpu)
	return !ok || n+others <= commonChannels // where nobody knows, max_channels has to do
}

// runlistOf is where a channel goes: to the engine of its group, or to its own. Channels of a GPU that is not known count nowhere.
func (a *account) runlistOf(client, parent, engine uint32) runlist {
	r := runlist{a.gpuOf(client, parent), engine}
	if group, ok := a.lookup(client, parent); ok && group.kind == rm.ClassTSG {
		if group.engine != 0 || engine == 0 {
			r.engine = group.engine
		}
	}
	r.engine = max(r.engine, engineGR) // 0 on cards before Ampere
	return r
}

func (a *account) channelsIn(r runlist) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.runlists[r]
}

// countChannel counts a channel, or one less. The account is locked.
func (a *account) countChannel(r runlist, n int) {
	if r.gpu == noGPU {
		return
	}
	if a.runlists[r] += n; a.runlists[r] <= 0 {
		delete(a.runlists, r)
	}
	a.reportChannels(r.gpu)
}

// reportChannels passes on how many channels there are on a GPU. The account is locked.
func (a *account) reportChannels(gpu int) {
	if a.onChannels == nil {
		return
	}
	most := 0
	for x, n := range a.runlists {
		if x.gpu == gpu {
			most = max(most, n)
		}
	}
	a.onChannels(gpu, most)
}
