// LD_PRELOAD library for CUDA programs, of which a context is never given compute preemption, whatever libcuda asks for.
//   NOPREEMPT=drop  SET_CTXSW_PREEMPTION_MODE is answered OK and not made: the context keeps what it has
//   NOPREEMPT=wfi   and once a compute object is made, the mode that waits for the end of kernels is asked for
// Says on stderr what it did. Build: cc -shared -fPIC -o nopreempt.so nopreempt.c
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MODE = 0x20801210, CONTROL = 0xc020462a };

// Of the client whose group was made last: channel groups and subdevices are numbers of one client.
static uint32_t client, group, subdevice, asked;

static void wfi(int fd) {
	uint32_t params[8] = {1, group, 0, 0};
	uint32_t out[8] = {client, subdevice, MODE, 0, 0, 0, sizeof params, 0xbad};
	uint64_t address = (uintptr_t)params;
	memcpy(out + 4, &address, sizeof address);
	long r = syscall(SYS_ioctl, fd, (unsigned long)CONTROL, out);
	fprintf(stderr, "nopreempt: WFI: result %ld status %#x\n", r, out[7]);
}

int ioctl(int fd, unsigned long cmd, ...) {
	va_list list;
	va_start(list, cmd);
	uint32_t *p = va_arg(list, uint32_t *);
	va_end(list);
	const char *mode = getenv("NOPREEMPT");
	if (mode && (uint32_t)cmd == CONTROL && p[2] == MODE) {
		fprintf(stderr, "nopreempt: dropped the mode: flags %u compute %u\n", ((uint32_t *)*(uintptr_t *)(p + 4))[0], ((uint32_t *)*(uintptr_t *)(p + 4))[3]);
		p[7] = 0;
		return 0;
	}
	long r = syscall(SYS_ioctl, fd, cmd, p);
	if (r == 0 && (cmd & 0xff) == 0x2b && (cmd >> 16 & 0x3fff) == 48 && p[10] == 0) { // RM_ALLOC
		if (p[3] == 0x2080 && p[0] == client) subdevice = p[2];
		if (p[3] == 0x2080 && !group) client = p[0], subdevice = p[2];
		if (p[3] == 0xa06c) client = p[0], group = p[2], asked = 0;
		if (mode && !strcmp(mode, "wfi") && (p[3] & 0xff) == 0xc0 && p[3] > 0xb000 && p[0] == client && !asked) {
			asked = 1;
			wfi(fd);
		}
	}
	return (int)r; // syscall() has set errno
}
