// SPDX-License-Identifier: Apache-2.0

package rm

import "slices"

// gssBit marks the controls that the kernel driver hands to the GPU's firmware without a table of its own ("GSS legacy",
// src/nvidia/interface/deprecated/rmapi_gss_legacy_control.c). It copies the parameters as they are, so a pointer in them
// is never followed on the CPU; but their meaning is not published, hence an explicit list.
const gssBit = 1 << 15

// gssAllowed are the ones that CUDA and NVML were seen to use on 580.159.04, ascending: nvidia-smi plain and with -q, pmon,
// dmon, topo and queries, PyTorch, Triton, JAX and the PyTorch profiler. Not here on purpose: 0x2080a083, utilisation samples
// behind a pointer, with the pids of everybody.
var gssAllowed = []uint32{
	0x20808159,
	0x20808162,
	0x2080852a,
	0x2080852b,
	0x2080852e,
	0x2080852f,
	0x20808536,
	0x2080853a,
	0x20808542,
	0x20808546,
	0x20809001,
	0x20809009,
	0x20809019,
	0x20809038,
	0x20809064,
	0x2080a026,
	0x2080a060,
	0x2080a06e,
	0x2080a080,
	0x2080a084,
	0x2080a0a4,
	0x2080a0a6,
	0x2080a0a7,
	0x2080a0a8,
	0x2080a0f2,
	0x2080a612,
	0x2080a618,
	0x2080a63c,
}

// gssSwallowed are answered OK and not executed: 0x2080a06f is PERF_RATED_TDP_SET_CONTROL (0x2080206f in ctrl2080perf.h: the interface of
// PERF with NVxxxx_CTRL_LEGACY_NON_PRIVILEGED is 0xa0, ctrl2080base.h), which can lock the GPU's clocks at their base for everybody.
// 0x2080a06e next to it reads that.
var gssSwallowed = []uint32{
	0x2080a06f,
}

// gssProfiling are the ones that Nsight Compute uses beyond those: RATED_TDP_GET_STATUS, which reads who limits the clocks
// (ctrl2080perf.h), and one of the same group that no header has.
var gssProfiling = []uint32{
	0x2080a06d,
	0x2080a0c8,
}

func gssControl(id uint32) (Control, bool) {
	c := Control{ID: id, Name: ControlName(id), Kind: ControlFlat, FDOff: -1, Source: "trace"}
	switch {
	case slices.Contains(gssAllowed, id):
	case slices.Contains(gssSwallowed, id):
		c.Kind = ControlSwallow
	case slices.Contains(gssProfiling, id):
		c.Profiling = true
	default:
		return Control{}, false
	}
	return c, true
}
