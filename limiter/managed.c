/*
 * Managed memory (cudaMallocManaged): mappings of nvidia-uvm, shared, whose file offset is their address. The driver makes
 * them without asking anybody, so the limiter asks first: the guard, or in preload mode the slots.
 */
#include "cgpu.h"

static uint32_t marks;
uint32_t managed_ranges;

static void remember(uint64_t base, uint64_t end, int fd)
{
	ADD(&managed_ranges, 1);
	if (base >= end || !entry_add(CLIENT_RANGE, ADD(&marks, 1), (struct entry){.kind = KIND_RANGE, .base = base, .end = end, .fd = fd}))
		ADD(&managed_ranges, -1);
}

/* mark singles out what is remembered of [base, end) before the kernel unmaps it: another thread may map there right after. */
static uint64_t mark(uint64_t base, uint64_t end)
{
	uint64_t m = (uint64_t)CLIENT_LEAVING << 32 | ADD(&marks, 1);
	struct cursor c = {0, 0};
	struct entry *e;

	while ((e = entry_next(&c))) {
		if (LOAD(&e->key) >> 32 != CLIENT_RANGE || LOAD(&e->base) >= end || LOAD(&e->end) <= base || !entry_take(e))
			continue;
		uint64_t from = e->base, to = e->end;
		e->base = from > base ? from : base;
		e->end = to < end ? to : end;
		remember(from, e->base, e->fd);
		remember(e->end, to, e->fd);
		STORE(&e->key, m);
	}
	return m;
}

int is_uvm(const struct cgpu_header *page, int fd)
{
	struct stat st;
	return !page->uvm_device || (!failed(sys_fstat(fd, &st)) && (st.st_mode & S_TYPE) == S_CHAR && st.st_rdev == page->uvm_device);
}

static long tell(int fd, unsigned int request, struct cgpu_managed_call *call)
{
	long ret;
	while ((ret = sys_ioctl(fd, request, call)) == -EINTR)
		;
	return ret;
}

static void release(const struct cgpu_header *page, uint64_t base, uint64_t end, int fd)
{
	struct cgpu_managed_call call = {.base = base, .length = end - base};

	if (page->flags & CGPU_FLAG_PRELOAD)
		slots_release_managed(page, end - base);
	else if (is_uvm(page, fd)) /* the program may have closed it and opened another; then the guard finds out by itself */
		tell(fd, CGPU_RELEASE_MANAGED, &call);
}

/* settle ends what mark began: the ranges are gone, or they are not, because the system call failed. */
static void settle(uint64_t m, int done)
{
	struct cursor c = {0, 0};
	struct entry *e;

	while ((e = entry_next(&c))) {
		if (LOAD(&e->key) != m)
			continue;
		if (done) {
			release(vgpu_page(), e->base, e->end, e->fd);
			STORE(&e->key, 0);
			ADD(&managed_ranges, -1);
		} else {
			STORE(&e->key, (uint64_t)CLIENT_RANGE << 32 | (uint32_t)m);
		}
	}
}

/* reserve asks for the memory. */
static int reserve(const struct cgpu_header *page, uint64_t base, uint64_t end, int fd)
{
	struct cgpu_managed_call call = {.base = base, .length = end - base};

	if (page->flags & CGPU_FLAG_PRELOAD)
		return slots_reserve_managed(page, end - base);
	/*
	 * A guard that does not know the call, or none: the mapping is made, and whoever watches the limit finds it. Its end is
	 * told all the same; of a range that he does not know the guard gives nothing back.
	 */
	return failed(tell(fd, CGPU_RESERVE_MANAGED, &call)) || call.status == RM_STATUS_OK;
}

/* The kernel's pages may be larger on arm64, but CUDA maps in multiples of 64 KiB at least. */
static uint64_t end_of(uint64_t base, size_t len)
{
	uint64_t end = (base + len + 4095) & ~4095ull;
	return end < base ? UINT64_MAX : end;
}

long managed_mmap(const struct cgpu_header *page, void *addr, size_t len, int prot, int flags, int fd, long off)
{
	uint64_t base = (uint64_t)addr, end = end_of(base, len);

	if ((LOAD(&refusals) && forget(base, base + len)) || !is_uvm(page, fd))
		return managed_replace(addr, len, prot, flags, fd, off);
	/* What is there goes first: the guard knows ranges by their addresses, and an end told late would be the new one's. */
	if (flags & MAP_FIXED)
		settle(mark(base, end), 1);
	if (page->flags & CGPU_FLAG_MANAGED_DENY || !reserve(page, base, end, fd))
		return refuse(base, base + len, flags);
	long ret = sys_mmap(addr, len, prot, flags, fd, off);
	if (ret == (long)addr)
		remember(base, end, fd);
	else
		release(page, base, end, fd);
	return ret;
}

long managed_replace(void *addr, size_t len, int prot, int flags, int fd, long off)
{
	uint64_t m = flags & MAP_FIXED && LOAD(&managed_ranges) ? mark((uint64_t)addr, end_of((uint64_t)addr, len)) : 0;
	long ret = sys_mmap(addr, len, prot, flags, fd, off);
	if (m)
		settle(m, !failed(ret));
	return ret;
}

long managed_munmap(void *addr, size_t len)
{
	uint64_t m = mark((uint64_t)addr, end_of((uint64_t)addr, len));
	long ret = sys_munmap(addr, len);
	settle(m, !failed(ret));
	return ret;
}
