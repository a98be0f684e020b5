// Managed memory against a limit: allocates GIB of it (several sizes with commas, several times where asked), fills it on the GPU,
// reads it on the CPU. Prints the CUDA error's name where it is refused, and whether ordinary memory can be had after that.
// With "leaderless" a second thread does it, after the first has ended: /proc then shows no maps of the process by its own number.
// usage: managed GIB[,GIB…] [ROUNDS [HOLD_SECONDS [leaderless]]]
#include "check.h"
#include <cstring>
#include <pthread.h>
#include <unistd.h>

__global__ void fill(unsigned char* p, size_t n) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x) p[i] = (unsigned char)(i * 7);
}

static void try_once(size_t bytes, int hold) {
  unsigned char* p = nullptr;
  cudaError_t e = cudaMallocManaged(&p, bytes);
  printf("managed %s\n", cudaGetErrorName(e));
  if (e != cudaSuccess) {
    cudaGetLastError();
  } else {
    fill<<<1024, 256>>>(p, bytes);
    CHECK(cudaDeviceSynchronize());
    size_t free_bytes, total_bytes;
    CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    bool right = true;
    for (size_t i = 0; i < bytes; i += bytes / 1001 + 1) right = right && p[i] == (unsigned char)(i * 7);
    printf("right %d used_MiB %zu total_MiB %zu\n", right, (total_bytes - free_bytes) / MIB, total_bytes / MIB);
    fflush(stdout);
    sleep(hold);
    CHECK(cudaFree(p));
  }
  void* q = nullptr;
  printf("ordinary %s\n", cudaGetErrorName(cudaMalloc(&q, 64 * MIB)));
  CHECK(cudaFree(q));
  fflush(stdout);
}

struct Arguments {
  int count;
  char** values;
};

static void* run(void* arguments) {
  auto [argc, argv] = *(Arguments*)arguments;
  int rounds = argc > 2 ? atoi(argv[2]) : 1, hold = argc > 3 ? atoi(argv[3]) : 0;
  CHECK(cudaFree(0));
  for (int round = 0; round < rounds; round++) {
    for (char* size = argc > 1 ? argv[1] : (char*)"1"; *size;) {
      char* end;
      double gib = strtod(size, &end);
      try_once((size_t)(gib * 1024) * MIB, hold);
      size = *end == ',' ? end + 1 : end + strlen(end);
    }
  }
  return nullptr;
}

int main(int argc, char** argv) {
  static Arguments arguments;
  arguments = {argc, argv};
  if (argc <= 4) {
    run(&arguments);
    return 0;
  }
  pthread_t thread;
  if (pthread_create(&thread, nullptr, run, &arguments) != 0) return 1;
  pthread_exit(nullptr);
}
