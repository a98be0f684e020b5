/*
 * kill -9 at any instruction loses no memory. The limit is 64 MiB.
 * usage: kill step N     one allocation, killed after every N-th instruction
 *        kill storm MS   eight processes that allocate and free, killed at random for so long
 */
#include "check.h"

#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <time.h>

enum { LIMIT_MIB = 64, WORKERS = 8 };

static struct { uint32_t pid; uint64_t real; } *workers; /* what each has of the driver, in MiB */
static int me;

long cgpu_test_ioctl(int fd, unsigned request, void *arg)
{
	(void)fd;
	if ((request & 0xff) == RM_NR_ALLOC) {
		if (get32(arg, RM_ALLOC_CLASS) == 0x40 && workers)
			__atomic_fetch_add(&workers[me].real, get64((void *)get64(arg, RM_ALLOC_PARAMS), RM_MEMORY_SIZE) / MIB, __ATOMIC_SEQ_CST);
		set32(arg, 40, 0);
	} else {
		if (workers && get32(arg, RM_FREE_OBJECT) == get32(arg, RM_FREE_ROOT))
			__atomic_store_n(&workers[me].real, 0, __ATOMIC_SEQ_CST);
		else if (workers)
			__atomic_fetch_sub(&workers[me].real, get32(arg, RM_FREE_OBJECT) >> 16, __ATOMIC_SEQ_CST);
		set32(arg, RM_FREE_STATUS, 0);
	}
	return 0;
}

/* all says that the whole limit can be had, by a process of its own. */
static int all(void)
{
	int status;
	pid_t child = fork();
	if (child == 0)
		_exit(rm_memory(1, 2, 3, LIMIT_MIB * MIB, 0) != 0);
	CHECK(waitpid(child, &status, 0) == child);
	return status == 0;
}

#if defined(__x86_64__)
static int step(int every)
{
	int status, trials = 0;
	long steps = 0;

	for (int k = 1;; k += every, trials++) {
		int over = 0;
		pid_t child = fork();
		if (child == 0) {
			if (ptrace(PTRACE_TRACEME, 0, 0, 0) != 0)
				_exit(77);
			raise(SIGSTOP);
			_exit(rm_memory(1, 2, 3, LIMIT_MIB * MIB, 0) != 0);
		}
		CHECK(waitpid(child, &status, 0) == child);
		if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
			return 77;
		for (int i = 0; i < k && !over; i++, steps++) {
			CHECK(ptrace(PTRACE_SINGLESTEP, child, 0, 0) == 0 && waitpid(child, &status, 0) == child);
			over = WIFEXITED(status);
		}
		if (over)
			CHECK(WEXITSTATUS(status) == 0);
		else
			CHECK(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child);
		CHECK(all());
		if (over)
			break;
	}
	printf("%d kills, %ld steps\n", trials, steps);
	return trials < 10;
}
#else
static int step(int every) { return every ? 77 : 77; }
#endif

static void work(int i)
{
	unsigned seed = getpid();
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	me = i;
	workers[i].pid = getpid();
	for (uint32_t n = 1;; n++) {
		uint32_t size = 2 * (1 + rand_r(&seed) % 12), handle = size << 16 | (n & 0xffff);
		if (rm_memory(1, 2, handle, size * MIB, 0) == 0 && rand_r(&seed) % 8)
			rm_free(1, handle);
		else if (rand_r(&seed) % 4 == 0)
			rm_free(1, 1); /* the whole client */
	}
}

/* dead says that a worker's memory is the driver's again. */
static int dead(uint32_t pid)
{
	char path[32], b[512];
	snprintf(path, sizeof path, "/proc/%u/stat", pid);
	int fd = open(path, O_RDONLY);
	ssize_t n = fd < 0 ? -1 : read(fd, b, sizeof b - 1);
	close(fd);
	if (n <= 0)
		return 1;
	b[n] = 0;
	char *s = strrchr(b, ')');
	return s && (s[2] == 'Z' || s[2] == 'X');
}

static uint64_t held(void)
{
	uint64_t sum = 0;
	for (int i = 0; i < WORKERS; i++)
		if (!dead(workers[i].pid))
			sum += __atomic_load_n(&workers[i].real, __ATOMIC_SEQ_CST);
	return sum;
}

static int storm(long ms)
{
	struct timespec now, end, pause;
	unsigned seed = 1, kills = 0;
	uint64_t most = 0;

	workers = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	clock_gettime(CLOCK_MONOTONIC, &end);
	end.tv_sec += ms / 1000;
	for (int i = 0; i < WORKERS; i++)
		workers[i].pid = 0;
	pid_t pids[WORKERS] = {0};
	do {
		int i = rand_r(&seed) % WORKERS;
		if (pids[i]) {
			CHECK(kill(pids[i], SIGKILL) == 0);
			kills++;
			CHECK(waitpid(pids[i], NULL, 0) == pids[i]);
		}
		workers[i].real = 0;
		if ((pids[i] = fork()) == 0)
			work(i);
		workers[i].pid = pids[i];
		for (int k = 0; k < 10; k++) {
			/* Not one moment's picture, so one that is too much is looked at again. */
			uint64_t sum = 0;
			for (int again = 0; again < 1000 && (again == 0 || sum > LIMIT_MIB); again++)
				sum = held();
			CHECK(sum <= LIMIT_MIB);
			most = sum > most ? sum : most;
		}
		pause.tv_sec = 0, pause.tv_nsec = rand_r(&seed) % 2000000;
		nanosleep(&pause, NULL);
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (now.tv_sec < end.tv_sec);
	for (int i = 0; i < WORKERS; i++)
		if (pids[i])
			CHECK(kill(pids[i], SIGKILL) == 0 && waitpid(pids[i], NULL, 0) == pids[i]);
	workers = NULL;
	CHECK(all());
	printf("%u kills, %llu of %d MiB held at most\n", kills, (unsigned long long)most, LIMIT_MIB);
	return kills < 10 || most < LIMIT_MIB / 2;
}

int main(int argc, char **argv)
{
	CHECK(argc == 3);
	return strcmp(argv[1], "step") ? storm(atol(argv[2])) : step(atoi(argv[2]));
}
