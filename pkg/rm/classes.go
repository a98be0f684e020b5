package rm

// Ascending by id.
var classes = []classRow{
	{id: 0x0, name: "NV01_ROOT", kind: ClassRoot, optional: true, sizes: []since{{0, 4}}},
	{id: 0x1, name: "NV01_ROOT_NON_PRIV", kind: ClassRoot, optional: true, sizes: []since{{0, 4}}},
	{id: 0x3e, name: "NV01_MEMORY_SYSTEM", kind: ClassSysmem, sizes: []since{{0, 120}, {545, 128}}},
	{id: 0x40, name: "NV01_MEMORY_LOCAL_USER", kind: ClassVidmem, sizes: []since{{0, 120}, {545, 128}}},
	{id: 0x41, name: "NV01_ROOT_CLIENT", kind: ClassRoot, optional: true, sizes: []since{{0, 4}}},
	{id: 0x79, name: "NV01_EVENT_OS_EVENT", kind: ClassEvent, sizes: []since{{0, 24}}, clients: []int{0}},
	{id: 0x80, name: "NV01_DEVICE_0", kind: ClassDevice, sizes: []since{{0, 56}}},
	{id: 0x2080, name: "NV20_SUBDEVICE_0", kind: ClassSubdevice, optional: true, sizes: []since{{0, 4}}},
	{id: 0x90f1, name: "FERMI_VASPACE_A", kind: ClassVASpace, sizes: []since{{0, 48}, {580, 56}}},
	{id: 0xa06c, name: "KEPLER_CHANNEL_GROUP_A", kind: ClassTSG, sizes: []since{{0, 20}}},
	{id: 0xc86f, name: "HOPPER_CHANNEL_GPFIFO_A", kind: ClassChannel, sizes: []since{{0, 304}, {545, 360}, {570, 368}}},
	{id: 0xcbc0, name: "HOPPER_COMPUTE_A", kind: ClassCompute, optional: true, sizes: []since{{0, 16}}},
}
