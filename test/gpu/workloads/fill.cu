// Allocates until the driver says no, in one of three ways, and reports how much that was; a kernel then proves that
// the context survived the refusal.
//   fill malloc|async|vmm [PIECE_MIB] [KEEP_MIB HOLD_S]   with KEEP_MIB: takes only that much and holds it
#include <cstring>
#include <cuda.h>
#include <unistd.h>
#include <vector>
#include "check.h"

__global__ void add_one(int* p) { *p += 1; }

static CUresult vmm_take(size_t size, CUdeviceptr* out) {
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = 0;
  CUmemGenericAllocationHandle handle;
  CUresult r = cuMemCreate(&handle, size, &prop, 0);
  if (r) return r;
  if ((r = cuMemAddressReserve(out, size, 0, 0, 0))) return r;
  if ((r = cuMemMap(*out, size, 0, handle, 0))) return r;
  CUmemAccessDesc access = {};
  access.location = prop.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return cuMemSetAccess(*out, size, &access, 1);
}

int main(int argc, char** argv) {
  const char* way = argc > 1 ? argv[1] : "malloc";
  size_t piece = (argc > 2 ? atoll(argv[2]) : 64) * MIB;
  size_t keep = argc > 3 ? atoll(argv[3]) * MIB : 0;
  CHECK(cudaFree(0));
  report_memory();
  int* canary;
  CHECK(cudaMalloc(&canary, 4));
  CHECK(cudaMemset(canary, 0, 4));
  size_t got = 0;
  std::vector<void*> held;
  const char* said = "kept";
  while (!keep || got < keep) {
    void* p = nullptr;
    cudaError_t e = cudaSuccess;
    if (!strcmp(way, "malloc")) {
      e = cudaMalloc(&p, piece);
    } else if (!strcmp(way, "async")) {
      e = cudaMallocAsync(&p, piece, 0);
      if (!e) e = cudaStreamSynchronize(0);
    } else {
      CUdeviceptr d;
      CUresult r = vmm_take(piece, &d);
      p = (void*)d;
      if (r == CUDA_ERROR_OUT_OF_MEMORY) e = cudaErrorMemoryAllocation;
      else if (r) { fprintf(stderr, "vmm: CUresult %d\n", r); return 1; }
    }
    if (e) {
      said = cudaGetErrorName(e);
      if (e != cudaErrorMemoryAllocation) { fprintf(stderr, "want cudaErrorMemoryAllocation, got %s\n", said); return 1; }
      cudaGetLastError();
      break;
    }
    // Memory that was promised must also be there.
    CHECK(cudaMemset(p, 1, piece));
    held.push_back(p);
    got += piece;
  }
  add_one<<<1, 1>>>(canary);
  int value = 0;
  CHECK(cudaMemcpy(&value, canary, 4, cudaMemcpyDeviceToHost));
  printf("allocated_MiB %zu then %s canary %d\n", got / MIB, said, value);
  fflush(stdout);
  if (keep) sleep(argc > 4 ? atoi(argv[4]) : 10);
  return value == 1 ? 0 : 1;
}
