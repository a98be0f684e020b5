/*
 * A mapping that looks like managed memory, of a file that no guard stands behind.
 * usage: memfd maps|denied
 */
#include "check.h"

int main(int argc, char **argv)
{
	size_t len = 4 * MIB;
	char *at = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	int f = memfd_create("uvm", 0);

	CHECK(argc == 2 && at != MAP_FAILED && ftruncate(f, (long)at + len) == 0);
	char *got = mmap(at, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, f, (long)at);
	if (!strcmp(argv[1], "denied")) {
		CHECK(got == MAP_FAILED && errno == ENOMEM);
		return 0;
	}
	CHECK(got == at);
	got[len - 1] = 1;
	CHECK(munmap(at, len) == 0);
	return 0;
}
