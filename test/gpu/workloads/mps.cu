// A CUDA program in steps, each of which is one argument; each says what came of it, how long it took and what is free:
//   STEP: OK|cudaError… MILLISECONDS ms free FREE of TOTAL MiB
// (its first line is "pid NUMBER"), and tells rmtrace.c, if that is loaded, before it begins. A step that fails does not end the program; the exit status is
// the number of steps that failed, 99 at most.
//   context          make one           malloc:MIB  managed:MIB  host:MIB    allocate and touch
//   launch:N         N small kernels    long:SECONDS  one kernel that lasts   loop:SECONDS  small kernels; every second: how many, all right, the longest wait for 64 of them?
//   fill:MIB         allocate pieces of MIB until refused, free them           free   what malloc, managed and host have
//   share:FILE       CUDA IPC: give away the first malloc    borrow:FILE  take it, add 1 to it, give it back
//   touch:FILE  wait:FILE  sleep:SECONDS                     limit  cudaDevAttrMultiProcessorCount
#include <cstring>
#include <string>
#include <sys/ioctl.h>
#include <unistd.h>
#include <vector>
#include "check.h"

__global__ void add(unsigned* p, unsigned n) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) p[i] += 1;
}
__global__ void last(double seconds, unsigned* p) {
  unsigned long long begin, t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    p[threadIdx.x] += 1;
  } while (t - begin < seconds * 1e9);
}

static const unsigned words = 1 << 16;
static std::vector<void*> device, managed, pinned;
static unsigned* scratch;

static cudaError_t context() {
  if (scratch) return cudaSuccess;
  cudaError_t e = cudaMalloc(&scratch, words * 4);
  return e ? e : cudaMemset(scratch, 0, words * 4);
}
static cudaError_t touched(void* p) {
  add<<<16, 256>>>((unsigned*)p, words);
  return cudaDeviceSynchronize();
}
static cudaError_t loop(double seconds) {
  cudaError_t e = context();
  if (e || (e = cudaMemset(scratch, 0, words * 4))) return e;
  double begin = now_s(), told = begin, waited = begin, longest = 0;
  unsigned n = 0, value[2] = {0, 0};
  while (now_s() - begin < seconds) {
    add<<<16, 256>>>(scratch, words);
    n++;
    if (n % 64 == 0) {
      if ((e = cudaDeviceSynchronize())) return e;
      if (now_s() - waited > longest) longest = now_s() - waited;
      waited = now_s();
    }
    if (now_s() - told < 1) continue;
    told = now_s();
    if ((e = cudaMemcpy(value, scratch, 4, cudaMemcpyDeviceToHost)) || (e = cudaMemcpy(value + 1, scratch + words - 1, 4, cudaMemcpyDeviceToHost))) return e;
    printf("%.1f s: %u kernels, %s, longest %.1f ms\n", told - begin, n, value[0] == n && value[1] == n ? "right" : "WRONG", longest * 1e3);
    fflush(stdout);
    waited = now_s(), longest = 0;
  }
  return cudaDeviceSynchronize();
}
static cudaError_t ipc(const char* file, bool give) {
  cudaIpcMemHandle_t handle;
  cudaError_t e = cudaSuccess;
  if (give && device.empty()) return cudaErrorInvalidValue;
  if (give && (e = cudaIpcGetMemHandle(&handle, device[0]))) return e;
  FILE* f = fopen(file, give ? "w" : "r");
  if (!f) return cudaErrorFileNotFound;
  size_t n = give ? fwrite(&handle, sizeof handle, 1, f) : fread(&handle, sizeof handle, 1, f);
  fclose(f);
  if (n != 1) return cudaErrorFileNotFound;
  void* p;
  if (give || (e = cudaIpcOpenMemHandle(&p, handle, cudaIpcMemLazyEnablePeerAccess))) return e;
  e = touched(p);
  cudaError_t f2 = cudaIpcCloseMemHandle(p);
  return e ? e : f2;
}
static cudaError_t fill(size_t mib) {
  std::vector<void*> got;
  void* p;
  cudaError_t e;
  while (!(e = cudaMalloc(&p, mib * MIB))) got.push_back(p);
  printf("fill: %zu MiB, then %s\n", got.size() * mib, cudaGetErrorName(e));
  cudaGetLastError();
  for (void* x : got) cudaFree(x);
  return e == cudaErrorMemoryAllocation ? cudaSuccess : e;
}
static cudaError_t step(const std::string& name, const char* value) {
  double number = atof(value);
  void* p;
  cudaError_t e = cudaSuccess;
  if (name == "context") return context();
  if (name == "malloc") return (e = cudaMalloc(&p, number * MIB)) ? e : (device.push_back(p), touched(p));
  if (name == "managed") return (e = cudaMallocManaged(&p, number * MIB)) ? e : (managed.push_back(p), touched(p));
  if (name == "host") return (e = cudaHostAlloc(&p, number * MIB, cudaHostAllocMapped)) ? e : (pinned.push_back(p), touched(p));
  if (name == "launch") {
    for (int i = 0; i < number && !e; i++) e = context() ? cudaGetLastError() : touched(scratch);
    return e;
  }
  if (name == "long") {
    if ((e = context())) return e;
    last<<<1, 32>>>(number, scratch);
    printf("long: launched\n");
    fflush(stdout);
    return cudaDeviceSynchronize();
  }
  if (name == "loop") return loop(number);
  if (name == "fill") return fill(number);
  if (name == "share") return ipc(value, true);
  if (name == "borrow") return ipc(value, false);
  if (name == "free") {
    for (auto* list : {&device, &managed}) {
      for (void* x : *list) e = cudaFree(x) ? cudaGetLastError() : e;
      list->clear();
    }
    for (void* x : pinned) e = cudaFreeHost(x) ? cudaGetLastError() : e;
    pinned.clear();
    return e;
  }
  if (name == "limit") {
    int n = 0;
    e = cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0);
    printf("limit: %d multiprocessors\n", n);
    return e;
  }
  if (name == "touch") {
    FILE* f = fopen(value, "w");
    return f && !fclose(f) ? e : cudaErrorFileNotFound;
  }
  if (name == "sleep") return usleep(number * 1e6), e;
  if (name == "wait") {
    while (access(value, F_OK)) usleep(20000);
    return e;
  }
  return cudaErrorInvalidValue;
}

int main(int argc, char** argv) {
  int failed = 0;
  printf("pid %d\n", (int)getpid());
  for (int i = 1; i < argc; i++) {
    const char* colon = strchr(argv[i], ':');
    std::string name(argv[i], colon ? colon - argv[i] : strlen(argv[i]));
    ioctl(-1, 0x4d41524b, argv[i]);
    double begin = now_s();
    cudaError_t e = step(name, colon ? colon + 1 : "");
    double took = (now_s() - begin) * 1e3;
    size_t free_bytes = 0, total_bytes = 0;
    if (scratch && !e) cudaMemGetInfo(&free_bytes, &total_bytes);
    printf("%s: %s %.1f ms free %zu of %zu MiB\n", argv[i], e ? cudaGetErrorName(e) : "OK", took, free_bytes / MIB, total_bytes / MIB);
    fflush(stdout);
    failed += e != cudaSuccess;
  }
  ioctl(-1, 0x4d41524b, "end");
  return failed < 99 ? failed : 99;
}
