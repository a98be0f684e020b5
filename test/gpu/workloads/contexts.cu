// Contexts that are made and ended again and again in one process, some in the middle of a kernel, two at a time: each works.
//   contexts [COUNT]
// Prints "contexts N".
#include <cuda.h>
#include "check.h"

#define OK(call)                                                     \
  do {                                                               \
    CUresult r_ = (call);                                            \
    if (r_ != CUDA_SUCCESS) {                                        \
      const char* name_ = "?";                                       \
      cuGetErrorName(r_, &name_);                                    \
      fprintf(stderr, "context %d: %s: %s\n", i, #call, name_);      \
      return 1;                                                      \
    }                                                                \
  } while (0)

__global__ void fill(int* p, int value) { p[threadIdx.x] = value; }
__global__ void spin(long long cycles) {
  for (const long long begin = clock64(); clock64() - begin < cycles;) {
  }
}

int main(int argc, char** argv) {
  const int count = argc > 1 ? atoi(argv[1]) : 6;
  CUdevice device;
  CUcontext before = 0, context = 0;
  int i = 0;
  OK(cuInit(0));
  OK(cuDeviceGet(&device, 0));
  for (; i < count; i++) {
#if CUDA_VERSION >= 13000
    OK(cuCtxCreate(&context, 0, 0, device));
#else
    OK(cuCtxCreate(&context, 0, device));
#endif
    int* p;
    int got = -1;
    CHECK(cudaMalloc(&p, 4 * 32));
    fill<<<1, 32>>>(p, i);
    CHECK(cudaMemcpy(&got, p + 31, 4, cudaMemcpyDeviceToHost));
    if (got != i) {
      fprintf(stderr, "context %d: %d is there\n", i, got);
      return 1;
    }
    if (i % 3 == 1) spin<<<1, 1>>>(50000000);  // it ends in the middle of this
    if (before) OK(cuCtxDestroy(before));
    before = context;
    if (i % 3 == 2) {
      OK(cuCtxDestroy(before));
      before = 0;
    }
  }
  printf("contexts %d\n", count);
  return 0;
}
