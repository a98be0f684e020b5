// CUDA IPC between two processes of one container: the parent allocates, the child opens the handle and writes, the
// parent reads. The child is this program again, because a context does not survive fork.
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>
#include "check.h"

__global__ void set(int* p, int value) { *p = value; }

int main(int argc, char** argv) {
  cudaIpcMemHandle_t handle;
  if (argc > 1) {
    if (read(0, &handle, sizeof handle) != sizeof handle) return 2;
    int* p;
    CHECK(cudaIpcOpenMemHandle((void**)&p, handle, cudaIpcMemLazyEnablePeerAccess));
    set<<<1, 1>>>(p, 4711);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaIpcCloseMemHandle(p));
    return 0;
  }
  int* p;
  CHECK(cudaMalloc(&p, 64 * MIB));
  CHECK(cudaMemset(p, 0, 64 * MIB));
  CHECK(cudaIpcGetMemHandle(&handle, p));
  int ends[2];
  if (pipe(ends)) return 2;
  pid_t child = fork();
  if (child == 0) {
    dup2(ends[0], 0);
    execl("/proc/self/exe", argv[0], "child", (char*)0);
    _exit(127);
  }
  if (write(ends[1], &handle, sizeof handle) != sizeof handle) return 2;
  int status = 0;
  waitpid(child, &status, 0);
  int value = 0;
  CHECK(cudaMemcpy(&value, p, 4, cudaMemcpyDeviceToHost));
  printf("ipc child status %d value %d\n", status, value);
  return status == 0 && value == 4711 ? 0 : 1;
}
