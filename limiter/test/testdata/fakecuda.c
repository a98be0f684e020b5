// SPDX-License-Identifier: Apache-2.0

// A libcuda.so.1 for cgpu-load: one queue, in which a kernel takes a nanosecond of sleep for each turn, and a little more.
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

typedef int result;
typedef void *handle;

static int64_t over; // when the queue is empty
struct event {
	int64_t at;
};

static int64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

result cuInit(unsigned flags) { return getenv("NO_DEVICE") ? 100 : (int)flags; }
result cuGetErrorString(result r, const char **text) { *text = r == 100 ? "no CUDA-capable device is detected" : "other"; return 0; }
result cuDeviceGet(int *device, int i) { *device = i; return 0; }
result cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 16 ? 4 : device; return 0; }
result cuCtxCreate_v2(handle *context, unsigned flags, int device) { *context = malloc(1 + flags + (unsigned)device); return 0; }
result cuModuleLoadData(handle *module, const void *text) { *module = (handle)text; return *(const char *)text == '.' ? 0 : 218; }
result cuModuleGetFunction(handle *function, handle module, const char *name) { *function = module; return *name == 's' ? 0 : 500; }
result cuEventCreate(handle *event, unsigned flags) { *event = calloc(flags, sizeof(struct event)); return 0; }
result cuEventRecord(handle event, handle stream) { ((struct event *)event)->at = over; return stream != NULL; }

result cuEventSynchronize(handle event)
{
	int64_t at = ((struct event *)event)->at;
	struct timespec t = {at / 1000000000, at % 1000000000};
	clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
	return 0;
}

result cuLaunchKernel(handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, handle stream,
	void **arguments, void **extra)
{
	int64_t begin = now();
	if (!function || gx != 8 || gy * gz * by * bz != 1 || bx != 256 || shared || stream || extra)
		return 1;
	if (over < begin)
		over = begin;
	over += *(unsigned *)arguments[0] + 5000;
	return 0;
}
