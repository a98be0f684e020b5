/* What the test programs share: CHECK, calls of the resource manager, and the page as a program of the host sees it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../page.h"

#define CHECK(cond)                                                                                  \
	do {                                                                                         \
		if (!(cond)) {                                                                       \
			fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #cond, errno); \
			_exit(1);                                                                    \
		}                                                                                    \
	} while (0)

#define MIB (1ull << 20)
#define CALL(nr, size) (3u << 30 | (size) << 16 | 'F' << 8 | (nr))

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

__attribute__((unused)) static struct cgpu_header *open_page(void)
{
	int fd = open(CGPU_PAGE_PATH, O_RDWR);
	struct stat st;
	CHECK(fd >= 0 && fstat(fd, &st) == 0);
	void *at = mmap(NULL, st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(at != MAP_FAILED);
	close(fd);
	return at;
}
__attribute__((unused)) static struct cgpu_vgpu *page_vgpu(struct cgpu_header *p, int i) { return (struct cgpu_vgpu *)(p + 1) + i; }
__attribute__((unused)) static struct cgpu_slot *page_slot(struct cgpu_header *p, int i)
{
	return (struct cgpu_slot *)((struct cgpu_vgpu *)(p + 1) + CGPU_MAX_VGPUS) + i;
}
__attribute__((unused)) static uint64_t page_used(struct cgpu_header *p, int gpu)
{
	uint64_t sum = 0;
	for (unsigned i = 0; i < p->processes; i++)
		if (page_slot(p, i)->owner)
			sum += page_slot(p, i)->used[gpu];
	return sum;
}

static inline uint32_t get32(const void *b, size_t off)
{
	uint32_t v;
	memcpy(&v, (const char *)b + off, 4);
	return v;
}
static inline uint64_t get64(const void *b, size_t off)
{
	uint64_t v;
	memcpy(&v, (const char *)b + off, 8);
	return v;
}
static inline void set32(void *b, size_t off, uint32_t v) { memcpy((char *)b + off, &v, 4); }
static inline void set64(void *b, size_t off, uint64_t v) { memcpy((char *)b + off, &v, 8); }

/* rm_alloc makes an object by the 48-byte form and returns its status. */
__attribute__((unused)) static uint32_t rm_alloc(uint32_t client, uint32_t parent, uint32_t handle, uint32_t class, void *params)
{
	char o[48] = {0};
	set32(o, RM_ALLOC_ROOT, client);
	set32(o, RM_ALLOC_PARENT, parent);
	set32(o, RM_ALLOC_OBJECT, handle);
	set32(o, RM_ALLOC_CLASS, class);
	set64(o, RM_ALLOC_PARAMS, (uint64_t)params);
	CHECK(ioctl(9, CALL(RM_NR_ALLOC, sizeof o), o) == 0);
	return get32(o, 40);
}
__attribute__((unused)) static uint32_t rm_memory(uint32_t client, uint32_t parent, uint32_t handle, uint64_t size, uint32_t attr)
{
	char p[128] = {0};
	set64(p, RM_MEMORY_SIZE, size);
	set32(p, RM_MEMORY_ATTR, attr);
	return rm_alloc(client, parent, handle, 0x40, p);
}
__attribute__((unused)) static uint32_t rm_free(uint32_t client, uint32_t handle)
{
	char o[RM_FREE_SIZE] = {0};
	set32(o, RM_FREE_ROOT, client);
	set32(o, RM_FREE_OBJECT, handle);
	CHECK(ioctl(9, CALL(RM_NR_FREE, sizeof o), o) == 0);
	return get32(o, RM_FREE_STATUS);
}
__attribute__((unused)) static uint32_t rm_control(uint32_t client, uint32_t object, uint32_t cmd, void *params, uint32_t size)
{
	char o[RM_CONTROL_SIZE] = {0};
	set32(o, RM_CONTROL_CLIENT, client);
	set32(o, RM_CONTROL_OBJECT, object);
	set32(o, RM_CONTROL_CMD, cmd);
	set64(o, RM_CONTROL_PARAMS, (uint64_t)params);
	set32(o, RM_CONTROL_PARAMS_SIZE, size);
	CHECK(ioctl(9, CALL(RM_NR_CONTROL, sizeof o), o) == 0);
	return get32(o, RM_CONTROL_STATUS);
}
