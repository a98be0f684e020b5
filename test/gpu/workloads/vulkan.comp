#version 450
// What vulkan.c runs: each value goes through so many rounds of a linear congruence. The SPIR-V of it is vulkan.comp.h:
//   glslangValidator -V --vn vulkan_comp -o vulkan.comp.h vulkan.comp
layout(local_size_x = 256) in;
layout(std430, binding = 0) buffer Values { uint values[]; };
layout(push_constant) uniform Push { uint rounds; };
void main() {
	uint i = gl_GlobalInvocationID.x, x = values[i];
	for (uint round = 0; round < rounds; round++) x = x * 1664525u + 1013904223u;
	values[i] = x;
}
