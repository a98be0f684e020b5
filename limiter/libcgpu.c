/*
 * libcgpu.so, the limiter: the preload library that keeps a container's programs within their vGPU.
 *
 * It stands in front of four functions of the C library and makes their system calls itself. Programs that never touch a
 * GPU pass through after a few comparisons; the vGPU page is not even looked for. docs/internals/limiter.md tells the rest.
 */
#include "cgpu.h"

#define EXPORT __attribute__((visibility("default")))
#define MANAGED (CGPU_FLAG_MANAGED_LIMIT | CGPU_FLAG_MANAGED_DENY)

/* Heterogeneous memory management lets kernels use malloc'ed memory, which then moves to the device uncounted. */
static long initialize_uvm(int fd, unsigned int request, void *arg)
{
	uint64_t flags;

	if (copy_in(&flags, (uint64_t)arg + RM_UVM_INITIALIZE_FLAGS, sizeof flags) && (flags |= RM_UVM_INIT_DISABLE_HMM))
		copy_out((uint64_t)arg + RM_UVM_INITIALIZE_FLAGS, &flags, sizeof flags);
	return sys_ioctl(fd, request, arg);
}

/* is_rm picks the calls of the resource manager that make or drop memory, or tell of it. */
static int is_rm(unsigned int number)
{
	unsigned int nr = number & 0xff;

	return (number >> 8 & 0xff) == 'F' &&
	       (nr == RM_NR_ALLOC || nr == RM_NR_FREE || nr == RM_NR_CONTROL || nr == RM_NR_DUP || nr == RM_NR_HEAP);
}

static int is_managed(unsigned int number)
{
	return number == UVM_ALLOC_SEMAPHORE_POOL || number == UVM_VALIDATE_VA_RANGE || number == UVM_DISABLE_READ_DUPLICATION;
}

/*
 * ioctl is variadic in every libc, but both architectures pass a variadic argument of this kind where they pass a third
 * one. The kernel, and musl, take 32 bits of the number.
 */
EXPORT int ioctl(int fd, unsigned long request, void *arg)
{
	unsigned int number = (unsigned int)request;

	/* With a guard there is nothing to do here: it answers these calls itself. */
	if (is_rm(number) && vgpu_page()->flags & CGPU_FLAG_PRELOAD)
		return (int)result(preload_call(vgpu_page(), fd, number, arg));
	if (number == RM_UVM_INITIALIZE && vgpu_page()->flags & CGPU_FLAG_NO_HMM)
		return (int)result(initialize_uvm(fd, number, arg));
	if (is_managed(number) && vgpu_page()->flags & MANAGED && is_uvm(vgpu_page(), fd))
		return (int)result(managed_call(fd, number, arg));
	return (int)result(sys_ioctl(fd, number, arg));
}

EXPORT void *mmap(void *addr, size_t len, int prot, int flags, int fd, long off)
{
	int type = flags & MAP_TYPE;

	/* What managed memory looks like. libcuda also maps plain files and devices; their offsets are not their addresses. */
	if ((type == MAP_SHARED || type == MAP_SHARED_VALIDATE) && fd >= 0 && off && off == (long)addr && vgpu_page()->flags & MANAGED)
		return (void *)result(managed_mmap(vgpu_page(), addr, len, prot, flags, fd, off));
	if (LOAD(&refusals) && !addr && prot == PROT_NONE && fd < 0 && refuses_reservation(len))
		return (void *)result(-ENOMEM);
	if (LOAD(&refusals) && flags & MAP_FIXED && prot != PROT_NONE)
		forget((uint64_t)addr, (uint64_t)addr + len);
	/* CUDA may end a mapping by putting an inaccessible one in its place. */
	if (flags & MAP_FIXED && LOAD(&managed_ranges))
		return (void *)result(managed_replace(addr, len, prot, flags, fd, off));
	return (void *)result(sys_mmap(addr, len, prot, flags, fd, off));
}

/* Offsets are 64 bits wide anyway. */
EXPORT void *mmap64(void *addr, size_t len, int prot, int flags, int fd, long off) __attribute__((alias("mmap")));

EXPORT int munmap(void *addr, size_t len)
{
	if (LOAD(&refusals) && keeps((uint64_t)addr, (uint64_t)addr + len))
		return 0;
	if (LOAD(&managed_ranges))
		return (int)result(managed_munmap(addr, len));
	return (int)result(sys_munmap(addr, len));
}
