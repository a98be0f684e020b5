/* Managed memory with a guard, which this program plays: what the guard is asked, and that it is told of every end. */
#include "check.h"

/* Volatile: the C library declares ioctl as a function that comes back to no function here. */
static volatile uint64_t held, limit = 8 * MIB;
static volatile int asked, told, hmm;

long cgpu_test_ioctl(int fd, unsigned request, void *arg)
{
	struct cgpu_managed_call *m = arg;
	(void)fd;
	if (request == RM_UVM_INITIALIZE) {
		hmm = !(get64(arg, 0) & RM_UVM_INIT_DISABLE_HMM);
		set32(arg, 8, 7);
		return 0;
	}
	if (request == CGPU_RELEASE_MANAGED) {
		told++;
		CHECK(held >= m->length);
		held -= m->length;
		return 0;
	}
	if (request != CGPU_RESERVE_MANAGED)
		return -ENOTTY;
	asked++;
	if (held + m->length > limit) {
		m->status = RM_STATUS_NO_MEMORY;
		return 0;
	}
	held += m->length;
	return 0;
}

static int uvm;

static char *managed(char *at, size_t len) { return mmap(at, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, uvm, (long)at); }

int main(void)
{
	char *at = mmap(NULL, 64 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	struct { uint64_t flags; uint32_t status, reserved; } init = {2, 0, 0};

	uvm = memfd_create("uvm", 0);
	CHECK(at != MAP_FAILED && ftruncate(uvm, (long)at + 64 * MIB) == 0);

	hmm = -1;
	CHECK(ioctl(uvm, RM_UVM_INITIALIZE, &init) == 0 && hmm == 0 && init.flags == (2 | RM_UVM_INIT_DISABLE_HMM) && init.status == 7);

	errno = 77;
	CHECK(managed(at, 6 * MIB) == at && held == 6 * MIB && asked == 1 && errno == 77);
	CHECK(managed(at + 8 * MIB, 3 * MIB) == at + 8 * MIB && held == 6 * MIB && asked == 2); /* refused; refuse.c tests the rest */
	CHECK(managed(at + 8 * MIB, MIB + 1) == at + 8 * MIB && held == 7 * MIB + 4096); /* whole pages */
	CHECK(munmap(at + 8 * MIB, MIB + 1) == 0 && held == 6 * MIB && told == 1);

	/* In pieces: the middle, by another mapping; then the left, then more than the rest. */
	CHECK(mmap(at + 2 * MIB, 2 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at + 2 * MIB && held == 4 * MIB);
	CHECK(munmap((void *)1, 4096) == -1 && held == 4 * MIB);
	CHECK(munmap(at, 2 * MIB) == 0 && held == 2 * MIB);
	CHECK(munmap(at + MIB, 20 * MIB) == 0 && held == 0 && told == 4);

	/* A mapping that the kernel refuses is not charged. Write access to a file that is open for reading only. */
	int ro = open("/proc/self/exe", O_RDONLY);
	CHECK(mmap(at, MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, ro, (long)at) == MAP_FAILED && errno == EACCES);
	CHECK(held == 0 && told == 5);

	/* One over another: the old one ends, the new one begins. */
	CHECK(managed(at, 8 * MIB) == at && managed(at, 8 * MIB) == at && held == 8 * MIB);
	CHECK(munmap(at, 8 * MIB) == 0 && held == 0);

	/* Not what managed memory looks like: not asked for. */
	asked = 0;
	CHECK(mmap(NULL, MIB, PROT_READ, MAP_SHARED, uvm, 4096) != MAP_FAILED);
	CHECK(mmap(at, MIB, PROT_READ, MAP_PRIVATE | MAP_FIXED, uvm, (long)at) == at);
	CHECK(asked == 0);

	/* Many ranges, and a child of fork that unmaps what it believes to have. */
	limit = 4096 * MIB;
	for (int i = 0; i < 1000; i++)
		CHECK(managed(at + i * 8192, 4096) == at + i * 8192);
	CHECK(held == 1000 * 4096);
	pid_t child = fork();
	if (child == 0) {
		told = 0;
		CHECK(munmap(at, 1000 * 8192) == 0 && told == 0);
		_exit(0);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	told = 0;
	CHECK(munmap(at, 1000 * 8192) == 0 && held == 0 && told == 1000);
	return 0;
}
