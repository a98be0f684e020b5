// What the test programs share: every CUDA call is checked, sizes are MiB.
#pragma once
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#define MIB ((size_t)1 << 20)
#define CHECK(call)                                                                          \
  do {                                                                                       \
    cudaError_t e_ = (call);                                                                 \
    if (e_ != cudaSuccess) {                                                                 \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
      exit(1);                                                                               \
    }                                                                                        \
  } while (0)

static inline double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
static inline void report_memory() {
  size_t free_bytes, total_bytes;
  CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  printf("total_MiB %zu free_MiB %zu\n", total_bytes / MIB, free_bytes / MIB);
}
