/*
 * What a process holds: a hash table in levels, each twice the size of the one before, none of which ever moves. An entry is
 * taken and given back by one atomic exchange of its key, so there is no lock that a signal handler could wait for.
 */
#include "cgpu.h"

#define TAKEN 1ull /* the key of an entry that is being written; no client has the number 0 */
#define LEVELS 16
#define FIRST_BITS 8
#define WINDOW 8 /* entries of a level in which a key may be */

static struct entry *levels[LEVELS];

static struct entry *level(int i, int grow)
{
	struct entry *l = LOAD(&levels[i]), *none = NULL;
	size_t size = sizeof *l << (FIRST_BITS + i);
	if (l || !grow)
		return l;
	long at = sys_mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (failed(at))
		return NULL;
	l = (struct entry *)at;
	if (SWAP(&levels[i], &none, l))
		return l;
	sys_munmap(l, size);
	return none;
}

/* place is the n-th place of a key in a level. */
static struct entry *place(struct entry *l, int i, uint64_t key, uint32_t n)
{
	uint32_t bits = FIRST_BITS + (uint32_t)i;
	return &l[((uint32_t)(key * 0x9e3779b97f4a7c15ull >> (64 - bits)) + n) & ((1u << bits) - 1)];
}

struct entry *entry_find(uint32_t client, uint32_t handle)
{
	uint64_t key = (uint64_t)client << 32 | handle;
	uint32_t pid = sys_getpid();
	struct entry *l;

	for (int i = 0; client && i < LEVELS && (l = level(i, 0)); i++)
		for (uint32_t n = 0; n < WINDOW; n++) {
			struct entry *e = place(l, i, key, n);
			if (LOAD(&e->key) == key && LOAD(&e->pid) == pid)
				return e;
		}
	return NULL;
}

/* entry_add remembers a handle. Null: there is no memory for it, and what it holds stays charged to the process. */
struct entry *entry_add(uint32_t client, uint32_t handle, struct entry value)
{
	struct entry *l, *stale = entry_find(client, handle);

	/* The driver gave this handle out, so the old object is gone: its file was closed, which the limiter does not see. */
	if (stale && entry_take(stale))
		entry_drop(vgpu_page(), stale);
	value.key = (uint64_t)client << 32 | handle;
	value.pid = sys_getpid();
	for (int i = 0; client && i < LEVELS && (l = level(i, 1)); i++)
		for (uint32_t n = 0; n < WINDOW; n++) {
			struct entry *e = place(l, i, value.key, n);
			uint64_t old = LOAD(&e->key);
			/* A child of fork has its parent's table but not its memory: those entries are free. */
			if ((old && LOAD(&e->pid) == value.pid) || !SWAP(&e->key, &old, TAKEN))
				continue;
			__builtin_memcpy((char *)e + sizeof e->key, (char *)&value + sizeof value.key, sizeof value - sizeof value.key);
			STORE(&e->key, value.key);
			return e;
		}
	return NULL;
}

/* entry_take makes an entry the caller's; 0: another thread has it. It ends with entry_drop, or by storing a key again. */
int entry_take(struct entry *e)
{
	uint64_t key = LOAD(&e->key);
	return key > TAKEN && SWAP(&e->key, &key, TAKEN);
}

/* entry_next walks through all that this process holds. */
struct entry *entry_next(struct cursor *c)
{
	uint32_t pid = sys_getpid();
	struct entry *l;

	for (; c->level < LEVELS && (l = level(c->level, 0)); c->level++, c->index = 0)
		while (c->index < 1u << (FIRST_BITS + c->level)) {
			struct entry *e = &l[c->index++];
			if (LOAD(&e->key) > TAKEN && LOAD(&e->pid) == pid)
				return e;
		}
	return NULL;
}

/* entry_drop ends an entry that was taken. Its charge passes to another handle on the same memory, or else it is given back. */
void entry_drop(const struct cgpu_header *page, struct entry *e)
{
	uint64_t size = __atomic_exchange_n(&e->size, 0, __ATOMIC_SEQ_CST);
	uint32_t memory = LOAD(&e->memory);
	struct cursor c = {0, 0};
	struct entry *other;
	uint8_t gpu = LOAD(&e->gpu);

	int shared = LOAD(&e->shared);
	STORE(&e->key, 0);
	while (size && shared && (other = entry_next(&c))) {
		uint64_t none = 0;
		if (LOAD(&other->memory) != memory || !SWAP(&other->size, &none, size))
			continue;
		/* Taken meanwhile? Then whoever took it gives the size back, unless it was not seen there. */
		if (LOAD(&other->key) > TAKEN || !SWAP(&other->size, &size, 0))
			return;
	}
	if (size)
		slots_release(page, gpu, size);
}
