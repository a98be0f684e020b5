/*
 * Preload mode: the calls of the resource manager that make device memory, drop it, or tell how much there is. The guard's
 * alloc.go, heap.go and account.go do the same from outside of the process, and do it for hostile programs, too.
 */
#include "cgpu.h"

#define CLASS_CLIENT 0x41u /* with 0 and 1, its older names */
#define CLASS_MEMORY 0x40u
#define CLASS_DEVICE 0x80u
#define CLASS_SUBDEVICE 0x2080u
#define CLASS_GROUP 0xa06cu

#define CONTROL_ID_INFO 0x205u /* NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2 */
#define CONTROL_FB_INFO 0x20801301u
#define CONTROL_FB_INFO_V2 0x20801303u
#define CONTROL_TIMESLICE 0xa06c0103u /* NVA06C_CTRL_CMD_SET_TIMESLICE */

#define CALL(nr, size) (3u << 30 | (size) << 16 | 'F' << 8 | (nr))

#define ENGINE_GR_LAST 8 /* NV2080_ENGINE_TYPE_GR7; 0 leaves it to the channels */
#define PAGE_SMALL (64ull << 10)
#define PAGE_HUGE (2 * MIB)
#define ATTR_PAGE_HUGE 3
#define NO_GPU (-1)

static uint32_t change; /* the page's change that timeslices were last set for */
static uint32_t memories; /* numbers them */

/* A call: the caller's arguments, and a copy of the structure. */
struct call {
	const struct cgpu_header *page;
	int fd;
	unsigned int request;
	uint64_t arg;
	size_t size, status; /* of the structure, and where the status is in it */
	unsigned char *o;    /* the copy */
};

static uint32_t u32(const unsigned char *b, size_t off)
{
	uint32_t v;
	__builtin_memcpy(&v, b + off, sizeof v);
	return v;
}

static uint64_t u64(const unsigned char *b, size_t off)
{
	uint64_t v;
	__builtin_memcpy(&v, b + off, sizeof v);
	return v;
}

static long pass(struct call *c) { return sys_ioctl(c->fd, c->request, (void *)c->arg); }

/* answer ends a call without the driver. */
static long answer(struct call *c, uint32_t status) { return copy_out(c->arg + c->status, &status, sizeof status) ? 0 : -EFAULT; }

/* execute passes the call on and reads the structure again. done says that the driver did it. */
static long execute(struct call *c, int *done)
{
	long ret = pass(c);

	*done = !failed(ret) && copy_in(c->o, c->arg, c->size) && u32(c->o, c->status) == RM_STATUS_OK;
	return ret;
}

static int load(struct call *c, size_t size, size_t status)
{
	c->size = size;
	c->status = status;
	return (c->request >> 16 & 0x3fff) == size && copy_in(c->o, c->arg, size);
}

/* control makes a control of the limiter's own, on a file of the program. */
static int control(int fd, uint32_t client, uint32_t object, uint32_t cmd, void *params, uint32_t size)
{
	uint32_t o[] = {client, object, cmd, 0, (uint32_t)(uint64_t)params, (uint32_t)((uint64_t)params >> 32), size, 0};

	_Static_assert(sizeof o == RM_CONTROL_SIZE && RM_CONTROL_PARAMS == 16 && RM_CONTROL_PARAMS_SIZE == 24, "NVOS54");
	return !failed(sys_ioctl(fd, CALL(RM_NR_CONTROL, RM_CONTROL_SIZE), o)) && o[RM_CONTROL_STATUS / 4] == RM_STATUS_OK;
}

static int free_object(int fd, uint32_t client, uint32_t handle)
{
	uint32_t o[] = {client, 0, handle, 0};

	_Static_assert(sizeof o == RM_FREE_SIZE && RM_FREE_OBJECT == 8, "NVOS00");
	return !failed(sys_ioctl(fd, CALL(RM_NR_FREE, RM_FREE_SIZE), o)) && o[RM_FREE_STATUS / 4] == RM_STATUS_OK;
}

/* gpu_of finds the vGPU of an object. */
static int gpu_of(const struct cgpu_header *page, uint32_t client, uint32_t handle)
{
	struct entry *o = entry_find(client, handle);

	if (vgpu_count(page) == 1)
		return 0;
	return o && o->gpu < vgpu_count(page) ? o->gpu : NO_GPU;
}

/* device_gpu asks RM which of the container's GPUs a device object is on; its parameters name it by a number of RM's. */
static int device_gpu(struct call *c)
{
	uint32_t instance = 0, client = u32(c->o, RM_ALLOC_ROOT);
	uint64_t params = u64(c->o, RM_ALLOC_PARAMS);

	if (params && !copy_in(&instance, params + RM_DEVICE_ID, sizeof instance))
		return NO_GPU;
	for (unsigned int i = 0; i < vgpu_count(c->page); i++) {
		uint32_t info[8] = {vgpu(c->page, i)->gpuid};
		if (vgpu_count(c->page) == 1 || (control(c->fd, client, client, CONTROL_ID_INFO, info, sizeof info) && info[2] == instance))
			return (int)i;
	}
	return NO_GPU;
}

static void set_timeslice(const struct cgpu_header *page, unsigned int gpu, int fd, uint64_t key)
{
	uint64_t micros = LOAD(&vgpu(page, gpu)->timeslice_micros);

	if (micros)
		control(fd, (uint32_t)(key >> 32), (uint32_t)key, CONTROL_TIMESLICE, &micros, sizeof micros);
}

/* follow sets the timeslices again when the host has changed the page. */
static void follow(const struct cgpu_header *page)
{
	uint32_t now = LOAD(&page->change), seen = LOAD(&change);
	struct cursor cursor = {0, 0};
	struct entry *o;

	if (now == seen || !SWAP(&change, &seen, now))
		return;
	while ((o = entry_next(&cursor)))
		if (o->kind == KIND_GROUP && o->gpu < vgpu_count(page))
			set_timeslice(page, o->gpu, o->fd, o->key);
}

static uint64_t round_up(uint64_t n, uint64_t page) { return n > UINT64_MAX - page ? UINT64_MAX : (n + page - 1) / page * page; }

/* granted is what memory really takes, from what the driver wrote back. */
static uint64_t granted(uint64_t size, uint32_t attr)
{
	int huge = (attr >> RM_MEMORY_ATTR_PAGE_SHIFT & RM_MEMORY_ATTR_PAGE_MASK) == ATTR_PAGE_HUGE;

	return round_up(size, huge ? PAGE_HUGE : PAGE_SMALL);
}

/* Where a call says what memory it wants, and later what it got: in its structure, or behind a pointer of it. */
struct wish {
	uint64_t size;              /* to reserve */
	uint64_t size_at, attr_at;  /* addresses; 0: it takes what was reserved */
	size_t handle;              /* offset in the structure */
	uint32_t client, parent;
	uint8_t kind;
};

/* allocate makes what takes device memory: reserve, execute, settle to what it took. */
static long allocate(struct call *c, struct wish w)
{
	int gpu = gpu_of(c->page, w.client, w.parent), done;
	uint64_t took = w.size, size;
	uint32_t attr;

	if (gpu == NO_GPU || !slots_reserve(c->page, (unsigned int)gpu, w.size))
		return answer(c, RM_STATUS_NO_MEMORY);
	long ret = execute(c, &done);
	if (!done) {
		slots_release(c->page, (unsigned int)gpu, w.size);
		return ret;
	}
	uint32_t handle = u32(c->o, w.handle);
	if (w.size_at && copy_in(&size, w.size_at, sizeof size) && copy_in(&attr, w.attr_at, sizeof attr))
		took = granted(size, attr);
	/* More than was reserved: the caller asked for pages of 512 MiB. */
	if (took > w.size && !slots_reserve(c->page, (unsigned int)gpu, took - w.size)) {
		if (free_object(c->fd, w.client, handle)) {
			slots_release(c->page, (unsigned int)gpu, w.size);
			return answer(c, RM_STATUS_NO_MEMORY);
		}
		took = w.size;
	}
	if (took < w.size)
		slots_release(c->page, (unsigned int)gpu, w.size - took);
	entry_add(w.client, handle, (struct entry){.size = took, .memory = ADD(&memories, 1), .parent = w.parent, .fd = c->fd,
						   .kind = w.kind, .gpu = (uint8_t)gpu});
	if (w.kind == KIND_GROUP)
		set_timeslice(c->page, (unsigned int)gpu, c->fd, (uint64_t)w.client << 32 | handle);
	return ret;
}

/* drop_below forgets what is below a handle, or all of a client: its handle is its number. */
static void drop_below(const struct cgpu_header *page, uint32_t client, uint32_t handle)
{
	struct cursor c = {0, 0};
	struct entry *e;

	while ((e = entry_next(&c))) {
		uint64_t key = LOAD(&e->key);
		if (key >> 32 != client || (handle != client && LOAD(&e->parent) != handle) || !entry_take(e))
			continue;
		if (handle != client && e->kind <= KIND_SUBDEVICE)
			drop_below(page, client, (uint32_t)key);
		entry_drop(page, e);
	}
}

/* on_alloc makes an object. The driver tells the forms of the structure by its size; these are those since branch 535. */
static long on_alloc(struct call *c)
{
	size_t size = c->request >> 16 & 0x3fff, status = size == 48 ? 40 : size == 40 ? 36 : 28;
	struct wish w = {.handle = RM_ALLOC_OBJECT};
	uint64_t params;
	uint32_t engine = 0;
	int gpu = NO_GPU, done;

	if ((size != 48 && size != 40 && size != 32) || !load(c, size, status))
		return pass(c);
	w.client = u32(c->o, RM_ALLOC_ROOT);
	w.parent = u32(c->o, RM_ALLOC_PARENT);
	params = u64(c->o, RM_ALLOC_PARAMS);
	switch (u32(c->o, RM_ALLOC_CLASS)) {
	case CLASS_MEMORY:
		w.size_at = params + RM_MEMORY_SIZE;
		w.attr_at = params + RM_MEMORY_ATTR;
		w.kind = KIND_MEMORY;
		if (!params || !copy_in(&w.size, w.size_at, sizeof w.size))
			return pass(c); /* to be refused */
		w.size = round_up(w.size, PAGE_HUGE);
		return allocate(c, w);
	case CLASS_GROUP:
		if ((params && !copy_in(&engine, params + RM_TSG_ENGINE_TYPE, sizeof engine)) || engine > ENGINE_GR_LAST)
			return pass(c);
		w.size = CGPU_CONTEXT_OVERHEAD;
		w.kind = KIND_GROUP;
		return allocate(c, w);
	case CLASS_DEVICE:
		w.kind = KIND_DEVICE;
		gpu = device_gpu(c);
		break;
	case CLASS_SUBDEVICE:
		w.kind = KIND_SUBDEVICE;
		gpu = gpu_of(c->page, w.client, w.parent);
		break;
	case 0: case 1: case CLASS_CLIENT:
		break;
	default:
		return pass(c);
	}
	long ret = execute(c, &done);
	if (!done)
		return ret;
	if (w.kind && gpu != NO_GPU)
		entry_add(w.client, u32(c->o, w.handle), (struct entry){.parent = w.parent, .kind = w.kind, .gpu = (uint8_t)gpu});
	else if (!w.kind) /* a new client: one of the same number is gone, its file closed */
		drop_below(c->page, u32(c->o, w.handle), u32(c->o, w.handle));
	return ret;
}

/* drop frees an object by any call. It leaves the table first: the handle may be another thread's as soon as it is free. */
static long drop(struct call *c, uint32_t client, uint32_t handle)
{
	struct entry *e = handle == client ? NULL : entry_find(client, handle);
	int taken = e && entry_take(e), done;
	long ret = execute(c, &done);

	if (done && (handle == client || (taken && e->kind <= KIND_SUBDEVICE)))
		drop_below(c->page, client, handle);
	if (taken && done)
		entry_drop(c->page, e);
	else if (taken)
		STORE(&e->key, (uint64_t)client << 32 | handle);
	return ret;
}

/* on_dup makes a second handle. Memory of another process is that process' to account for. */
static long on_dup(struct call *c)
{
	if (!load(c, RM_DUP_SIZE, RM_DUP_STATUS))
		return pass(c);
	struct entry *from = entry_find(u32(c->o, RM_DUP_CLIENT_SRC), u32(c->o, RM_DUP_OBJECT_SRC));
	struct entry copy = {.parent = u32(c->o, RM_DUP_PARENT)};
	int done;

	if (from) {
		STORE(&from->shared, 1);
		copy.kind = from->kind == KIND_GROUP ? KIND_MEMORY : from->kind; /* one timeslice is enough */
		copy.memory = from->memory;
		copy.gpu = from->gpu;
		copy.shared = 1;
	}
	long ret = execute(c, &done);
	if (from && done)
		entry_add(u32(c->o, RM_DUP_CLIENT), u32(c->o, RM_DUP_OBJECT), copy);
	return ret;
}

/* on_heap is the old way to allocate, still used by graphics libraries. */
static long on_heap(struct call *c)
{
	struct wish w = {.handle = RM_HEAP_ALLOC_MEMORY, .kind = KIND_MEMORY};
	size_t size_at = RM_HEAP_ALLOC_SIZE, attr_at = RM_HEAP_ALLOC_ATTR;
	int gpu, done;
	long ret;

	if (!load(c, RM_HEAP_SIZE, RM_HEAP_STATUS))
		return pass(c);
	w.client = u32(c->o, RM_HEAP_ROOT);
	w.parent = u32(c->o, RM_HEAP_PARENT);
	switch (u32(c->o, RM_HEAP_FUNCTION)) {
	case RM_HEAP_FN_ALLOC_SIZE:
		break;
	case RM_HEAP_FN_ALLOC_SIZE_RANGE:
		size_at = RM_HEAP_ALLOC_RANGE_SIZE;
		break;
	case RM_HEAP_FN_ALLOC_TILED:
		attr_at = RM_HEAP_TILED_ATTR;
		break;
	case RM_HEAP_FN_FREE:
		return drop(c, w.client, u32(c->o, RM_HEAP_FREE_MEMORY));
	case RM_HEAP_FN_INFO:
		ret = execute(c, &done);
		gpu = gpu_of(c->page, w.client, w.parent);
		if (done && gpu != NO_GPU)
			present_heap(c->page, (unsigned int)gpu, c->arg);
		return ret;
	default:
		return pass(c);
	}
	if (u32(c->o, RM_HEAP_ALLOC_FLAGS) & RM_MEMORY_FLAG_VIRTUAL ||
	    (u32(c->o, attr_at) >> RM_MEMORY_ATTR_LOCATION_SHIFT & RM_MEMORY_ATTR_LOCATION_MASK))
		return pass(c); /* addresses, or host memory */
	w.size = u64(c->o, size_at);
	if (attr_at == RM_HEAP_TILED_ATTR) /* the driver computes the size */
		w.size = (uint64_t)u32(c->o, RM_HEAP_TILED_HEIGHT) * u32(c->o, RM_HEAP_TILED_PITCH);
	w.size = round_up(w.size, PAGE_HUGE);
	w.size_at = c->arg + size_at;
	w.attr_at = c->arg + attr_at;
	return allocate(c, w);
}

static long on_control(struct call *c)
{
	struct { uint32_t count, reserved; uint64_t list; } info;

	if (!load(c, RM_CONTROL_SIZE, RM_CONTROL_STATUS))
		return pass(c);
	uint32_t cmd = u32(c->o, RM_CONTROL_CMD), client = u32(c->o, RM_CONTROL_CLIENT), object = u32(c->o, RM_CONTROL_OBJECT);
	uint64_t params = u64(c->o, RM_CONTROL_PARAMS);
	int ours = cmd == CONTROL_FB_INFO || cmd == CONTROL_FB_INFO_V2 || cmd == CONTROL_TIMESLICE, done;
	int gpu = ours ? gpu_of(c->page, client, object) : NO_GPU;
	if (gpu == NO_GPU)
		return pass(c);
	if (cmd == CONTROL_TIMESLICE && vgpu(c->page, (unsigned int)gpu)->timeslice_micros) {
		/* libcuda asks for its own, once per context, when the channels are there: a good time to set ours again. */
		set_timeslice(c->page, (unsigned int)gpu, c->fd, (uint64_t)client << 32 | object);
		return answer(c, RM_STATUS_OK);
	}
	long ret = execute(c, &done);
	/* The driver has just read and written the parameters, so the count is one that it took. */
	if (done && cmd == CONTROL_FB_INFO && copy_in(&info, params, sizeof info))
		present_fb_info(c->page, (unsigned int)gpu, info.list, info.count);
	else if (done && cmd == CONTROL_FB_INFO_V2 && copy_in(&info, params, sizeof info))
		present_fb_info(c->page, (unsigned int)gpu, params + RM_FB_INFO_LIST, info.count);
	return ret;
}

long preload_call(const struct cgpu_header *page, int fd, unsigned int request, void *arg)
{
	unsigned char o[RM_HEAP_SIZE]; /* the largest */
	struct call c = {.page = page, .fd = fd, .request = request, .arg = (uint64_t)arg, .o = o};

	follow(page);
	switch (request & 0xff) {
	case RM_NR_ALLOC:
		return on_alloc(&c);
	case RM_NR_FREE:
		return load(&c, RM_FREE_SIZE, RM_FREE_STATUS) ? drop(&c, u32(c.o, RM_FREE_ROOT), u32(c.o, RM_FREE_OBJECT)) : pass(&c);
	case RM_NR_DUP:
		return on_dup(&c);
	case RM_NR_HEAP:
		return on_heap(&c);
	}
	return on_control(&c);
}
