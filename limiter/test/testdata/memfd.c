/*
 * A mapping that looks like managed memory, of a file that no guard stands behind.
 * usage: memfd maps|denied
 */
#include "check.h"

static int pipe_end(void)
{
	int p[2];
	CHECK(pipe(p) == 0);
	return p[1];
}

int main(int argc, char **argv)
{
	size_t len = 4 * MIB;
	char *at = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	int f = memfd_create("uvm", 0);

	CHECK(argc == 2 && at != MAP_FAILED && ftruncate(f, (long)at + len) == 0);
	char *got = mmap(at, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, f, (long)at);
	CHECK(got == at); /* also when it is denied: then it is a mapping of nothing */
	if (!strcmp(argv[1], "denied")) {
		CHECK(write(pipe_end(), got, 1) == -1 && errno == EFAULT);
		CHECK(munmap(at, len) == 0 && msync(at, len, MS_ASYNC) == 0); /* still there */
		CHECK(mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == ENOMEM);
		CHECK(mmap(at - 64 * MIB, len, PROT_READ, MAP_SHARED, f, (long)at - 64 * MIB) == MAP_FAILED && errno == ENOMEM);
		return 0;
	}
	got[len - 1] = 1;
	CHECK(munmap(at, len) == 0);
	return 0;
}
