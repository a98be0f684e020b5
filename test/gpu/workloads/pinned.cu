// Every kind of page-locked host memory, as programs have it: made by CUDA, the program's own, refused and tried again, seen by kernels, in
// copies and graphs, of several threads at once. The guard asks the driver about what the task makes of it (RM_ALLOC_MEMORY) and must refuse
// none.
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>
#include "check.h"

__global__ void add(int* p, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) p[i] += 1;
}

static int failures = 0;

// used has a kernel and copies use host memory that is `size` bytes long.
static void used(const char* what, void* host, size_t size) {
  int n = size / sizeof(int), *seen, *device;
  for (int i = 0; i < n; i++) ((int*)host)[i] = i;
  CHECK(cudaHostGetDevicePointer((void**)&seen, host, 0));
  add<<<(n + 255) / 256, 256>>>(seen, n);
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMalloc(&device, size));
  CHECK(cudaMemcpyAsync(device, host, size, cudaMemcpyHostToDevice));
  add<<<(n + 255) / 256, 256>>>(device, n);
  CHECK(cudaMemcpyAsync(host, device, size, cudaMemcpyDeviceToHost));
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaFree(device));
  int wrong = 0;
  for (int i = 0; i < n; i++) wrong += ((int*)host)[i] != i + 2;
  if (wrong) failures++;
  printf("%s: %zu bytes, %d wrong\n", what, size, wrong);
}

static void own(const char* what, size_t size, unsigned flags) {
  void* p = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) exit(2);
  memset(p, 0, size); // or pages are missing
  CHECK(cudaHostRegister(p, size, flags));
  used(what, p, size);
  CHECK(cudaHostUnregister(p));
  CHECK(cudaHostRegister(p, size, flags)); // again
  used(what, p, size);
  CHECK(cudaHostUnregister(p));
  munmap(p, size);
}

// refused registers what cannot be pinned for writing, and then what can at the same place.
static void refused(size_t size) {
  int fd = open("/proc/self/exe", O_RDONLY);
  void* p = mmap(0, size, PROT_READ, MAP_SHARED, fd, 0);
  if (fd < 0 || p == MAP_FAILED) exit(2);
  cudaError_t e = cudaHostRegister(p, size, cudaHostRegisterMapped);
  printf("a file's pages: %s\n", cudaGetErrorName(e));
  if (e == cudaSuccess) CHECK(cudaHostUnregister(p));
  cudaGetLastError();
  if (mmap(p, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != p) exit(2);
  memset(p, 0, size);
  CHECK(cudaHostRegister(p, size, cudaHostRegisterMapped));
  used("the same place after that", p, size);
  CHECK(cudaHostUnregister(p));
}

int main() {
  void* p;
  for (size_t size : {(size_t)4096, MIB, 64 * MIB}) {
    CHECK(cudaMallocHost(&p, size));
    used("cudaMallocHost", p, size);
    CHECK(cudaFreeHost(p));
    for (unsigned flags : {cudaHostAllocMapped, cudaHostAllocPortable, cudaHostAllocWriteCombined}) {
      CHECK(cudaHostAlloc(&p, size, flags));
      used("cudaHostAlloc", p, size);
      CHECK(cudaFreeHost(p));
    }
    own("cudaHostRegister", size, cudaHostRegisterMapped);
    own("cudaHostRegister, portable", size, cudaHostRegisterPortable);
  }
  refused(16384);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; t++) threads.emplace_back([] {
    for (int i = 0; i < 20; i++) own("a thread", 256 << 10, cudaHostRegisterMapped);
  });
  for (std::thread& t : threads) t.join();
  printf("pinned %s\n", failures ? "WRONG" : "right");
  return failures != 0;
}
