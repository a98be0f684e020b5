/* What a program in preload mode sees of the card: one of the size of its limit. The guard's present.go does the same. */
#include "cgpu.h"

static uint64_t min(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t free_of(const struct cgpu_header *page, unsigned int gpu, uint64_t *limit)
{
	*limit = __atomic_load_n(&vgpu(page, gpu)->limit, __ATOMIC_RELAXED);
	return *limit - min(slots_used(page, gpu), *limit);
}

/* present_fb_info rewrites a list of the driver's: pairs of index and KiB. */
void present_fb_info(const struct cgpu_header *page, unsigned int gpu, uint64_t list, uint32_t count)
{
	uint64_t limit, free = free_of(page, gpu, &limit);
	uint32_t total_kib = (uint32_t)min(limit >> 10, UINT32_MAX), free_kib = (uint32_t)min(free >> 10, UINT32_MAX);
	struct { uint32_t index, kib; } e;

	_Static_assert(sizeof e == RM_FB_INFO_ENTRY, "NV2080_CTRL_FB_INFO");
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

/* present_heap rewrites the answer of the heap function INFO, in bytes. */
void present_heap(const struct cgpu_header *page, unsigned int gpu, uint64_t call)
{
	uint64_t limit, free = free_of(page, gpu, &limit), largest;

	if (vgpu(page, gpu)->flags & CGPU_VGPU_NATIVE || !copy_in(&largest, call + RM_HEAP_INFO_SIZE, sizeof largest))
		return;
	largest = min(largest, free);
	copy_out(call + RM_HEAP_TOTAL, &limit, sizeof limit);
	copy_out(call + RM_HEAP_FREE, &free, sizeof free);
	copy_out(call + RM_HEAP_INFO_SIZE, &largest, sizeof largest);
}
