/*
 * libcgpu.so, the limiter: the preload library that keeps a container's programs within their vGPU.
 *
 * It stands in front of four functions of the C library and makes their system calls itself. Programs that never touch a
 * GPU pass through after a few comparisons; the vGPU page is not even looked for. docs/internals/limiter.md tells the rest.
 */
#include "cgpu.h"

#define EXPORT __attribute__((visibility("default")))

/* Heterogeneous memory management lets kernels use malloc'ed memory, which then moves to the device uncounted. */
static long initialize_uvm(int fd, unsigned int request, void *arg)
{
	struct { uint64_t flags; uint32_t status, reserved; } call;
	long ret;

	_Static_assert(RM_UVM_INITIALIZE_FLAGS == 0, "UVM_INITIALIZE_PARAMS");
	if (!copy_in(&call, (uint64_t)arg, sizeof call))
		return sys_ioctl(fd, request, arg);
	call.flags |= RM_UVM_INIT_DISABLE_HMM;
	ret = sys_ioctl(fd, request, &call);
	if (!failed(ret) && !copy_out((uint64_t)arg + 8, &call.status, sizeof call.status))
		return -EFAULT;
	return ret;
}

/* is_rm picks the calls of the resource manager that make or drop memory, or tell of it. */
static int is_rm(unsigned int number)
{
	unsigned int nr = number & 0xff;

	return (number >> 8 & 0xff) == 'F' &&
	       (nr == RM_NR_ALLOC || nr == RM_NR_FREE || nr == RM_NR_CONTROL || nr == RM_NR_DUP || nr == RM_NR_HEAP);
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
	return (int)result(sys_ioctl(fd, number, arg));
}

EXPORT void *mmap(void *addr, size_t len, int prot, int flags, int fd, long off)
{
	const struct cgpu_header *page;
	int type = flags & MAP_TYPE;

	/* What managed memory looks like. libcuda also maps plain files and devices; their offsets are not their addresses. */
	if ((type == MAP_SHARED || type == MAP_SHARED_VALIDATE) && fd >= 0 && off && off == (long)addr) {
		page = vgpu_page();
		if (page->flags & (CGPU_FLAG_MANAGED_LIMIT | CGPU_FLAG_MANAGED_DENY))
			return (void *)result(managed_mmap(page, addr, len, prot, flags, fd, off));
	}
	/* CUDA may end a mapping by putting an inaccessible one in its place. */
	if (flags & MAP_FIXED && LOAD(&managed_ranges))
		return (void *)result(managed_replace(addr, len, prot, flags, fd, off));
	return (void *)result(sys_mmap(addr, len, prot, flags, fd, off));
}

/* Offsets are 64 bits wide anyway. */
EXPORT void *mmap64(void *addr, size_t len, int prot, int flags, int fd, long off) __attribute__((alias("mmap")));

EXPORT int munmap(void *addr, size_t len)
{
	if (LOAD(&managed_ranges))
		return (int)result(managed_munmap(addr, len));
	return (int)result(sys_munmap(addr, len));
}
