// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"github.com/opencgpu/cgpu/pkg/rm"
)

// controlCall is one RM_CONTROL on an object that exists and fits the control.
type controlCall struct {
	*request
	client *client
	object *object
	index  int    // of the parameter block in call.Blocks, for pointers inside it
	p      []byte // parameters, at least as long as the table says
}

// control numbers carry their class in the upper half (0x2080 in 0x2080018d).
type controlRow struct {
	size int // shortest parameters
	run  func(*controlCall) uint32
}

// controls that do something. Others of pkg/rm's allow table succeed without effect; unknown ones are not supported.
// Names are NVIDIA's, from src/common/sdk/nvidia/inc/ctrl.
var controls = map[uint32]controlRow{
	0x201:      {4 * rm.GPUIDListLen, (*controlCall).attachedIDs},    // GPU_GET_ATTACHED_IDS
	0x202:      {40, (*controlCall).idInfo},                          // GPU_GET_ID_INFO
	0x204:      {4, (*controlCall).deviceIDs},                        // GPU_GET_DEVICE_IDS
	0x205:      {32, (*controlCall).idInfoV2},                        // GPU_GET_ID_INFO_V2
	0x214:      {8 * rm.GPUIDListLen, (*controlCall).probedIDs},      // GPU_GET_PROBED_IDS
	0x215:      {rm.GPUIDFailedID + 4, (*controlCall).attachIDs},     // GPU_ATTACH_IDS
	0x21b:      {12, (*controlCall).pciInfo},                         // GPU_GET_PCI_INFO
	0x274:      {272, (*controlCall).uuidInfo},                       // GPU_GET_UUID_INFO
	0x275:      {268, (*controlCall).uuidFromID},                     // GPU_GET_UUID_FROM_GPU_ID
	0x288:      {rm.ActiveDevicesList, (*controlCall).active},        // GPU_GET_ACTIVE_DEVICE_IDS
	0xd02:      {16, (*controlCall).handleInfo},                      // CLIENT_GET_HANDLE_INFO
	0xd04:      {12, (*controlCall).setSharePolicy},                  // CLIENT_SET_INHERITED_SHARE_POLICY
	0xd06:      {16, (*controlCall).shareObject},                     // CLIENT_SHARE_OBJECT
	0x3d05:     {24, (*controlCall).exportFD},                        // OS_UNIX_EXPORT_OBJECT_TO_FD
	0x3d0b:     {2128, (*controlCall).exportFDs},                     // OS_UNIX_EXPORT_OBJECTS_TO_FD
	0x3d06:     {20, (*controlCall).importFD},                        // OS_UNIX_IMPORT_OBJECT_FROM_FD
	0x801707:   {rm.ContextBufferSize, (*controlCall).contextBuffer}, // FIFO_GET_ENGINE_CONTEXT_PROPERTIES
	0x20800110: {68, (*controlCall).name},                            // GPU_GET_NAME_STRING
	0x2080014a: {268, (*controlCall).gid},                            // GPU_GET_GID_INFO
	0x2080018d: {rm.PidsTable, (*controlCall).pids},                  // GPU_GET_PIDS
	0x2080018e: {rm.PidInfoList, (*controlCall).pidInfo},             // GPU_GET_PID_INFO
	0x2080110b: {536, (*controlCall).disableChannels},                // FIFO_DISABLE_CHANNELS
	0x20801123: {1552, (*controlCall).groupChannels},                 // FIFO_GET_CHANNEL_GROUP_UNIQUE_ID_INFO
	0x20801210: {32, (*controlCall).setPreemption},                   // GR_SET_CTXSW_PREEMPTION_MODE
	0x20801301: {16, (*controlCall).fbInfo},                          // FB_GET_INFO
	0x20801303: {rm.FBInfoList, (*controlCall).fbInfoV2},             // FB_GET_INFO_V2
	0x20802096: {rm.GPUMonSamples, (*controlCall).gpuMon},            // PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2
	0xa06c0101: {2, (*controlCall).schedule},                         // GPFIFO_SCHEDULE, of a group
	0xa06c0103: {8, (*controlCall).setTimeslice},                     // SET_TIMESLICE
	0xa06c0104: {8, (*controlCall).getTimeslice},                     // GET_TIMESLICE
	0xa06c0105: {8, (*controlCall).preempt},                          // PREEMPT
	0xa06f0103: {2, (*controlCall).schedule},                         // GPFIFO_SCHEDULE, of a channel
	0xc36f0108: {4, (*controlCall).submitToken},                      // GPFIFO_GET_WORK_SUBMIT_TOKEN
	CtrlSubmit: {SubmitSize, (*controlCall).simSubmit},               // the simulated driver's own
	CtrlWork:   {WorkSize, (*controlCall).simWork},
}

// control is RM_CONTROL.
func (r *request) control() uint32 {
	out := r.call.Outer
	if rm.U32(out, rm.ControlFlags) != 0 {
		return rm.StatusInvalidArgument // serialised parameters and lock bypass are not modelled
	}
	c, st := r.client(rm.U32(out, rm.ControlClient))
	if st != rm.StatusOK {
		return st
	}
	o := c.objects[rm.U32(out, rm.ControlObject)]
	if o == nil {
		return rm.StatusObjectNotFound
	}
	cmd := rm.U32(out, rm.ControlCmd)
	if !controlFits(cmd, o) {
		return rm.StatusNotSupported
	}
	if o.lost() {
		return rm.StatusGPUIsLost
	}
	index, p := r.block(-1, rm.ControlParams)
	row, found := controls[cmd]
	if !found {
		if _, found = r.d.abi.Control(cmd); !found {
			return rm.StatusNotSupported
		}
		return rm.StatusOK
	}
	if len(p) < row.size {
		return rm.StatusInvalidArgument
	}
	return row.run(&controlCall{request: r, client: c, object: o, index: index, p: p})
}

// controlFits reports whether the object's class has the control; only where the state depends on it.
func controlFits(cmd uint32, o *object) bool {
	switch class := cmd >> 16; class {
	case 0:
		return o.class == classRootClient
	case classDevice, classSubdevice, classGroup:
		return o.class == class
	case 0xa06f, 0xc36f:
		return o.channel != nil
	}
	return true
}

// handleInfo tells an object's parent (index 1) or class (2).
func (c *controlCall) handleInfo() uint32 {
	o := c.client.objects[rm.U32(c.p, 0)]
	if o == nil {
		return rm.StatusObjectNotFound
	}
	switch rm.U32(c.p, 4) {
	case 1:
		parent := uint32(0)
		if o.parent != nil {
			parent = o.parent.handle
		}
		rm.PutU32(c.p, 8, parent)
	case 2:
		rm.PutU32(c.p, 8, o.class)
	default:
		return rm.StatusInvalidArgument
	}
	return rm.StatusOK
}
