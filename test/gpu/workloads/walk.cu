// CUDA at random: processes that make contexts, allocate, map, export, import, share by IPC, run kernels and free, in any order, and end
// in the middle of it, by exit or by SIGKILL. What a context is made of, no raw call can imitate as CUDA itself does.
//   walk --seconds S [--seed N] [--processes N] [--limit-mib N]
// The last line is {"final":true,"processes","killed","operations","refused"}. Out of memory is a refusal; everything else is an error.
#include <cuda.h>
#include <csignal>
#include <cstring>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>
#include "spin.h"

__global__ void touch(char* p, size_t n) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) p[i]++;
}

// What all processes see.
struct Shared {
  volatile unsigned long long operations, refused;
  volatile int errors;
  struct { volatile int full; CUipcMemHandle handle; } ipc[8];
};
static Shared* shared;

static bool ok(CUresult r, const char* what) {
  __sync_fetch_and_add(&shared->operations, 1);
  if (r == CUDA_SUCCESS) return true;
  if (r == CUDA_ERROR_OUT_OF_MEMORY) {
    __sync_fetch_and_add(&shared->refused, 1);
    return false;
  }
  const char* name = "?";
  cuGetErrorName(r, &name);
  fprintf(stderr, "pid %d: %s: %s\n", (int)getpid(), what, name);
  __sync_fetch_and_add(&shared->errors, 1);
  return false;
}
#define OK(call) ok((call), #call)

struct Mapped { CUmemGenericAllocationHandle handle; CUdeviceptr at; size_t size; bool own; };

// One process: so many operations, then it ends with whatever it has.
struct Process {
  CUdevice device = 0;
  CUmemAllocationProp prop = {};
  size_t grain = 0, limit;
  std::vector<std::pair<CUdeviceptr, size_t>> memory;
  std::vector<CUdeviceptr> opened;
  std::vector<void*> host;
  std::vector<Mapped> mapped;
  std::vector<int> files;  // exported
  std::vector<CUstream> streams;

  explicit Process(size_t limit) : limit(limit) {}
  static size_t below(size_t n) { return (size_t)(drand48() * n); }
  template <class T> static T take(std::vector<T>& v) {
    std::swap(v[below(v.size())], v.back());
    T x = v.back();
    v.pop_back();
    return x;
  }
  size_t size() {
    const size_t n = below(20);
    if (n == 0) return limit / (2 + below(6));  // the limit is reached
    return n < 8 ? (1 + below(64)) << 12 : (1 + below(256)) << 16;
  }
  bool begin() {
    CUcontext context;
    if (!OK(cuInit(0)) || !OK(cuDeviceGet(&device, 0)) || !OK(cuDevicePrimaryCtxRetain(&context, device))) return false;
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return OK(cuCtxSetCurrent(context)) && OK(cuMemGetAllocationGranularity(&grain, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  }
  // map gives physical memory addresses; what cannot be done is taken back.
  void map(CUmemGenericAllocationHandle handle, size_t n, bool own) {
    Mapped m{handle, 0, n, own};
    CUmemAccessDesc access = {};
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (OK(cuMemAddressReserve(&m.at, n, 0, 0, 0))) {
      if (OK(cuMemMap(m.at, n, 0, handle, 0))) {
        if (OK(cuMemSetAccess(m.at, n, &access, 1))) {
          mapped.push_back(m);
          return;
        }
        OK(cuMemUnmap(m.at, n));
      }
      OK(cuMemAddressFree(m.at, n));
    }
    OK(cuMemRelease(handle));
  }
  void unmap(Mapped m) {
    if (drand48() < 0.5) {  // either order: the mapping holds the memory
      OK(cuMemUnmap(m.at, m.size));
      OK(cuMemRelease(m.handle));
    } else {
      OK(cuMemRelease(m.handle));
      OK(cuMemUnmap(m.at, m.size));
    }
    OK(cuMemAddressFree(m.at, m.size));
  }
  void drop() {
    OK(cuCtxSynchronize());
    while (!memory.empty()) OK(cuMemFree(take(memory).first));
    while (!mapped.empty()) unmap(take(mapped));
    while (!opened.empty()) OK(cuIpcCloseMemHandle(take(opened)));
  }
  void one() {
    const size_t n = size();
    switch (below(24)) {
      case 0: case 1: case 2: case 3: {
        CUdeviceptr p;
        if (OK(cuMemAlloc(&p, n))) memory.push_back({p, n});
        break;
      }
      case 4: case 5: case 6:
        if (!memory.empty()) OK(cuMemFree(take(memory).first));
        break;
      case 7: case 8: {
        const size_t whole = (n + grain - 1) / grain * grain;
        CUmemGenericAllocationHandle h;
        if (OK(cuMemCreate(&h, whole, &prop, 0))) map(h, whole, true);
        break;
      }
      case 9: case 10:
        if (!mapped.empty()) unmap(take(mapped));
        break;
      case 11: case 12: {
        if (mapped.empty()) break;
        const Mapped m = mapped[below(mapped.size())];
        int fd;
        if (!m.own || !OK(cuMemExportToShareableHandle(&fd, m.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0))) break;
        CUmemGenericAllocationHandle h;
        if (drand48() < 0.5 && OK(cuMemImportFromShareableHandle(&h, (void*)(size_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))) map(h, m.size, false);
        if (files.size() < 16) files.push_back(fd);
        else close(fd);
        break;
      }
      case 13:
        if (!files.empty()) close(take(files));
        break;
      case 14: {
        void* p;
        if (host.size() < 16 && OK(cuMemHostAlloc(&p, 1 << 20, 0))) host.push_back(p);
        break;
      }
      case 15:
        if (!host.empty()) OK(cuMemFreeHost(take(host)));
        break;
      case 16: {
        CUstream s;
        if (streams.size() < 16 && OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING))) streams.push_back(s);
        break;
      }
      case 17:
        if (!streams.empty()) OK(cuStreamDestroy(take(streams)));
        break;
      case 18: case 19: case 20:
        if (!memory.empty()) {
          const auto m = memory[below(memory.size())];
          touch<<<64, 128, 0, streams.empty() ? 0 : (cudaStream_t)streams[below(streams.size())]>>>((char*)m.first, m.second);
          ok((CUresult)cudaGetLastError(), "kernel");
        }
        break;
      case 21: {  // memory of this process for another one
        auto& slot = shared->ipc[below(8)];
        if (!memory.empty() && !slot.full && OK(cuIpcGetMemHandle((CUipcMemHandle*)&slot.handle, memory[below(memory.size())].first))) slot.full = 1;
        break;
      }
      case 22: {  // it may be gone, or be this process' own
        auto& slot = shared->ipc[below(8)];
        CUdeviceptr p;
        if (slot.full && cuIpcOpenMemHandle(&p, *(CUipcMemHandle*)&slot.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) == CUDA_SUCCESS) opened.push_back(p);
        slot.full = 0;
        break;
      }
      default:
        if (!opened.empty()) OK(cuIpcCloseMemHandle(take(opened)));
        else if (drand48() < 0.1) drop();
    }
  }
};

int main(int argc, char** argv) {
  Options o;
  o.take(std::vector<std::string>(argv + 1, argv + argc), "seconds seed processes limit-mib");
  const double end = now_s() + o.number("seconds", 60);
  const size_t limit = (size_t)o.number("limit-mib", 6144) * MIB, want = (size_t)o.number("processes", 3);
  long seed = (long)o.number("seed", 1);
  srand48(seed);
  shared = (Shared*)mmap(0, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) { perror("mmap"); return 1; }
  // CUDA does not survive fork: this process never uses it.
  std::vector<pid_t> live;
  int processes = 0, killed = 0, failed = 0;
  while (!live.empty() || now_s() < end) {
    if (live.size() < want && now_s() < end) {
      processes++;
      const long s = ++seed;
      const pid_t pid = fork();
      if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        srand48(s);
        Process p(limit);
        if (p.begin()) {
          for (size_t n = 200 + Process::below(2000); n > 0 && now_s() < end; n--) p.one();
          if (drand48() < 0.3) p.drop();
        }
        if (drand48() < 0.5) _exit(0);  // without CUDA's own cleaning up
        exit(0);
      }
      live.push_back(pid);
    }
    usleep(20000 + (useconds_t)(drand48() * 100000));
    if (!live.empty() && drand48() < 0.03) {
      kill(live[(size_t)(drand48() * live.size())], SIGKILL);
      killed++;
    }
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
      if (!(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) && !(WIFEXITED(status) && WEXITSTATUS(status) == 0)) failed++;
      for (size_t i = 0; i < live.size(); i++)
        if (live[i] == pid) live.erase(live.begin() + i--);
    }
  }
  printf("{\"final\":true,\"processes\":%d,\"killed\":%d,\"operations\":%llu,\"refused\":%llu,\"errors\":%d,\"failed\":%d}\n", processes, killed,
         shared->operations, shared->refused, shared->errors, failed);
  return failed || shared->errors;
}
