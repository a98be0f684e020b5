/*
 * Managed memory that a guard, which this program plays, refuses. The order of the calls is libcuda's, as traced on driver
 * 580.159: it must learn that there is no memory, and must never see the same addresses again.
 */
#include "check.h"

#include <pthread.h>

#define NOTES 64
#define UNIT (32 * MIB)
#define PLAIN (MAP_PRIVATE | MAP_ANONYMOUS)
#define DISABLE_READ_DUPLICATION 45
#define ALLOC_SEMAPHORE_POOL 68
#define VALIDATE_VA_RANGE 72

static volatile uint64_t held, limit;
static volatile int asked, executed;
static int uvm, pipe_end;

struct range { uint64_t base, length; uint32_t status, reserved; };

long cgpu_test_ioctl(int fd, unsigned request, void *arg)
{
	struct range *r = arg;
	(void)fd;
	switch (request) {
	case CGPU_RESERVE_MANAGED:
		__atomic_add_fetch(&asked, 1, __ATOMIC_SEQ_CST);
		if (held + r->length > limit)
			r->status = RM_STATUS_NO_MEMORY;
		else
			held += r->length;
		return 0;
	case CGPU_RELEASE_MANAGED:
		CHECK(held >= r->length);
		held -= r->length;
		return 0;
	}
	__atomic_add_fetch(&executed, 1, __ATOMIC_SEQ_CST);
	r->status = 7; /* of the driver */
	return 0;
}

static int mapped(char *at, size_t len) { return msync(at, len, MS_ASYNC) == 0; }
static int readable(char *at) { return write(pipe_end, at, 1) == 1; }
static char *reserve(size_t len) { return mmap(NULL, len, PROT_NONE, PLAIN, -1, 0); }
static char *managed(char *at, size_t len) { return mmap(at, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, uvm, (long)at); }

static uint32_t ask(unsigned number, char *at, size_t len)
{
	struct range r = {(uint64_t)at, len, 99, 0};
	CHECK(ioctl(uvm, number, &r) == 0 && r.base == (uint64_t)at && r.length == len);
	return r.status;
}

/* Whole units are reserved, whatever is mapped of them. */
static size_t units(size_t n) { return (n + UNIT - 1) & ~(UNIT - 1); }

/* place reserves and gives the ends back. */
static char *place(size_t n)
{
	size_t len = units(n) + UNIT - 4096;
	char *got = reserve(len), *at;

	n = units(n);

	CHECK(got != MAP_FAILED);
	at = (char *)units((uint64_t)got);
	CHECK(at == got || munmap(got, at - got) == 0);
	CHECK(at + n == got + len || munmap(at + n, got + len - at - n) == 0);
	return at;
}

/* attempt goes up to where libcuda gives its reservation back. */
static char *attempt(size_t n)
{
	char *at = place(n);

	errno = 77;
	CHECK(managed(at, n) == at && mapped(at, n) && errno == 77);
	CHECK(ask(VALIDATE_VA_RANGE, at, n) == RM_STATUS_NO_MEMORY && ask(DISABLE_READ_DUPLICATION, at, n) == RM_STATUS_NO_MEMORY);
	CHECK(mmap(at, n, PROT_NONE, PLAIN | MAP_FIXED, -1, 0) == at);
	CHECK(ask(VALIDATE_VA_RANGE, at, n) == RM_STATUS_NO_MEMORY && errno == 77);
	return at;
}

static void give_back(char *at, size_t n) { CHECK(munmap(at, units(n)) == 0 && mapped(at, units(n))); }
static int refused_once(size_t n) { return reserve(units(n) + UNIT - 4096) == MAP_FAILED && errno == ENOMEM; }

/* comes_back: a later allocation is made, at other addresses, and nothing of the refusal is left. */
static void comes_back(char *was, size_t n)
{
	uint64_t before = limit;
	char *at = place(n);

	CHECK(at + n <= was || was + n <= at);
	limit = held + n;
	executed = 0;
	CHECK(managed(at, n) == at && held == limit && readable(at) && ask(VALIDATE_VA_RANGE, at, n) == 7 && executed == 1);
	CHECK(munmap(at, units(n)) == 0 && !mapped(at, units(n)) && held == limit - n);
	limit = before;
}

static void sequence(void)
{
	size_t sizes[] = {4096, 2 * MIB, UNIT - 4096, UNIT, 64 * MIB + 4096};

	for (int i = 0; i < 5; i++) {
		executed = asked = 0;
		char *at = attempt(sizes[i]);
		CHECK(executed == 0 && asked == 1 && held == 0 && !readable(at));
		give_back(at, sizes[i]);
		CHECK(refused_once(sizes[i]));
		comes_back(at, sizes[i]);
	}
	/* Whatever the alignment: as much as was given back, and a unit more, but not beyond. */
	for (int more = 0; more < 2; more++) {
		give_back(attempt(MIB), MIB);
		CHECK(reserve(UNIT + more * UNIT) == MAP_FAILED && errno == ENOMEM);
	}
	/* Only what reserves: none of these is libcuda's. Then one of another size: libcuda did not come back. */
	char *at = attempt(MIB), *hint = place(MIB);
	give_back(at, MIB);
	CHECK(mmap(NULL, MIB, PROT_READ, PLAIN, -1, 0) != MAP_FAILED && mmap(NULL, MIB, PROT_NONE, MAP_PRIVATE, uvm, 0) != MAP_FAILED);
	CHECK(mmap(hint, MIB, PROT_NONE, PLAIN | MAP_FIXED, -1, 0) == hint && refused_once(MIB));
	for (int k = 0; k < 2; k++) {
		give_back(attempt(MIB), MIB);
		CHECK(reserve(k ? UNIT - 4096 : 2 * UNIT + 4096) != MAP_FAILED && reserve(UNIT) != MAP_FAILED);
	}
	/* Without a reservation there is nothing to leave. */
	at = place(MIB);
	CHECK(munmap(at, MIB) == 0 && mmap(at, MIB, PROT_READ, MAP_SHARED, uvm, (long)at) == MAP_FAILED && errno == ENOMEM && !mapped(at, MIB));
	/* Where the kernel refuses, that is the answer. */
	CHECK(managed((char *)4097, 4096) == MAP_FAILED && errno == EINVAL);
}

/* stale: libcuda, or somebody else, does with a refused range what ends it. Then it is as any other. */
static void stale(void)
{
	/* What was there is charged no more, so it is gone, too. */
	limit = MIB;
	char *at = place(2 * MIB);
	CHECK(managed(at, MIB) == at && held == MIB && managed(at, 2 * MIB) == at && held == 0 && !readable(at));
	limit = 2 * MIB;
	/* Mapped after all: the driver is asked, and an unmapping is one. */
	CHECK(managed(at, 2 * MIB) == at && held == 2 * MIB && readable(at) && ask(VALIDATE_VA_RANGE, at, 2 * MIB) == 7);
	CHECK(munmap(at, 2 * MIB) == 0 && held == 0 && !mapped(at, MIB) && reserve(2 * MIB) != MAP_FAILED);
	limit = 0;

	/* Unmapped with more around it, or in part. */
	for (int part = 0; part < 2; part++) {
		at = place(4 * MIB);
		CHECK(managed(at + MIB, 2 * MIB) == at + MIB);
		CHECK(part ? munmap(at + MIB, MIB) == 0 && !mapped(at + MIB, MIB) : munmap(at, 4 * MIB) == 0 && !mapped(at + MIB, 2 * MIB));
		CHECK(ask(VALIDATE_VA_RANGE, at + MIB, 2 * MIB) == 7 && reserve(2 * MIB) != MAP_FAILED);
	}
	at = place(2 * UNIT);
	CHECK(managed(at, MIB) == at && munmap(at, MIB + UNIT) == 0 && !mapped(at, MIB) && reserve(MIB) != MAP_FAILED);
	/* In the rest of its unit there may be anything; it goes. */
	limit = MIB;
	at = place(MIB);
	CHECK(managed(at + 4 * MIB, MIB) == at + 4 * MIB && held == MIB && managed(at, MIB) == at && held == MIB);
	CHECK(mmap(at + 2 * MIB, MIB, PROT_READ, PLAIN | MAP_FIXED, -1, 0) == at + 2 * MIB && readable(at + 2 * MIB));
	limit = 0;
	give_back(at, MIB);
	CHECK(!readable(at + 2 * MIB) && held == 0 && refused_once(MIB));
	/* Something else mapped there. */
	at = attempt(MIB);
	CHECK(mmap(at, 4096, PROT_READ, PLAIN | MAP_FIXED, -1, 0) == at && readable(at) && ask(VALIDATE_VA_RANGE, at, MIB) == 7);
	CHECK(munmap(at, MIB) == 0 && !mapped(at, MIB) && reserve(MIB) != MAP_FAILED);
	/* Refused twice, given back once. */
	at = attempt(MIB);
	CHECK(managed(at, MIB) == at);
	give_back(at, MIB);
	CHECK(ask(VALIDATE_VA_RANGE, at, MIB) == 7 && refused_once(MIB) && reserve(MIB) != MAP_FAILED);
}

static void full(void)
{
	char *at[NOTES], *one;

	for (int i = 0; i < NOTES; i++)
		at[i] = attempt(MIB);
	one = place(MIB);
	CHECK(managed(one, MIB) == MAP_FAILED && errno == ENOMEM && mapped(one, MIB) && ask(VALIDATE_VA_RANGE, one, MIB) == 7);
	CHECK(munmap(one, MIB) == 0 && !mapped(one, MIB) && reserve(MIB) != MAP_FAILED);
	for (int i = 0; i < NOTES; i++)
		give_back(at[i], MIB);
	CHECK(refused_once(MIB) && reserve(MIB) != MAP_FAILED); /* one thread has one attempt */
	give_back(attempt(MIB), MIB);
	CHECK(refused_once(MIB));
}

/* Semaphore pools are mapped in the same way, but are host memory. */
static void pools(void)
{
	char *at = place(4 * MIB);

	asked = 0;
	for (int i = 0; i < 2 * NOTES; i++) {
		CHECK(ask(ALLOC_SEMAPHORE_POOL, at, MIB) == 7 && managed(at, MIB) == at && asked == 0 && held == 0 && readable(at));
		CHECK(munmap(at, MIB) == 0 && !mapped(at, MIB));
	}
	/* Once, and exactly that. */
	CHECK(ask(ALLOC_SEMAPHORE_POOL, at, MIB) == 7 && managed(at, MIB) == at && managed(at, MIB) == at && asked == 1);
	CHECK(ask(ALLOC_SEMAPHORE_POOL, at, MIB) == 7 && managed(at, 2 * MIB) == at && asked == 2);
	give_back(at, 2 * MIB);
	CHECK(refused_once(2 * MIB));
	/* Made, but never mapped, again and again. */
	for (int i = 0; i < 2 * NOTES; i++)
		CHECK(ask(ALLOC_SEMAPHORE_POOL, at, MIB) == 7);
	give_back(attempt(MIB), MIB);
	CHECK(refused_once(MIB) && asked == 3);
	CHECK(munmap(at, MIB) == 0 && managed(at, MIB) == at && asked == 4);
	give_back(at, MIB);
	CHECK(refused_once(MIB));
}

static pthread_barrier_t barrier;

static void *bystander(void *arg)
{
	(void)arg;
	for (int i = 0; i < 2; i++) {
		pthread_barrier_wait(&barrier);
		char *at = reserve(2 * UNIT - 4096);
		CHECK(at != MAP_FAILED && munmap(at, 2 * UNIT - 4096) == 0);
		pthread_barrier_wait(&barrier);
	}
	return NULL;
}

static void *storm(void *arg)
{
	for (int i = 0; i < 300; i++) {
		size_t n = 4096 * (1 + (i * 7 + (long)arg) % 50);
		char *at = attempt(n);
		give_back(at, n);
		CHECK(refused_once(n));
		CHECK(munmap(place(n), n) == 0);
	}
	return NULL;
}

static void threads(void)
{
	pthread_t other[8];

	CHECK(pthread_barrier_init(&barrier, NULL, 2) == 0 && pthread_create(&other[0], NULL, bystander, NULL) == 0);
	for (int i = 0; i < 2; i++) {
		char *at = attempt(MIB);
		if (i)
			give_back(at, MIB);
		pthread_barrier_wait(&barrier);
		pthread_barrier_wait(&barrier);
		if (!i)
			give_back(at, MIB);
		CHECK(refused_once(MIB));
	}
	CHECK(pthread_join(other[0], NULL) == 0);
	for (long i = 0; i < 8; i++)
		CHECK(pthread_create(&other[i], NULL, storm, (void *)i) == 0);
	for (int i = 0; i < 8; i++)
		CHECK(pthread_join(other[i], NULL) == 0);
	comes_back(NULL, MIB);
}

/* A child has its parent's refused ranges and their addresses, but it is another thread. */
static void forked(void)
{
	char *kept = attempt(MIB), *back = attempt(MIB);
	int status;

	give_back(back, MIB);
	pid_t child = fork();
	if (child == 0) {
		CHECK(reserve(MIB) != MAP_FAILED && mapped(back, MIB) && ask(VALIDATE_VA_RANGE, kept, MIB) == RM_STATUS_NO_MEMORY);
		CHECK(munmap(kept, MIB) == 0 && mapped(kept, MIB));
		sequence();
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(refused_once(MIB) && ask(VALIDATE_VA_RANGE, kept, MIB) == RM_STATUS_NO_MEMORY);
	give_back(kept, MIB);
	CHECK(refused_once(MIB) && reserve(MIB) != MAP_FAILED);
}

int main(void)
{
	int p[2];

	uvm = memfd_create("uvm", 0);
	CHECK(ftruncate(uvm, 1l << 48) == 0 && pipe(p) == 0);
	pipe_end = p[1];
	sequence();
	stale();
	full();
	pools();
	threads();
	forked();
	full(); /* no note was lost on the way */
	return 0;
}
