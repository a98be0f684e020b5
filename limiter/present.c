/* What a program in preload mode sees of the card: one of the size of its limit. The guard's present.go does the same. */
#include "cgpu.h"

static uint64_t min(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* present_fb_info rewrites a list of the driver's: pairs of index and KiB. */
void present_fb_info(const struct cgpu_header *page, unsigned int gpu, uint64_t list, uint32_t count)
{
	uint64_t limit = LOAD(&vgpu(page, gpu)->limit), free = limit - min(slots_used(page, gpu), limit);
	uint32_t total_kib = (uint32_t)min(limit >> 10, UINT32_MAX), free_kib = (uint32_t)min(free >> 10, UINT32_MAX);
	struct { uint32_t index, kib; } e;

	if (vgpu(page, gpu)->flags & CGPU_VGPU_NATIVE)
		return;
	for (; count && copy_in(&e, list, sizeof e); count--, list += sizeof e) {
		switch (e.index) {
		case RM_FB_RAM_SIZE: case RM_FB_TOTAL_RAM_SIZE: case RM_FB_HEAP_SIZE: case RM_FB_USABLE_RAM_SIZE: case RM_FB_PROTECTED_TOTAL:
			e.kib = total_kib;
			break;
		case RM_FB_MAPPABLE_HEAP_SIZE:
			e.kib = (uint32_t)min(e.kib, total_kib);
			break;
		case RM_FB_HEAP_FREE: case RM_FB_PROTECTED_FREE:
			e.kib = free_kib;
			break;
		case RM_FB_LARGEST_FREE_REGION:
			e.kib = (uint32_t)min(e.kib, free_kib);
			break;
		case RM_FB_TAX_SIZE:
			e.kib = 0;
			break;
		default:
			continue;
		}
		copy_out(list, &e, sizeof e);
	}
}
