package rm

// gssBit marks the controls that the kernel driver hands to the GPU's firmware without a table of its own ("GSS legacy",
// src/nvidia/interface/deprecated/rmapi_gss_legacy_control.c). It copies the parameters as they are, so a pointer in them
// is never followed on the CPU; but their meaning is not published, hence an explicit list.
const gssBit = 1 << 15

// gssAllowed are the ones that CUDA and NVML were seen to use, ascending. Not here on purpose: 0x2080a083, utilisation
// samples behind a pointer, with the pids of everybody.
var gssAllowed = []uint32{
	0x20809009, // nvidia-smi, 580.159.04
	0x2080a612, // nvidia-smi, 580.159.04: utilisation
	0x2080a618, // nvidia-smi, 580.159.04: utilisation
}

func gssControl(id uint32) (Control, bool) {
	for _, a := range gssAllowed {
		if a == id {
			return Control{ID: id, Name: ControlName(id), Kind: ControlFlat, FDOff: -1, Source: "trace"}, true
		}
	}
	return Control{}, false
}
