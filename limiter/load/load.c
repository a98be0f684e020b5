// SPDX-License-Identifier: Apache-2.0

// cgpu-load: the program in the containers of `cgpu doctor --measure`. It computes on the first GPU that it sees, through the CUDA driver
// API, and says how much. cgpu-probe load is the same for the simulated driver.
//
// Lines on standard input: "calibrate", "hog" (two kernels of half a millisecond are queued always), "loop" (launches a kernel of a
// millisecond, waits for it, launches the next) and "stop". Its end, for whatever reason, ends the program. Lines on standard output,
// times in microseconds of CLOCK_MONOTONIC:
//   up                   there is a context
//   ready HOG LOOP       what a kernel of each kind takes alone, one behind the other; the answer to calibrate
//   work AT DONE LAST    every 50 ms: kernels done by now times what each takes alone; when the last one ended
//   gap FROM TO          no kernel ended between two moments more than 100 ms apart
// Exit status 3: there is no CUDA here to try it with; 1: something else failed.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "spin.h"

enum { NO_CUDA = 3, THREADS = 256, REPORT_US = 50000, GAP_US = 100000, HOG_US = 500, LOOP_US = 1000 };
enum { PROCESSORS = 16 }; // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

typedef int result;
typedef void *handle;

static struct {
	result (*init)(unsigned);
	result (*device)(int *, int);
	result (*attribute)(int *, int, int);
	result (*context)(handle *, unsigned, int);
	result (*module)(handle *, const void *);
	result (*function)(handle *, handle, const char *);
	result (*event)(handle *, unsigned);
	result (*record)(handle, handle);
	result (*wait)(handle);
	result (*launch)(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **, void **);
	result (*text)(result, const char **);
} cu;

static const struct {
	const char *name;
	void *at;
} symbols[] = {
	{"cuInit", &cu.init}, {"cuDeviceGet", &cu.device}, {"cuDeviceGetAttribute", &cu.attribute}, {"cuCtxCreate_v2", &cu.context},
	{"cuModuleLoadData", &cu.module}, {"cuModuleGetFunction", &cu.function}, {"cuEventCreate", &cu.event},
	{"cuEventRecord", &cu.record}, {"cuEventSynchronize", &cu.wait}, {"cuLaunchKernel", &cu.launch}, {"cuGetErrorString", &cu.text},
};

enum mode { STOP, HOG, LOOP, CALIBRATE };

// What the threads share: the worker has the GPU, the reporter tells, and the first one reads what is wanted.
static struct {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	enum mode mode;
	double done;
	int64_t last;
} state = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, STOP, 0, 0};

static struct {
	handle function, events[2];
	unsigned blocks;
	unsigned turns[LOOP + 1];
	double alone[LOOP + 1]; // microseconds of a kernel
} gpu;

static void end(int status, const char *what, const char *why)
{
	fprintf(stderr, "cgpu-load: %s: %s\n", what, why);
	fflush(stderr);
	_exit(status);
}

static void check(const char *what, result r)
{
	const char *text = NULL;
	if (r == 0)
		return;
	if (!cu.text || cu.text(r, &text) != 0 || !text)
		text = "an error that CUDA does not know";
	end(cu.text && strcmp(what, "cuInit") == 0 ? NO_CUDA : 1, what, text);
}

static int64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * INT64_C(1000000) + t.tv_nsec / 1000;
}

static void say(const char *line)
{
	flockfile(stdout);
	fputs(line, stdout);
	if (fflush(stdout) != 0)
		_exit(1);
	funlockfile(stdout);
}

static void load(void)
{
	setenv("CUDA_CACHE_DISABLE", "1", 1); // leave nothing in the user's home
	handle library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!library)
		end(NO_CUDA, "libcuda.so.1", dlerror());
	for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
		void *p = dlsym(library, symbols[i].name);
		if (!p)
			end(NO_CUDA, "libcuda.so.1 lacks", symbols[i].name);
		memcpy(symbols[i].at, &p, sizeof p);
	}
	int device, processors;
	handle context, module;
	check("cuInit", cu.init(0));
	check("cuDeviceGet", cu.device(&device, 0));
	check("cuDeviceGetAttribute", cu.attribute(&processors, PROCESSORS, device));
	check("cuCtxCreate", cu.context(&context, 0, device));
	check("cuModuleLoadData", cu.module(&module, spin_ptx));
	check("cuModuleGetFunction", cu.function(&gpu.function, module, "spin"));
	for (int i = 0; i < 2; i++)
		check("cuEventCreate", cu.event(&gpu.events[i], 2)); // CU_EVENT_DISABLE_TIMING
	gpu.blocks = 2 * (unsigned)processors; // all of the GPU, so that a preemption has something to save
}

static void start(unsigned turns, int event)
{
	uint64_t out = 0;
	void *arguments[] = {&turns, &out};
	check("cuLaunchKernel", cu.launch(gpu.function, gpu.blocks, 1, 1, THREADS, 1, 1, 0, NULL, arguments, NULL));
	check("cuEventRecord", cu.record(gpu.events[event], NULL));
}

// each is what a kernel takes when n of them are queued at once.
static double each(unsigned turns, int n)
{
	int64_t begin = now();
	for (int i = 0; i < n; i++)
		start(turns, 0);
	check("cuEventSynchronize", cu.wait(gpu.events[0]));
	return (double)(now() - begin) / n;
}

// The clocks of a GPU that has been idle go up first. Of three rounds the shortest counts: the others were disturbed.
static void calibrate(void)
{
	unsigned turns = 1000;
	for (int64_t begin = now(); now() - begin < 200000;) {
		double took = each(turns, 10);
		turns = took < 100 ? turns * 4 : (unsigned)(turns * HOG_US / took) + 1;
	}
	for (enum mode m = HOG; m <= LOOP; m++) {
		gpu.turns[m] = m * turns;
		gpu.alone[m] = 1e9;
		for (int round = 0; round < 3; round++) {
			double took = each(gpu.turns[m], 40 / (int)m);
			if (took < gpu.alone[m])
				gpu.alone[m] = took;
		}
	}
	char line[100];
	snprintf(line, sizeof line, "ready %.1f %.1f\n", gpu.alone[HOG], gpu.alone[LOOP]);
	say(line);
}

// ended counts a kernel.
static void ended(enum mode m)
{
	int64_t at = now(), before;
	pthread_mutex_lock(&state.lock);
	before = state.last;
	state.last = at;
	state.done += gpu.alone[m];
	pthread_mutex_unlock(&state.lock);
	if (before && at - before > GAP_US) {
		char line[100];
		snprintf(line, sizeof line, "gap %lld %lld\n", (long long)before, (long long)at);
		say(line);
	}
}

static enum mode wanted(void)
{
	pthread_mutex_lock(&state.lock);
	enum mode m = state.mode;
	pthread_mutex_unlock(&state.lock);
	return m;
}

static void compute(enum mode m)
{
	unsigned queued = m == HOG ? 2 : 1;
	pthread_mutex_lock(&state.lock);
	state.last = 0; // what was before is no gap
	pthread_mutex_unlock(&state.lock);
	for (unsigned i = 0; i < queued; i++)
		start(gpu.turns[m], (int)i);
	for (unsigned i = 0, left = queued; left > 0; i = (i + 1) % queued) {
		check("cuEventSynchronize", cu.wait(gpu.events[i]));
		ended(m);
		if (wanted() == m)
			start(gpu.turns[m], (int)i);
		else
			left--;
	}
}

static void *worker(void *unused)
{
	(void)unused;
	load();
	say("up\n");
	for (;;) {
		pthread_mutex_lock(&state.lock);
		while (state.mode == STOP)
			pthread_cond_wait(&state.changed, &state.lock);
		enum mode m = state.mode;
		if (m == CALIBRATE)
			state.mode = STOP;
		pthread_mutex_unlock(&state.lock);
		if (m == CALIBRATE)
			calibrate();
		else if (gpu.turns[m] == 0)
			end(1, "not calibrated", "want calibrate first");
		else
			compute(m);
	}
	return NULL;
}

static void *reporter(void *unused)
{
	(void)unused;
	for (;;) {
		usleep(REPORT_US);
		char line[100];
		pthread_mutex_lock(&state.lock);
		snprintf(line, sizeof line, "work %lld %.0f %lld\n", (long long)now(), state.done, (long long)state.last);
		pthread_mutex_unlock(&state.lock);
		say(line);
	}
	return NULL;
}

int main(void)
{
	static const char *words[] = {[STOP] = "stop\n", [HOG] = "hog\n", [LOOP] = "loop\n", [CALIBRATE] = "calibrate\n"};
	pthread_t thread;
	char line[32];
	if (pthread_create(&thread, NULL, worker, NULL) != 0 || pthread_create(&thread, NULL, reporter, NULL) != 0)
		end(1, "pthread_create", "no thread");
	while (fgets(line, sizeof line, stdin)) {
		for (enum mode m = STOP; m <= CALIBRATE; m++) {
			if (strcmp(line, words[m]) != 0)
				continue;
			pthread_mutex_lock(&state.lock);
			state.mode = m;
			pthread_cond_signal(&state.changed);
			pthread_mutex_unlock(&state.lock);
		}
	}
	_exit(0); // the driver takes back what is on the GPU, also of a container that is paused
}
