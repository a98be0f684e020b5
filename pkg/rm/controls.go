package rm

// Ascending by id.
var controls = []controlRow{
	{id: 0x201, name: "NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS", kind: ControlGPUList, sizes: []since{{0, 128}}},
	{id: 0x20801303, name: "NV2080_CTRL_CMD_FB_GET_INFO_V2", kind: ControlFBInfoV2, sizes: []since{{0, 436}, {545, 444}, {560, 460}, {580, 1028}}},
	{id: 0xa06c0103, name: "NVA06C_CTRL_CMD_SET_TIMESLICE", kind: ControlSwallow, sizes: []since{{0, 8}}},
}
