/*
 * The account of preload mode: every process of the container has a slot in the vGPU page and writes only into its own. What
 * the container uses is the sum. There is no lock, so a process may be killed at any instruction: what it held is found in
 * its slot by whoever needs room next, and goes back with the process.
 */
#include "cgpu.h"

#define SWEEPING (1ull << 63)  /* in Slot.Owner: the rest names who clears the slot */
#define START_MASK 0x7fffffffull
#define CLAIMING 0xffffffffull /* in mine: a thread is looking for a slot */

static uint64_t mine; /* number of the process << 32 | its slot's index + 1; wrong after a fork, and seen to be */

static uint64_t number(const char *s)
{
	uint64_t n = 0;
	while (*s >= '0' && *s <= '9')
		n = n * 10 + (uint64_t)(*s++ - '0');
	return n;
}

/* look reads when a process started, in clock ticks, and whether it is dead and only its parent does not know yet. */
static int look(uint32_t pid, uint64_t *start, int *dead)
{
	char path[24] = "/proc/", buf[1024], *p = path + 6;
	const char *field[23] = {0}, *s;
	uint32_t unit = 1;
	int n = 2;

	while (pid / unit >= 10)
		unit *= 10;
	for (; unit; unit /= 10)
		*p++ = (char)('0' + pid / unit % 10);
	__builtin_memcpy(p, "/stat", 6);
	long fd = sys_open(path, O_RDONLY | O_CLOEXEC);
	if (failed(fd))
		return 0;
	long got = sys_read((int)fd, buf, sizeof buf - 1);
	sys_close((int)fd);
	if (failed(got))
		return 0;
	buf[got] = 0;
	/* Fields are counted from the last bracket: the name, field 2, may hold anything. */
	for (s = buf; *s; s++)
		if (*s == ')')
			n = 2;
		else if (*s == ' ' && n < 22)
			field[++n] = s + 1;
	if (n < 22)
		return 0;
	*start = number(field[22]);
	/* The first thread may have ended while others go on: then it is a zombie, too, but not the only thread. */
	*dead = (*field[3] == 'Z' || *field[3] == 'X') && number(field[20]) <= 1;
	return 1;
}

static uint64_t identity(uint32_t pid)
{
	uint64_t start;
	int dead;
	return look(pid, &start, &dead) ? pid | (start & START_MASK) << 32 : pid;
}

/* gone says that the process that an owner word names has ended. In doubt it has not. */
static int gone(uint64_t owner)
{
	uint64_t start, then = owner >> 32 & START_MASK;
	int pid = (int)(uint32_t)owner, dead;

	if (pid <= 0 || sys_kill(pid, 0) == -ESRCH)
		return 1;
	return look((uint32_t)pid, &start, &dead) && (dead || (then && then != (start & START_MASK)));
}

static void clear(struct cgpu_slot *slot)
{
	for (int i = 0; i < CGPU_MAX_VGPUS; i++)
		STORE(&slot->used[i], 0);
	STORE(&slot->managed, 0);
}

/* sweep frees the slots of dead processes. Whoever dies while clearing one leaves his own name in it, to be found dead. */
static void sweep(struct cgpu_slot *slots, unsigned int n, uint64_t self)
{
	for (unsigned int i = 0; i < n; i++) {
		uint64_t owner = LOAD(&slots[i].owner);
		if (!owner || (owner & ~SWEEPING) == self || !gone(owner & ~SWEEPING) || !SWAP(&slots[i].owner, &owner, SWEEPING | self))
			continue;
		clear(&slots[i]);
		STORE(&slots[i].owner, 0);
	}
}

/* claim takes a free slot, or the one that this process had before it became another program (execve); 0: there is none. */
static uint64_t claim(struct cgpu_slot *slots, unsigned int n, uint64_t self)
{
	for (unsigned int i = 0; i < n; i++)
		if (LOAD(&slots[i].owner) == self) {
			clear(&slots[i]);
			return i + 1;
		}
	for (int swept = 0; swept < 2; swept++) {
		for (unsigned int i = 0; i < n; i++) {
			uint64_t owner = 0;
			if (SWAP(&slots[i].owner, &owner, self))
				return i + 1;
		}
		sweep(slots, n, self);
	}
	return 0;
}

/*
 * own finds this process' slot, or claims one; null: there is none. While one thread claims, others wait. A signal handler
 * that interrupted the claim cannot be waited for, so it gives up in the end.
 */
static struct cgpu_slot *own(const struct cgpu_header *page)
{
	uint64_t pid = sys_getpid();
	unsigned int n;
	struct cgpu_slot *slots = vgpu_slots(page, &n);

	for (int i = 0; n && i < 10000; i++) {
		uint64_t known = LOAD(&mine), index = (uint32_t)known;
		if (known >> 32 == pid && index == CLAIMING) {
			sys_yield();
			continue;
		}
		if (known >> 32 == pid && index && index <= n && (uint32_t)LOAD(&slots[index - 1].owner) == pid)
			return &slots[index - 1];
		if (!SWAP(&mine, &known, pid << 32 | CLAIMING))
			continue;
		index = claim(slots, n, identity((uint32_t)pid));
		STORE(&mine, pid << 32 | index);
		return index ? &slots[index - 1] : NULL;
	}
	return NULL;
}

uint64_t slots_used(const struct cgpu_header *page, unsigned int gpu)
{
	unsigned int n;
	struct cgpu_slot *slots = vgpu_slots(page, &n);
	uint64_t sum = 0;

	for (unsigned int i = 0; i < n; i++) {
		uint64_t used = LOAD(&slots[i].owner) ? LOAD(&slots[i].used[gpu]) : 0;
		sum = sum + used < sum ? UINT64_MAX : sum + used;
	}
	return sum;
}

/* subtract never goes below zero, whatever somebody else has written into the slot. */
static void subtract(uint64_t *from, uint64_t size)
{
	uint64_t old = LOAD(from);
	while (!SWAP(from, &old, old > size ? old - size : 0))
		;
}

/*
 * take adds first and looks at the sum then. Of two processes that do so at the same time at least one sees the other, so
 * the sum never stays over the limit.
 */
static int take(const struct cgpu_header *page, struct cgpu_slot *slot, unsigned int gpu, uint64_t size)
{
	uint64_t limit = LOAD(&vgpu(page, gpu)->limit);
	int native = vgpu(page, gpu)->flags & CGPU_VGPU_NATIVE;
	if (size >> 62 || (!native && size > limit))
		return 0;
	ADD(&slot->used[gpu], size);
	if (native || slots_used(page, gpu) <= limit)
		return 1;
	subtract(&slot->used[gpu], size);
	return 0;
}

int slots_reserve(const struct cgpu_header *page, unsigned int gpu, uint64_t size)
{
	unsigned int n;
	struct cgpu_slot *slot = own(page), *slots = vgpu_slots(page, &n);

	for (int attempt = 0; slot && attempt < 3; attempt++) {
		if (take(page, slot, gpu, size))
			return 1;
		/* Two that asked at the same time may both have been refused, though there is room for one. */
		if (attempt == 0)
			sweep(slots, n, LOAD(&slot->owner));
		else
			sys_yield();
	}
	return 0;
}

void slots_release(const struct cgpu_header *page, unsigned int gpu, uint64_t size)
{
	struct cgpu_slot *slot = own(page);
	if (slot)
		subtract(&slot->used[gpu], size);
}

/* Managed memory may move to any GPU of the container, so it counts on each that has a limit: the first n of them here. */
static void release_first(const struct cgpu_header *page, unsigned int n, uint64_t size)
{
	while (n--)
		if (!(vgpu(page, n)->flags & CGPU_VGPU_NATIVE))
			slots_release(page, n, size);
}

int slots_reserve_managed(const struct cgpu_header *page, uint64_t size)
{
	struct cgpu_slot *slot = own(page);

	for (unsigned int i = 0; i < vgpu_count(page); i++)
		if (!(vgpu(page, i)->flags & CGPU_VGPU_NATIVE) && !slots_reserve(page, i, size)) {
			release_first(page, i, size);
			return 0;
		}
	if (slot)
		ADD(&slot->managed, size);
	return slot != NULL;
}

void slots_release_managed(const struct cgpu_header *page, uint64_t size)
{
	struct cgpu_slot *slot = own(page);

	release_first(page, vgpu_count(page), size);
	if (slot)
		subtract(&slot->managed, size);
}
