// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/rm"
)

// rewriteAnswer rewrites the answers of controls into what a container may see: a card of the size of its limit, and only its
// own processes and GPUs.
func (g *Guard) rewriteAnswer(c *trappedCall, ctl rm.Control, params []byte) {
	switch ctl.Kind {
	case rm.ControlFBInfoV2:
		g.rewriteFBInfo(c, params[min(len(params), rm.FBInfoList):], rm.U32(params, rm.FBInfoCount))
	case rm.ControlFBInfo:
		if len(c.call.Blocks) > 1 {
			g.rewriteFBInfo(c, c.call.Blocks[1].Data, rm.U32(params, rm.FBInfoV1Count))
		}
	case rm.ControlPids:
		g.rewritePids(params)
	case rm.ControlPidInfo:
		g.restorePidInfo(params)
	case rm.ControlGPUMon:
		g.rewriteGPUMon(params)
	case rm.ControlGPUList:
		// 0x201 has one list, 0x214 two (probed, excluded) or, since 580, three.
		for off := 0; off+4*rm.GPUIDListLen <= len(params); off += 4 * rm.GPUIDListLen {
			g.filterIDs(params, off)
		}
	case rm.ControlActiveDevices:
		g.filterActiveDevices(params)
	case rm.ControlDeviceMask:
		g.maskDevices(params)
	case rm.ControlUUIDQuery:
		if !g.ownsGPUID(rm.U32(params, rm.UUIDQueryGPUID)) {
			clear(params[rm.UUIDQueryFlags:])
			c.status(rm.StatusObjectNotFound)
		}
	}
}

// limitOf is the account of the GPU that an object is of, or of the only one. False: nobody knows the GPU, or it is the container's whole.
func (g *Guard) limitOf(client, object uint32) (gpuAccount, bool) {
	gpu := g.account.gpuOf(client, object)
	if gpu == noGPU {
		if len(g.gpus) != 1 {
			return gpuAccount{}, false
		}
		gpu = 0
	}
	u := g.account.usage(gpu)
	return u, !u.native
}

// rewriteFBInfo presents a card of the size of the limit. Entries are pairs of index and KiB.
func (g *Guard) rewriteFBInfo(c *trappedCall, list []byte, count uint32) {
	u, ok := g.limitOf(rm.U32(c.call.Outer, rm.ControlClient), rm.U32(c.call.Outer, rm.ControlObject))
	if !ok {
		return
	}
	total, free := kib(u.total()), kib(u.free())
	for i := 0; i < int(min(count, 1<<16)) && (i+1)*rm.FBInfoEntry <= len(list); i++ {
		off := i * rm.FBInfoEntry
		v := rm.U32(list, off+4)
		switch rm.U32(list, off) {
		case rm.FBIndexRAMSize, rm.FBIndexTotalRAMSize, rm.FBIndexHeapSize, rm.FBIndexUsableRAMSize, rm.FBIndexProtectedMemTotal:
			v = total
		case rm.FBIndexMappableHeapSize:
			v = min(v, total)
		case rm.FBIndexHeapFree, rm.FBIndexProtectedMemFree:
			v = free
		case rm.FBIndexLargestFreeRegion:
			v = min(v, free)
		case rm.FBIndexTaxSize:
			v = 0
		}
		rm.PutU32(list, off+4, v)
	}
}

func kib(b quota.Bytes) uint32 { return uint32(min(b/quota.KiB, 1<<32-1)) }

// rewritePids filters the process list and turns the host's numbers into the container's own. The guard executes the
// control in the host's pid namespace, so RM lists every tenant's.
func (g *Guard) rewritePids(params []byte) {
	n := uint32(0)
	for i := range min(rm.U32(params, rm.PidsCount), rm.PidsMax) {
		p := g.tasks.byHostPid(int(rm.U32(params, rm.PidsTable+4*int(i))))
		if p == nil {
			continue
		}
		rm.PutU32(params, rm.PidsTable+4*int(n), uint32(p.nspid))
		n++
	}
	for i := n; i < rm.PidsMax; i++ {
		rm.PutU32(params, rm.PidsTable+4*int(i), 0)
	}
	rm.PutU32(params, rm.PidsCount, n)
}

// noPid is asked about where the container asks for a process that is not its own: no process has this number.
const noPid = 0x7fffffff

// translatePidInfo turns the container's process numbers into the host's before the call.
func (g *Guard) translatePidInfo(params []byte) bool {
	n := rm.U32(params, rm.PidInfoCount)
	if n > rm.PidInfoMax {
		return false
	}
	for i := range int(n) {
		off := rm.PidInfoList + i*rm.PidInfoEntry + rm.PidInfoPid
		if p := g.tasks.byNSPid(int(rm.U32(params, off))); p != nil {
			rm.PutU32(params, off, uint32(p.tgid))
		} else {
			rm.PutU32(params, off, noPid)
		}
	}
	return true
}

// restorePidInfo turns them back and blanks what belongs to no process of the container.
func (g *Guard) restorePidInfo(params []byte) {
	for i := range int(min(rm.U32(params, rm.PidInfoCount), rm.PidInfoMax)) {
		off := rm.PidInfoList + i*rm.PidInfoEntry
		if p := g.tasks.byHostPid(int(rm.U32(params, off+rm.PidInfoPid))); p != nil {
			rm.PutU32(params, off+rm.PidInfoPid, uint32(p.nspid))
			continue
		}
		rm.PutU32(params, off+rm.PidInfoPid, 0)
		if end := off + rm.PidInfoEntry; end <= len(params) {
			clear(params[off+rm.PidInfoPrivate : end])
		}
	}
}

// filterActiveDevices drops hidden GPUs from the list of NV0000_CTRL_CMD_GPU_GET_ACTIVE_DEVICE_IDS.
func (g *Guard) filterActiveDevices(params []byte) {
	n := 0
	count := int(min(rm.U32(params, rm.ActiveDevicesCount), rm.ActiveDevicesMax))
	for i := range count {
		off := rm.ActiveDevicesList + i*rm.ActiveDevicesEntry
		if off+rm.ActiveDevicesEntry > len(params) || !g.ownsGPUID(rm.U32(params, off)) {
			continue
		}
		to := rm.ActiveDevicesList + n*rm.ActiveDevicesEntry
		copy(params[to:to+rm.ActiveDevicesEntry], params[off:])
		n++
	}
	if end := rm.ActiveDevicesList + n*rm.ActiveDevicesEntry; end <= len(params) {
		clear(params[end:])
	}
	rm.PutU32(params, rm.ActiveDevicesCount, uint32(n))
}

// maskDevices keeps only the container's own device instances, as far as the guard has learned them.
func (g *Guard) maskDevices(params []byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	mask := uint32(0)
	for instance := range g.instances {
		if instance < 32 {
			mask |= 1 << instance
		}
	}
	if mask != 0 {
		rm.PutU32(params, 0, rm.U32(params, 0)&mask)
	}
}

// rewriteGPUMon blanks the samples of processes that are not the container's, and turns host process numbers into its own.
func (g *Guard) rewriteGPUMon(params []byte) {
	form := g.abi.GPUMon()
	if form.Entry <= 0 {
		return
	}
	for off := rm.GPUMonSamples; off+form.Entry <= len(params); off += form.Entry {
		for _, pid := range form.Pids {
			at := off + pid
			if p := g.tasks.byHostPid(int(rm.U32(params, at))); p != nil {
				rm.PutU32(params, at, uint32(p.nspid))
				continue
			}
			// An engine's block begins with its utilisation, eight bytes before the process.
			rm.PutU32(params, at-8, 0)
			rm.PutU32(params, at, 0)
		}
	}
}
