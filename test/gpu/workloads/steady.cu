// Works with a buffer that must stay what it is, for so many seconds, and allocates and frees beside it.
//   steady SECONDS
#include "check.h"

__global__ void fill(unsigned* p, size_t n) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = (unsigned)(i * 2654435761u);
}
__global__ void verify(const unsigned* p, size_t n, unsigned* bad) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
    if (p[i] != (unsigned)(i * 2654435761u)) atomicAdd(bad, 1);
}

int main(int argc, char** argv) {
  double seconds = argc > 1 ? atof(argv[1]) : 5, begin = now_s();
  size_t n = 64 << 20;
  unsigned *kept, *bad, wrong = 0, rounds = 0;
  CHECK(cudaMalloc(&kept, n * sizeof *kept));
  CHECK(cudaMalloc(&bad, sizeof *bad));
  CHECK(cudaMemset(bad, 0, sizeof *bad));
  fill<<<512, 256>>>(kept, n);
  while (now_s() - begin < seconds) {
    void* extra;
    CHECK(cudaMalloc(&extra, 64 * MIB));
    CHECK(cudaMemset(extra, 1, 64 * MIB));
    verify<<<512, 256>>>(kept, n, bad);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(extra));
    rounds++;
  }
  CHECK(cudaMemcpy(&wrong, bad, sizeof wrong, cudaMemcpyDeviceToHost));
  printf("rounds %u wrong %u\n", rounds, wrong);
  return wrong != 0;
}
