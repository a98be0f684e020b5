// Memory spilled to the host: fills FILL_MIB of the GPU, then works on SPILL_MIB more, which a vGPU with a full limit serves from
// host memory. Prints "name value" lines: bandwidths in GB/s, whether results are right, and CUDA's errors for what spilled
// memory cannot do.
// usage: spill FILL_MIB SPILL_MIB
#include "check.h"
#include <cuda.h>

__global__ void add(unsigned* p, size_t n, unsigned by) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x) p[i] += (unsigned)i + by;
}
__global__ void sum(const uint4* p, size_t n, unsigned* out) {
  unsigned s = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x) {
    uint4 v = p[i];
    s += v.x + v.y + v.z + v.w;
  }
  atomicAdd(out, s);
}
__global__ void sample(cudaTextureObject_t t, int width, int height, float* worst) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < width * height; i += gridDim.x * blockDim.x) {
    int x = i % width, y = i / width;
    float d = fabsf(tex2D<float>(t, x + 0.5f, y + 0.5f) - (float)((x * 31 + y * 17) % 1000));
    if (d > 0) atomicMax((int*)worst, __float_as_int(d));
  }
}

template <typename F>
float milliseconds(F f) {
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  CHECK(cudaEventRecord(a));
  f();
  CHECK(cudaEventRecord(b));
  CHECK(cudaEventSynchronize(b));
  float ms;
  CHECK(cudaEventElapsedTime(&ms, a, b));
  return ms;
}

int main(int argc, char** argv) {
  size_t fill = (argc > 1 ? atoi(argv[1]) : 1024) * MIB, bytes = (argc > 2 ? atoi(argv[2]) : 1024) * MIB, n = bytes / 4;
  CHECK(cudaFree(0));
  for (size_t done = 0; done < fill; done += 64 * MIB) {
    void* p;
    if (cudaMalloc(&p, 64 * MIB) != cudaSuccess) {
      printf("filled_MiB %zu\n", done / MIB);
      return 1;
    }
  }
  size_t free_bytes, total_bytes;
  CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  printf("total_MiB %zu free_MiB %zu\n", total_bytes / MIB, free_bytes / MIB);
  unsigned *p, *out;
  CHECK(cudaMalloc(&out, 4));
  double begin = now_s();
  CHECK(cudaMalloc(&p, bytes));
  printf("malloc_ms %.1f\n", (now_s() - begin) * 1e3);
  CHECK(cudaMemset(p, 0, bytes));
  const int rounds = 5;
  add<<<2048, 256>>>(p, n, 1);
  printf("write_read_GBs %.1f\n", 2.0 * rounds * bytes / 1e6 / milliseconds([&] { for (int i = 0; i < rounds; i++) add<<<2048, 256>>>(p, n, 1); }));
  printf("read_GBs %.1f\n", 1.0 * rounds * bytes / 1e6 / milliseconds([&] { for (int i = 0; i < rounds; i++) sum<<<2048, 256>>>((uint4*)p, n / 4, out); }));
  printf("memset_GBs %.1f\n", 1.0 * bytes / 1e6 / milliseconds([&] { CHECK(cudaMemsetAsync(p, 0, bytes)); }));
  CHECK(cudaMemset(p, 0, bytes));
  add<<<2048, 256>>>(p, n, 5);
  unsigned* host = (unsigned*)malloc(bytes);
  CHECK(cudaMemcpy(host, p, bytes, cudaMemcpyDeviceToHost));
  bool right = true;
  for (size_t i = 0; i < n; i++) right = right && host[i] == (unsigned)i + 5;
  printf("right %d\n", right);
  free(host);

  // Textures read through a layout of their own.
  const int width = 4096, height = 4096;
  float* pixels = (float*)malloc(width * height * 4);
  for (int i = 0; i < width * height; i++) pixels[i] = (float)((i % width * 31 + i / width * 17) % 1000);
  cudaArray_t array;
  cudaChannelFormatDesc channel = cudaCreateChannelDesc<float>();
  CHECK(cudaMallocArray(&array, &channel, width, height));
  CHECK(cudaMemcpy2DToArray(array, 0, 0, pixels, width * 4, width * 4, height, cudaMemcpyHostToDevice));
  cudaResourceDesc resource = {};
  resource.resType = cudaResourceTypeArray;
  resource.res.array.array = array;
  cudaTextureDesc texture = {};
  cudaTextureObject_t object;
  CHECK(cudaCreateTextureObject(&object, &resource, &texture, nullptr));
  float worst = 0, *device_worst = (float*)out;
  CHECK(cudaMemset(out, 0, 4));
  sample<<<1024, 256>>>(object, width, height, device_worst);
  CHECK(cudaMemcpy(&worst, out, 4, cudaMemcpyDeviceToHost));
  memset(pixels, 0, width * height * 4);
  CHECK(cudaMemcpy2DFromArray(pixels, width * 4, array, 0, 0, width * 4, height, cudaMemcpyDeviceToHost));
  for (int i = 0; i < width * height; i++) worst = fmaxf(worst, fabsf(pixels[i] - (float)((i % width * 31 + i / width * 17) % 1000)));
  printf("texture_worst %.0f\n", worst);

  void* pooled;
  CHECK(cudaMallocAsync(&pooled, 256 * MIB, 0));
  CHECK(cudaMemsetAsync(pooled, 1, 256 * MIB, 0));
  CHECK(cudaFreeAsync(pooled, 0));
  CHECK(cudaDeviceSynchronize());
  cudaIpcMemHandle_t ipc;
  printf("ipc %s\n", cudaGetErrorName(cudaIpcGetMemHandle(&ipc, p)));
  cudaGetLastError();
  CUmemAllocationProp property = {};
  property.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  property.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  property.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle generic;
  CUdeviceptr va;
  CUmemAccessDesc access = {};
  access.location = property.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const size_t piece = 64 * MIB;
  int fd;
  int made = cuMemCreate(&generic, piece, &property, 0);
  if (!made) made = cuMemAddressReserve(&va, piece, 0, 0, 0);
  if (!made) made = cuMemMap(va, piece, 0, generic, 0);
  if (!made) made = cuMemSetAccess(va, piece, &access, 1);
  if (!made) made = cuMemsetD8(va, 1, piece);
  const char* said = "";
  cuGetErrorName((CUresult)cuMemExportToShareableHandle(&fd, generic, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), &said);
  printf("vmm %d export %s\n", made, said);
  CHECK(cudaFree(p));
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMalloc(&p, bytes));
  CHECK(cudaMemset(p, 1, bytes));
  CHECK(cudaDeviceSynchronize());
  printf("again ok\n");
}
