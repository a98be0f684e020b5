// cgpu_spank.so puts the tasks of a Slurm job on slices of GPUs, as cgpu run does with a command: docs/slurm.md.
//
// A task is a process that slurmstepd forks and that becomes the user's program. Before it does, it
//
//   - as root, takes a mount namespace of its own (task_init_privileged);
//   - waits until slurmstepd has put it into the step's cgroups. Then slurmstepd, as root, starts "cgpu slurm-task" (task_post_fork), which
//     reserves the slice, starts its guard, makes a cgroup below the task's, and mounts a /dev of the slice's into that namespace;
//   - as the user, takes the filter that it is told, and gives its listener to the guard (task_init).
//
// All that follows in it is inside: task prologs, the user's program. Whatever fails ends the task, also where plugstack.conf has the plugin as
// optional. Who somebody is and which job it is comes from slurmstepd, never from the environment, which is the user's.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/spank.h>

SPANK_PLUGIN(cgpu, 1)

#ifndef SECCOMP_FILTER_FLAG_NEW_LISTENER
#define SECCOMP_FILTER_FLAG_NEW_LISTENER (1UL << 3)
#endif
#define WAIT_KILLABLE (1UL << 5)  // SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, Linux 5.19

enum { MAX_OPTION = 32, MAX_ANSWER = 64 << 10, MAX_ENV = 16, NO_SLICE = 125, WAIT_SECONDS = 120, HELPER_SECONDS = 30 };

// The options, as the user has written them; cgpu slurm-task reads them.
enum { MEMORY, WEIGHT, PERCENT, OPTIONS };
static char options[OPTIONS][MAX_OPTION + 1];
static const char *const flags[OPTIONS] = {"--memory", "--weight", "--percent"};

// A pair of sockets for each task of the step on this node: the first is the task's, the second the helper's.
static int (*pairs)[2];
static uint32_t tasks;
static int mine = -1;  // in a task: its own
static ino_t own;      // the task's mount namespace

static int option(int val, const char *arg, int remote)
{
	(void)remote;
	size_t n = arg ? strlen(arg) : 0;
	if (val < 0 || val >= OPTIONS || n == 0 || n > MAX_OPTION || arg[0] < '0' || arg[0] > '9') {
		slurm_error("cgpu: %.40s: want a number, or for --gpu-mem a size such as 6GiB", arg ? arg : "");
		return ESPANK_BAD_ARG;
	}
	memcpy(options[val], arg, n + 1);
	return ESPANK_SUCCESS;
}

static struct spank_option known[] = {
	{"gpu-mem", "SIZE", "GPU memory of each task, such as 6GiB", 1, MEMORY, option},
	{"gpu-weight", "N", "1 to 64: share of the GPU's time beside others", 1, WEIGHT, option},
	{"gpu-percent", "N", "1 to 100: share of the GPU's time", 1, PERCENT, option},
};

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	(void)ac, (void)av;
	spank_context_t where = spank_context();
	if (where != S_CTX_LOCAL && where != S_CTX_ALLOCATOR && where != S_CTX_REMOTE)
		return ESPANK_SUCCESS;
	for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
		spank_err_t err = spank_option_register(sp, &known[i]);
		if (err != ESPANK_SUCCESS) {
			slurm_error("cgpu: --%s: %s", known[i].name, spank_strerror(err));
			return err;
		}
	}
	return ESPANK_SUCCESS;
}

int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	(void)ac, (void)av;
	if (!options[MEMORY][0] && (options[WEIGHT][0] || options[PERCENT][0])) {
		slurm_error("cgpu: --gpu-weight and --gpu-percent: want --gpu-mem as well");
		if (spank_context() != S_CTX_REMOTE)  // there the task says so
			return ESPANK_BAD_ARG;
	}
	uint32_t step;
	if (spank_context() != S_CTX_REMOTE || spank_get_item(sp, S_JOB_STEPID, &step) != ESPANK_SUCCESS || step == SLURM_EXTERN_CONT)
		return ESPANK_SUCCESS;
	if (spank_get_item(sp, S_JOB_LOCAL_TASK_COUNT, &tasks) != ESPANK_SUCCESS || !(pairs = calloc(tasks, sizeof *pairs))) {
		slurm_error("cgpu: how many tasks the step has is not known");
		return ESPANK_ERROR;
	}
	// Sooner or later a task ends that nobody answers: a helper that was killed closes its end, but others may have copies of it.
	struct timeval patience = {.tv_sec = WAIT_SECONDS};
	for (uint32_t i = 0; i < tasks; i++)
		if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pairs[i]) ||
		    setsockopt(pairs[i][0], SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience)) {
			slurm_error("cgpu: socketpair: %m");
			return ESPANK_ERROR;
		}
	return ESPANK_SUCCESS;
}

// refuse ends a task. The status is that of cgpu run where there is no slice.
__attribute__((noreturn, format(printf, 1, 2))) static void refuse(const char *format, ...)
{
	char text[1024];
	va_list list;
	va_start(list, format);
	vsnprintf(text, sizeof text, format, list);
	va_end(list);
	slurm_error("cgpu: %s", text);
	_exit(NO_SLICE);
}

// space is which namespace that is; 0: not known.
static ino_t space(const char *path)
{
	struct stat st;
	return stat(path, &st) ? 0 : st.st_ino;
}

int slurm_spank_task_init_privileged(spank_t sp, int ac, char **av)
{
	(void)ac, (void)av;
	int task;
	if (!pairs || spank_get_item(sp, S_TASK_ID, &task) != ESPANK_SUCCESS || task < 0 || (uint32_t)task >= tasks)
		refuse("which task this is is not known");
	mine = pairs[task][0];
	for (uint32_t i = 0; i < tasks; i++) {
		close(pairs[i][1]);
		if (i != (uint32_t)task)
			close(pairs[i][0]);
	}
	// Root is to work in what is slurmstepd's tree and no other's: not in that of an image which another plugin has entered.
	char parents[32];
	snprintf(parents, sizeof parents, "/proc/%d/ns/mnt", (int)getppid());
	if (!space(parents) || space(parents) != space("/proc/self/ns/mnt"))
		refuse("another plugin has put the task into a mount namespace: cgpu_spank.so does not go with it");
	if (unshare(CLONE_NEWNS) || mount("", "/", "", MS_REC | MS_SLAVE, NULL))
		refuse("mount namespace: %s", strerror(errno));
	own = space("/proc/self/ns/mnt");
	return ESPANK_SUCCESS;
}

// value finds NAME=value among the arguments in plugstack.conf.
static const char *value(int ac, char **av, const char *name)
{
	size_t n = strlen(name);
	for (int i = 0; i < ac; i++)
		if (!strncmp(av[i], name, n) && av[i][n] == '=')
			return av[i] + n + 1;
	return NULL;
}

// start becomes the helper, with its end of the task's socket as descriptor 3. It is called between fork and exec, so it must do with
// system calls. It ends with slurmstepd, since the task's number is the task's only as long as slurmstepd has not waited for it.
__attribute__((noreturn)) static void start(const char *path, char *const *argv, char *const *envp, int fd)
{
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	int null = open("/dev/null", O_RDWR);
	if (prctl(PR_SET_PDEATHSIG, SIGKILL) || null < 0 || setsid() < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0 || dup2(null, 2) < 0)
		_exit(1);
	if (fd == 3)
		fcntl(fd, F_SETFD, 0);
	else if (dup2(fd, 3) < 0)
		_exit(1);
	syscall(SYS_close_range, 4, ~0U, 0);
	execve(path, argv, envp);
	_exit(1);
}

// await waits for the helper, and ends it when it takes too long.
static void await(pid_t child)
{
	const struct timespec pause = {.tv_nsec = 2000000};
	struct timespec now, begin;
	clock_gettime(CLOCK_MONOTONIC, &begin);
	for (int ended = 0;;) {
		pid_t p = waitpid(child, NULL, ended ? 0 : WNOHANG);
		if (p == child || (p < 0 && errno != EINTR))
			return;
		clock_gettime(CLOCK_MONOTONIC, &now);
		if (!ended && now.tv_sec - begin.tv_sec >= HELPER_SECONDS)
			ended = kill(child, SIGKILL) == 0;
		nanosleep(&pause, NULL);
	}
}

// gpus are those that Slurm has allotted to the step, as slurmstepd has just written them over whatever the user had there.
static void gpus(spank_t sp, uint32_t step, char *text, int size)
{
	int job = step == SLURM_BATCH_SCRIPT || step == SLURM_INTERACTIVE_STEP;
	if (spank_getenv(sp, job ? "SLURM_JOB_GPUS" : "SLURM_STEP_GPUS", text, size) != ESPANK_SUCCESS)
		text[0] = 0;
}

int slurm_spank_task_post_fork(spank_t sp, int ac, char **av)
{
	uint32_t job, step, global;
	int task;
	pid_t pid;
	uid_t uid;
	if (!pairs)  // the step of a whole allocation, which has no tasks
		return ESPANK_SUCCESS;
	if (spank_get_item(sp, S_TASK_ID, &task) != ESPANK_SUCCESS || task < 0 || (uint32_t)task >= tasks)
		return ESPANK_ERROR;
	char words[8 + OPTIONS][300], list[256];
	char *argv[sizeof words / sizeof words[0] + 2] = {"cgpu", "slurm-task"};
	int n = 0;
	if (spank_get_item(sp, S_TASK_PID, &pid) != ESPANK_SUCCESS || spank_get_item(sp, S_JOB_UID, &uid) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_ID, &job) != ESPANK_SUCCESS || spank_get_item(sp, S_JOB_STEPID, &step) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_TASK_GLOBAL_ID, &global) != ESPANK_SUCCESS)
		return ESPANK_ERROR;
	gpus(sp, step, list, sizeof list);
	snprintf(words[n++], sizeof words[0], "--pid=%d", (int)pid);
	snprintf(words[n++], sizeof words[0], "--uid=%u", (unsigned)uid);
	snprintf(words[n++], sizeof words[0], "--job=%u", job);
	snprintf(words[n++], sizeof words[0], "--gres=%s", list);
	if (step == SLURM_BATCH_SCRIPT)
		snprintf(words[n++], sizeof words[0], "--name=slurm-%u.batch", job);
	else if (step == SLURM_INTERACTIVE_STEP)
		snprintf(words[n++], sizeof words[0], "--name=slurm-%u.interactive", job);
	else
		snprintf(words[n++], sizeof words[0], "--name=slurm-%u.%u.%u", job, step, global);
	if (value(ac, av, "policy") && snprintf(words[n++], sizeof words[0], "--policy=%s", value(ac, av, "policy")) >= (int)sizeof words[0])
		return ESPANK_ERROR;
	for (int i = 0; i < OPTIONS; i++)
		if (options[i][0])
			snprintf(words[n++], sizeof words[0], "%s=%s", flags[i], options[i]);
	for (int i = 0; i < n; i++)
		argv[i + 2] = words[i];

	// Of the environment only what administrators have said: in plugstack.conf, and slurmd's own.
	char *envp[MAX_ENV + 2] = {NULL}, conf[4096];
	int e = 0;
	for (int i = 0; i < ac && e < MAX_ENV; i++)
		if (!strncmp(av[i], "CGPU_", 5))
			envp[e++] = av[i];
	if (getenv("SLURM_CONF") && (size_t)snprintf(conf, sizeof conf, "SLURM_CONF=%s", getenv("SLURM_CONF")) < sizeof conf)
		envp[e++] = conf;

	const char *path = value(ac, av, "cgpu") ? value(ac, av, "cgpu") : "/usr/bin/cgpu";
	pid_t child = fork();
	if (child == 0)
		start(path, argv, envp, pairs[task][1]);
	close(pairs[task][1]);  // where there is no helper, the task reads the end of file
	// Until this returns nobody waits for the task. If it ends meanwhile its number stays its own, and leads the helper to nobody else.
	if (child > 0)
		await(child);
	return ESPANK_SUCCESS;
}

// What the helper says: pkg/slurm/task.
enum { OPEN, HIDDEN, GUARDED, REFUSED };
struct head {
	uint32_t kind, majors, program, text, limiter;
};

// receive reads the answer, and the descriptor that may come with it.
static ssize_t receive(char *buffer, size_t size, int *fd)
{
	union {
		struct cmsghdr head;
		char space[CMSG_SPACE(sizeof(int))];
	} control = {0};
	struct iovec io = {buffer, size};
	struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	ssize_t n;
	while ((n = recvmsg(mine, &m, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR)
		;
	struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&m) : NULL;
	if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len == CMSG_LEN(sizeof(int)))
		memcpy(fd, CMSG_DATA(c), sizeof(int));
	return m.msg_flags & MSG_TRUNC ? -1 : n;
}

// check refuses files that lead past the task's own /dev: slurmstepd has opened what srun --input names before there was one.
static void check(const char *majors, uint32_t n)
{
	for (int fd = 0; fd < 3; fd++) {
		struct stat st;
		if (fstat(fd, &st))
			continue;
		int past = S_ISDIR(st.st_mode);
		for (uint32_t i = 0; i < n && S_ISCHR(st.st_mode); i++) {
			uint32_t number;
			memcpy(&number, majors + i * sizeof number, sizeof number);
			past |= number == major(st.st_rdev);
		}
		if (past)
			refuse("standard input, output or error is a folder or the node of a graphics card: redirect it elsewhere");
	}
	// A working folder below /dev is still one of the host's.
	char dir[4096] = "";
	int whole = getcwd(dir, sizeof dir) && dir[0] == '/';
	if (whole && strcmp(dir, "/dev") && strncmp(dir, "/dev/", 5))
		return;
	if ((!whole || chdir(dir)) && chdir("/"))
		refuse("working folder: %s", strerror(errno));
}

// environment is what cgpu run makes of it (pkg/hostrun/env.go): GPUs count from 0 in a slice, and the preload library comes first.
static void environment(spank_t sp, const char *limiter)
{
	static char old[64 << 10], preload[sizeof old + 256];
	spank_unsetenv(sp, "CUDA_VISIBLE_DEVICES");
	spank_unsetenv(sp, "NVIDIA_VISIBLE_DEVICES");
	spank_unsetenv(sp, "GPU_DEVICE_ORDINAL");
	if (!*limiter)
		return;
	if (spank_getenv(sp, "LD_PRELOAD", old, sizeof old) != ESPANK_SUCCESS)
		old[0] = 0;
	snprintf(preload, sizeof preload, "%s%s%s", limiter, old[0] ? ":" : "", old);
	spank_setenv(sp, "LD_PRELOAD", preload, 1);
}

// guard takes the filter and gives its listener to the guard.
static void guard(const char *program, size_t size, const char *state, size_t length, int conn)
{
	struct sock_fprog filter = {.len = size / sizeof(struct sock_filter), .filter = (struct sock_filter *)program};
	if (geteuid() && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		refuse("no_new_privs: %s", strerror(errno));
	unsigned long how = SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_SPEC_ALLOW;
	int listener = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, how | WAIT_KILLABLE, &filter);
	if (listener < 0 && errno == EINVAL)
		listener = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, how, &filter);
	if (listener < 0)
		refuse("seccomp filter: %s", strerror(errno));
	union {
		struct cmsghdr head;
		char space[CMSG_SPACE(sizeof(int))];
	} control = {.head = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
	memcpy(CMSG_DATA(&control.head), &listener, sizeof listener);
	struct iovec io = {(void *)state, length};
	struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	if (sendmsg(conn, &m, MSG_NOSIGNAL) != (ssize_t)length)
		_exit(NO_SLICE);  // nobody answers an ioctl now, and printing may want one
	close(listener);
	// The guard looks at this process for its /dev, and then closes the connection: a task may end at once while its children go on.
	char none;
	while (read(conn, &none, 1) < 0 && errno == EINTR)
		;
	close(conn);
}

int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	(void)ac, (void)av;
	static char buffer[MAX_ANSWER + 1] __attribute__((aligned(8)));
	int conn = -1;
	struct head h;
	if (mine < 0)
		refuse("the task has not been prepared");
	ssize_t n = receive(buffer, MAX_ANSWER, &conn);
	if (n < (ssize_t)sizeof h)
		refuse("cgpu slurm-task has said nothing: is it where plugstack.conf says (cgpu=PATH)?");
	memcpy(&h, buffer, sizeof h);
	if (!own || space("/proc/self/ns/mnt") != own)
		refuse("another plugin has changed the task's mount namespace: cgpu_spank.so does not go with it");
	const char *majors = buffer + sizeof h, *program = majors + (uint64_t)h.majors * sizeof(uint32_t), *text = program + h.program,
		   *limiter = text + h.text;
	if (limiter + h.limiter != buffer + n)
		refuse("cgpu slurm-task and this plugin are of different versions");
	close(mine);
	switch (h.kind) {
	case OPEN:
		return ESPANK_SUCCESS;
	case HIDDEN:
		check(majors, h.majors);
		return ESPANK_SUCCESS;
	case GUARDED:
		if (conn < 0)
			refuse("cgpu slurm-task has sent no connection to the guard");
		check(majors, h.majors);
		buffer[n] = 0;
		environment(sp, limiter);
		guard(program, h.program, text, h.text, conn);
		return ESPANK_SUCCESS;
	default:
		refuse("%.*s", (int)h.text, text);
	}
}
