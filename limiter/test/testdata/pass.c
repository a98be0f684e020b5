/*
 * What is not the limiter's passes through: results, errno, any number of arguments, pointers that are none.
 * usage: pass [FLAGS]: of the page
 */
#include "check.h"

#include <sys/syscall.h>

#define NO_DRIVER (errno == ENOTTY || errno == ENOSYS) /* qemu knows no number that it has not heard of */

int main(int argc, char **argv)
{
	unsigned flags = argc > 1 ? strtoul(argv[1], NULL, 0) : 0;
	int p[2], n = 0;
	char c = 'x', *at;
	FILE *f = tmpfile();
	struct { uint64_t flags; uint32_t status, reserved; } uvm = {0};

	CHECK(pipe(p) == 0 && write(p[1], &c, 1) == 1);
	errno = 77;
	CHECK(ioctl(p[0], FIONREAD, &n) == 0 && n == 1);
	CHECK(ioctl(p[0], FIOCLEX) == 0 && fcntl(p[0], F_GETFD) == FD_CLOEXEC);
	CHECK(errno == 77);
	CHECK(ioctl(p[0], TIOCGWINSZ, &n) == -1 && errno == ENOTTY);
	CHECK(ioctl(-1, FIONREAD, &n) == -1 && errno == EBADF);
	CHECK(ioctl(p[0], FIONREAD, (void *)8) == -1 && errno == EFAULT);

	/* Numbers of the resource manager and of UVM, where there is no such driver, with good and bad pointers. */
	unsigned nrs[] = {RM_NR_ALLOC, RM_NR_FREE, RM_NR_CONTROL, RM_NR_DUP, RM_NR_HEAP};
	unsigned sizes[] = {0, 16, 28, 32, 40, 48, 184};
	char o[184] = {0};
	/* Where the kernel does not look pointers up for the limiter (qemu does not), it trusts them. */
	int checked = syscall(SYS_process_vm_readv, getpid(), NULL, 0, NULL, 0, 0) == 0;
	for (unsigned i = 0; i < sizeof nrs / sizeof *nrs; i++)
		for (unsigned k = 0; k < sizeof sizes / sizeof *sizes; k++) {
			/* Heap control is refused in preload mode, whatever the file is. */
			if (nrs[i] == RM_NR_HEAP && sizes[k] == RM_HEAP_SIZE && flags & CGPU_FLAG_PRELOAD)
				CHECK(ioctl(p[0], CALL(nrs[i], sizes[k]), o) == 0 && get32(o, RM_HEAP_STATUS) == RM_STATUS_NOT_SUPPORTED);
			else
				CHECK(ioctl(p[0], CALL(nrs[i], sizes[k]), o) == -1 && NO_DRIVER);
			CHECK(!checked || (ioctl(p[0], CALL(nrs[i], sizes[k]), (void *)8) == -1 && NO_DRIVER));
			CHECK(!checked || (ioctl(p[0], CALL(nrs[i], sizes[k]), NULL) == -1 && NO_DRIVER));
		}
	CHECK(ioctl(p[0], RM_UVM_INITIALIZE, &uvm) == -1 && NO_DRIVER);
	CHECK(uvm.flags == (flags & CGPU_FLAG_NO_HMM ? RM_UVM_INIT_DISABLE_HMM : 0));
	unsigned uvm_calls[] = {45, 68, 72}; /* those that a refusal of managed memory has to do with */
	for (int i = 0; i < 3; i++) {
		CHECK(ioctl(p[0], uvm_calls[i], o) == -1 && NO_DRIVER);
		CHECK(!checked || (ioctl(p[0], uvm_calls[i], (void *)8) == -1 && NO_DRIVER));
	}
	CHECK(!checked || (ioctl(p[0], RM_UVM_INITIALIZE, NULL) == -1 && NO_DRIVER));

	errno = 77;
	at = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(at != MAP_FAILED);
	at[8191] = 1;
	CHECK(mmap(at, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at);
	CHECK(munmap(at, 8192) == 0);
	CHECK(ftruncate(fileno(f), 65536) == 0 && pwrite(fileno(f), "y", 1, 4096) == 1);
	at = mmap64(NULL, 4096, PROT_READ, MAP_SHARED, fileno(f), 4096);
	CHECK(at != MAP_FAILED && *at == 'y' && munmap(at, 4096) == 0);
	CHECK(errno == 77);
	CHECK(mmap(NULL, 0, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == EINVAL);
	CHECK(mmap(NULL, 4096, PROT_READ, MAP_SHARED, -1, 0) == MAP_FAILED && errno == EBADF);
	CHECK(munmap((void *)1, 4096) == -1 && errno == EINVAL);
	return 0;
}
