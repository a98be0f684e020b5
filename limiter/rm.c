/*
 * Preload mode: the calls of the resource manager that make device memory, drop it, or tell how much there is. The guard's
 * alloc.go, vidheap.go and account.go do the same from outside of the process, and do it for hostile programs, too.
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
	return !failed(sys_ioctl(fd, 3u << 30 | RM_CONTROL_SIZE << 16 | 'F' << 8 | RM_NR_CONTROL, o)) && o[RM_CONTROL_STATUS / 4] == RM_STATUS_OK;
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

/*
 * allocate makes what takes device memory: reserve, execute, settle to what it took. params is where the driver tells that;
 * 0: what was reserved.
 */
static long allocate(struct call *c, uint8_t kind, uint64_t reserved, uint64_t params)
{
	uint32_t client = u32(c->o, RM_ALLOC_ROOT), parent = u32(c->o, RM_ALLOC_PARENT), attr;
	int gpu = gpu_of(c->page, client, parent), done;
	uint64_t took = reserved, size;

	if (gpu == NO_GPU || !slots_reserve(c->page, (unsigned int)gpu, reserved))
		return answer(c, RM_STATUS_NO_MEMORY);
	long ret = execute(c, &done);
	if (!done) {
		slots_release(c->page, (unsigned int)gpu, reserved);
		return ret;
	}
	uint32_t handle = u32(c->o, RM_ALLOC_OBJECT);
	if (params && copy_in(&size, params + RM_MEMORY_SIZE, sizeof size) && copy_in(&attr, params + RM_MEMORY_ATTR, sizeof attr))
		took = round_up(size, (attr >> RM_MEMORY_ATTR_PAGE_SHIFT & RM_MEMORY_ATTR_PAGE_MASK) == ATTR_PAGE_HUGE ? PAGE_HUGE : PAGE_SMALL);
	/* More than was reserved, because the caller asked for pages of 512 MiB: a program honest enough for this mode does not. */
	if (took > reserved && !slots_reserve(c->page, (unsigned int)gpu, took - reserved))
		took = reserved;
	if (took < reserved)
		slots_release(c->page, (unsigned int)gpu, reserved - took);
	entry_add(client, handle, (struct entry){.size = took, .memory = ADD(&memories, 1), .parent = parent, .fd = c->fd,
						 .kind = kind, .gpu = (uint8_t)gpu});
	if (kind == KIND_GROUP)
		set_timeslice(c->page, (unsigned int)gpu, c->fd, (uint64_t)client << 32 | handle);
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
	uint32_t engine = 0;
	uint8_t kind = KIND_NONE;
	int gpu = NO_GPU, done;
	uint64_t memory;

	if ((size != 48 && size != 40 && size != 32) || !load(c, size, status))
		return pass(c);
	uint32_t client = u32(c->o, RM_ALLOC_ROOT), parent = u32(c->o, RM_ALLOC_PARENT);
	uint64_t params = u64(c->o, RM_ALLOC_PARAMS);
	switch (u32(c->o, RM_ALLOC_CLASS)) {
	case CLASS_MEMORY:
		if (!params || !copy_in(&memory, params + RM_MEMORY_SIZE, sizeof memory))
			return pass(c); /* to be refused */
		return allocate(c, KIND_MEMORY, round_up(memory, PAGE_HUGE), params);
	case CLASS_GROUP:
		if ((params && !copy_in(&engine, params + RM_TSG_ENGINE_TYPE, sizeof engine)) || engine > ENGINE_GR_LAST)
			return pass(c);
		return allocate(c, KIND_GROUP, CGPU_CONTEXT_OVERHEAD, 0);
	case CLASS_DEVICE:
		kind = KIND_DEVICE;
		gpu = device_gpu(c);
		break;
	case CLASS_SUBDEVICE:
		kind = KIND_SUBDEVICE;
		gpu = gpu_of(c->page, client, parent);
		break;
	case 0: case 1: case CLASS_CLIENT:
		break;
	default:
		return pass(c);
	}
	long ret = execute(c, &done);
	uint32_t handle = u32(c->o, RM_ALLOC_OBJECT);
	if (done && kind && gpu != NO_GPU)
		entry_add(client, handle, (struct entry){.parent = parent, .kind = kind, .gpu = (uint8_t)gpu});
	else if (done && !kind) /* a new client: one of the same number is gone, its file closed */
		drop_below(c->page, handle, handle);
	return ret;
}

/* on_free frees an object. It leaves the table first: the handle may be another thread's as soon as it is free. */
static long on_free(struct call *c)
{
	if (!load(c, RM_FREE_SIZE, RM_FREE_STATUS))
		return pass(c);
	uint32_t client = u32(c->o, RM_FREE_ROOT), handle = u32(c->o, RM_FREE_OBJECT);
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
	if (done && cmd != CONTROL_TIMESLICE && copy_in(&info, params, sizeof info))
		present_fb_info(c->page, (unsigned int)gpu, cmd == CONTROL_FB_INFO ? info.list : params + RM_FB_INFO_LIST, info.count);
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
		return on_free(&c);
	case RM_NR_DUP:
		return on_dup(&c);
	case RM_NR_HEAP: /* the old way to allocate, which nothing of CUDA's takes: not accounted for, so not allowed */
		return load(&c, RM_HEAP_SIZE, RM_HEAP_STATUS) ? answer(&c, RM_STATUS_NOT_SUPPORTED) : pass(&c);
	}
	return on_control(&c);
}
