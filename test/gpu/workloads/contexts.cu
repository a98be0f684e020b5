// Contexts that are made and ended again and again in one process, some in the middle of a kernel, two at a time: each works.
//   contexts [COUNT [SECONDS]]
// Prints "contexts N". Of SECONDS, a kernel lasts for so long in one more context at the end, and the time that took is printed, too.
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

__global__ void last(double seconds) {
  unsigned long long begin, t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  } while (t - begin < seconds * 1e9);
}

static CUresult create(CUcontext* context, CUdevice device) {
#if CUDA_VERSION >= 13000
  return cuCtxCreate(context, 0, 0, device);
#else
  return cuCtxCreate(context, 0, device);
#endif
}

int main(int argc, char** argv) {
  const int count = argc > 1 ? atoi(argv[1]) : 6;
  CUdevice device;
  CUcontext before = 0, context = 0;
  int i = 0;
  OK(cuInit(0));
  OK(cuDeviceGet(&device, 0));
  for (; i < count; i++) {
    OK(create(&context, device));
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
  if (argc > 2) {
    fflush(stdout);
    OK(create(&context, device));
    const double begin = now_s();
    last<<<1024, 256>>>(atof(argv[2]));
    CHECK(cudaDeviceSynchronize());
    printf("a kernel of %s s took %.1f s\n", argv[2], now_s() - begin);
  }
  return 0;
}
