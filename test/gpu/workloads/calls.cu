// Makes calls when it is told to: each line on standard input is a kind and a number of calls, and is answered by a line with
// both and the microseconds that a call took. What it costs elsewhere meanwhile is calls.py's to see.
#include <cstring>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <fcntl.h>
#include "check.h"

static int null_device;
static size_t free_bytes, total_bytes;

static void context() { CHECK(cudaFree(0)); }
static void system_call() { syscall(SYS_getppid); }
// A number whose low byte is RM_CONTROL's, and whose size is not: the guard gets it and lets it continue.
static void waved() { ioctl(null_device, _IOC(_IOC_READ | _IOC_WRITE, 'x', 0x2a, 4), 0); }
static void mem_get_info() { CHECK(cudaMemGetInfo(&free_bytes, &total_bytes)); }
static void allocate() {
  void* p;
  CHECK(cudaMalloc(&p, 2 * MIB));
  CHECK(cudaFree(p));
}

int main() {
  const struct { const char* name; void (*call)(); } kinds[] = {
      {"context", context}, {"syscall", system_call}, {"waved", waved}, {"memgetinfo", mem_get_info}, {"malloc", allocate}};
  null_device = open("/dev/null", O_RDWR);
  char name[32];
  int n;
  while (scanf("%31s %d", name, &n) == 2)
    for (auto& k : kinds) {
      if (strcmp(name, k.name)) continue;
      double begin = now_s();
      for (int i = 0; i < n; i++) k.call();
      printf("%s %d %.3f\n", name, n, (now_s() - begin) / n * 1e6);
      fflush(stdout);
    }
}
