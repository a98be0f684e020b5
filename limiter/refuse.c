/*
 * How a program learns that its managed memory was refused.
 *
 * libcuda first reserves the addresses (mmap of inaccessible memory), then maps nvidia-uvm over them. When the second fails it
 * reports cudaErrorUnknown, whatever errno says (tried with every one, driver 580.159); only of a reservation that fails does it
 * say cudaErrorMemoryAllocation. UVM allows a mapping to succeed without being one, and has the caller ask what became of it
 * (UVM_VALIDATE_VA_RANGE; uvm_mmap in the driver's uvm.c). So a refused mapping is left as the reservation that it is, the
 * questions about it are answered "no memory", libcuda takes its reservation back and tries another address, and that second
 * reservation is what fails.
 *
 * libcuda never forgets that it had the first addresses, and stumbles (cudaErrorAlreadyMapped) when the kernel gives them out
 * again. So they stay reserved: address space, no memory.
 *
 * What is known of a range is a note. A note is about the range only as long as nothing else is mapped there and nothing is
 * taken away: whatever does so ends it, or else a later mapping of the same addresses would be refused for nothing.
 */
#include "cgpu.h"

/* libcuda reserves whole units of this, and one more, of which it gives the ends back. It maps only what it needs. */
#define ALIGNMENT (32 * MIB)

/* POOL is no refusal: a range that is about to be mapped, but not as managed memory. */
enum state { FREE, BUSY, POOL, REFUSED, RETURNED };

/* Who looks for a note changes it later without a lock: nobody else does, because it is his own range or his own thread. */
static struct note {
	uint64_t base, end;
	uint32_t thread, state;
} notes[64];
uint32_t refusals; /* how many notes are in use: 0 nearly always */

#define EACH(n) (struct note *n = notes; n < notes + sizeof notes / sizeof *notes; n++)

static int change(struct note *n, uint32_t from, uint32_t to)
{
	if (!SWAP(&n->state, &from, to))
		return 0;
	ADD(&refusals, (to != FREE) - (from != FREE));
	return 1;
}

static int add(uint64_t base, uint64_t end, uint32_t state)
{
	for EACH(n) {
		if (!change(n, FREE, BUSY))
			continue;
		n->base = base;
		n->end = end;
		n->thread = sys_gettid();
		return change(n, BUSY, state);
	}
	return 0;
}

/* forget ends what is known of a range, because it is about to be something else. It says whether that was exactly a pool. */
int forget(uint64_t base, uint64_t end)
{
	int pool = 0;

	for EACH(n) {
		uint32_t state = LOAD(&n->state);
		int exact = n->base == base && n->end == end;
		if ((state == POOL || state == REFUSED) && n->base < end && n->end > base && change(n, state, FREE))
			pool |= exact && state == POOL;
	}
	return pool;
}

static long block(uint64_t base, uint64_t end)
{
	return managed_replace((void *)base, end - base, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

/*
 * refuse answers a mapping of managed memory that may not be. What it would have replaced goes all the same, as with any
 * MAP_FIXED: if it was managed memory, it is charged no more. Without MAP_FIXED there is no place to leave a reservation.
 */
long refuse(uint64_t base, uint64_t end, int flags)
{
	if (!(flags & MAP_FIXED))
		return -ENOMEM;
	long at = block(base, end);
	return failed(at) || add(base, end, REFUSED) ? at : -ENOMEM;
}

long managed_call(int fd, unsigned int number, void *arg)
{
	const uint32_t status = RM_STATUS_NO_MEMORY;
	uint64_t range[2];

	if (!copy_in(range, (uint64_t)arg, sizeof range))
		return sys_ioctl(fd, number, arg);
	if (number == UVM_ALLOC_SEMAPHORE_POOL) {
		forget(range[0], range[0] + range[1]);
		add(range[0], range[0] + range[1], POOL);
		return sys_ioctl(fd, number, arg);
	}
	for EACH(n)
		if (LOAD(&n->state) == REFUSED && n->base == range[0])
			return copy_out((uint64_t)arg + UVM_STATUS, &status, sizeof status) ? 0 : -EFAULT;
	return sys_ioctl(fd, number, arg);
}

/*
 * keeps says that a range stays reserved although it is unmapped: a refused one, with what is left of its last unit. Whatever
 * else is in there goes, as the caller wants it.
 */
int keeps(uint64_t base, uint64_t end)
{
	for EACH(n) {
		if (LOAD(&n->state) != REFUSED || n->base != base || end - n->end >= ALIGNMENT || failed(block(base, end)))
			continue;
		n->end = end;
		return change(n, REFUSED, RETURNED);
	}
	forget(base, end);
	return 0;
}

/*
 * refuses_reservation says that a reservation is the second one, of the thread that was refused: its next one after it gave
 * the first back. If that has another size libcuda did not come back, and is not waited for any longer.
 */
int refuses_reservation(size_t len)
{
	uint32_t thread = sys_gettid();
	int refused = 0;

	for EACH(n) {
		uint64_t size = n->end - n->base;
		if (LOAD(&n->state) == RETURNED && n->thread == thread && change(n, RETURNED, FREE))
			refused |= len - size <= ALIGNMENT; /* unsigned: a smaller one is none, either */
	}
	return refused;
}
