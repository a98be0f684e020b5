// exceptions KIND [CUBIN]: one kernel that ends in a hardware exception; prints the error that the program sees, and when.
// KIND: trap, breakpoint, misaligned, address, stack, shared, local, assert, or instruction, for which CUBIN is a module
// whose kernel `nothing` begins with bytes that are no instruction (exceptions.sh makes it).
#include <cassert>
#include <cuda.h>
#include <string>
#include "check.h"

__global__ void trap_() { asm volatile("trap;"); }
__global__ void breakpoint() { asm volatile("brkpt;"); }
__global__ void misaligned(char* p) { *(volatile int*)(p + 1) = 1; }
__global__ void address() { *(volatile int*)0x10 = 1; }
__device__ __noinline__ int deep(volatile int* n) {
  volatile int frame[64];
  frame[*n & 63] = *n;
  return *n < 0 ? 0 : deep(n) + frame[*n & 63];
}
__global__ void stack(int* n) { *n = deep(n); }
__global__ void shared() {
  extern __shared__ int s[];
  ((volatile int*)s)[1 << 22] = 1;
}
__global__ void local(int far) {
  volatile int a[4];
  a[far] = 1;
}
__global__ void assertion(int no) { assert(no); }

static CUresult instruction(const char* cubin) {
  CUmodule module;
  CUfunction nothing;
  CUresult e = cuModuleLoad(&module, cubin);
  if (e == CUDA_SUCCESS) e = cuModuleGetFunction(&nothing, module, "nothing");
  return e == CUDA_SUCCESS ? cuLaunchKernel(nothing, 1, 1, 1, 1, 1, 1, 0, 0, nullptr, nullptr) : e;
}

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const std::string kind = argv[1];
  char* memory;
  CHECK(cudaMalloc((void**)&memory, 4096));
  CHECK(cudaMemset(memory, 0, 4096));
  CHECK(cudaDeviceSynchronize());
  double begin = now_s();
  if (kind == "trap") trap_<<<1, 1>>>();
  else if (kind == "breakpoint") breakpoint<<<1, 1>>>();
  else if (kind == "misaligned") misaligned<<<1, 1>>>(memory);
  else if (kind == "address") address<<<1, 1>>>();
  else if (kind == "stack") stack<<<1, 1>>>((int*)memory);
  else if (kind == "shared") shared<<<1, 1>>>();
  else if (kind == "local") local<<<1, 1>>>(1 << 28);
  else if (kind == "assert") assertion<<<1, 1>>>(0);
  else if (kind == "instruction" && argc > 2) printf("launch %d ", instruction(argv[2]));
  else return 2;
  const char* launch = cudaGetErrorName(cudaGetLastError());
  const char* end = cudaGetErrorName(cudaDeviceSynchronize());
  printf("%s %s %s\n", kind.c_str(), launch, end);
  fprintf(stderr, "after_ms %.0f\n", (now_s() - begin) * 1e3);
  return 0;
}
