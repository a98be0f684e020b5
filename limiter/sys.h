/* System calls, made directly: the library must load into programs with any C library, or none that it knows. */
#ifndef CGPU_SYS_H
#define CGPU_SYS_H

#include <asm/errno.h>
#include <asm/stat.h>
#include <asm/unistd.h>
#include <linux/fcntl.h>
#include <linux/mman.h>
#include <linux/uio.h>
#include <stddef.h>
#include <stdint.h>

#define S_TYPE 0170000 /* in st_mode; linux/stat.h and asm/stat.h do not go together everywhere */
#define S_CHAR 0020000
#define S_REGULAR 0100000

/* sys6 returns what the kernel does: a result, or an error number negated. */
static inline long sys6(long nr, long a, long b, long c, long d, long e, long f)
{
#if defined(__x86_64__)
	long ret;
	register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
	__asm__ volatile("syscall" : "=a"(ret) : "0"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
	return ret;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = nr, x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b, x2 __asm__("x2") = c, x3 __asm__("x3") = d, x4 __asm__("x4") = e, x5 __asm__("x5") = f;
	__asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return x0;
#else
#error "libcgpu: want x86-64 or arm64"
#endif
}

static inline int failed(long ret) { return (unsigned long)ret > -4096UL; }

#ifdef CGPU_TEST_DRIVER
/* The tests play the driver. */
extern long cgpu_test_ioctl(int fd, unsigned int request, void *arg) __attribute__((visibility("default")));
#define sys_ioctl(fd, request, arg) cgpu_test_ioctl(fd, request, arg)
#else
static inline long sys_ioctl(int fd, unsigned int request, void *arg) { return sys6(__NR_ioctl, fd, request, (long)arg, 0, 0, 0); }
#endif

static inline long sys_mmap(void *addr, size_t len, int prot, int flags, int fd, long off)
{
	return sys6(__NR_mmap, (long)addr, (long)len, prot, flags, fd, off);
}
static inline long sys_munmap(void *addr, size_t len) { return sys6(__NR_munmap, (long)addr, (long)len, 0, 0, 0, 0); }
static inline long sys_open(const char *path, int flags) { return sys6(__NR_openat, AT_FDCWD, (long)path, flags, 0, 0, 0); }
static inline long sys_read(int fd, void *to, size_t len) { return sys6(__NR_read, fd, (long)to, (long)len, 0, 0, 0); }
static inline long sys_close(int fd) { return sys6(__NR_close, fd, 0, 0, 0, 0, 0); }
static inline long sys_fstat(int fd, struct stat *st) { return sys6(__NR_fstat, fd, (long)st, 0, 0, 0, 0); }
static inline long sys_kill(int pid, int signal) { return sys6(__NR_kill, pid, signal, 0, 0, 0, 0); }
static inline uint32_t sys_getpid(void) { return (uint32_t)sys6(__NR_getpid, 0, 0, 0, 0, 0, 0); }
static inline uint32_t sys_gettid(void) { return (uint32_t)sys6(__NR_gettid, 0, 0, 0, 0, 0, 0); }
static inline void sys_yield(void) { sys6(__NR_sched_yield, 0, 0, 0, 0, 0, 0); }

/* copy_in and copy_out reach the caller's memory, and say no where the kernel would say EFAULT. See sys.c. */
int copy_in(void *to, uint64_t user, size_t len);
int copy_out(uint64_t user, const void *from, size_t len);

/* result turns a kernel's answer into what the C library's function would return, with errno. */
long result(long ret);

#endif
