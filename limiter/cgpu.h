/* What the files of the limiter share. Nothing of it is visible outside of the library. */
#ifndef CGPU_H
#define CGPU_H

#pragma GCC visibility push(hidden)

#include "page.h"
#include "sys.h"

#define MIB (1ull << 20)
/* What a CUDA context takes of device memory beyond what it allocates. The guard's default is the same. */
#define CGPU_CONTEXT_OVERHEAD (13 * MIB)

#define LOAD(p) __atomic_load_n(p, __ATOMIC_SEQ_CST)
#define STORE(p, v) __atomic_store_n(p, v, __ATOMIC_SEQ_CST)
#define ADD(p, n) __atomic_add_fetch(p, n, __ATOMIC_SEQ_CST)
#define SWAP(p, old, new) __atomic_compare_exchange_n(p, old, new, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)

/* vgpu.c: the vGPU page. Never null; without a page it is one without flags. */
const struct cgpu_header *vgpu_page(void);
const struct cgpu_vgpu *vgpu(const struct cgpu_header *page, unsigned int i);
unsigned int vgpu_count(const struct cgpu_header *page);
/* vgpu_slots has none where the page cannot be written: in preload mode nothing may be allocated then. */
struct cgpu_slot *vgpu_slots(const struct cgpu_header *page, unsigned int *count);

/* slots.c: the container's account in preload mode. Sizes in bytes; reserve answers 0 where the limit is in the way. */
int slots_reserve(const struct cgpu_header *page, unsigned int gpu, uint64_t size);
void slots_release(const struct cgpu_header *page, unsigned int gpu, uint64_t size);
uint64_t slots_used(const struct cgpu_header *page, unsigned int gpu);
int slots_reserve_managed(const struct cgpu_header *page, uint64_t size);
void slots_release_managed(const struct cgpu_header *page, uint64_t size);

/* table.c: what this process holds: objects of the driver, and managed ranges. */
enum kind { KIND_NONE, KIND_DEVICE, KIND_SUBDEVICE, KIND_GROUP, KIND_MEMORY, KIND_RANGE };
#define CLIENT_RANGE 1u /* stands for the client in the keys of ranges; RM's own begin with 0xc1d00000 */
#define CLIENT_LEAVING 2u

struct entry {
	uint64_t key;          /* client << 32 | handle */
	uint64_t size;         /* of device memory that is charged */
	uint64_t base, end;    /* of a range */
	uint32_t pid, parent;
	uint32_t memory;       /* which memory a handle is on; handles on the same have the same number */
	int32_t fd;            /* of a group's client, of a range */
	uint8_t kind, gpu, shared;
};
struct cursor { int level; uint32_t index; };

struct entry *entry_find(uint32_t client, uint32_t handle);
struct entry *entry_add(uint32_t client, uint32_t handle, struct entry value);
struct entry *entry_next(struct cursor *c);
int entry_take(struct entry *e);
void entry_drop(const struct cgpu_header *page, struct entry *e);

/* managed.c: mappings of nvidia-uvm. All return what the system call would. */
extern uint32_t managed_ranges; /* how many are remembered: 0 in most programs, for all their life */
long managed_mmap(const struct cgpu_header *page, void *addr, size_t len, int prot, int flags, int fd, long off);
long managed_replace(void *addr, size_t len, int prot, int flags, int fd, long off);
long managed_munmap(void *addr, size_t len);
int is_uvm(const struct cgpu_header *page, int fd);

/* Calls on nvidia-uvm, of the driver's uvm_ioctl.h. All three begin with base and length. */
#define UVM_DISABLE_READ_DUPLICATION 45
#define UVM_ALLOC_SEMAPHORE_POOL 68
#define UVM_VALIDATE_VA_RANGE 72
#define UVM_STATUS 16 /* of the first and the last */

/* refuse.c: how a refusal of managed memory reaches the program. */
extern uint32_t refusals; /* 0 nearly always */
long refuse(uint64_t base, uint64_t end, int flags);
int forget(uint64_t base, uint64_t end);
long managed_call(int fd, unsigned int number, void *arg);
int keeps(uint64_t base, uint64_t end);
int refuses_reservation(size_t len);

/* rm.c: a call of the resource manager in preload mode. present.c: a card of the size of the limit. */
long preload_call(const struct cgpu_header *page, int fd, unsigned int request, void *arg);
void present_fb_info(const struct cgpu_header *page, unsigned int gpu, uint64_t list, uint32_t count);

#pragma GCC visibility pop

#endif
