/* The vGPU page: found once, at the first call that could matter, and kept for the life of the process. */
#include "cgpu.h"

#define PAGE_SIZE_MAX (1u << 20)
#define SLOTS_OFFSET (sizeof(struct cgpu_header) + CGPU_MAX_VGPUS * sizeof(struct cgpu_vgpu))

static const struct cgpu_header none;   /* no page: no flags, nothing to do */
static const struct cgpu_header *found; /* null: not looked for yet */
static int writable;                    /* set before found is */

/* valid says that a page is one, and as long as it says. */
static int valid(const struct cgpu_header *p, size_t size)
{
	size_t need = SLOTS_OFFSET + p->processes * sizeof(struct cgpu_slot);

	return p->magic == CGPU_PAGE_MAGIC && p->version == CGPU_PAGE_VERSION && p->vgpus <= CGPU_MAX_VGPUS &&
	       p->processes <= CGPU_MAX_PROCESSES && p->size >= need && p->size <= size;
}

/* passing says that an error may be gone the next time. For others the search is over. */
static int passing(long ret) { return ret == -EMFILE || ret == -ENFILE || ret == -EINTR || ret == -ENOMEM; }

static const struct cgpu_header *map_page(void)
{
	struct stat st;
	int prot = PROT_READ | PROT_WRITE;
	long fd, at = 0;

	/* Writable in preload mode only. Elsewhere it is a read-only mount. */
	fd = sys_open(CGPU_PAGE_PATH, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
	if (fd == -EROFS || fd == -EACCES || fd == -EPERM) {
		prot = PROT_READ;
		fd = sys_open(CGPU_PAGE_PATH, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
	}
	if (failed(fd))
		return passing(fd) ? NULL : &none;
	if (!failed(sys_fstat((int)fd, &st)) && (st.st_mode & S_TYPE) == S_REGULAR && st.st_size >= (long)SLOTS_OFFSET &&
	    st.st_size <= PAGE_SIZE_MAX)
		at = sys_mmap(NULL, (size_t)st.st_size, prot, MAP_SHARED, (int)fd, 0);
	sys_close((int)fd);
	if (!at || failed(at))
		return passing(at) ? NULL : &none;
	if (valid((const struct cgpu_header *)at, (size_t)st.st_size)) {
		STORE(&writable, !!(prot & PROT_WRITE));
		return (const struct cgpu_header *)at;
	}
	sys_munmap((void *)at, (size_t)st.st_size);
	return &none;
}

const struct cgpu_header *vgpu_page(void)
{
	const struct cgpu_header *page = LOAD(&found), *other = NULL;

	if (page)
		return page;
	page = map_page();
	if (!page)
		return &none;
	/* Two threads may both have mapped it. One mapping is kept. */
	if (SWAP(&found, &other, page))
		return page;
	if (page != &none)
		sys_munmap((void *)page, page->size);
	return other;
}

unsigned int vgpu_count(const struct cgpu_header *page) { return page->vgpus < CGPU_MAX_VGPUS ? page->vgpus : CGPU_MAX_VGPUS; }

const struct cgpu_vgpu *vgpu(const struct cgpu_header *page, unsigned int i) { return (const struct cgpu_vgpu *)(page + 1) + i; }

struct cgpu_slot *vgpu_slots(const struct cgpu_header *page, unsigned int *count)
{
	*count = LOAD(&writable) ? page->processes : 0;
	/* Other processes of the container could write more into the page than was there when it was checked. */
	if (*count > CGPU_MAX_PROCESSES)
		*count = 0;
	return *count ? (struct cgpu_slot *)((char *)page + SLOTS_OFFSET) : NULL;
}
