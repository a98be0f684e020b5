// SPDX-License-Identifier: Apache-2.0

// The kernel, for compute capability 5.0 and newer: the driver makes code of it. It is an amount of work, not of time: one that watched a
// clock would be over at once when it comes back from a preemption.
static const char spin_ptx[] =
	".version 6.0\n"
	".target sm_50\n"
	".address_size 64\n"
	".visible .entry spin(\n"
		".param .u32 spin_turns,\n"
		".param .u64 spin_out\n"
	")\n"
	"{\n"
		".reg .pred %p<3>;\n"
		".reg .f32 %f<2>;\n"
		".reg .b32 %r<3>;\n"
		".reg .b64 %rd<3>;\n"
		"ld.param.u32 %r1, [spin_turns];\n"
		"ld.param.u64 %rd1, [spin_out];\n"
		"mov.u32 %r2, %tid.x;\n"
		"cvt.rn.f32.u32 %f1, %r2;\n"
	"$turn:\n"
		"fma.rn.f32 %f1, %f1, 0f3F7FF972, 0f3F000000;\n"
		"add.s32 %r1, %r1, -1;\n"
		"setp.ne.s32 %p1, %r1, 0;\n"
		"@%p1 bra $turn;\n"
	// Never true, which no compiler knows.
		"setp.neu.f32 %p2, %f1, 0fBF800000;\n"
		"@%p2 bra $over;\n"
		"cvta.to.global.u64 %rd2, %rd1;\n"
		"st.global.f32 [%rd2], %f1;\n"
	"$over:\n"
		"ret;\n"
	"}\n";
