// SPDX-License-Identifier: Apache-2.0

// Threads that pin host memory and free it, beside threads that allocate device memory and free it, all at once: handles of what was freed
// are used anew while others are in a call that makes host memory. The last line is "pinthreads right N", N what all did in a second.
//   pinthreads [SECONDS]
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <cuda_runtime.h>

static std::atomic<bool> over{false};
static std::atomic<long> done{0}, wrong{0};

static void must(cudaError_t e, const char *what) {
  if (e != cudaSuccess && wrong++ < 5)
    printf("%s: %s\n", what, cudaGetErrorName(e));
}

static void pins(int kind) {
  const size_t size = 64 << 10;
  void *own = aligned_alloc(4096, size), *device = nullptr;
  must(cudaMalloc(&device, size), "cudaMalloc");
  while (!over) {
    void *host = own;
    if (kind == 0)
      must(cudaHostRegister(own, size, cudaHostRegisterDefault), "cudaHostRegister");
    else
      must(cudaMallocHost(&host, size), "cudaMallocHost");
    memset(host, 7, size);
    must(cudaMemcpy(device, host, size, cudaMemcpyHostToDevice), "to the device");
    memset(host, 0, size);
    must(cudaMemcpy(host, device, size, cudaMemcpyDeviceToHost), "to the host");
    if (static_cast<char *>(host)[size - 1] != 7)
      wrong++;
    if (kind == 0)
      must(cudaHostUnregister(own), "cudaHostUnregister");
    else
      must(cudaFreeHost(host), "cudaFreeHost");
    done++;
  }
}

static void allocates() {
  while (!over) {
    void *p = nullptr;
    must(cudaMalloc(&p, 4 << 20), "cudaMalloc");
    must(cudaMemset(p, 1, 4 << 20), "cudaMemset");
    must(cudaFree(p), "cudaFree");
    done++;
  }
}

int main(int argc, char **argv) {
  const double seconds = argc > 1 ? atof(argv[1]) : 5;
  must(cudaSetDeviceFlags(cudaDeviceScheduleYield), "cudaSetDeviceFlags");
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; i++)
    threads.emplace_back(pins, i % 2);
  for (int i = 0; i < 2; i++)
    threads.emplace_back(allocates);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  over = true;
  for (auto &t : threads)
    t.join();
  if (wrong)
    printf("pinthreads wrong %ld\n", wrong.load());
  else
    printf("pinthreads right %.0f\n", done / seconds);
  return wrong != 0;
}
