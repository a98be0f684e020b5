/* Preload mode in one process, on a driver that this program plays. The page has two vGPUs: 64 MiB, and 32 MiB. */
#include "check.h"

static struct { uint32_t client, handle, parent; uint64_t size; } objects[4096];
/* Volatile: the C library declares ioctl as a function that comes back to no function here. */
static volatile int executed;
static volatile uint64_t slice;
static volatile uint32_t slice_of;
static volatile uint32_t next_handle = 0xcaf00000;

static void forget(uint32_t client, uint32_t handle)
{
	for (int i = 0; i < 4096; i++)
		if (objects[i].client == client && (objects[i].handle == handle || handle == client)) {
			memset(&objects[i], 0, sizeof objects[i]);
		} else if (objects[i].client == client && objects[i].parent == handle) {
			forget(client, objects[i].handle);
		}
}

static uint32_t make(uint32_t client, uint32_t parent, uint32_t handle, uint64_t size)
{
	int i = 0;
	while (objects[i].client)
		i++;
	objects[i].client = client, objects[i].parent = parent, objects[i].size = size;
	return objects[i].handle = handle ? handle : next_handle++;
}

long cgpu_test_ioctl(int fd, unsigned request, void *arg)
{
	(void)fd;
	executed++;
	switch (request & 0xff) {
	case RM_NR_ALLOC: {
		void *p = (void *)get64(arg, RM_ALLOC_PARAMS);
		uint32_t size = request >> 16 & 0x3fff, class = get32(arg, RM_ALLOC_CLASS);
		set32(arg, RM_ALLOC_OBJECT, make(get32(arg, RM_ALLOC_ROOT), get32(arg, RM_ALLOC_PARENT), get32(arg, RM_ALLOC_OBJECT), 0));
		if (class == 0x40 && get32(p, 8) == 0x512) /* pages of 512 MiB, so to speak */
			set64(p, RM_MEMORY_SIZE, get64(p, RM_MEMORY_SIZE) * 16);
		set32(arg, size == 48 ? 40 : size == 40 ? 36 : 28, 0);
		return 0;
	}
	case RM_NR_FREE:
		if (get32(arg, RM_FREE_OBJECT) == 0xdead) {
			set32(arg, RM_FREE_STATUS, 0x57);
			return 0;
		}
		forget(get32(arg, RM_FREE_ROOT), get32(arg, RM_FREE_OBJECT));
		set32(arg, RM_FREE_STATUS, 0);
		return 0;
	case RM_NR_DUP:
		set32(arg, RM_DUP_OBJECT, make(get32(arg, RM_DUP_CLIENT), get32(arg, RM_DUP_PARENT), get32(arg, RM_DUP_OBJECT), 0));
		set32(arg, RM_DUP_STATUS, 0);
		return 0;
	case RM_NR_CONTROL: {
		char *p = (char *)get64(arg, RM_CONTROL_PARAMS);
		set32(arg, RM_CONTROL_STATUS, 0);
		switch (get32(arg, RM_CONTROL_CMD)) {
		case 0x205:
			set32(p, 8, get32(p, 0) == 0x100 ? 5 : 3); /* RM's numbers are in no order */
			break;
		case 0xa06c0103:
			slice = get64(p, 0);
			slice_of = get32(arg, RM_CONTROL_OBJECT);
			break;
		}
		return 0;
	}
	}
	return -EINVAL;
}

static struct cgpu_header *page;

static void fb_info(uint32_t client, uint32_t object, uint32_t *total, uint32_t *unused)
{
	uint32_t v2[1 + 2 * 4] = {4, RM_FB_RAM_SIZE, 9999999, RM_FB_HEAP_FREE, 9999999, RM_FB_LARGEST_FREE_REGION, 5, 0x5, 77};
	uint32_t v1[2 * 2] = {RM_FB_RAM_SIZE, 9999999, RM_FB_HEAP_FREE, 9999999};
	struct { uint32_t count, reserved; uint64_t list; } old = {2, 0, (uint64_t)v1};

	CHECK(rm_control(client, object, 0x20801303, v2, sizeof v2) == 0);
	CHECK(v2[6] == (v2[4] < 5 ? v2[4] : 5) && v2[8] == 77);
	*total = v2[2], *unused = v2[4];
	CHECK(rm_control(client, object, 0x20801301, &old, sizeof old) == 0);
	CHECK(v1[1] == *total && v1[3] == *unused);
}

enum { C = 0xc1d00000, DEV0 = 0x10, DEV1 = 0x11, SUB0 = 0x20, SUB1 = 0x21 };

/* forked: a child of fork has its own account and nothing of its parent's. emulated: qemu tells lies of when a process began. */
static void forked(int emulated)
{
	char device[64] = {0};

	set32(device, RM_DEVICE_ID, 5);
	if (emulated)
		return;
	pid_t child = fork();
	if (child == 0) {
		CHECK(rm_free(C, 1) == 0 && page_used(page, 0) == 30 * MIB);
		CHECK(rm_alloc(C + 1, C + 1, DEV0, 0x80, device) == 0);
		CHECK(rm_memory(C + 1, DEV0, 1, 36 * MIB, 0) == RM_STATUS_NO_MEMORY && rm_memory(C + 1, DEV0, 1, 34 * MIB, 0) == 0);
		CHECK(page_used(page, 0) == 64 * MIB && page_slot(page, 1)->used[0] == 34 * MIB);
		raise(SIGKILL);
	}
	siginfo_t info;
	CHECK(waitid(P_PID, child, &info, WEXITED | WNOWAIT) == 0 && info.si_status == SIGKILL);
	/* It is dead, though nobody has waited for it. Whoever needs room finds out. */
	CHECK(page_used(page, 0) == 64 * MIB && rm_memory(C, DEV0, 2, 34 * MIB, 0) == 0 && page_slot(page, 1)->owner == 0);
	CHECK(waitpid(child, NULL, 0) == child);
}

int main(int argc, char **argv)
{
	char device[64] = {0}, group[20] = {0}, heap[RM_HEAP_SIZE] = {0}, dup[RM_DUP_SIZE] = {0};
	uint32_t total, unused;

	(void)argv;
	page = open_page();
	CHECK(rm_alloc(C, 0, C, 0x41, NULL) == 0);
	/* Instance 5 is the first vGPU, 3 the second. */
	set32(device, RM_DEVICE_ID, 5);
	CHECK(rm_alloc(C, C, DEV0, 0x80, device) == 0);
	set32(device, RM_DEVICE_ID, 3);
	CHECK(rm_alloc(C, C, DEV1, 0x80, device) == 0);
	CHECK(rm_alloc(C, DEV0, SUB0, 0x2080, NULL) == 0 && rm_alloc(C, DEV1, SUB1, 0x2080, NULL) == 0);

	/* Limits, and that what is refused does not reach the driver. Small sizes are reserved at 2 MiB, settled to 64 KiB. */
	CHECK(rm_memory(C, DEV0, 1, 60 * MIB, 0) == 0 && page_used(page, 0) == 60 * MIB);
	CHECK(rm_memory(C, SUB0, 2, 1000, 0) == 0 && page_used(page, 0) == 60 * MIB + 65536);
	CHECK(rm_memory(C, SUB0, 3, 1000, 3u << 23) == 0 && page_used(page, 0) == 62 * MIB + 65536);
	executed = 0;
	CHECK(rm_memory(C, DEV0, 4, 4 * MIB, 0) == RM_STATUS_NO_MEMORY && executed == 0);
	CHECK(rm_memory(C, DEV0, 4, ~0ull, 0) == RM_STATUS_NO_MEMORY && rm_memory(C, DEV0, 4, 1ull << 63, 0) == RM_STATUS_NO_MEMORY);
	CHECK(rm_memory(C, 0x999, 4, MIB, 0) == RM_STATUS_NO_MEMORY && executed == 0); /* on no GPU that is known */
	CHECK(rm_memory(C, DEV1, 4, 32 * MIB, 0) == 0 && page_used(page, 1) == 32 * MIB);
	CHECK(rm_memory(C, DEV1, 5, 65536, 0) == RM_STATUS_NO_MEMORY);

	fb_info(C, SUB0, &total, &unused);
	CHECK(total == 64 << 10 && unused == (2 << 10) - 64);
	fb_info(C, SUB1, &total, &unused);
	CHECK(total == 32 << 10 && unused == 0);

	/* The host lowers the limit, then raises it. */
	page_vgpu(page, 0)->limit = 16 * MIB;
	fb_info(C, SUB0, &total, &unused);
	CHECK(total == 16 << 10 && unused == 0 && rm_memory(C, DEV0, 5, 65536, 0) == RM_STATUS_NO_MEMORY);
	page_vgpu(page, 0)->limit = 128 * MIB;
	CHECK(rm_memory(C, DEV0, 5, 60 * MIB, 0) == 0 && rm_free(C, 5) == 0);
	page_vgpu(page, 0)->limit = 64 * MIB;

	/* Frees: one, one that the driver refuses, a handle used again, and of a device with all below it. */
	CHECK(rm_free(C, 1) == 0 && page_used(page, 0) == 2 * MIB + 65536);
	CHECK(rm_memory(C, DEV0, 0xdead, 4 * MIB, 0) == 0 && rm_free(C, 0xdead) == 0x57 && page_used(page, 0) == 6 * MIB + 65536);
	CHECK(rm_memory(C, DEV0, 1, 60 * MIB, 0) == RM_STATUS_NO_MEMORY && rm_memory(C, DEV0, 1, 8 * MIB, 0) == 0);
	CHECK(rm_memory(C, DEV0, 1, 4 * MIB, 0) == 0 && page_used(page, 0) == 10 * MIB + 65536);
	CHECK(rm_free(C, DEV0) == 0 && page_used(page, 0) == 0 && page_used(page, 1) == 32 * MIB);
	CHECK(rm_free(C, 4) == 0 && page_used(page, 1) == 0);

	/* Handles that the driver chooses, many of them. */
	set32(device, RM_DEVICE_ID, 5);
	CHECK(rm_alloc(C, C, DEV0, 0x80, device) == 0);
	for (int i = 0; i < 900; i++)
		CHECK(rm_memory(C, DEV0, 0, 65536, 0) == 0);
	CHECK(page_used(page, 0) == 900 * 65536);
	for (uint32_t h = 0xcaf00000; h < next_handle; h++)
		CHECK(rm_free(C, h) == 0);
	CHECK(page_used(page, 0) == 0);

	/* More granted than asked for. */
	char big[128] = {0};
	set32(big, 8, 0x512);
	set64(big, RM_MEMORY_SIZE, 2 * MIB);
	CHECK(rm_alloc(C, DEV0, 1, 0x40, big) == 0 && page_used(page, 0) == 32 * MIB);
	set64(big, RM_MEMORY_SIZE, 4 * MIB);
	CHECK(rm_alloc(C, DEV0, 2, 0x40, big) == 0 && page_used(page, 0) == 36 * MIB); /* too much, too late */
	CHECK(rm_free(C, 1) == 0 && rm_free(C, 2) == 0 && page_used(page, 0) == 0);

	/* A second handle keeps the memory. */
	CHECK(rm_memory(C, DEV0, 1, 8 * MIB, 0) == 0);
	set32(dup, RM_DUP_CLIENT, C), set32(dup, RM_DUP_PARENT, DEV0), set32(dup, RM_DUP_OBJECT, 2);
	set32(dup, RM_DUP_CLIENT_SRC, C), set32(dup, RM_DUP_OBJECT_SRC, 1);
	CHECK(ioctl(9, CALL(RM_NR_DUP, sizeof dup), dup) == 0 && page_used(page, 0) == 8 * MIB);
	CHECK(rm_free(C, 1) == 0 && page_used(page, 0) == 8 * MIB);
	CHECK(rm_free(C, 2) == 0 && page_used(page, 0) == 0);

	/* Contexts: a flat charge, and the page's timeslice instead of libcuda's. */
	set32(group, RM_TSG_ENGINE_TYPE, 1);
	CHECK(rm_alloc(C, DEV0, 7, 0xa06c, group) == 0 && page_used(page, 0) == 13 * MIB && slice == 4000 && slice_of == 7);
	uint64_t micros = 2048;
	slice = 0;
	CHECK(rm_control(C, 7, 0xa06c0103, &micros, sizeof micros) == 0 && slice == 4000);
	page_vgpu(page, 0)->timeslice_micros = 9000;
	page->change++;
	CHECK(rm_control(C, C, 0x201, &micros, 0) == 0 && slice == 9000 && slice_of == 7);
	page_vgpu(page, 0)->timeslice_micros = 0;
	CHECK(rm_control(C, 7, 0xa06c0103, &micros, sizeof micros) == 0 && slice == 2048);
	set32(group, RM_TSG_ENGINE_TYPE, 11);
	CHECK(rm_alloc(C, DEV0, 8, 0xa06c, group) == 0 && page_used(page, 0) == 13 * MIB);
	CHECK(rm_free(C, 7) == 0 && rm_free(C, 8) == 0 && page_used(page, 0) == 0);

	/* The old way to allocate is refused whole. */
	executed = 0;
	for (uint32_t function = 0; function < 32; function++) {
		set32(heap, RM_HEAP_FUNCTION, function), set32(heap, RM_HEAP_STATUS, 0);
		CHECK(ioctl(9, CALL(RM_NR_HEAP, sizeof heap), heap) == 0 && get32(heap, RM_HEAP_STATUS) == RM_STATUS_NOT_SUPPORTED);
	}
	CHECK(executed == 0);

	/* Managed memory counts on both. */
	char *at = mmap(NULL, 64 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	int uvm = memfd_create("uvm", 0);
	CHECK(ftruncate(uvm, (long)at + 64 * MIB) == 0);
	CHECK(mmap(at, 40 * MIB, PROT_READ, MAP_SHARED | MAP_FIXED, uvm, (long)at) == at); /* refused */
	CHECK(page_used(page, 0) == 0 && page_used(page, 1) == 0);
	CHECK(mmap(at, 30 * MIB, PROT_READ, MAP_SHARED | MAP_FIXED, uvm, (long)at) == at);
	CHECK(page_used(page, 0) == 30 * MIB && page_used(page, 1) == 30 * MIB && page_slot(page, 0)->managed == 30 * MIB);
	CHECK(rm_memory(C, DEV1, 1, 4 * MIB, 0) == RM_STATUS_NO_MEMORY && rm_memory(C, DEV0, 1, 30 * MIB, 0) == 0);
	CHECK(munmap(at, 10 * MIB) == 0 && page_used(page, 1) == 20 * MIB);
	CHECK(munmap(at, 64 * MIB) == 0 && page_used(page, 1) == 0 && page_slot(page, 0)->managed == 0);

	forked(argc > 1);

	/* Of the whole client; and another client of its number. */
	CHECK(rm_free(C, C) == 0 && page_used(page, 0) == 0);
	CHECK(rm_alloc(C, C, DEV0, 0x80, device) == 0 && rm_memory(C, DEV0, 1, 30 * MIB, 0) == 0);
	CHECK(rm_alloc(C, 0, C, 0x41, NULL) == 0 && page_used(page, 0) == 0);

	/* No slot left, all of them living: refused. */
	for (unsigned i = 0; i < page->processes; i++)
		page_slot(page, i)->owner = 1;
	CHECK(rm_alloc(C, C, DEV0, 0x80, device) == 0 && rm_memory(C, DEV0, 1, MIB, 0) == RM_STATUS_NO_MEMORY);
	return 0;
}
