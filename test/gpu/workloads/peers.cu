// Two GPUs of one container, by each of CUDA's ways to use one's memory from the other.
//   peers copy   one process: a copy between the GPUs, and a kernel of the second that writes the first's memory
//   peers ipc    CUDA IPC: a process on the second GPU opens memory of the first
//   peers vmm    the virtual memory API: memory of the first, passed as a descriptor, is mapped by a process on the second
// Prints "peers WAY value 4711" when the first GPU reads what the second has written.
#include <cstring>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <cuda.h>
#include "check.h"

#define DRIVER(call)                                                   \
  do {                                                                 \
    CUresult r_ = (call);                                              \
    if (r_ != CUDA_SUCCESS) {                                          \
      const char* name_ = "?";                                         \
      cuGetErrorName(r_, &name_);                                      \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, name_); \
      exit(1);                                                         \
    }                                                                  \
  } while (0)

static const size_t size = 640 * MIB;  // from 512 on memory has NVLink addresses of its own behind an NVSwitch

__global__ void set(int* p, int value) { *p = value; }

static void write_from_second(int* p) {
  CHECK(cudaSetDevice(1));
  set<<<1, 1>>>(p, 4711);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
}

static int report(const char* way, const int* p) {
  int value = 0;
  CHECK(cudaSetDevice(0));
  CHECK(cudaMemcpy(&value, p, sizeof value, cudaMemcpyDeviceToHost));
  printf("peers %s value %d\n", way, value);
  return value == 4711 ? 0 : 1;
}

// again runs this program as "WAY child" with message on its standard input, and waits for it. A context does not survive fork.
static int again(const char* way, const void* message, size_t length) {
  int ends[2], status = 1;
  if (pipe(ends)) return 2;
  pid_t child = fork();
  if (child == 0) {
    dup2(ends[0], 0);
    execl("/proc/self/exe", "peers", way, "child", (char*)0);
    _exit(127);
  }
  if (write(ends[1], message, length) != (ssize_t)length) return 2;
  waitpid(child, &status, 0);
  return status;
}

static int copy() {
  int *first, *second;
  CHECK(cudaSetDevice(1));
  CHECK(cudaMalloc(&second, size));
  set<<<1, 1>>>(second, 4710);
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaDeviceEnablePeerAccess(0, 0));
  CHECK(cudaSetDevice(0));
  CHECK(cudaMalloc(&first, size));
  CHECK(cudaMemcpyPeer(first, 0, second, 1, size));
  int value = 0;
  CHECK(cudaMemcpy(&value, first, sizeof value, cudaMemcpyDeviceToHost));
  if (value != 4710) {
    fprintf(stderr, "copied %d\n", value);
    return 1;
  }
  write_from_second(first);
  return report("copy", first);
}

static int ipc(bool child) {
  cudaIpcMemHandle_t handle;
  int* p;
  if (child) {
    if (read(0, &handle, sizeof handle) != sizeof handle) return 2;
    CHECK(cudaSetDevice(1));
    CHECK(cudaIpcOpenMemHandle((void**)&p, handle, cudaIpcMemLazyEnablePeerAccess));
    write_from_second(p);
    CHECK(cudaIpcCloseMemHandle(p));
    return 0;
  }
  CHECK(cudaSetDevice(0));
  CHECK(cudaMalloc(&p, size));
  CHECK(cudaMemset(p, 0, size));
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaIpcGetMemHandle(&handle, p));
  if (int status = again("ipc", &handle, sizeof handle)) {
    fprintf(stderr, "child: status %d\n", status);
    return 1;
  }
  return report("ipc", p);
}

// mapped gives memory an address at which both GPUs, or the first alone, may use it.
static CUdeviceptr mapped(CUmemGenericAllocationHandle memory, int gpus) {
  CUdeviceptr address;
  DRIVER(cuMemAddressReserve(&address, size, 0, 0, 0));
  DRIVER(cuMemMap(address, size, 0, memory, 0));
  CUmemAccessDesc access[2] = {};
  for (int i = 0; i < gpus; i++) {
    access[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access[i].location.id = i;
    access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  DRIVER(cuMemSetAccess(address, size, access, gpus));
  return address;
}

static int vmm(bool child) {
  CUmemGenericAllocationHandle memory;
  int fd;
  for (int i = 0; i < 2; i++) {
    CHECK(cudaSetDevice(i));
    CHECK(cudaFree(0)); // makes the context
  }
  if (child) {
    if (read(0, &fd, sizeof fd) != sizeof fd) return 2;
    DRIVER(cuMemImportFromShareableHandle(&memory, (void*)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    write_from_second((int*)mapped(memory, 2));
    return 0;
  }
  CUmemAllocationProp wanted = {};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  wanted.location.id = 0;
  wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  DRIVER(cuMemCreate(&memory, size, &wanted, 0));
  CHECK(cudaSetDevice(0));
  int* p = (int*)mapped(memory, 1);
  CHECK(cudaMemset(p, 0, size));
  CHECK(cudaDeviceSynchronize());
  int shared;
  DRIVER(cuMemExportToShareableHandle(&shared, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  fd = dup(shared); // without FD_CLOEXEC, for the child
  if (int status = again("vmm", &fd, sizeof fd)) {
    fprintf(stderr, "child: status %d\n", status);
    return 1;
  }
  return report("vmm", p);
}

int main(int argc, char** argv) {
  std::string way = argc > 1 ? argv[1] : "";
  bool child = argc > 2;
  if (way == "copy") return copy();
  if (way == "ipc") return ipc(child);
  if (way == "vmm") return vmm(child);
  fprintf(stderr, "usage: peers copy|ipc|vmm\n");
  return 2;
}
