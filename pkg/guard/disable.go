// SPDX-License-Identifier: Apache-2.0

package guard

import "github.com/opencgpu/cgpu/pkg/rm"

// NVIDIA's MPS server takes its channel group off the GPU while it ends a client (terminate_client), and lets it run again afterwards. The
// driver looks at no handle of FIFO_DISABLE_CHANNELS: it takes channels of any client of the node. Executed it would also let run what the
// guard has off. Without it the client ends as well, and the others go on (docs/internals/mps.md): the server preempts the group, too.

// checkDisable is FIFO_DISABLE_CHANNELS of a domain's server, of groups of its own: it has come to nothing when it is answered.
func (g *Guard) checkDisable(c *trappedCall) plan {
	n := int(rm.U32(c.params, rm.DisableCount))
	own := g.cfg.DomainServer && n >= 1 && n <= rm.DisableMost && c.params[rm.DisableRewind] == 0
	for i := 0; own && i < n; i++ {
		own = g.account.isGroup(rm.U32(c.params, rm.DisableClients+4*i), rm.U32(c.params, rm.DisableChannels+4*i))
	}
	if !own {
		return answer(c.deny(rm.StatusNotSupported, "disable", "denied NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS"))
	}
	return answer(c.status(rm.StatusOK))
}
