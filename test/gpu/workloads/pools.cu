// Memory pools: of device memory that other processes can be given (POSIX descriptors), which grows and shrinks, and of managed memory.
//   pools [device|managed]
// Prints "pools NAME" of each that works.
#include <cuda.h>
#include <string.h>
#include <unistd.h>
#include "check.h"

#define OK(call)                                                \
  do {                                                          \
    CUresult r_ = (call);                                       \
    if (r_ != CUDA_SUCCESS) {                                   \
      const char* name_ = "?";                                  \
      cuGetErrorName(r_, &name_);                               \
      fprintf(stderr, "pools: %s: %s: %s\n", kind, #call, name_); \
      return 1;                                                 \
    }                                                           \
  } while (0)

__global__ void fill(unsigned char* p, unsigned char value) { p[blockIdx.x * 65536ull + threadIdx.x] = value; }

// use allocates from the pool, writes, reads, and gives all back.
static int use(const char* kind, CUmemoryPool pool, CUmemAllocationHandleType handles, size_t most) {
  const size_t sizes[] = {4096, 3ull << 20, 700ull << 20, 2ull << 20};
  for (size_t size : sizes) {
    if (most && size > most) continue;
    CUdeviceptr p;
    unsigned char got = 0;
    OK(cuMemAllocFromPoolAsync(&p, size, pool, 0));
    fill<<<(unsigned)((size + 65535) / 65536), 64>>>((unsigned char*)p, 7);
    CHECK(cudaMemcpyAsync(&got, (void*)(p + (size - 1) / 65536 * 65536), 1, cudaMemcpyDeviceToHost, 0));
    CHECK(cudaStreamSynchronize(0));
    if (got != 7) {
      fprintf(stderr, "pools: %s: %d is there\n", kind, got);
      return 1;
    }
    if (handles) {
      int fd = -1;
      OK(cuMemPoolExportToShareableHandle(&fd, pool, handles, 0));
      close(fd);
    }
    OK(cuMemFreeAsync(p, 0));
    OK(cuStreamSynchronize(0));
    OK(cuMemPoolTrimTo(pool, 0));
  }
  return 0;
}

static int device(const char* kind, size_t most) {
  CUmemoryPool pool;
  CUmemPoolProps props = {};
  props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  props.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  props.maxSize = most;
  OK(cuMemPoolCreate(&pool, &props));
  if (use(kind, pool, props.handleTypes, most)) return 1;
  OK(cuMemPoolDestroy(pool));
  printf("pools %s\n", kind);
  return 0;
}

static int managed(const char* kind) {
#if CUDA_VERSION >= 13000
  CUmemoryPool pool;
  CUmemLocation where = {};
  where.type = CU_MEM_LOCATION_TYPE_NONE;
  where.id = -1;
  OK(cuMemGetMemPool(&pool, &where, CU_MEM_ALLOCATION_TYPE_MANAGED));
  if (use(kind, pool, CU_MEM_HANDLE_TYPE_NONE, 0)) return 1;
  printf("pools %s\n", kind);
#endif
  return 0;
}

int main(int argc, char** argv) {
  const char* only = argc > 1 ? argv[1] : "";
  int status = 0;
  CHECK(cudaFree(0));
  if (strcmp(only, "managed")) status |= device("device", 0) | device("device, 2 MiB", 2 << 20);
  if (strcmp(only, "device")) status |= managed("managed");
  return status;
}
