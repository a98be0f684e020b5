// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"slices"

	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// pids is GET_PIDS: processes with a context on the GPU, or with any use of it when the caller names the subdevice
// class. The numbers are of the initial pid namespace: the server of the simulation stands there.
func (c *controlCall) pids() uint32 {
	any := rm.U32(c.p, rm.PidsID) == classSubdevice
	if rm.U32(c.p, rm.PidsIDType) != 0 {
		return rm.StatusNotSupported
	}
	var pids []int32
	for _, cl := range c.d.clients {
		for _, o := range cl.objects {
			if o.gpu == c.object.gpu && (any || isCompute(o.class)) {
				pids = append(pids, cl.pid)
				break
			}
		}
	}
	slices.Sort(pids)
	pids = slices.Compact(pids)
	room := min((len(c.p)-rm.PidsTable)/4, rm.PidsMax)
	pids = pids[:min(len(pids), room)]
	for i, p := range pids {
		rm.PutU32(c.p, rm.PidsTable+4*i, uint32(p))
	}
	rm.PutU32(c.p, rm.PidsCount, uint32(len(pids)))
	return rm.StatusOK
}

// usage is what _gpuCollectMemInfo in gpu_rmapi.c counts for a process.
type usage struct{ private, sharedOwned, sharedDuped quota.Bytes }

// usageOf sums the class 0x40 memory of a process on a GPU: its own, its own with further references, and others'.
func (d *Driver) usageOf(g *gpu, pid int32) usage {
	var u usage
	seen := map[*memory]bool{}
	for _, cl := range d.clients {
		if cl.pid != pid {
			continue
		}
		for _, o := range cl.objects {
			m := o.memory
			if m == nil || m.gpu != g || seen[m] {
				continue
			}
			seen[m] = true
			switch {
			case m.pid != pid:
				u.sharedDuped += m.size
			case m.refs > 1:
				u.sharedOwned += m.size
			default:
				u.private += m.size
			}
		}
	}
	return u
}

func (c *controlCall) pidInfo() uint32 {
	n := rm.U32(c.p, rm.PidInfoCount)
	if n > rm.PidInfoMax || int(n)*rm.PidInfoEntry > len(c.p)-rm.PidInfoList {
		return rm.StatusInvalidArgument
	}
	for i := range int(n) {
		e := c.p[rm.PidInfoList+i*rm.PidInfoEntry:][:rm.PidInfoEntry]
		if rm.U32(e, rm.PidInfoIndex) != 0 {
			rm.PutU32(e, rm.PidInfoResult, rm.StatusInvalidArgument)
			continue
		}
		u := c.d.usageOf(c.object.gpu, int32(rm.U32(e, rm.PidInfoPid)))
		rm.PutU32(e, rm.PidInfoResult, rm.StatusOK)
		rm.PutU64(e, rm.PidInfoPrivate, uint64(u.private))
		rm.PutU64(e, rm.PidInfoSharedOwned, uint64(u.sharedOwned))
		rm.PutU64(e, rm.PidInfoSharedDuped, uint64(u.sharedDuped))
		rm.PutU32(e, 64, rm.GPUIDUnused) // no MIG
		rm.PutU32(e, 68, rm.GPUIDUnused)
	}
	return rm.StatusOK
}
